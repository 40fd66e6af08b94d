"""packed_objective beside the same in plain torch and what others do per sequence, accuracy first.

    python kernels/bench/sequence_objective.py                               on a GPU
    python kernels/bench/sequence_objective.py --device cpu --shapes tiny    a smoke test of the harness itself

A candidate computes loss and gradient per token from packed log-probs, and its metrics (ours: the terms that the host
counts them from after the update). The roof is one pass over memory: reading the log-probs once and writing their
gradient once. All of this is launches, not bytes; a host synchronisation costs more than either, so the harness also
says which candidates have one.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hacpo_kernels import Bounds, packed_objective
from harness import Row, Stopwatch, arguments, commit_name, device_name, gpu_state, quantiles, save, table

SHAPES = {
    "tiny": [(16, 20)],
    "targets": [(32, 600), (256, 1000), (2048, 1000), (16384, 1000)],
}

BOUNDS = Bounds(
    eps_low=3e-4,
    eps_high=4e-4,
    log_ratio_clamp=20.0,
    cross="band",
    delta=0.2,
    delta_step=0.025,
    high=1.0,
    alpha=1.0,
    ratio_cap=2.0,
    divergence_limit=0.2,
)


@dataclass(frozen=True)
class Batch:
    """Packed log-probs [T] of B answers of unequal length, and what the objective wants of each."""

    token_logprob: torch.Tensor
    cu_seqlens: torch.Tensor
    source_logprob: torch.Tensor
    advantage: torch.Tensor
    is_self: torch.Tensor
    num_tokens: int


def make_batch(num_sequences: int, mean_length: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * mean_length, (num_sequences,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = -torch.rand(int(cu_seqlens[-1]), generator=generator)
    means = torch.stack([part.mean() for part in tokens.split(lengths.tolist())])
    source = means + torch.randn(num_sequences, generator=generator) * 0.05
    advantage = torch.randn(num_sequences, generator=generator)
    is_self = torch.rand(num_sequences, generator=generator) < 0.5
    parts = (tokens, cu_seqlens.int(), source, advantage, is_self)
    return Batch(*(x.to(device) for x in parts), num_tokens=len(tokens))


def ours(backend: str) -> Callable[[Batch], torch.Tensor]:
    def gradient(batch: Batch) -> torch.Tensor:
        tokens = batch.token_logprob.detach().requires_grad_()
        loss, _, _ = packed_objective(
            tokens, batch.cu_seqlens, batch.source_logprob, batch.advantage, batch.is_self, update_index=1,
            bounds=BOUNDS, backend=backend,
        )  # fmt: skip
        return torch.autograd.grad(loss, tokens, torch.ones_like(loss))[0]

    return gradient


def kernel_only(batch: Batch) -> torch.Tensor:
    """The launch without the expansion to tokens: what the target of 15 microseconds is about."""
    return packed_objective(
        batch.token_logprob, batch.cu_seqlens, batch.source_logprob, batch.advantage, batch.is_self, update_index=1,
        bounds=BOUNDS, backend="triton",
    )[1]  # fmt: skip


def eager(batch: Batch) -> torch.Tensor:
    """Autograd through padded [B, L] tensors, the usual way; the metrics are one `.item()` each."""
    tokens = batch.token_logprob.detach().requires_grad_()
    lengths = batch.cu_seqlens.diff()
    places = torch.arange(int(lengths.max()), device=tokens.device)
    mask_BL = places[None, :] < lengths[:, None]
    index_BL = (batch.cu_seqlens[:-1, None] + places[None, :]).clamp(max=batch.num_tokens - 1)
    mean_B = (tokens[index_BL] * mask_BL).sum(dim=1) / lengths
    ratio_B = (mean_B - batch.source_logprob).clamp(-20, 20).exp()
    own_B = -torch.minimum(ratio_B * batch.advantage, ratio_B.clamp(1 - 3e-4, 1 + 4e-4) * batch.advantage)
    band_B = ratio_B.clamp(0.825, 1.0)
    cross_B = -band_B * band_B.detach() * batch.advantage
    torch.where(batch.is_self, own_B, cross_B).sum().backward()
    for chosen in (batch.is_self, ~batch.is_self):
        ratio_B[chosen].mean().item()
        (ratio_B[chosen] < 0.825).float().mean().item()
    return tokens.grad


CAPTURED = "ours (triton), no token expansion"
MAKERS: dict[str, Callable[[], Callable]] = {
    "ours (triton)": lambda: ours("triton"),
    CAPTURED: lambda: kernel_only,
    "ours (plain torch)": lambda: ours("reference"),
    "eager padded": lambda: eager,
    "torch.compile of eager padded": lambda: torch.compile(eager),
}


def exact_gradient(batch: Batch) -> torch.Tensor:
    """float64, sequence by sequence."""
    tokens = batch.token_logprob.cpu().double().requires_grad_()
    parts = tokens.split(batch.cu_seqlens.cpu().diff().tolist())
    columns = (batch.source_logprob, batch.advantage, batch.is_self)
    loss = 0.0
    for part, source, advantage, is_self in zip(parts, *(x.cpu().tolist() for x in columns)):
        ratio = (part.mean() - source).exp()
        band = ratio.clamp(0.825, 1.0)
        own = torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
        loss = loss - (own if is_self else band * band.detach() * advantage)
    return torch.autograd.grad(loss, tokens)[0]


def gate(candidate: Callable, batch: Batch) -> tuple[str, bool]:
    got, want = candidate(batch).detach().cpu().double(), exact_gradient(batch)
    if len(got) != len(want):  # one number per sequence
        got = got.repeat_interleave(batch.cu_seqlens.cpu().diff().long())
    error = ((got - want).abs().max() / want.abs().max()).item()
    return f"{'exact' if error < 1e-5 else 'FAILS'}: {error:.1e}", error < 1e-5


def synchronises(call: Callable[[], object], device: torch.device) -> str:
    """True if CUDA's own checker sees the host wait."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return "synchronises"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no synchronisation"


def measure(shape: tuple[int, int], given: argparse.Namespace, missing: dict[str, str]):
    """Rows of one shape."""
    device = given.device
    batch = make_batch(*shape, device)
    name_of_shape = f"B{shape[0]} L{shape[1]} T{batch.num_tokens}"
    blank = Row(device_name(device), commit_name(), name_of_shape, "", "loss, gradient, metrics", "", "")
    watch, ready, gates = Stopwatch(device), {}, {}
    for name in (name for name in MAKERS if name.startswith(tuple(given.only))):
        try:
            candidate = MAKERS[name]()
            gates[name], passes = gate(candidate, batch)
            if passes:
                ready[name] = functools.partial(candidate, batch)
        except Exception as problem:  # a competitor may fail in any way of its own: it is listed with its reason
            missing[name] = f"{type(problem).__name__}: {str(problem).splitlines()[:1]}"
    if device.type == "cuda" and CAPTURED in gates:
        # Python launches a kernel in more time than it takes; a captured graph shows what it takes.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel_only(batch)
        ready[f"{CAPTURED}, CUDA graph"] = graph.replay
    written = torch.empty_like(batch.token_logprob)
    ready["one pass over memory"] = lambda: torch.mul(batch.token_logprob, 2.0, out=written)
    times = {name: quantiles(x) for name, x in watch.interleaved(ready, given.rounds, given.warmups).items()}
    floor = times["one pass over memory"][1]
    for name, (p20, p50, p80) in times.items():
        yield replace(
            blank, candidate=name, gate=gates.get(name, "the roof"), note=synchronises(ready[name], device),
            p20_ms=p20, p50_ms=p50, p80_ms=p80, fraction=floor / p50, peak_mib=watch.peak_mib(ready[name]),
        )  # fmt: skip
    for name in gates.keys() - ready.keys():
        yield replace(blank, candidate=name, gate=gates[name], note="no time: fails the gate")


def main() -> int:
    given = arguments(__doc__, SHAPES, rounds=50)
    missing, rows = {}, []
    before = gpu_state(given.device)
    for shape in SHAPES[given.shapes]:
        rows += measure(shape, given, missing)
        print(table([row for row in rows if row.shape == rows[-1].shape]), flush=True)
    path = save(
        "sequence_objective", rows, missing, f"GPU before: {before}; after: {gpu_state(given.device)}", given.out
    )
    print("\n".join(f"missing {name}: {why}" for name, why in missing.items()), f"\n{path}")
    return 0 if all(row.gate.startswith("exact") or not row.candidate.startswith("ours") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
