"""Bytes that a plan of a weight sync moves, counted piece by piece."""

from typing import NamedTuple

from hacpo_mega.models.sharding.publish_plan import WeightSyncPlan


class MovedBytes(NamedTuple):
    """Bytes by rank: `sent` to others, `received` from others, `written` into the engine."""

    sent: list[int]
    received: list[int]
    written: list[int]


def moved_bytes(plan: WeightSyncPlan) -> MovedBytes:
    moved = MovedBytes(*([0] * plan.num_ranks for _ in MovedBytes._fields))
    for piece in plan.pieces:
        size = piece.shard.size * plan.itemsize
        moved.written[piece.target] += size
        if piece.crosses:
            moved.sent[piece.source] += size
            moved.received[piece.target] += size
    return moved
