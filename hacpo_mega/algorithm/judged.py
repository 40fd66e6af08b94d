"""A lane's judged answers, as the advantages of one learner see them: the argument of methods and of users' functions.

Elsewhere: what an objective sees (answers.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_GIVEN = torch.zeros(0)


@dataclass(frozen=True)
class Judged:
    """A lane's judged answers: P prompts, N agents, G answers each; S skills.

    rewards_PNG     float64, in [0, 1]; NaN marks an unjudged answer: it enters no mean and gets advantage 0
    successes_PNG   bool, which of them the judge calls correct (reward.success)
    capability_N    P_hat > 0, the same on every lane
    learner         number of the agent whose advantages are asked for
    step, num_steps       the current step, from 1, and the last one
    num_tokens_PNG        int64, length of each answer in its source's tokens
    text_hash_PNG         int64, equal for equal texts
    skill_names, skill_P  names of all skills [S], in alphabetical order, and the number of each prompt's, int64;
                          prompts without a skill have the one named ""
    skill_capability_NS   float64, capability on the prompts of a skill: the mean over all answers of the window that
                          capability_N has; NaN without a judged one
    skill_judged_NS       float64, number of judged answers that it is the mean of
    The fields after `learner` have defaults, so that a function that does not read them can be tried without them.
    """

    rewards_PNG: Tensor
    successes_PNG: Tensor
    capability_N: Tensor
    learner: int
    step: int = 1
    num_steps: int = 1
    num_tokens_PNG: Tensor = NOT_GIVEN
    text_hash_PNG: Tensor = NOT_GIVEN
    skill_names: tuple[str, ...] = ("",)
    skill_P: Tensor = NOT_GIVEN
    skill_capability_NS: Tensor = NOT_GIVEN
    skill_judged_NS: Tensor = NOT_GIVEN
