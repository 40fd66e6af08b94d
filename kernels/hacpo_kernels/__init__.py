"""Log-probs without logits, and the HACPO objective in one launch. Tensors in, tensors out; knows nothing of a trainer.

logprob_T = linear_logprob(hidden, weight, target, group=tensor_parallel_group)
loss_B, coefficient_B, stats = sequence_objective(logprob_T, cu_seqlens, source_logprob, advantage, is_self, ...)
"""

from hacpo_kernels.dispatch import linear_logprob, objective_from_mean, segment_sum, sequence_objective
from hacpo_kernels.objective_stats import ObjectiveStats

__all__ = ["ObjectiveStats", "linear_logprob", "objective_from_mean", "segment_sum", "sequence_objective"]
