"""Advantages of every method, by `algorithm.method` (config/tables/methods.py lists the methods)."""

from torch import Tensor

from hacpo_mega.algorithm.advantage import checked_rewards, hacpo_advantages
from hacpo_mega.algorithm.named import named_advantages
from hacpo_mega.algorithm.rivals import f_tis_advantages, sgt_advantages
from hacpo_mega.config import AlgorithmConfig


def advantages_of(
    rewards_PNG: Tensor, successes_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig
) -> Tensor:
    """Advantage with which `learner` trains on every answer; 0 for answers that it does not train on.

    rewards_PNG   [P, N, G], in [0, 1]; NaN marks an unjudged answer: it enters no mean and gets advantage 0
    successes_PNG bool [P, N, G]: which of them the judge calls correct; only sgt reads it
    capability_N  [N], P_hat > 0; only hacpo reads it
    Returns float64 [P, N, G]. Raises ValueError for shapes that do not fit.
    """
    if config.advantages is not None:
        return named_advantages(rewards_PNG, capability_N, learner, config)
    if config.method == "sgt":
        return sgt_advantages(checked_rewards(rewards_PNG, capability_N, learner), successes_PNG, learner, config)
    if config.method == "f_tis":
        return f_tis_advantages(checked_rewards(rewards_PNG, capability_N, learner), config)
    return hacpo_advantages(rewards_PNG, capability_N, learner, config)
