"""Log-probs without logits, and the HACPO objective in one launch. Tensors in, tensors out; independent of any trainer.

logprob_T = linear_logprob(hidden, weight, target, group=tensor_parallel_group)
loss_B, coefficient_B, terms = packed_objective(logprob_T, cu_seqlens, source, advantage, is_self, update_index=0,
                                                bounds=Bounds(...))
stats = objective_stats(terms)
"""

from hacpo_kernels.api import linear_logprob, objective_from_mean, packed_objective, segment_sum
from hacpo_kernels.autograd import main_grad_placeholder
from hacpo_kernels.bounds import Bounds
from hacpo_kernels.objective_stats import ObjectiveStats, SequenceTerms, objective_stats
from hacpo_kernels.products import add_product, product

__all__ = [
    "Bounds",
    "ObjectiveStats",
    "SequenceTerms",
    "add_product",
    "linear_logprob",
    "main_grad_placeholder",
    "objective_from_mean",
    "objective_stats",
    "packed_objective",
    "product",
    "segment_sum",
]
