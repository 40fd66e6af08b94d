"""Log-probs without logits, the HACPO objective in one launch, sums of experts: tensors in, tensors out, no trainer.

logprob_T = linear_logprob(hidden, weight, target, group=tensor_parallel_group)
loss_B, coefficient_B, terms = packed_objective(logprob_T, cu_seqlens, source, advantage, is_self, update_index=0,
                                                bounds=Bounds(...))
stats = objective_stats(terms)
"""

from hacpo_kernels.api import (
    add_grouped_product,
    combine_gradients,
    combine_rows,
    linear_logprob,
    objective_from_mean,
    packed_objective,
    segment_sum,
)
from hacpo_kernels.bounds import Bounds
from hacpo_kernels.objective_stats import ObjectiveStats, SequenceTerms, objective_stats
from hacpo_kernels.products import add_product, product

__all__ = [
    "Bounds",
    "ObjectiveStats",
    "SequenceTerms",
    "add_grouped_product",
    "add_product",
    "combine_gradients",
    "combine_rows",
    "linear_logprob",
    "objective_from_mean",
    "objective_stats",
    "packed_objective",
    "product",
    "segment_sum",
]
