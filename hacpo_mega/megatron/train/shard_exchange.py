"""What data parallelism sends: gradients summed into the shard of each rank, weights gathered from all shards.

Megatron's wrapper asks torch for both. torch asks the library even where a rank is alone with its gradients, and gloo's
copies the whole model three times an update for that; here nothing is sent, on every device. Among several ranks gloo
sums all gradients on all ranks, in copies, and gathers into a copy, too. Here each rank sends the others what they
keep, in place and in pieces. NCCL does all this by itself.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

PIECE = 1 << 20  # numbers: what is added is still in the cache


def sum_into_shard(
    shard_N: torch.Tensor, whole_DN: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Adds up what D ranks hold of this rank's shard of N numbers, which lies in its place of `whole_DN`.

    What is left in the places of other shards is undefined. Of several ranks gloo's sum is in the order of its own
    gradient first and of the other ranks then. Collective over `group`.
    """
    if group.size() == 1:
        return None
    if async_op or op != dist.ReduceOp.SUM or not shard_N.is_cpu:
        return _library_sums(shard_N, whole_DN, op=op, group=group, async_op=async_op)
    shards = whole_DN.chunk(group.size())
    others = _others(group)
    received = {peer: torch.empty_like(shard_N[:PIECE]) for peer in others}
    for start in range(0, len(shard_N), PIECE):
        piece = shard_N[start : start + PIECE]
        sent = [dist.isend(shards[peer][start : start + PIECE], group=group, group_dst=peer) for peer in others]
        come = [dist.irecv(received[peer][: len(piece)], group=group, group_src=peer) for peer in others]
        for peer, work in zip(others, come, strict=True):
            work.wait()
            piece += received[peer][: len(piece)]
        for work in sent:
            work.wait()
    return None


def gather_shards(
    whole_DN: torch.Tensor, shard_N: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Fills `whole_DN` with the shards of D ranks, of which this rank's lies in its place. Collective over `group`."""
    if group.size() == 1:
        return None
    if async_op or not shard_N.is_cpu:
        return _library_gathers(whole_DN, shard_N, group=group, async_op=async_op)
    shards = whole_DN.chunk(group.size())
    others = _others(group)
    works = [dist.isend(shard_N, group=group, group_dst=peer) for peer in others]
    works += [dist.irecv(shards[peer], group=group, group_src=peer) for peer in others]
    for work in works:
        work.wait()
    return None


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group, in order."""
    return [peer for peer in range(group.size()) if peer != group.rank()]


_library_sums = param_and_grad_buffer.dist_reduce_scatter_func
_library_gathers = param_and_grad_buffer.dist_all_gather_func
