"""Advantages whose baseline is the learner's own success V_k[p], the mean reward of its answers to prompt p.

    value        own (R - V) / sd,   others' (R - V)+ / sd,   sd the deviation of all N G rewards of the prompt
    value_raw    own 2 (R - V),      others' 2 (R - V)+ = 2 (1 - V) for a right answer

Bias: own answers have none, since E[(R - b) grad log pi] = grad V for every b that does not depend on the answer;
others' weigh prompts anew, towards those with small V. Variance: own answers to a prompt that the learner always or
never solves are silent, where another baseline adds noise of mean 0; others' right answers have none where there is one
right text.

    [algorithm]
    method = "naive"
    advantages = "configs/methods/value.py:value"
"""

import torch
from torch import Tensor

from hacpo_mega.algorithm import REWARD_TOLERANCE, Judged


def value(judged: Judged) -> Tensor:
    """Own (R - V) / sd, others' (R - V)+ / sd; [P, N, G]."""
    rewards_PM = judged.rewards_PNG.flatten(1)
    count_P = (~rewards_PM.isnan()).sum(dim=1)
    mean_P1 = rewards_PM.nanmean(dim=1, keepdim=True)
    squares_P = (rewards_PM - mean_P1).square().nansum(dim=1)
    deviation_P = (squares_P / (count_P - 1).clamp(min=1)).sqrt()
    return surplus(judged) / (deviation_P + 1e-6)[:, None, None]


def value_raw(judged: Judged) -> Tensor:
    """Own 2 (R - V), others' 2 (R - V)+; [P, N, G]."""
    return 2.0 * surplus(judged)


def surplus(judged: Judged) -> Tensor:
    """R - V of own answers, its positive part of others' [P, N, G]; 0 where the rewards of a prompt are equal."""
    rewards_PNG = judged.rewards_PNG
    own_value_P = rewards_PNG[:, judged.learner].nanmean(dim=1).nan_to_num()
    surplus_PNG = rewards_PNG - own_value_P[:, None, None]
    highest_P = rewards_PNG.nan_to_num(nan=-torch.inf).amax(dim=(1, 2))
    lowest_P = rewards_PNG.nan_to_num(nan=torch.inf).amin(dim=(1, 2))
    is_silent_PNG = rewards_PNG.isnan() | (highest_P - lowest_P <= REWARD_TOLERANCE)[:, None, None]
    is_own_N = torch.arange(rewards_PNG.shape[1]) == judged.learner
    trained_PNG = torch.where(is_own_N[None, :, None], surplus_PNG, surplus_PNG.clamp(min=0.0))
    return trained_PNG.masked_fill(is_silent_PNG, 0.0)
