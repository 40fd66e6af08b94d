"""The objective of one learner: HACPO eq. 47 (own answers), eq. 50 (others' answers), Algorithm 1's update.

s      = exp( mean_logprob_learner(now) - mean_logprob_source(old) )          sequence ratio
own    L = - min( s A, clip(s, 1 - eps_low, 1 + eps_high) A )
cross  L = - c sg[c]^alpha (omega A),  c = clip(s, low(m), 1),  low(m) = min(1, 1 - delta + m delta_step)
c^alpha is the exponential importance weight, low(m) the stepwise clip at the m-th update of a step.

The arithmetic itself is `hacpo_kernels.reference.objective_from_mean`, which the Triton kernel is held to, and the band
is `hacpo_kernels.Bounds`. Here are the configuration's numbers for them, the objective of whole sequences, the weight
of a sample, and the optional KL to the frozen initial policy. An update applies the same objective to packed tokens
(policy_loss.py).
"""

import torch
from hacpo_kernels import Bounds, ObjectiveStats, objective_from_mean, objective_stats
from torch import Tensor

from hacpo_mega.config import AlgorithmConfig


def objective_bounds(config: AlgorithmConfig) -> Bounds:
    """The bounds of a run, as its configuration has them."""
    return Bounds(
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        delta=config.delta,
        delta_step=config.delta_step,
        alpha=config.alpha,
        log_ratio_clamp=config.log_ratio_clamp,
    )


def sequence_objective(
    seq_logprob_B: Tensor,
    source_logprob_B: Tensor,
    advantage_B: Tensor,
    is_self_B: Tensor,
    update_index: int,
    config: AlgorithmConfig,
) -> tuple[Tensor, Tensor, ObjectiveStats]:
    """Loss of every sequence and its derivative by the sequence's mean log-prob, [B] each, and (sum, count) stats.

    seq_logprob_B     mean log-prob of the learner now, nats per token
    source_logprob_B  mean log-prob of the source when it answered
    advantage_B       from `hacpo_advantages`, omega applied
    update_index      m, the optimizer updates this learner has already made in this step
    """
    bounds = objective_bounds(config)
    loss_B, grad_B, terms = objective_from_mean(
        seq_logprob_B, source_logprob_B, advantage_B, is_self_B, update_index=update_index, bounds=bounds
    )
    return loss_B, grad_B, objective_stats(terms)


def sample_weight(num_prompts: int, num_rollouts: int, num_agents: int, config: AlgorithmConfig) -> float:
    """What one sample of a global minibatch of `num_prompts` prompts weighs.

    `sum`: J_homo + J_hete, each divided by P G (Algorithm 1). `mean`: divided by all N P G samples (authors' code).
    The counts are global and fixed by the configuration, so no packing, layout or dropped sample changes a gradient.
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
    """kl_coef * weight * sum over sequences of their mean KL to the frozen initial policy, and that KL as (sum, count).

    The low-variance estimator exp(d) - d - 1 with d = reference - learner per token (Schulman, "Approximating KL
    divergence"; `low_var_kl` in verl). `kl_on = "own"` counts own answers only. The rows of sequence b are
    row_cu_seqlens_B[b]:row_cu_seqlens_B[b + 1].
    """
    # Bounded before exp, as the ratio is: one token that the learner has all but forgotten must not overflow the loss.
    difference_R = (reference_logprob_R - token_logprob_R).clamp(-20.0, 20.0)
    kl_R = difference_R.exp() - difference_R - 1.0
    length_B = row_cu_seqlens_B.diff()
    owner_R = torch.repeat_interleave(length_B.long())
    kl_B = token_logprob_R.new_zeros(len(length_B)).index_add(0, owner_R, kl_R) / length_B.clamp(min=1)
    counted_B = is_self_B if config.kl_on == "own" else torch.ones_like(is_self_B)
    total = torch.where(counted_B, kl_B, 0.0).sum()
    return config.kl_coef * weight * total, torch.stack([total.detach().double(), counted_B.sum().double()])
