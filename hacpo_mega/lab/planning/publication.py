"""What a publication moves by rank, as the plan of a run would have it (models/publish_plan.py), in closed form.

A search asks it of hundreds of layouts. All layers are cut alike: what one tensor rank of the actor has in common with
one rank of an engine is counted of a single layer, and taken as often as a stage has layers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.publish_plan import Shard, actor_shards, engine_shards, shard_of
from hacpo_mega.models.segments import Slot, stage_slots


@dataclass(frozen=True)
class Published:
    """Numbers, by rank of a cell: what it sends to others, receives, and writes into its engine; to how many it sends.

    What is received is what a rank's engine holds and its actor does not: no plan receives less.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    written: tuple[int, ...]
    num_receivers: int


@dataclass(frozen=True)
class _Tensors:
    """Some tensors that the same stages hold, each of these all of them.

    shared       [tensor rank of the actor][rank of the engine]: numbers that both hold
    replicated   numbers that every tensor rank holds, and every rank of the engine
    """

    stages: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    replicated: int


@lru_cache(maxsize=4096)
def published(architecture: Architecture, tp: int, stages: tuple[int, ...], engine_tp: int) -> Published:
    """Of one publication in a cell of `tp` ranks for each of the stages, which have so many layers."""
    num_ranks = tp * len(stages)
    sent, received, written = ([0] * num_ranks for _ in range(3))
    receivers: list[set[int]] = [set() for _ in range(num_ranks)]
    for times, tensors in _held(architecture, tp, stages, engine_tp):
        for rank in range(num_ranks):
            for holder, size in _moves(tensors, rank, tp, engine_tp):
                written[rank] += times * size
                if size and holder != rank:
                    received[rank] += times * size
                    sent[holder] += times * size
                    receivers[holder].add(rank)
    return Published(tuple(sent), tuple(received), tuple(written), max(map(len, receivers)))


def _moves(tensors: _Tensors, rank: int, tp: int, engine_tp: int) -> Iterator[tuple[int, int]]:
    """(from whom, numbers): what the rank needs, from the nearest of those who have it."""

    def nearest(holders: Iterable[int]) -> int:
        return min(holders, key=lambda holder: (abs(holder - rank), holder))

    for t, row in enumerate(tensors.shared):
        yield nearest(stage * tp + t for stage in tensors.stages), row[rank % engine_tp]
    # of neighbouring ranks, all of which have it, the nearest is the rank itself or one of both ends
    inside = (min(max(rank, stage * tp), stage * tp + tp - 1) for stage in tensors.stages)
    yield nearest(inside), tensors.replicated


def _held(
    architecture: Architecture, tp: int, stages: tuple[int, ...], engine_tp: int
) -> Iterator[tuple[int, _Tensors]]:
    """How often what is held where: every stage's layers, and what is beside them."""
    layer, beside = _of_one_layer(architecture, tp, engine_tp)
    for stage, layers in enumerate(stages):
        yield layers, _Tensors((stage,), *layer)
    last = len(stages) - 1
    for parameter, counted in beside:
        if not parameter.startswith("embedding."):
            holders = (last,)
        else:
            holders = (0, last) if architecture.tied and last else (0,)
        yield 1, _Tensors(holders, *counted)


_Counted = tuple[tuple[tuple[int, ...], ...], int]


@lru_cache(maxsize=256)
def _of_one_layer(architecture: Architecture, tp: int, engine_tp: int) -> tuple[_Counted, list[tuple[str, _Counted]]]:
    """What is common of a layer, and of every parameter that is in none, by its name."""
    thin = replace(architecture, num_layers=1)
    slots = stage_slots(thin, (1,), 0)
    layer = [slot for slot in slots if slot.parameter.startswith("decoder.layers.")]
    beside = [(slot.parameter, _overlaps(thin, [slot], tp, engine_tp)) for slot in slots if slot not in layer]
    return _overlaps(thin, layer, tp, engine_tp), beside


def _overlaps(architecture: Architecture, slots: list[Slot], tp: int, engine_tp: int) -> _Counted:
    actor = [[shard_of(r) for _, r in actor_shards(slots, architecture, tp=tp, tp_rank=t)] for t in range(tp)]
    engine = [list(engine_shards(slots, architecture, tp=engine_tp, rank=e)) for e in range(engine_tp)]
    everywhere = set(actor[0]).intersection(*actor[1:]) if tp > 1 else set()
    rows = tuple(
        tuple(_shared([shard for shard in mine if shard not in everywhere], theirs) for theirs in engine)
        for mine in actor
    )
    return rows, sum(shard.size for shard in everywhere)


def _shared(some: list[Shard], others: list[Shard]) -> int:
    return sum(
        shared.size
        for one in some
        for other in others
        if one.name == other.name and (shared := one.overlap(other)) is not None
    )
