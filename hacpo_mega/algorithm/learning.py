"""Training targets of one agent, given a lane's rewards: its advantages, and which answers are trained, by whom.

Combines the method's advantages (methods.py) with its choice of answers (dynamic_groups.py).
"""

from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hacpo_mega.algorithm.dynamic_groups import trained_answers
from hacpo_mega.algorithm.judged import Judged
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


def learning_of(judged: Judged, config: AlgorithmConfig) -> Learning:
    """Training targets of agent number `judged.learner`, from its lane's judged answers."""
    learner, num_agents = judged.learner, judged.rewards_PNG.shape[1]
    advantages = [advantages_of(replace(judged, learner=k), config) for k in range(num_agents)]
    trains = [trained_answers(advantages_PNG, k, config) for k, advantages_PNG in enumerate(advantages)]
    others = [trains_PNG[:, learner] for k, trains_PNG in enumerate(trains) if k != learner]
    own_PG = trains[learner][:, learner]
    return Learning(
        advantages[learner],
        trains[learner],
        own_PG.any(dim=1),
        torch.stack([torch.zeros_like(own_PG), *others]).any(dim=0),
    )
