"""Kernels of a mixture of experts beside the same in plain torch, accuracy first.

    python kernels/bench/experts.py                               on a GPU
    python kernels/bench/experts.py --device cpu --shapes tiny    a smoke test of the harness itself

Combine: a token's rows, weighted and summed, and both gradients. Product: the gradient of the experts' matrices, added
to its float32 sum. The roof of the first is one pass over its bytes; the teraflops of the second are of its products.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from hacpo_kernels import add_grouped_product, combine_gradients, combine_rows
from harness import Row, Stopwatch, arguments, commit_name, device_name, gpu_state, quantiles, save, table

# (tokens, experts of a token, experts of the rank, hidden size, width): Qwen3-30B-A3B's, on one rank and on ep 8.
SHAPES = {"tiny": [(6, 2, 4, 32, 16)], "targets": [(8192, 8, 128, 2048, 768), (8192, 8, 16, 2048, 768)]}
# Largest error beside the largest number: bf16 is rounded once; tensor cores cut a float32 sum off every sixteen rows,
# in cuBLAS's product, too.
ALLOWED = {"combine": 2.0**-7, "product": 2.0**-13}


@dataclass(frozen=True)
class Batch:
    """Rows [R, H] with their places [n, k], shares and a gradient [n, H]; gradients [R, W] and their sum [e, W, H]."""

    rows: torch.Tensor
    place: torch.Tensor
    shares: torch.Tensor
    grad: torch.Tensor
    grad_rows: torch.Tensor
    ends: torch.Tensor
    total: torch.Tensor


def make_batch(shape: tuple[int, ...], device: torch.device) -> Batch:
    """Experts of uneven load, one of them idle."""
    (num_tokens, per_token, num_experts, hidden, width), generator = shape, torch.Generator().manual_seed(0)
    load = torch.rand(num_experts, generator=generator)
    load[0] = 0.0
    ends = (load.cumsum(0) / load.sum() * num_tokens * per_token).round().int()
    rows, grad, grad_rows = (
        torch.randn(*size, generator=generator).bfloat16().to(device)
        for size in ((num_tokens * per_token, hidden), (num_tokens, hidden), (num_tokens * per_token, width))
    )
    place = torch.randperm(num_tokens * per_token, generator=generator).view(num_tokens, per_token).to(device)
    shares = torch.rand(num_tokens, per_token, generator=generator).to(device)
    total = torch.zeros(num_experts, width, hidden, device=device)
    return Batch(rows, place, shares, grad, grad_rows, ends.to(device), total)


def combined(backend: str) -> Callable[[Batch], tuple[torch.Tensor, ...]]:
    def call(batch: Batch) -> tuple[torch.Tensor, ...]:
        out = combine_rows(batch.rows, batch.place, batch.shares, backend=backend)
        return out, *combine_gradients(batch.grad, batch.rows, batch.place, batch.shares, backend=backend)

    return call


def added(backend: str) -> Callable[[Batch], tuple[torch.Tensor]]:
    def call(batch: Batch) -> tuple[torch.Tensor]:
        add_grouped_product(batch.total, batch.grad_rows, batch.rows, batch.ends, backend=backend)
        return (batch.total,)

    return call


def rounded(batch: Batch) -> tuple[torch.Tensor]:
    """torch's grouped product, rounded to bf16, and the pass that adds it."""
    batch.total.add_(torch._grouped_mm(batch.grad_rows.T, batch.rows, offs=batch.ends))
    return (batch.total,)


def one_pass(rows: torch.Tensor, written: torch.Tensor) -> None:
    torch.neg(rows, out=written)
    rows.amax()


CALLS = {
    "combine": {"ours (triton)": combined("triton"), "ours (plain torch)": combined("reference")},
    "product": {"ours (triton)": added("triton"), "ours (plain torch)": added("reference"), "grouped_mm": rounded},
}


def exact(what: str, batch: Batch) -> tuple[torch.Tensor, ...]:
    """float64, on the CPU."""
    rows, grad_rows, ends = batch.rows.cpu().double(), batch.grad_rows.cpu().double(), batch.ends.tolist()
    if what == "product":
        edges = zip([0, *ends], ends)
        return (torch.stack([grad_rows[first:last].T @ rows[first:last] for first, last in edges]),)
    leaves = rows.requires_grad_(), batch.shares.cpu().double().requires_grad_()
    out = (leaves[0][batch.place.cpu()] * leaves[1][..., None]).sum(dim=1)
    return out.detach(), *torch.autograd.grad(out, leaves, batch.grad.cpu().double())


def gate(what: str, call: Callable, batch: Batch, wanted: tuple[torch.Tensor, ...]) -> str:
    batch.total.zero_()
    pairs = zip(call(batch), wanted, strict=True)
    error = max(((got.cpu().double() - want).abs().max() / want.abs().max()).item() for got, want in pairs)
    return f"{'exact' if error < ALLOWED[what] else 'rounds'}: {error:.1e}"


def measure(shape: tuple[int, ...], given: argparse.Namespace, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of one shape."""
    batch, watch = make_batch(shape, given.device), Stopwatch(given.device)
    num_tokens, per_token, num_experts, hidden, width = shape
    name_of_shape = f"n{num_tokens} k{per_token} e{num_experts} H{hidden} W{width}"
    for what, calls in CALLS.items():
        wanted, gates, ready = exact(what, batch), {}, {}
        for name in (name for name in calls if name.startswith(tuple(given.only))):
            try:
                gates[name] = gate(what, calls[name], batch, wanted)
                ready[name] = functools.partial(calls[name], batch)
            except Exception as problem:  # a competitor may fail in any way of its own: it is listed with its reason
                missing[f"{what}, {name}"] = f"{type(problem).__name__}: {str(problem).splitlines()[:1]}"
        if what == "combine":
            # Forward reads the rows; backward reads and writes them.
            ready["one pass over memory"] = functools.partial(one_pass, batch.rows, torch.empty_like(batch.rows))
        times = {name: quantiles(x) for name, x in watch.interleaved(ready, given.rounds, given.warmups).items()}
        floor, blank = times.get("one pass over memory"), Row(device_name(given.device), commit_name(), *[""] * 5)
        for name, (p20, p50, p80) in times.items():
            work = 2e-9 * num_tokens * per_token * hidden * width / p50 if what == "product" else None
            yield replace(
                blank, shape=name_of_shape, candidate=name, what=what, gate=gates.get(name, "the roof"), p20_ms=p20,
                p50_ms=p50, p80_ms=p80, teraflops=work, fraction=floor and floor[1] / p50,
                peak_mib=watch.peak_mib(ready[name]),
            )  # fmt: skip


def main() -> int:
    given = arguments(__doc__, SHAPES, rounds=50)
    missing, rows, before = {}, [], gpu_state(given.device)
    for shape in SHAPES[given.shapes]:
        rows += measure(shape, given, missing)
    print(table(rows), flush=True)
    path = save("experts", rows, missing, f"GPU before: {before}; after: {gpu_state(given.device)}", given.out)
    print("\n".join(f"missing {name}: {why}" for name, why in missing.items()), f"\n{path}")
    return 0 if all(row.gate.startswith("exact") or not row.candidate.startswith("ours") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
