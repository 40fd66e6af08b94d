"""Packed batches for the objective, and its loss and gradient by autograd in ten lines of float64."""

from dataclasses import dataclass

import torch
from hacpo_kernels import Bounds
from kernel_cases import DEVICE, UNIT

# The paper's numbers (AlgorithmConfig has them as defaults; the kernels have none).
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
# No ratio of a batch is nearer than this to a border, where its gradient jumps: far more than a float32 mean is off.
MARGIN = 1e-5


@dataclass(frozen=True)
class Expected:
    """float64 on the CPU; `relative` bounds the relative error of loss and coefficient of a sequence, [B]."""

    loss: torch.Tensor  # [B]
    coefficient: torch.Tensor  # [B]
    token_grad: torch.Tensor  # [T]
    relative: torch.Tensor  # [B]


def oracle(token_logprob, lengths, source, advantage, is_self, update_index, bounds, denominators=None) -> Expected:
    """Loss per sequence and gradient per token, sequence by sequence, by autograd in float64.

    The bound: a sum of n tokens is off by n u times their absolute sum; divided by the length that is the error of the
    mean, and of log s; (1 + alpha) times it is the relative error of s^(1 + alpha); 16 more roundings for the rest.
    Results rounded to float32 add that rounding. Refuses batches with a ratio on a border.
    """
    tokens = token_logprob.detach().cpu().double().requires_grad_()
    low = min(1.0, 1.0 - bounds.delta + update_index * bounds.delta_step)
    losses, relative = [], []
    for b, segment in enumerate(tokens.split(lengths)):
        if lengths[b] == 0:
            losses.append(tokens.sum() * 0.0)
            relative.append(0.0)
            continue
        length = denominators[b] if denominators else lengths[b]
        log_s = segment.sum() / length - source[b].item()
        assert abs(abs(log_s) - bounds.log_ratio_clamp) > MARGIN, f"sequence {b} is on the border of the clamp"
        s = log_s.clamp(-bounds.log_ratio_clamp, bounds.log_ratio_clamp).exp()
        A = advantage[b].item()
        if is_self[b]:
            borders = (1 - bounds.eps_low, 1 + bounds.eps_high)
            loss = -torch.minimum(s * A, s.clamp(*borders) * A)
        else:
            borders = (low, 1.0)
            c = s.clamp(low, 1.0)
            loss = -c * c.detach() ** bounds.alpha * A
        assert all(abs(s - border) > MARGIN for border in borders), f"sequence {b} is on a border: ratio {s.item()}"
        losses.append(loss)
        unit = UNIT[torch.float64]
        error = unit * ((lengths[b] + 2) * segment.abs().sum().item() / length + 2 * abs(source[b].item()))
        relative.append((1 + bounds.alpha) * (2 * error + 16 * unit) + 2 * UNIT[token_logprob.dtype])
    loss_B = torch.stack(losses)
    loss_B.sum().backward()
    coefficient_B = torch.stack([part[0] if len(part) else part.sum() for part in tokens.grad.split(lengths)])
    return Expected(loss_B.detach(), coefficient_B, tokens.grad, torch.tensor(relative, dtype=torch.float64))


def make_batch(lengths, *, dtype=torch.float64, seed=0, spread=0.15):
    """Tokens whose ratios fall on every side of every bound, none of them near one: log s is small (inside the own
    clip, on either side of 1), middling (outside the own clip) or large (half to 2.5 times `spread`)."""
    generator = torch.Generator().manual_seed(seed)
    num_sequences = len(lengths)
    tokens = -torch.rand(sum(lengths), generator=generator, dtype=torch.float64).mul(3).to(dtype).double()
    mean = torch.stack([x.mean() if len(x) else x.sum() for x in tokens.split(lengths)])
    kind = torch.randint(0, 3, (num_sequences,), generator=generator)
    sign = torch.randint(0, 2, (num_sequences,), generator=generator).mul(2).sub(1)
    size = torch.rand(num_sequences, generator=generator, dtype=torch.float64).add(0.25)
    source = mean - sign * size * torch.tensor([1.5e-4, 2e-3, 2 * spread], dtype=torch.float64)[kind]
    advantage = torch.randn(num_sequences, generator=generator, dtype=torch.float64)
    advantage[::7] = 0.0
    is_self = torch.rand(num_sequences, generator=generator) < 0.5
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return [x.to(DEVICE, dtype) for x in (tokens, source, advantage)] + [is_self.to(DEVICE), cu_seqlens]
