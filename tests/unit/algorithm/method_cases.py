"""Cubes of rewards and configurations that the tests of all methods share, and the objective of whole sequences."""

import math

import torch
from hacpo_kernels import ObjectiveStats, objective_from_mean, objective_stats
from torch import Tensor

from hacpo_mega.algorithm import Judged, PackedAnswers, objective_bounds
from hacpo_mega.config import AlgorithmConfig

NAN = math.nan


def cube(seed: int, num_agents: int, num_rollouts: int = 4) -> torch.Tensor:
    """[7, N, G] rewards: mixed, all zero, all one, a failing learner beside a peer, graded, with unjudged answers."""
    generator = torch.Generator().manual_seed(seed)
    rewards = (torch.rand(7, num_agents, num_rollouts, generator=generator) > 0.5).double()
    rewards[1], rewards[2] = 0.0, 1.0
    rewards[3] = 0.0
    rewards[3, -1, 0] = 1.0
    rewards[4] = torch.rand(num_agents, num_rollouts, generator=generator).double()
    rewards[5, 0, 1] = rewards[6, -1] = NAN  # one answer of the first agent, and all of the last one's
    return rewards


def config_of(method: str, **options) -> AlgorithmConfig:
    return AlgorithmConfig(method=method, **options)


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


def judged(rewards_PNG: Tensor, capability_N: Tensor, learner: int) -> Judged:
    """Judged answers of which those with reward 1 are successes."""
    return Judged(rewards_PNG, rewards_PNG == 1.0, capability_N, learner)


def answers_of(
    logprob_R: Tensor,
    starts_B1: Tensor,
    source_logprob_B: Tensor,
    advantage_B: Tensor,
    is_self_B: Tensor,
    length_B: Tensor,
    update_index: int,
    old_logprob_R: Tensor | None = None,
) -> PackedAnswers:
    """The record of an objective, with ratios within 20 nats."""
    starts_B1, none_B = starts_B1.long(), torch.zeros(len(length_B), dtype=torch.int64)
    mean_B = torch.segment_reduce(logprob_R.double(), "sum", offsets=starts_B1) / length_B.double()
    log_ratio_B = (mean_B - source_logprob_B.double()).clamp(-20.0, 20.0)
    old_R = torch.full_like(logprob_R.detach(), NAN) if old_logprob_R is None else old_logprob_R
    columns = log_ratio_B, advantage_B.double(), is_self_B, none_B, none_B, length_B.double()
    return PackedAnswers(logprob_R, old_R, starts_B1, *columns, update_index)
