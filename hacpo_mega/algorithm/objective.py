"""The objective of one learner: HACPO eq. 47 (own answers), eq. 50 (others' answers), Algorithm 1's update.

s      = exp( mean_logprob_learner(now) - mean_logprob_source(old) )          sequence ratio
own    L = - min( s A, clip(s, 1 - eps_low, 1 + eps_high) A )
cross  L = - c sg[c]^alpha (omega A),  c = clip(s, low(m), 1),  low(m) = min(1, 1 - delta + m delta_step)
c^alpha is the exponential importance weight, low(m) the stepwise clip at the m-th update of a step.

The arithmetic itself is `hacpo_kernels.reference.objective_from_mean`, which the Triton kernel is held to; here are its
options by the names of the configuration, the weight of a sample, and the optional KL to the frozen initial policy.
"""

from typing import NamedTuple

import torch
from hacpo_kernels import ObjectiveStats, objective_from_mean
from hacpo_kernels import sequence_objective as packed_sequence_objective
from torch import Tensor

from hacpo_mega.config import AlgorithmConfig


class _Options(NamedTuple):
    """What the objective needs of the configuration, by the kernel's names."""

    eps_low: float
    eps_high: float
    delta: float
    delta_step: float
    alpha: float
    log_ratio_clamp: float

    @classmethod
    def of(cls, config: AlgorithmConfig) -> "_Options":
        return cls(*(getattr(config, name) for name in cls._fields))


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
    return objective_from_mean(
        seq_logprob_B,
        source_logprob_B,
        advantage_B,
        is_self_B,
        update_index=update_index,
        **_Options.of(config)._asdict(),
    )


def cross_band(update_index: int, config: AlgorithmConfig) -> float:
    """low(m) = min(1, 1 - delta + m delta_step): the lower end of the cross band, which tightens with every update."""
    return min(1.0, 1.0 - config.delta + update_index * config.delta_step)


class PackedSequences(NamedTuple):
    """What the objective needs of a packed micro-batch (records.MicroBatch), on the device of the log-probs."""

    row_cu_seqlens_B: Tensor
    source_logprob_B: Tensor
    advantage_B: Tensor
    is_self_B: Tensor
    length_B: Tensor


def policy_loss(
    token_logprob_R: Tensor, sequences: PackedSequences, update_index: int, weight: float, config: AlgorithmConfig
) -> tuple[Tensor, ObjectiveStats]:
    """The sum of the losses of packed sequences, each times `weight` (`sample_weight`): a scalar with a gradient."""
    loss_B, _, stats = packed_sequence_objective(
        token_logprob_R,
        sequences.row_cu_seqlens_B,
        sequences.source_logprob_B,
        sequences.advantage_B,
        sequences.is_self_B,
        update_index=update_index,
        length=sequences.length_B,
        **_Options.of(config)._asdict(),
    )
    return loss_B.sum() * weight, stats


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
    sequences: PackedSequences,
    weight: float,
    config: AlgorithmConfig,
) -> tuple[Tensor, Tensor]:
    """kl_coef * weight * sum over sequences of their mean KL to the frozen initial policy, and that KL as (sum, count).

    The low-variance estimator exp(d) - d - 1 with d = reference - learner per token (Schulman, "Approximating KL
    divergence"; `low_var_kl` in verl). `kl_on = "own"` counts own answers only.
    """
    difference_R = (reference_logprob_R - token_logprob_R).clamp(-20.0, 20.0)
    kl_R = difference_R.exp() - difference_R - 1.0
    length_B = sequences.row_cu_seqlens_B.diff()
    owner_R = torch.repeat_interleave(length_B.long())
    kl_B = torch.zeros_like(sequences.advantage_B).index_add(0, owner_R, kl_R) / length_B.clamp(min=1)
    counted_B = sequences.is_self_B if config.kl_on == "own" else torch.ones_like(sequences.is_self_B)
    total = torch.where(counted_B, kl_B, 0.0).sum()
    return config.kl_coef * weight * total, torch.stack([total.detach().double(), counted_B.sum().double()])
