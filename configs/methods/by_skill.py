"""HACPO's advantages with a capability of its own for each skill, shrunk towards the pooled one.

One omega for a pair of agents cannot say "better here, worse there". For prompts of skill s

    P_hat_k[s] = (n_k[s] mean_k[s] + PRIOR P_hat_k) / (n_k[s] + PRIOR)

takes the place of P_hat_k in HACPO's baselines and in omega: mean_k[s] is over the n_k[s] judged answers of the window,
PRIOR counts answers. A skill that few prompts have keeps about the pooled omega.

Bias: as HACPO's, by skill; a baseline below the mean of a prompt's rewards pushes up right and wrong answers alike.
Variance: omega of a skill that an agent nearly never solves is large, and so is the weight of its peer's answers.

    [algorithm]
    method = "hacpo"
    advantages = "configs/methods/by_skill.py:by_skill"
"""

import torch
from torch import Tensor

from hacpo_mega.algorithm import Judged, hacpo_advantages
from hacpo_mega.config import AlgorithmConfig

PRIOR = 64.0


def by_skill(judged: Judged) -> Tensor:
    """Advantages [P, N, G] by the paper's defaults, omega applied."""
    weight_NS = judged.skill_judged_NS
    earned_NS = weight_NS * judged.skill_capability_NS.nan_to_num()
    capability_NS = (earned_NS + PRIOR * judged.capability_N[:, None]) / (weight_NS + PRIOR)
    advantages_PNG = torch.zeros_like(judged.rewards_PNG)
    for skill in range(len(judged.skill_names)):
        is_P = judged.skill_P == skill
        advantages_PNG[is_P] = hacpo_advantages(
            judged.rewards_PNG[is_P], capability_NS[:, skill], judged.learner, AlgorithmConfig()
        )
    return advantages_PNG
