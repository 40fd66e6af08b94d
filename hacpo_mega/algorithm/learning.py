"""Training targets of one agent, given a lane's rewards: its advantages, and which answers are trained, by whom.

Combines the method's advantages (methods.py) with its choice of answers (dynamic_groups.py).
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from hacpo_mega.algorithm.dynamic_groups import trained_answers
from hacpo_mega.algorithm.methods import advantages_of
from hacpo_mega.config import AlgorithmConfig


class Learning(NamedTuple):
    """Training targets of one agent on a lane's answers, once their rewards are known.

    advantages_PNG   float64, its advantages           trains_PNG   bool, answers that it trains on
    own_P            bool, prompts whose own answers it trains on
    wanted_PG        bool, its answers that others train on
    """

    advantages_PNG: Tensor
    trains_PNG: Tensor
    own_P: Tensor
    wanted_PG: Tensor

    def weighted(self, weights_PNG: Tensor) -> Self:
        """Multiplies every answer's advantage by its weight [P, N, G]."""
        return self._replace(advantages_PNG=self.advantages_PNG * weights_PNG)


def learning_of(
    rewards_PNG: Tensor, successes_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig
) -> Learning:
    """Training targets of agent number `learner`, from its lane's rewards and successes [P, N, G].

    capability_N [N] are all agents' capabilities.
    """
    num_agents = rewards_PNG.shape[1]
    advantages = [advantages_of(rewards_PNG, successes_PNG, capability_N, k, config) for k in range(num_agents)]
    trains = [trained_answers(advantages_PNG, k, config) for k, advantages_PNG in enumerate(advantages)]
    others = [trains_PNG[:, learner] for k, trains_PNG in enumerate(trains) if k != learner]
    own_PG = trains[learner][:, learner]
    return Learning(
        advantages[learner],
        trains[learner],
        own_PG.any(dim=1),
        torch.stack([torch.zeros_like(own_PG), *others]).any(dim=0),
    )
