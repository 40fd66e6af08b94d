"""The paper: HACPO (arXiv 2603.02604) as pure functions on tensors. No collectives, files, logging or tokenizers."""

from hacpo_mega.algorithm.advantage import REWARD_TOLERANCE, hacpo_advantages
from hacpo_mega.algorithm.answers import PackedAnswers
from hacpo_mega.algorithm.capability import CapabilityTracker, capability_ratios, reward_tally, skill_tally
from hacpo_mega.algorithm.dynamic_groups import trained_answers
from hacpo_mega.algorithm.engine_correction import engine_weights, scale_gradient
from hacpo_mega.algorithm.gradient_products import GradientProducts
from hacpo_mega.algorithm.judged import Judged
from hacpo_mega.algorithm.learning import learning_of
from hacpo_mega.algorithm.methods import advantages_of, has_autograd_objective, objective_of
from hacpo_mega.algorithm.objective import (
    kl_penalty,
    mean_logprobs,
    objective_bounds,
    sample_weight,
    token_objective,
)
from hacpo_mega.algorithm.user_functions import objective_loss, reads_skills, reads_source_tokens

__all__ = [
    "REWARD_TOLERANCE",
    "CapabilityTracker",
    "GradientProducts",
    "Judged",
    "PackedAnswers",
    "advantages_of",
    "capability_ratios",
    "engine_weights",
    "hacpo_advantages",
    "has_autograd_objective",
    "kl_penalty",
    "learning_of",
    "mean_logprobs",
    "objective_bounds",
    "objective_loss",
    "objective_of",
    "reads_skills",
    "reads_source_tokens",
    "reward_tally",
    "sample_weight",
    "scale_gradient",
    "skill_tally",
    "token_objective",
    "trained_answers",
]
