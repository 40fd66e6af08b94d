"""Selection of trained answers: those that change a gradient (after DAPO, arXiv 2503.14476).

DAPO samples until a batch is full of prompts with a signal. Here nothing is sampled again: an answer with advantage 0
adds nothing to any gradient, so it is neither scored nor trained, and the loss keeps its divisor. An advantage within
ADVANTAGE_TOLERANCE of 0 counts as 0: graded rewards leave a rounding error where an answer earned the mean.
"""

import torch
from torch import Tensor

from hacpo_mega.config import AlgorithmConfig

# Advantages are near 1, and their error is 1e-16 over a deviation of at least REWARD_TOLERANCE / sqrt(n).
ADVANTAGE_TOLERANCE = 1e-9


def trained_answers(advantages_PNG: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """Mask of the answers that `learner` trains on, bool [P, N, G], from its advantages [P, N, G].

    Others' answers: those whose advantage is not 0. Own answers to a prompt: all if the advantage of any is not 0,
    else none. A KL to the initial policy is a gradient of its own: the answers that it counts (`kl_on`) are trained.
    """
    has_kl = config.kl_coef > 0.0
    has_signal_PNG = advantages_PNG.abs() > ADVANTAGE_TOLERANCE
    trains_PNG = torch.ones_like(advantages_PNG, dtype=torch.bool)
    if not (has_kl and config.kl_on == "all"):
        trains_PNG &= has_signal_PNG
    trains_PNG[:, learner] = has_kl or has_signal_PNG[:, learner].any(dim=1, keepdim=True)
    return trains_PNG
