"""Shared parts of the kernel tests: oracles without hacpo_kernels, random heads, ranks of a sharded vocabulary.

On a machine with a GPU the same tests run the compiled kernels there; elsewhere Triton interprets them on the CPU.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton")
# Unit roundoff: the largest relative error of one rounding.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-24}
# Logit gradients of bf16 inputs are handed to the tensor cores in bf16, and the result is bf16 again: two roundings of
# 2^-8, of which the interpreter truncates the first.
STORED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-7 + 2.0**-8}


@dataclass(frozen=True)
class Head:
    """A random LM head: hidden [T, H], weight [V + pads, H] whose pad rows are NaN, target [T]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    vocab_size: int

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh differentiable copies of hidden and weight."""
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()


def make_head(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    pads: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 2.5,
    seed: int = 0,
    whole: bool = False,
) -> Head:
    """Logits with standard deviation `scale`; targets drawn from the softmax itself, as sampled answers are.

    `whole` makes hidden and weight small whole numbers: their logits are exact in float32 whatever order they are added
    up in, so that every bit after them is decided by the code under test and none by a host's matrix product.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).mul_(scale / hidden_size**0.5)
    weight = torch.randn(vocab_size + pads, hidden_size, generator=generator)
    if whole:
        hidden, weight = hidden.mul(2.0).round(), weight.round()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    prob = torch.softmax(hidden.double() @ weight[:vocab_size].double().T, dim=1)
    target = torch.multinomial(prob, 1, generator=generator)[:, 0] if num_tokens else torch.zeros(0, dtype=torch.int64)
    weight[vocab_size:] = torch.nan
    return Head(hidden.to(DEVICE), weight.to(DEVICE), target.to(DEVICE), vocab_size)


@dataclass(frozen=True)
class Exact:
    """float64 values and gradients of a head, all on the CPU, and how far a right implementation may be from them."""

    logprob: torch.Tensor  # [T]
    hidden_grad: torch.Tensor  # [T, H]
    weight_grad: torch.Tensor  # [V, H], no pad rows
    logprob_bound: torch.Tensor
    hidden_bound: torch.Tensor
    weight_bound: torch.Tensor


def exact(
    head: Head,
    coefficient,
    temperature: float = 1.0,
    ignore_index=-100,
    coefficient_error: float = 0.0,
    softcap: float | None = None,
) -> Exact:
    """The oracle: all logits in float64, torch's own log_softmax and autograd; and first-order bounds on rounding.

    With unit roundoff u, n u bounds the relative error of a sum of n terms in any order, against the sum of their
    absolute values. So with Z = max_v sum_h |hidden_h weight_vh| / temperature, the largest a logit can get on its way:

    log-prob    2 (H + 12) u Z: the error of two logits, and a dozen roundings of numbers up to Z (temperature,
                difference, base of the logarithm); (V + 48) u: the sum of exponentials, exp, log, and log V < 12
    gradients   every term is coefficient * (1{target} - p): p has the relative error of exp(log-prob), to which the
                sum over V or T terms adds its own, the stores in bf16 theirs, and the coefficient its own
    softcap     c tanh(z / c) turns an error of z into no larger one, and adds at most 12 u c: z / c, its exponential
                e and (1 - e) / (1 + e) are a dozen roundings of numbers up to 1. Two logits of a log-prob have it, and
                the slope 1 - tanh^2 of a gradient twice the error of tanh, with at most 2 / c of that of z
    """
    hidden = head.hidden.detach().cpu().double().requires_grad_()
    weight = head.weight[: head.vocab_size].detach().cpu().double().requires_grad_()
    target = head.target.cpu()
    kept = target != ignore_index
    logits_TV = hidden @ weight.T
    logits_TV = logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)
    logprob_TV = torch.log_softmax(logits_TV / temperature, dim=1)
    logprob = logprob_TV.gather(1, target.clamp(min=0)[:, None])[:, 0] * kept
    (logprob * coefficient.cpu().double()).sum().backward()

    unit, stored = UNIT[head.hidden.dtype], STORED[head.hidden.dtype]
    (num_tokens, hidden_size), num_columns = hidden.shape, len(weight)
    with torch.no_grad():
        largest_T = (hidden.abs() @ weight.abs().T).amax(dim=1) / temperature
        bound_T = unit * (2 * (hidden_size + 12) * largest_T + num_columns + 48)
        bound_T += 2 * 12 * unit * (softcap or 0.0) / temperature
        terms_TV = torch.nn.functional.one_hot(target.clamp(min=0), num_columns) + logprob_TV.exp()
        terms_TV *= (coefficient.cpu().double().abs() * kept / temperature)[:, None]
        slope_T = 0.0 if softcap is None else bound_T * temperature / softcap + 2 * 12 * unit
        error_T1 = (bound_T + stored + coefficient_error + slope_T)[:, None]
        # 8 more roundings for temperature, coefficient and the sums of micro-batches or shards
        return Exact(
            logprob.detach(),
            hidden.grad,
            weight.grad,
            bound_T * kept,
            (error_T1 + unit * (num_columns + 8)) * (terms_TV @ weight.abs()),
            ((error_T1 + unit * (num_tokens + 8)) * terms_TV).T @ hidden.abs(),
        )


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Every element of `got` is as near to `want` as the bound says; NaN is nowhere near."""
    error = (got.detach().cpu().double() - want.detach().cpu().double()).abs()
    outside = ~(error <= bound)
    assert not outside.any(), f"{int(outside.sum())} of {error.numel()} outside; largest error {error.max().item():.3g}"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error over the largest value that should be there."""
    return ((got.detach().cpu().double() - want).abs().max() / want.abs().max()).item()


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute error; NaN anywhere is infinitely wrong."""
    return (got.detach().cpu().double() - want.detach().cpu().double()).abs().nan_to_num(nan=torch.inf).max().item()


def _rank(rank: int, num_ranks: int, store: str, job: Callable, results: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.save(job(rank, dist.group.WORLD, *arguments), f"{results}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(num_ranks: int, folder, job: Callable, *arguments) -> list:
    """Results of `job(rank, group, *arguments)` on each of `num_ranks` real processes joined by gloo."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # for the children, which import Triton anew
    try:
        mp.spawn(_rank, (num_ranks, str(folder / "store"), job, str(folder), arguments), num_ranks)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
