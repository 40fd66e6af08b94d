"""The objective of one learner: HACPO eq. 47 (own answers), eq. 50 (others' answers), Algorithm 1's update.

s      = exp( mean_logprob_learner(now) - mean_logprob_source(old) )          sequence ratio
own    L = - min( s A, clip(s, 1 - eps_low, 1 + eps_high) A )
cross  L = - c sg[c]^alpha (omega A),  c = clip(s, low(m), 1),  low(m) = min(1, 1 - delta + m delta_step)
c^alpha is the exponential importance weight, low(m) the stepwise clip at the m-th update of a step.

The other methods share the objective of own answers, except grpo with one ratio per token (`token_objective`), and sgt
and f_tis with `ratio_level = "token"` (methods.py):
gspo, gspo_x2   nothing else                                                  naive   L = own, for others' answers too
f_tis           L = - sg[min(s, C)] A log-prob, 0 where A < 0 and log s < -g  sgt     L = - A mean_logprob_learner

The arithmetic is in kernels/hacpo_kernels/reference.py (`objective_from_mean`), which the Triton kernel must match, and
the band in `hacpo_kernels.Bounds`. This file has the configuration's numbers for them, the weight of a sample, and the
optional KL to the frozen initial policy. An update applies the objective to packed tokens (policy_loss.py).
"""

import math

import torch
from hacpo_kernels import Bounds, SequenceTerms, segment_sum
from torch import Tensor

from hacpo_mega.config import AlgorithmConfig


def objective_bounds(config: AlgorithmConfig) -> Bounds:
    """Bounds of the objective, from the configuration."""
    has_band = config.cross_clip != "none"
    return Bounds(
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        log_ratio_clamp=config.log_ratio_clamp,
        cross=config.cross_objective,
        delta=config.delta if has_band else 1.0,
        delta_step=config.delta_step if has_band else 0.0,
        high=1.0 if has_band else math.inf,
        alpha=config.alpha,
        ratio_cap=config.ratio_cap,
        divergence_limit=config.divergence_limit,
    )


def mean_logprobs(token_logprob_R: Tensor, row_cu_seqlens_B: Tensor) -> Tensor:
    """Mean log-prob of every packed answer, as the ratio uses it: fp32 nats [B], summed in float64, from tokens [R].

    The rows of answer b are row_cu_seqlens_B[b]:row_cu_seqlens_B[b + 1], at least one.
    """
    length_B = row_cu_seqlens_B.diff().to(token_logprob_R.device, torch.float64, non_blocking=True)
    return (segment_sum(token_logprob_R, row_cu_seqlens_B) / length_B).float()


def token_objective(
    token_logprob_R: Tensor,
    old_logprob_R: Tensor,
    advantage_B: Tensor,
    row_cu_seqlens_B: Tensor,
    config: AlgorithmConfig,
) -> tuple[Tensor, SequenceTerms]:
    """GRPO's loss of own answers, with one ratio per token (DeepSeekMath, arXiv 2402.03300, eq. 3, without its KL):

        L_b = - 1/|b| sum_t min( r_t A_b, clip(r_t, 1 - eps_low, 1 + eps_high) A_b ),  r_t = exp(logprob_t - old_t)

    token_logprob_R   nats [R] under the learner now, differentiable; the rows of answer b are
                      row_cu_seqlens_B[b]:row_cu_seqlens_B[b + 1]
    old_logprob_R     nats [R] under the policy that sampled, before the step's first update
    advantage_B       [B], of the own group
    Returns (loss_B, terms): per answer, `terms` has the mean ratio of its tokens and, as its weight, the mean ratio of
    the unclipped ones. GRPO differs from `hacpo`: agents learn alone, and the clip acts on tokens. Where the texts
    differ, a token of an answer weighs 1/|b| (GRPO), not 1/tokens of the batch (DAPO, arXiv 2503.14476). DAPO's wider
    upper clip is the default here.
    """
    length_B = row_cu_seqlens_B.diff()
    bound = config.log_ratio_clamp
    ratio_R = (token_logprob_R - old_logprob_R).clamp(-bound, bound).exp()
    clipped_R = ratio_R.clamp(1.0 - config.eps_low, 1.0 + config.eps_high)
    advantage_R = advantage_B[torch.repeat_interleave(length_B.long(), output_size=len(token_logprob_R))]
    loss_R = -torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R)
    loss_B = _token_means(loss_R, length_B)
    trained_R = torch.where(ratio_R * advantage_R > clipped_R * advantage_R, 0.0, ratio_R)
    with torch.no_grad():
        ratio_B = _token_means(ratio_R.double(), length_B).masked_fill(length_B == 0, torch.nan)
        weight_B = _token_means(trained_R.double(), length_B)
    is_self_B = torch.ones_like(advantage_B, dtype=torch.bool)
    return loss_B, SequenceTerms(loss_B.detach(), ratio_B, weight_B, advantage_B, is_self_B)


def _token_means(value_R: Tensor, length_B: Tensor) -> Tensor:
    """Mean over the tokens of each answer, [B], from values [R] of all tokens and the answers' lengths; 0 for none."""
    owner_R = torch.repeat_interleave(length_B.long(), output_size=len(value_R))
    return value_R.new_zeros(len(length_B)).index_add(0, owner_R, value_R) / length_B.clamp(min=1)


def sample_weight(num_prompts: int, num_rollouts: int, num_agents: int, config: AlgorithmConfig) -> float:
    """Weight of one sample of a global minibatch of `num_prompts` prompts.

    `sum`: J_homo + J_hete, each divided by P G (Algorithm 1). `mean`: divided by all N P G samples (authors' code). The
    counts are global and fixed by the configuration, so no packing, layout or dropped sample changes a gradient.
    """
    sources = num_agents if config.aggregation == "mean" and config.shares_answers else 1
    return 1.0 / (num_prompts * num_rollouts * sources)


def kl_penalty(
    token_logprob_R: Tensor,
    reference_logprob_R: Tensor,
    row_cu_seqlens_B: Tensor,
    is_self_B: Tensor,
    weight: float,
    config: AlgorithmConfig,
) -> tuple[Tensor, Tensor]:
    """kl_coef * weight * sum over sequences of their mean KL to the initial policy, and that KL as (sum, count).

    The low-variance estimator exp(d) - d - 1 with d = reference - learner per token (Schulman, "Approximating KL
    divergence"; `low_var_kl` in verl). `kl_on = "own"` counts own answers only. The rows of sequence b are
    row_cu_seqlens_B[b]:row_cu_seqlens_B[b + 1].
    """
    # Bounded before exp, as the ratio is: one very unlikely token must not overflow the loss.
    difference_R = (reference_logprob_R - token_logprob_R).clamp(-20.0, 20.0)
    kl_R = difference_R.exp() - difference_R - 1.0
    kl_B = _token_means(kl_R, row_cu_seqlens_B.diff())
    counted_B = is_self_B if config.kl_on == "own" else torch.ones_like(is_self_B)
    total = torch.where(counted_B, kl_B, 0.0).sum()
    return config.kl_coef * weight * total, torch.stack([total.detach().double(), counted_B.sum().double()])
