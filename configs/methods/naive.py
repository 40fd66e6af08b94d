"""Naive sharing's objective by another road: its formula in float64 by autograd, where a kernel has it by hand.

    s = exp(log ratio),   L = -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A) for everybody's answers

The same method twice was to show what rounding alone does to a run. On CPUs both compute in float64 and round once, so
every answer and metric of eight seeds is the same (docs/evidence_equals).

    [algorithm]
    method = "naive"
    objective = "configs/methods/naive.py:objective"
"""

import torch
from torch import Tensor

from hacpo_mega.algorithm import PackedAnswers


def objective(answers: PackedAnswers) -> Tensor:
    """Loss of each answer, [B]."""
    ratio_B = answers.log_ratio_B.exp()
    clipped_B = ratio_B.clamp(1.0 - 3e-4, 1.0 + 4e-4)
    return -torch.minimum(ratio_B * answers.advantage_B, clipped_B * answers.advantage_B)
