"""CISPO (MiniMax-M1, arXiv 2506.13585): the weight of a token is clipped, and no token loses its gradient.

    L_b = -1/|b| sum_t sg[min(r_t, 1 + eps_high)] A_b logprob_t,   r_t = exp(logprob_t - old_t)

The text has no lower bound, divides by all tokens of a group and leaves eps_high to tuning; here a token weighs 1/|b|,
as in `grpo`, and eps_high is EPS_HIGH.

    [algorithm]
    method = "gspo"                                   # own answers
    objective = "configs/methods/cispo.py:cispo"
"""

from torch import Tensor

from hacpo_mega.algorithm import PackedAnswers

EPS_HIGH = 0.28


def cispo(answers: PackedAnswers) -> Tensor:
    """Loss of each answer [B]."""
    weight_R = answers.ratio_R.detach().clamp(max=1.0 + EPS_HIGH)
    return -answers.advantage_B * answers.mean(weight_R * answers.logprob_R)
