"""Cubes of rewards and configurations that the tests of all methods share."""

import math

import torch

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
