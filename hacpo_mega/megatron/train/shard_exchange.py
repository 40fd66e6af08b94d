"""Reduce-scatter of gradients and all-gather of weights over gloo; CUDA enters only where a rank is alone.

Megatron's wrapper asks torch for both. torch calls the library even for a single rank, and gloo then copies the whole
model three times an update; here a single rank does nothing, on every device. Among several ranks gloo sums all
gradients on all ranks, in copies, and gathers into a copy, too. Here each rank sends the others their shards, in place
and in pieces. NCCL does all this by itself.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

PIECE = 1 << 20  # numbers: what is added is still in the cache


def sum_into_shard(
    shard_N: torch.Tensor, whole_DN: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Sums this rank's shard [N] over D ranks, in its place of `whole_DN`.

    The places of other shards are undefined afterwards. The order of the sum: own gradient first, then the other
    ranks'. Collective over `group`.
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
    """Fills `whole_DN` with the shards of D ranks; this rank's [N] lies in its place. Collective over `group`."""
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
    """Other ranks of a group, in order."""
    return [peer for peer in range(group.size()) if peer != group.rank()]


_library_sums = param_and_grad_buffer.dist_reduce_scatter_func
_library_gathers = param_and_grad_buffer.dist_all_gather_func
