"""SAPO (arXiv 2511.20347): a smooth gate around r_t = 1 in place of the clip, steeper for negative advantages.

    L_b = -1/|b| sum_t f(r_t) A_b,   f(r) = sigmoid(tau (r - 1)) 4 / tau

tau is TAU_POSITIVE where A_b > 0, else TAU_NEGATIVE. At r = 1 its gradient is that of the plain ratio,
f'(1) = 1, and vanishes on both sides.

    [algorithm]
    method = "gspo"                                  # own answers
    objective = "configs/methods/sapo.py:sapo"
"""

import torch
from torch import Tensor

from hacpo_mega.algorithm import PackedAnswers

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05


def sapo(answers: PackedAnswers) -> Tensor:
    """Loss of each answer [B]."""
    positive_B = torch.full_like(answers.advantage_B, TAU_POSITIVE)
    tau_R = answers.by_token(positive_B.masked_fill(answers.advantage_B <= 0.0, TAU_NEGATIVE))
    gate_R = torch.sigmoid(tau_R * (answers.ratio_R - 1.0)) * 4.0 / tau_R
    return -answers.advantage_B * answers.mean(gate_R)
