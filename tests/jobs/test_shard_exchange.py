"""Shards of gradients are summed where they stay, and weights come back whole: three ranks over gloo, and one alone."""

import numpy as np
import torch
import torch.distributed as dist
from job import run_group

from hacpo_mega.megatron.train import shard_exchange

RANKS, SHARD, PIECE = 3, 1001, 300  # the last piece is shorter


def gradients(rank: int) -> torch.Tensor:
    return torch.randn(RANKS * SHARD, generator=torch.Generator().manual_seed(rank))


def exchange() -> dict[str, np.ndarray]:
    """This rank's sums, and the weights that all ranks' sums are."""
    shard_exchange.PIECE = PIECE
    rank, group = dist.get_rank(), dist.group.WORLD
    found = {}
    for name, async_op in (("sums", False), ("library's", True)):
        whole = gradients(rank)
        mine = whole.chunk(RANKS)[rank]
        work = shard_exchange.sum_into_shard(mine, whole, op=dist.ReduceOp.SUM, group=group, async_op=async_op)
        assert (work is None) is not async_op
        if async_op:
            work.wait()
        found[name] = mine.clone().numpy()
        whole[: rank * SHARD] = whole[(rank + 1) * SHARD :] = torch.nan
        work = shard_exchange.gather_shards(whole, mine, group=group, async_op=async_op)
        if async_op:
            work.wait()
        found[f"{name} of all"] = whole.numpy()
    alone = [dist.new_group([member]) for member in range(RANKS)][rank]
    whole = gradients(rank)
    for async_op in (False, True):
        assert shard_exchange.sum_into_shard(whole, whole, op=None, group=alone, async_op=async_op) is None
        assert shard_exchange.gather_shards(whole, whole, group=alone, async_op=async_op) is None
    return found | {"alone": whole.numpy()}


def test_every_rank_has_its_sums_and_then_those_of_all():
    by_rank = run_group(RANKS, exchange)
    given = np.stack([gradients(rank).numpy() for rank in range(RANKS)])
    exact, bound = given.astype(np.float64).sum(0), 2 * RANKS * 2.0**-24 * np.abs(given).sum(0)
    for name in ("sums", "library's"):
        sums = np.concatenate([found[name] for found in by_rank])
        assert (np.abs(sums - exact) <= bound).all()
        for found in by_rank:
            assert np.array_equal(found[f"{name} of all"], sums)
    for rank, found in enumerate(by_rank):
        assert np.array_equal(found["alone"], given[rank])
