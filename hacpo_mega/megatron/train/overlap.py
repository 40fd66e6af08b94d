"""Overlap of data-parallel communication with compute: gradients during backward, weights during forward.

Megatron's wrapper does both for jobs in which every rank has equally many micro-batches. Here a cell may have none in
an update. So cells agree before each backward whether the reduction may begin inside it, and all cells start to gather
weights at one point, right after the optimizer's step; later calls only wait, which is not collective. By default on
where an agent's cells are on several nodes (`agents.data_parallel`).

Elsewhere: the reduction itself (schedule.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from hacpo_mega.megatron.train.shard_exchange import gather_shards


@contextmanager
def reduction_inside_backward(model: DistributedDataParallel, *, has_samples: bool) -> Iterator[None]:
    """Context of a backward: buckets are reduced as they are filled, if all cells of the agent have samples.

    Otherwise all of them reduce after it, since a cell without a backward would reduce its buckets in another order.
    Collective over the agent's ranks, with overlap.
    """
    wrapping = model.ddp_config
    if not wrapping.overlap_grad_reduce:
        yield
        return
    # The ranks of cp have the same samples, so the cells of one of them decide for all.
    least = torch.tensor(int(has_samples), device=next(model.parameters()).device)
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    wrapping.overlap_grad_reduce = bool(least)
    try:
        yield
    finally:
        wrapping.overlap_grad_reduce = True


def wait_before_use(model: DistributedDataParallel) -> None:
    """Makes every module wait for its weights before its forward, instead of Megatron's hooks.

    Megatron's hooks also start a gather that has not been started, in whatever cell has a forward.
    """
    model.disable_forward_pre_hook(param_sync=False)
    for module in model.module.modules():
        own = [p for p in module.parameters(recurse=False) if p in model.param_to_bucket_group]
        if groups := {model.param_to_bucket_group[parameter] for parameter in own}:
            module.register_forward_pre_hook(partial(_wait, tuple(groups)))


def buffers_of(model: DistributedDataParallel) -> list[Any]:
    """Megatron's buffers of weights and gradients, experts' included."""
    return [*model.buffers, *model.expert_parallel_buffers]


def _bucket_groups(model: DistributedDataParallel) -> list[Any]:
    return [*model.bucket_groups, *model.expert_parallel_bucket_groups]


def start_gather(model: DistributedDataParallel) -> None:
    """Starts to gather the weights that an optimizer's step has left in shards. Collective over the agent's ranks.

    Without overlap Megatron's step has already gathered them. `start_param_sync` is not used: it coalesces, and a
    coalesced gather of gloo corrupts the heap while others are in flight (pytorch issue 65231; still in torch 2.13).
    """
    if model.ddp_config.overlap_param_gather:
        for bucket_group in _bucket_groups(model):
            group = bucket_group.intra_distributed_optimizer_instance_group
            works = [_gather(bucket.param_data, group) for bucket in bucket_group.buckets]
            bucket_group.param_gather_handle = [work for work in works if work is not None]


def _gather(weights_N: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.distributed.Work | None:
    """Starts to fill the weights of a bucket [N] from the equal shards that every rank has in its place."""
    shard_N = weights_N.chunk(group.size())[group.rank()]
    return gather_shards(weights_N, shard_N, group=group, async_op=True)


def finish_gather(model: DistributedDataParallel) -> None:
    """Waits for the pending all-gather of updated parameters, before they are used outside their module's forward.

    An earlier write would be lost with gloo, which writes this rank's own shard, too.
    """
    _wait(tuple(_bucket_groups(model)))


def _wait(bucket_groups: tuple[Any, ...], *_forward: Any) -> None:
    for bucket_group in bucket_groups:
        if bucket_group.param_gather_handle is not None:
            for work in bucket_group.param_gather_handle:
                work.wait()
            bucket_group.param_gather_handle = None
