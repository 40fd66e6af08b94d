"""Equal micro-batch counts in all cells that share experts.

Token rows go to experts in other cells and back, forward and backward, so all of these cells must be in the same layer
at the same time. A cell with fewer micro-batches than the fullest gets empty ones: some padding, whose rows travel as
others do, and nothing trained.
Own and others' answers are filled up apart where they are packed apart: an expert then computes the same rows of all
cells together in scoring as in learning, so every bit is the same. Empty ones come first, so that a backward ends with
a real one wherever it can (overlap.py).

Not here: packing (samples/packing.py).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hacpo_mega.records import MicroBatch, Sample
from hacpo_mega.samples.packing import empty_microbatch


def evened(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches, in their order, with empty ones among them; unchanged if no other cell shares the experts.

    Otherwise collective over the ranks that share experts.
    """
    ranks = parallel_state.get_tensor_and_context_parallel_world_size()
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() <= ranks:
        return list(batches)
    own = next((number for number, batch in enumerate(batches) if _is_of_others(batch)), len(batches))
    kinds = batches[:own], batches[own:]
    most = torch.tensor([len(kind) for kind in kinds], device=torch.cuda.current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [
        batch
        for kind, number in zip(kinds, most.tolist(), strict=True)
        for batch in [*[empty_microbatch(ranks)] * (number - len(kind)), *kind]
    ]


def _is_of_others(batch: MicroBatch) -> bool:
    """True if it holds other agents' answers; sequences that are no samples count as own, as in scoring."""
    first = batch.sequences[0]
    return isinstance(first, Sample) and not first.is_self
