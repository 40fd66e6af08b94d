"""A layer's kernels, forward and backward, beside eager torch and Liger where it is installed; accuracy first.

    python kernels/bench/elementwise.py                              on a GPU
    python kernels/bench/elementwise.py --device cpu --shapes tiny   a smoke test of the harness itself

Gated activation, RMSNorm (of hidden states and of heads) and rotary embedding in bf16, at one rank's sizes. The roof is
one copy of the numbers that have to be read and written: these kernels are bytes, not arithmetic.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from hacpo_kernels import gated_activation, rms_norm, rotate_heads
from harness import Row, Stopwatch, arguments, commit_name, device_name, gpu_state, quantiles, save, table

# Gated activation: tokens and columns. Norm and rotary embedding: tokens, heads and their size.
EPS = 1e-6
SHAPES = {
    "tiny": [("silu", 8, 32), ("norm", 8, 2, 16), ("rotary", 8, 2, 16)],
    "targets": [
        *(("silu", tokens, width) for tokens in (4096, 16_384) for width in (768, 7168, 14_336)),
        *(("norm", 16_384, *sizes) for sizes in ((1, 2048), (1, 5120), (8, 128), (32, 128))),
        *(("rotary", tokens, heads, 128) for tokens in (4096, 16_384) for heads in (4, 16, 32)),
    ],
}


def eager(kind: str, *tensors: torch.Tensor) -> torch.Tensor:
    """The same in torch's operations, as Hugging Face has them."""
    if kind == "silu":
        gate, up = tensors[0].chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    if kind == "norm":
        numbers, weight = tensors
        wide = numbers if numbers.dtype == torch.float64 else numbers.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).type_as(numbers)
    heads, turns = tensors
    cosines, sines = turns.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def ours(kind: str, *tensors: torch.Tensor, backend: str) -> torch.Tensor:
    if kind == "silu":
        return gated_activation(*tensors, "silu", backend=backend)
    if kind == "norm":
        return rms_norm(*tensors, EPS, backend=backend)
    return rotate_heads(*tensors, interleaved=False, backend=backend)


def liger(kind: str, *tensors: torch.Tensor) -> torch.Tensor:
    """Liger's gate and up are two tensors; its rotation is of queries and keys in place, here of a copy."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    if kind == "silu":
        return LigerSiLUMulFunction.apply(*(part.contiguous() for part in tensors[0].chunk(2, dim=-1)))
    if kind == "norm":
        return LigerRMSNormFunction.apply(*tensors, EPS)
    heads, turns = tensors
    cosines, sines = (part[None].contiguous() for part in turns.chunk(2, dim=-1))
    query = heads.transpose(0, 1)[None].clone()
    return LigerRopeFunction.apply(query, query[:, :1].clone(), cosines, sines)[0][0].transpose(0, 1)


def torchs_norm(kind: str, *tensors: torch.Tensor) -> torch.Tensor:
    if kind != "norm":
        raise ValueError("torch has no kernel of its own for this")
    numbers, weight = tensors
    return torch.nn.functional.rms_norm(numbers, weight.shape, weight, EPS)


MAKERS: dict[str, Callable] = {
    "ours (triton)": functools.partial(ours, backend="triton"),
    "ours (plain torch)": functools.partial(ours, backend="reference"),
    "torch's norm": torchs_norm,
    "eager": eager,
    "torch.compile of eager": lambda *given: torch.compile(eager)(*given),
    "Liger": liger,
}


def inputs(shape: tuple, device: torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Tensors of one call in bf16, the first with a gradient, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    kind, tokens, *rest = shape
    sizes = (tokens, 2 * rest[0]) if kind == "silu" else (tokens, *rest)
    first = torch.randn(sizes, generator=generator).to(device, torch.bfloat16).requires_grad_()
    grad = torch.randn((tokens, *rest), generator=generator).to(device, torch.bfloat16)
    if kind == "silu":
        return (first,), grad
    if kind == "norm":
        weight = torch.ones(rest[1], dtype=torch.bfloat16, device=device, requires_grad=True)
        return (first, weight), grad
    angles = torch.outer(torch.arange(tokens).double(), 1e4 ** -torch.linspace(0, 1, rest[1] // 2).double())
    turns = torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=1)
    return (first, turns.to(device, torch.bfloat16)), grad


def step(candidate: Callable, kind: str, tensors: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple:
    """Value and gradients."""
    value = candidate(kind, *tensors)
    return value, *torch.autograd.grad(value, [tensor for tensor in tensors if tensor.requires_grad], grad)


def gate(candidate: Callable, kind: str, tensors: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[str, bool]:
    exact = [tensor.detach().double() for tensor in tensors]
    for mine, given in zip(exact, tensors, strict=True):
        mine.requires_grad_(given.requires_grad)
    wanted = step(eager, kind, tuple(exact), grad.double())
    pairs = zip(step(candidate, kind, tensors, grad), wanted, strict=True)
    error = max(((got.double() - want).abs().max() / want.abs().max()).item() for got, want in pairs)
    return f"{'exact' if error < 2**-6 else 'FAILS'}: {error:.1e}", error < 2**-6  # of numbers that are stored in bf16


def measure(shape: tuple, given: argparse.Namespace, missing: dict[str, str]):
    """Rows of one shape."""
    kind, (tensors, grad) = shape[0], inputs(shape, given.device)
    name_of_shape = " ".join(map(str, shape))
    blank = Row(device_name(given.device), commit_name(), name_of_shape, "", "forward and backward", "", "")
    watch, ready, gates = Stopwatch(given.device), {}, {}
    for name, candidate in MAKERS.items():
        if not name.startswith(tuple(given.only)):
            continue
        try:
            gates[name], passes = gate(candidate, kind, tensors, grad)
            if passes:
                ready[name] = functools.partial(step, candidate, kind, tensors, grad)
        except Exception as problem:  # a competitor may fail in any way of its own: it is listed with its reason
            missing[name] = f"{type(problem).__name__}: {str(problem).splitlines()[:1]}"
    # Forward reads the input and writes the result; backward reads the gradient (but for a rotation the input, too) and
    # writes one.
    moved = {"silu": 8, "norm": 5, "rotary": 4}[kind] * grad.numel()
    source = torch.empty(moved // 2, dtype=torch.bfloat16, device=given.device)
    target = torch.empty_like(source)
    ready["one copy of as many bytes"] = lambda: target.copy_(source)
    times = {name: quantiles(x) for name, x in watch.interleaved(ready, given.rounds, given.warmups).items()}
    floor = times["one copy of as many bytes"][1]
    for name, (p20, p50, p80) in times.items():
        yield replace(
            blank, candidate=name, gate=gates.get(name, "the roof"), p20_ms=p20, p50_ms=p50, p80_ms=p80,
            fraction=floor / p50, peak_mib=watch.peak_mib(ready[name]),
        )  # fmt: skip
    for name in gates.keys() - ready.keys():
        yield replace(blank, candidate=name, gate=gates[name], note="no time: fails the gate")


def main() -> int:
    given = arguments(__doc__, SHAPES, rounds=30)
    missing, rows = {}, []
    before = gpu_state(given.device)
    for shape in SHAPES[given.shapes]:
        rows += measure(shape, given, missing)
        print(table([row for row in rows if row.shape == rows[-1].shape]), flush=True)
    path = save("elementwise", rows, missing, f"GPU before: {before}; after: {gpu_state(given.device)}", given.out)
    print("\n".join(f"missing {name}: {why}" for name, why in missing.items()), f"\n{path}")
    return 0 if all(row.gate.startswith("exact") or not row.candidate.startswith("ours") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
