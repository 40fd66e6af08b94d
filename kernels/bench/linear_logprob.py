"""linear_logprob beside everything that does the same, on the same tensors, accuracy first.

    python kernels/bench/linear_logprob.py                               on a GPU: the shapes of docs/design/kernels.md
    python kernels/bench/linear_logprob.py --device cpu --shapes tiny    a smoke test of the harness itself

A candidate is a function from (hidden, weight, target) to log-probs; forward is timed alone, then together with its
backward under random signed per-token coefficients of which half are zero in runs (clipped sequences). `cublas` is no
candidate but the roof: the bare matrix products at these shapes, one forward, three backward (the recomputation counts
as work). Candidates that are not installed are listed as missing.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import hacpo_kernels
import torch
from harness import Row, Stopwatch, arguments, commit_name, device_name, gpu_state, quantiles, save, table
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEADS = ((2560, 151936), (2048, 151936), (3072, 128256), (4096, 151936), (4096, 128256))
SHAPES = {
    "tiny": [(64, 32, 500)],
    "targets": [(tokens, 2560, 151936) for tokens in (4096, 8192, 16384, 32768)],
    "sweep": [(tokens, 2560, 151936) for tokens in (256, 1024, 4096, 8191, 8192, 16384, 32768)]
    + [(8192, hidden, vocab // tp) for hidden, vocab in HEADS for tp in (1, 2, 4, 8)],
}
SEQUENCE = 256  # tokens that the sequence-mean error is taken over
# (sequence-mean error, weight-gradient error) up to which a candidate is exact enough for a clip of 3e-4, and up to
# which it is at least a kernel that rounds logits to bf16: timed, and said so. Beyond that there is no time.
EXACT, ROUNDED = (1e-5, 0.02), (2e-2, 0.1)


@dataclass(frozen=True)
class Batch:
    """Tensors of one shape and what float64 says about them."""

    hidden: torch.Tensor  # [T, H] bf16
    weight: torch.Tensor  # [V, H] bf16
    target: torch.Tensor  # [T]
    coefficient: torch.Tensor  # [T] fp32
    logprob: torch.Tensor  # [T] fp64
    columns: torch.Tensor  # [512] sampled vocabulary
    weight_grad: torch.Tensor  # [512, H] fp64, gradient of those


def make_batch(num_tokens: int, hidden_size: int, vocab_size: int, device: torch.device) -> Batch:
    """Logits whose deviation is 2 to 7 from token to token, and targets drawn from them: unsure and sure tokens, as in
    sampled answers. The softmax of two random matrices would be almost flat."""
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=device)
    deviation = torch.linspace(2, 7, num_tokens, device=device)[:, None]
    hidden = (draw(num_tokens, hidden_size) * deviation / hidden_size**0.5).bfloat16()
    weight = draw(vocab_size, hidden_size).bfloat16()
    coefficient = draw(num_tokens) / num_tokens
    coefficient[(torch.arange(num_tokens, device=device) // SEQUENCE) % 2 == 1] = 0.0
    columns = torch.randperm(vocab_size, generator=generator, device=device)[:512]
    exact, target = torch.empty(num_tokens, dtype=torch.float64, device=device), []
    weight_grad = torch.zeros(len(columns), hidden_size, dtype=torch.float64, device=device)
    weight64 = weight.double()
    for rows in torch.arange(num_tokens, device=device).split(512):
        hidden64 = hidden[rows].double()
        logprob_CV = (hidden64 @ weight64.T).log_softmax(dim=1)
        target.append(torch.multinomial(logprob_CV.float().exp(), 1, generator=generator)[:, 0])
        exact[rows] = logprob_CV.gather(1, target[-1][:, None])[:, 0]
        gradient = (columns[None, :] == target[-1][:, None]).double() - logprob_CV[:, columns].exp()
        weight_grad += (gradient * coefficient[rows, None].double()).T @ hidden64
    return Batch(hidden, weight, torch.cat(target), coefficient, exact, columns, weight_grad)


# ---- candidates: (hidden, weight, target) -> log-probs [T], differentiable ------------------------------------------


def ours(backend: str) -> Callable:
    return functools.partial(hacpo_kernels.linear_logprob, backend=backend)


def eager(hidden, weight, target):
    return (hidden @ weight.T).float().log_softmax(dim=1).gather(1, target[:, None])[:, 0]


def eager_fp32_logits(hidden, weight, target):
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32).log_softmax(dim=1).gather(1, target[:, None])[:, 0]
    return (hidden.float() @ weight.float().T).log_softmax(dim=1).gather(1, target[:, None])[:, 0]


def chunked(num_chunks: int) -> Callable:
    """torch.compile of one chunk, recomputed in backward."""
    one = torch.compile(eager)

    def logprob(hidden, weight, target):
        pairs = zip(hidden.chunk(num_chunks), target.chunk(num_chunks))
        return torch.cat([checkpoint(one, x, weight, y, use_reentrant=False) for x, y in pairs])

    return logprob


def torch_linear_cross_entropy(hidden, weight, target):
    return -functional.linear_cross_entropy(hidden, weight, target, reduction="none")


def liger(**options) -> Callable:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

    def logprob(hidden, weight, target):
        loss = function(hidden, weight, target, reduction="none", **options)
        return -(loss[0] if isinstance(loss, tuple) else loss)

    return logprob


def cut_cross_entropy(impl: str) -> Callable:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, target: -function(hidden, weight, target, reduction="none", impl=impl)


def quack() -> Callable:
    function = importlib.import_module("quack.linear_cross_entropy").linear_cross_entropy_func
    return lambda hidden, weight, target: -function(hidden, weight, None, target, reduction="none")


def verl() -> Callable:
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, target: function(hidden, weight, target, 1.0, "none")[0]


MAKERS: dict[str, Callable[[], Callable]] = {
    "ours (triton)": lambda: ours("triton"),
    "ours (plain torch)": lambda: ours("reference"),
    "eager, bf16 logits": lambda: eager,
    "eager, fp32 logits": lambda: eager_fp32_logits,
    "torch.compile, 4 chunks": lambda: chunked(4),
    "torch.compile, 16 chunks": lambda: chunked(16),
    "torch linear_cross_entropy": lambda: torch_linear_cross_entropy,
    "Liger FLCE": lambda: liger(),
    "Liger FLCE, fp32 sums": lambda: liger(accum_dtype=torch.float32),
    "Apple CCE": lambda: cut_cross_entropy("cce"),
    "Apple CCE exact": lambda: cut_cross_entropy("cce_exact"),
    "QuACK": quack,
    "verl Triton": verl,
}


def gate(candidate: Callable, batch: Batch) -> tuple[str, bool]:
    """(verdict with the errors of sequence means and weight gradient, whether it may be timed)."""
    hidden, weight = batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_()
    logprob = candidate(hidden, weight, batch.target)
    (logprob.float() * batch.coefficient).sum().backward()
    error = logprob.detach().double() - batch.logprob
    means = torch.stack([part.mean() for part in error.split(SEQUENCE)]).abs().max().item()
    wrong = (weight.grad[batch.columns].double() - batch.weight_grad).abs().max() / batch.weight_grad.abs().max()
    verdict = "FAILS"
    for name, (most, most_wrong) in (("rounds logits", ROUNDED), ("exact", EXACT)):
        if means < most and wrong.item() < most_wrong:
            verdict = name
    positive = int((logprob > 0).sum())
    text = f"{verdict}: mean {means:.1e}, dW {wrong.item():.1e}" + (f", {positive} above 0" if positive else "")
    return text, verdict != "FAILS"


def roof(batch: Batch, backward: bool) -> Callable[[], None]:
    """The matrix products alone, in the inputs' dtype."""
    gradient = torch.empty(len(batch.hidden), len(batch.weight), dtype=batch.hidden.dtype, device=batch.hidden.device)

    def run() -> None:
        torch.mm(batch.hidden, batch.weight.T, out=gradient)
        if backward:
            torch.mm(batch.hidden, batch.weight.T, out=gradient)
            torch.mm(gradient, batch.weight)
            torch.mm(gradient.T, batch.hidden)

    return run


def calls(candidate: Callable, batch: Batch) -> dict[str, Callable[[], None]]:
    """The calls of a candidate that are timed."""
    hidden, weight = batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            candidate(hidden, weight, batch.target)

    def both() -> None:
        logprob = candidate(hidden, weight, batch.target)
        torch.autograd.grad(logprob, (hidden, weight), batch.coefficient.to(logprob.dtype))

    return {"forward": forward, "forward+backward": both}


def measure(shape: tuple[int, int, int], given: argparse.Namespace, missing: dict[str, str]):
    """Rows of one shape."""
    device = given.device
    num_tokens, hidden_size, vocab_size = shape
    batch = make_batch(*shape, device)
    blank = Row(device_name(device), commit_name(), f"T{num_tokens} H{hidden_size} V{vocab_size}", "", "", "", "")
    watch, ready, gates = Stopwatch(device), {}, {}
    for name in (name for name in MAKERS if name.startswith(tuple(given.only))):
        try:
            candidate = MAKERS[name]()
            gates[name], passes = gate(candidate, batch)
            if passes:
                ready[name] = calls(candidate, batch)
        except Exception as problem:  # a competitor may fail in any way of its own: it is listed with its reason
            missing[name] = f"{blank.shape}: {type(problem).__name__}: {str(problem).splitlines()[:1]}"
    flops = 2e-9 * num_tokens * hidden_size * vocab_size
    for what, products in (("forward", 1), ("forward+backward", 4)):
        runs = {name: ready[name][what] for name in ready} | {"cublas": roof(batch, products > 1)}
        times = {name: quantiles(x) for name, x in watch.interleaved(runs, given.rounds, given.warmups).items()}
        for name, (p20, p50, p80) in times.items():
            yield replace(
                blank, candidate=name, what=what, gate=gates.get(name, "the roof"), p20_ms=p20, p50_ms=p50, p80_ms=p80,
                teraflops=products * flops / p50, fraction=times["cublas"][1] / p50,
                peak_mib=watch.peak_mib(runs[name]),
            )  # fmt: skip
        for name in gates.keys() - ready.keys():
            yield replace(blank, candidate=name, what=what, gate=gates[name], note="no time: fails the gate")


def main() -> int:
    given = arguments(__doc__, SHAPES, rounds=20)
    missing, rows = {}, []
    before = gpu_state(given.device)
    for shape in SHAPES[given.shapes]:
        rows += measure(shape, given, missing)
        print(table([row for row in rows if row.shape == rows[-1].shape]), flush=True)
    path = save("linear_logprob", rows, missing, f"GPU before: {before}; after: {gpu_state(given.device)}", given.out)
    print("\n".join(f"missing {name}: {why}" for name, why in missing.items()), f"\n{path}")
    return 0 if all(row.gate.startswith("exact") or not row.candidate.startswith("ours") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
