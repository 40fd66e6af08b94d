"""What the kernel tests share: oracles that use nothing of hacpo_kernels, random heads, ranks of a sharded vocabulary.

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
) -> Head:
    """Logits with standard deviation `scale`; targets drawn from the softmax itself, as sampled answers are."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).mul_(scale / hidden_size**0.5).to(dtype)
    weight = torch.randn(vocab_size + pads, hidden_size, generator=generator).to(dtype)
    prob = torch.softmax(hidden.double() @ weight[:vocab_size].double().T, dim=1)
    target = torch.multinomial(prob, 1, generator=generator)[:, 0] if num_tokens else torch.zeros(0, dtype=torch.int64)
    weight[vocab_size:] = torch.nan
    return Head(hidden.to(DEVICE), weight.to(DEVICE), target.to(DEVICE), vocab_size)


@dataclass(frozen=True)
class Exact:
    """float64 values and gradients of a head, all on the CPU."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    hidden_grad: torch.Tensor
    weight_grad: torch.Tensor  # [V, H], no pad rows


def exact(head: Head, coefficient, entropy_coefficient=None, temperature: float = 1.0, ignore_index=-100) -> Exact:
    """The oracle: all logits in float64, torch's own log_softmax and autograd."""
    hidden = head.hidden.detach().cpu().double().requires_grad_()
    weight = head.weight[: head.vocab_size].detach().cpu().double().requires_grad_()
    target = head.target.cpu()
    logprob_TV = torch.log_softmax(hidden @ weight.T / temperature, dim=1)
    kept = target != ignore_index
    logprob = logprob_TV.gather(1, target.clamp(min=0)[:, None])[:, 0] * kept
    entropy = torch.special.entr(logprob_TV.exp()).sum(dim=1) * kept
    loss = (logprob * coefficient.cpu().double()).sum()
    if entropy_coefficient is not None:
        loss = loss + (entropy * entropy_coefficient.cpu().double()).sum()
    loss.backward()
    return Exact(logprob.detach(), entropy.detach(), hidden.grad, weight.grad)


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
    """What `job(rank, group, *arguments)` returns on each of `num_ranks` real processes joined by gloo."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # for the children, which import Triton anew
    try:
        mp.spawn(_rank, (num_ranks, str(folder / "store"), job, str(folder), arguments), num_ranks)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
