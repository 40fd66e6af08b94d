"""The paper: HACPO (arXiv 2603.02604) as pure functions on tensors. No collectives, files, logging or tokenizers."""

from hacpo_mega.algorithm.advantage import REWARD_TOLERANCE, hacpo_advantages
from hacpo_mega.algorithm.capability import CapabilityTracker, capability_ratios, reward_tally
from hacpo_mega.algorithm.dynamic_groups import trained_answers
from hacpo_mega.algorithm.engine_correction import engine_weights, scale_gradient
from hacpo_mega.algorithm.gradient_products import GradientProducts
from hacpo_mega.algorithm.learning import learning_of
from hacpo_mega.algorithm.methods import advantages_of, has_own_objective, named_objective
from hacpo_mega.algorithm.objective import (
    kl_penalty,
    mean_logprobs,
    objective_bounds,
    sample_weight,
    token_objective,
)

__all__ = [
    "REWARD_TOLERANCE",
    "CapabilityTracker",
    "GradientProducts",
    "advantages_of",
    "capability_ratios",
    "engine_weights",
    "hacpo_advantages",
    "has_own_objective",
    "kl_penalty",
    "learning_of",
    "mean_logprobs",
    "named_objective",
    "objective_bounds",
    "reward_tally",
    "sample_weight",
    "scale_gradient",
    "token_objective",
    "trained_answers",
]
