"""The numbers that a publication moves, by rank: those of a run's plan (models/sharding/publish_plan.py), counted fast.

A search needs them for hundreds of layouts. All layers of a kind are cut alike: the overlap of an actor's rank and an
engine's rank is counted in one layer, and multiplied by the layers of a stage.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import block_cells
from hacpo_mega.models.sharding.publish_plan import actor_stacks, engine_shards, stack_of
from hacpo_mega.models.sharding.segments import Cut, Slot, stage_slots
from hacpo_mega.models.sharding.shards import Shard

LAYER = "decoder.layers."


@dataclass(frozen=True)
class Published:
    """Counts of numbers, by rank of a cell (or block, the cells that share experts).

    sent, received   to and from other ranks      written   into the rank's engine
    num_receivers    the most ranks that one rank sends to

    A rank receives the numbers that its engine holds and its actor does not: no plan receives less.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    written: tuple[int, ...]
    num_receivers: int


@dataclass(frozen=True)
class _Tensors:
    """Some tensors that the same stages hold, each of these all of them.

    shared       [share of the actor][rank of the engine]: numbers that both hold; neighbouring ranks of a stage have
                 the shares in turn, those of tensor parallelism or, of experts, those of expert parallelism, which may
                 go on in the same stage of the next cell
    replicated   numbers that every rank of the stage holds, and every rank of the engine
    """

    stages: tuple[int, ...]
    shared: tuple[tuple[int, ...], ...]
    replicated: int


@lru_cache(maxsize=4096)
def published(
    architecture: Architecture, tp: int, stages: tuple[int, ...], engine_tp: int, cp: int = 1, ep: int = 1
) -> Published:
    """Traffic of one publication in a cell of `tp` x `cp` ranks for each of the stages, which have so many layers."""
    cell_size = tp * cp * len(stages)
    num_ranks = cell_size * block_cells(ep, tp, cp)
    sent, received, written = ([0] * num_ranks for _ in range(3))
    receivers: list[set[int]] = [set() for _ in range(num_ranks)]
    for times, tensors in _held(architecture, tp, ep, stages, engine_tp):
        for rank in range(num_ranks):
            for holder, size in _moves(tensors, rank, tp * cp, cell_size, engine_tp):
                written[rank] += times * size
                if size and holder != rank:
                    received[rank] += times * size
                    sent[holder] += times * size
                    receivers[holder].add(rank)
    return Published(tuple(sent), tuple(received), tuple(written), max(map(len, receivers)))


def _moves(tensors: _Tensors, rank: int, width: int, cell_size: int, engine_tp: int) -> Iterator[tuple[int, int]]:
    """(holder, count of numbers) that a rank needs: from the nearest rank that holds them, in its own cell if possible.

    Ranks of a cell by stage, each of `width` ranks, of a stage by their part of the tokens, then by tensor rank.
    """

    def nearest(holders: Iterable[int]) -> int:
        return min(holders, key=lambda holder: (abs(holder - rank), holder))

    own = rank // cell_size
    for share, row in enumerate(tensors.shared):
        cell, first = (own, share) if len(tensors.shared) <= width else divmod(share, width)
        those = range(first, width, len(tensors.shared))
        starts = (cell * cell_size + stage * width for stage in tensors.stages)
        yield nearest(start + place for start in starts for place in those), row[rank % engine_tp]
    # of neighbouring ranks, all of which have it, the nearest is the rank itself or one of both ends
    starts = (own * cell_size + stage * width for stage in tensors.stages)
    yield nearest(min(max(rank, start), start + width - 1) for start in starts), tensors.replicated


def _held(
    architecture: Architecture, tp: int, ep: int, stages: tuple[int, ...], engine_tp: int
) -> Iterator[tuple[int, _Tensors]]:
    """Yields how often what is held where: every stage's layers by their kinds, and what is beside them."""
    for stage, layers in enumerate(stages):
        first = sum(stages[:stage])
        for thin, count in architecture.kinds(range(first, first + layers)).items():
            for counted in _of_one_layer(thin, tp, ep, engine_tp):
                yield count, _Tensors((stage,), *counted)
    last = len(stages) - 1
    for parameter, counted in _beside_layers(architecture, tp, engine_tp):
        if not parameter.startswith("embedding."):
            holders = (last,)
        else:
            holders = (0, last) if architecture.tied and last else (0,)
        yield 1, _Tensors(holders, *counted)


_Counted = tuple[tuple[tuple[int, ...], ...], int]


@lru_cache(maxsize=256)
def _of_one_layer(thin: Architecture, tp: int, ep: int, engine_tp: int) -> list[_Counted]:
    """The overlaps of a model's only layer, its experts by themselves."""
    layer = [slot for slot in stage_slots(thin, (1,), 0) if slot.parameter.startswith(LAYER)]
    experts = [slot for slot in layer if slot.cut is Cut.EXPERTS]
    others = [slot for slot in layer if slot.cut is not Cut.EXPERTS]
    of_layer = [_overlaps(thin, others, tp, 1, engine_tp)]
    return [*of_layer, _overlaps(thin, experts, 1, ep, engine_tp)] if experts else of_layer


@lru_cache(maxsize=256)
def _beside_layers(architecture: Architecture, tp: int, engine_tp: int) -> list[tuple[str, _Counted]]:
    """The overlaps of every parameter outside the layers, by its name."""
    thin = next(iter(architecture.kinds(range(1))))
    slots = [slot for slot in stage_slots(thin, (1,), 0) if not slot.parameter.startswith(LAYER)]
    return [(slot.parameter, _overlaps(thin, [slot], tp, 1, engine_tp)) for slot in slots]


def _overlaps(architecture: Architecture, slots: list[Slot], tp: int, ep: int, engine_tp: int) -> _Counted:
    """The overlaps of slots that `tp` ranks share, or of experts that `ep` ranks share."""
    actor = [
        [stack_of(r) for _, r in actor_stacks(slots, architecture, tp=tp, tp_rank=n % tp, ep=ep, ep_rank=n % ep)]
        for n in range(tp * ep)
    ]
    engine = [_by_name(engine_shards(slots, architecture, tp=engine_tp, rank=e)) for e in range(engine_tp)]
    everywhere = set(actor[0]).intersection(*actor[1:]) if len(actor) > 1 else set()
    rows = tuple(
        tuple(_shared([shard for shard in mine if shard not in everywhere], theirs) for theirs in engine)
        for mine in actor
    )
    return rows, sum(shard.size for shard in everywhere)


def _by_name(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    found = defaultdict(list)
    for shard in shards:
        found[shard.name].append(shard)
    return found


def _shared(some: list[Shard], others: dict[str, list[Shard]]) -> int:
    return sum(
        shared.size for one in some for other in others.get(one.name, ()) if (shared := one.overlap(other)) is not None
    )
