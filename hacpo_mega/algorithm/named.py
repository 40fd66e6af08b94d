"""Advantages and an objective of the user's own, named in the configuration, in place of a method's.

    [algorithm]
    method = "naive"                          # who learns from whom
    advantages = "mine.py:advantages"         # (rewards_PNG, capability_N, learner) -> advantages_PNG
    objective = "mine.py:objective"           # (log_ratio_B, advantage_B, is_self_B, update_index) -> loss_B

Both must be pure: every rank computes them for itself, and a different result would train a different model. The
objective is differentiated by autograd, in float64 torch, instead of the fused kernel.
"""

import torch
from hacpo_kernels import SequenceTerms
from torch import Tensor

from hacpo_mega.algorithm.advantage import checked_rewards
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.config.user_code import named_function


def named_advantages(rewards_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """Result of `algorithm.advantages` on a lane's rewards [P, N, G] and capabilities [N], float64 [P, N, G].

    0 for unjudged answers, and for others' if the method shares none. ValueError for anything but finite numbers of
    that shape.
    """
    rewards_PNG = checked_rewards(rewards_PNG, capability_N, learner)
    found = named_function(config.advantages)(rewards_PNG.clone(), capability_N.detach().cpu().clone(), learner)
    shape = tuple(rewards_PNG.shape)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"algorithm.advantages: {config.advantages} must return a tensor {shape}, found {what}")
    advantages_PNG = found.detach().to("cpu", torch.float64).masked_fill(rewards_PNG.isnan(), 0.0)
    if not advantages_PNG.isfinite().all():
        raise ValueError(f"algorithm.advantages: {config.advantages} returned a number that is not finite")
    if not config.shares_answers:
        others_N = torch.arange(shape[1]) != learner
        advantages_PNG[:, others_N] = 0.0
    return advantages_PNG


def named_objective(
    token_logprob_R: Tensor,
    row_cu_seqlens_B: Tensor,
    source_logprob_B: Tensor,
    advantage_B: Tensor,
    is_self_B: Tensor,
    length_B: Tensor,
    update_index: int,
    config: AlgorithmConfig,
) -> tuple[Tensor, SequenceTerms]:
    """Result of `algorithm.objective` on packed answers: (loss_B, terms), differentiable in the token log-probs [R].

    The function gets the log of each answer's ratio (learner over source of mean log-probs), float64 [B], bounded by
    log_ratio_clamp; advantages [B] with omega in them; is_self [B]; and m, the updates already made in this step.
    ValueError for a loss of another shape, or one that does not depend on the ratio.
    """
    sum_B = torch.segment_reduce(token_logprob_R.double(), "sum", offsets=row_cu_seqlens_B.long())
    bound = config.log_ratio_clamp
    log_ratio_B = (sum_B / length_B.double() - source_logprob_B.double()).clamp(-bound, bound)
    advantage_B = advantage_B.double()
    loss_B = named_function(config.objective)(log_ratio_B, advantage_B, is_self_B, update_index)
    if not isinstance(loss_B, Tensor) or loss_B.shape != log_ratio_B.shape:
        what = tuple(loss_B.shape) if isinstance(loss_B, Tensor) else type(loss_B).__name__
        raise ValueError(
            f"algorithm.objective: {config.objective} must return a loss per answer, a tensor "
            f"{tuple(log_ratio_B.shape)}, found {what}"
        )
    with torch.no_grad():
        weight_B = _weights(loss_B, log_ratio_B, advantage_B, config.objective)
        ratio_B = log_ratio_B.exp().masked_fill(row_cu_seqlens_B.diff() == 0, torch.nan)
    terms = SequenceTerms(loss_B.detach(), ratio_B, weight_B, advantage_B, is_self_B)
    return loss_B.to(token_logprob_R.dtype), terms


def _weights(loss_B: Tensor, log_ratio_B: Tensor, advantage_B: Tensor, name: str | None) -> Tensor:
    """w of SequenceTerms [B], from d loss / d mean log-prob = -w A; 0 where A is 0."""
    if not log_ratio_B.requires_grad:
        return torch.zeros_like(advantage_B)
    slope_B = None
    if loss_B.requires_grad:
        ones_B = torch.ones_like(loss_B)
        (slope_B,) = torch.autograd.grad(loss_B, log_ratio_B, ones_B, retain_graph=True, allow_unused=True)
    if slope_B is None:
        raise ValueError(f"algorithm.objective: {name} returned a loss that does not depend on log_ratio_B")
    return torch.where(advantage_B == 0.0, 0.0, -slope_B / advantage_B)
