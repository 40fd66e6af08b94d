"""Which answers are worth a forward and a backward: those that move a gradient (after DAPO, arXiv 2503.14476).

DAPO samples until a batch is full of prompts with a signal. Here nothing is sampled again: an answer whose advantage is
0 adds nothing to any gradient, so it is neither scored nor trained, and the loss is divided by what it was. An
advantage within ADVANTAGE_TOLERANCE of 0 is 0: graded rewards leave one of rounding where an answer earned the mean.
"""

import torch
from torch import Tensor

from hacpo_mega.config import AlgorithmConfig

# Beside advantages near 1: rewards carry 1e-16, over a deviation of at least REWARD_TOLERANCE / sqrt(n).
ADVANTAGE_TOLERANCE = 1e-9


def trained_answers(advantages_PNG: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """Which answers `learner` trains on, bool [P, N, G].

    Of others' answers those whose advantage is not 0. Own answers to a prompt all or none: they are scored before an
    update as they are packed in it, and one left out would move the others. A prompt counts as long as one of its
    advantages is not 0. A KL to the initial policy is a gradient by itself: what it counts (`kl_on`) is trained.
    """
    has_kl = config.kl_coef > 0.0
    moves_PNG = advantages_PNG.abs() > ADVANTAGE_TOLERANCE
    trains_PNG = torch.ones_like(advantages_PNG, dtype=torch.bool)
    if not (has_kl and config.kl_on == "all"):
        trains_PNG &= moves_PNG
    trains_PNG[:, learner] = has_kl or moves_PNG.any(dim=2).any(dim=1, keepdim=True)
    return trains_PNG
