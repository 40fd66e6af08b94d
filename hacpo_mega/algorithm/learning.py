"""What one agent trains on, given a lane's rewards, and what the others train on of its answers.

Put together from the method's advantages (methods.py) and its choice of answers (dynamic_groups.py).
Not here: what these are.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from hacpo_mega.algorithm.dynamic_groups import trained_answers
from hacpo_mega.algorithm.methods import advantages_of
from hacpo_mega.config import AlgorithmConfig


class Learning(NamedTuple):
    """What one agent learns from a lane's answers, once their rewards are known.

    advantages_PNG   float64, what it trains with      trains_PNG   bool, what it trains on
    own_P            bool, the prompts whose own answers it trains on
    wanted_PG        bool, which of its answers others train on
    """

    advantages_PNG: Tensor
    trains_PNG: Tensor
    own_P: Tensor
    wanted_PG: Tensor

    def weighted(self, weights_PNG: Tensor) -> Self:
        """The same with every answer's advantage times its weight."""
        return self._replace(advantages_PNG=self.advantages_PNG * weights_PNG)


def learning_of(
    rewards_PNG: Tensor, successes_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig
) -> Learning:
    """The learning of agent number `learner`, from its lane's rewards and successes [P, N, G] and all capabilities."""
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
