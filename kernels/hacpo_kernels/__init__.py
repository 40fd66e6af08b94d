"""Log-probs without logits, the HACPO objective and a layer's elementwise parts in one launch each, sums of experts.

Tensors in, tensors out; independent of any trainer.

logprob_T = linear_logprob(hidden, weight, target, group=tensor_parallel_group)
loss_B, coefficient_B, terms = packed_objective(logprob_T, cu_seqlens, source, advantage, is_self, update_index=0,
                                                bounds=Bounds(...))
stats = objective_stats(terms)
"""

from hacpo_kernels.api import (
    add_grouped_product,
    combine_gradients,
    combine_rows,
    gated_activation,
    linear_logprob,
    merge_adapter,
    objective_from_mean,
    packed_objective,
    rms_norm,
    rotate_heads,
    segment_sum,
)
from hacpo_kernels.autograd import main_grad_placeholder
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
    "gated_activation",
    "linear_logprob",
    "main_grad_placeholder",
    "merge_adapter",
    "objective_from_mean",
    "objective_stats",
    "packed_objective",
    "product",
    "rms_norm",
    "rotate_heads",
    "segment_sum",
]
