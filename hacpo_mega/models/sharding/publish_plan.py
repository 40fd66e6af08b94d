"""Plan of a weight sync, shard to shard: every piece's sender and receiver, so that each engine has the actor's
weights.

A shard is a rectangle of a tensor that a rank holds (shards.py). The actor's are cut by Megatron (segments.py), the
engine's by vLLM's weight loaders (rollout/weights/parts.py). Where they meet is a piece, which one rank reads and one
writes, most often the same: a strided copy. Only the others cross the wire, in buckets. So the bytes of a publication
are known before it. Imports no torch; not here: the exchange itself (megatron/weights/publish.py), and where in memory
a shard lies.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import (
    Cut,
    Rectangle,
    Slot,
    gate_rows,
    group_rows,
    padded_vocab_size,
    rectangles,
    shard_shape,
    stage_slots,
)
from hacpo_mega.models.sharding.shards import Shard, runs, stack_name, stacked

BUCKET_BYTES = 1 << 28
NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor that rank `source` reads and rank `target` writes, and the numbers of their shards that
    it lies in."""

    shard: Shard
    source: int
    source_shard: int
    target: int
    target_shard: int

    @property
    def crosses(self) -> bool:
        """True if it goes from one rank to another."""
        return self.source != self.target


@dataclass(frozen=True)
class WeightSyncPlan:
    """Every piece of a publication once, in buckets in which it is exchanged; equal on all ranks of a block of cells.

    itemsize   bytes of a number
    """

    num_ranks: int
    itemsize: int
    buckets: tuple[tuple[Piece, ...], ...]

    @cached_property
    def digest(self) -> bytes:
        """Hash of the plan, 16 bytes."""
        pieces = [
            [
                [p.shard.name, p.shard.offsets, p.shard.sizes, p.source, p.source_shard, p.target, p.target_shard]
                for p in bucket
            ]
            for bucket in self.buckets
        ]
        content = json.dumps([self.num_ranks, self.itemsize, pieces]).encode()
        return hashlib.blake2b(content, digest_size=16).digest()

    @property
    def pieces(self) -> Iterator[Piece]:
        """All of them, in order."""
        return (piece for bucket in self.buckets for piece in bucket)

    @cached_property
    def last_of_bucket(self) -> tuple[frozenset[str], ...]:
        """For every bucket, the tensors of which no rank gets anything in a later one."""
        last = {piece.shard.name: number for number, bucket in enumerate(self.buckets) for piece in bucket}
        return tuple(
            frozenset(piece.shard.name for piece in bucket if last[piece.shard.name] == number)
            for number, bucket in enumerate(self.buckets)
        )


def publish_plan(
    sources: Sequence[Sequence[Shard]],
    targets: Sequence[Sequence[Shard]],
    itemsize: int,
    bucket_bytes: int = BUCKET_BYTES,
    cell_size: int | None = None,
) -> WeightSyncPlan:
    """The plan for ranks that hold `sources[rank]` and need `targets[rank]`; numbers are of `itemsize` bytes.

    Several ranks may hold the same shard: each target takes it from itself, else from the nearest of them by number, of
    its own cell where it can: each `cell_size` ranks are one (None: all are). In a bucket no rank writes or sends more
    than `bucket_bytes`. ValueError where nobody holds what a rank needs, or where shards overlap that are not the same.
    """
    holders: dict[str, dict[Shard, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, shards in enumerate(sources):
        for number, shard in enumerate(shards):
            if shard.size:
                holders[shard.name][shard].append((rank, number))
    held: dict[Shard, _Overlaps] = {}  # several engines of a cell need the same shards
    pieces = []
    for rank, shards in enumerate(targets):
        for number, shard in enumerate(shards):
            if shard not in held:
                held[shard] = _overlaps(shard, rank, holders.get(shard.name, {}))
            for overlap, where in held[shard]:
                source, source_shard = min(where, key=partial(_distance, rank, cell_size or len(targets)))
                pieces += _split(Piece(overlap, source, source_shard, rank, number), bucket_bytes // itemsize)
    order = {name: index for index, name in enumerate(holders)}
    pieces.sort(key=lambda p: (order[p.shard.name], p.target, p.target_shard, p.shard.offsets))
    return WeightSyncPlan(len(targets), itemsize, tuple(_buckets(pieces, bucket_bytes // itemsize)))


# Parts of a shard that ranks hold: each rectangle, and the ranks and numbers of the shards that it lies in.
_Overlaps = Sequence[tuple[Shard, Sequence[tuple[int, int]]]]


def _distance(rank: int, cell_size: int, holder: tuple[int, int]) -> tuple[bool, int, tuple[int, int]]:
    """Distance between `rank` and a holder (its rank, the number of its shard); another cell is farthest."""
    return holder[0] // cell_size != rank // cell_size, abs(holder[0] - rank), holder


def _overlaps(shard: Shard, rank: int, holders: Mapping[Shard, Sequence[tuple[int, int]]]) -> _Overlaps:
    """Parts of a shard that `rank` needs. ValueError unless held shards cover each of its numbers once."""
    overlaps = [(overlap, where) for held, where in holders.items() if (overlap := held.overlap(shard)) is not None]
    num_held = sum(overlap.size for overlap, _ in overlaps)
    if num_held != shard.size:
        raise ValueError(
            f"{shard}, which the engine of rank {rank} of the cell needs, has {shard.size} numbers, and the actor's "
            f"shards have {num_held} of them: the actor and the engine were not built from the same config.json"
        )
    return overlaps


def _split(piece: Piece, limit: int) -> Iterator[Piece]:
    """A piece in blocks of at most `limit` numbers, cut along the first dimension that has several rows."""
    shard = piece.shard
    if shard.size <= limit:
        yield piece
        return
    dim = next((dim for dim, size in enumerate(shard.sizes) if size > 1), 0)
    rows = max(1, limit // (shard.size // shard.sizes[dim]))
    for start in range(0, shard.sizes[dim], rows):
        yield from _split(replace(piece, shard=shard.part(dim, start, min(rows, shard.sizes[dim] - start))), limit)


def _buckets(pieces: Iterable[Piece], limit: int) -> Iterator[tuple[Piece, ...]]:
    bucket: list[Piece] = []
    written: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for piece in pieces:
        size, crossing = piece.shard.size, piece.shard.size * piece.crosses
        if bucket and (written[piece.target] + size > limit or sent[piece.source] + crossing > limit):
            yield tuple(bucket)
            bucket = []
            written.clear()
            sent.clear()
        bucket.append(piece)
        written[piece.target] += size
        sent[piece.source] += crossing
    if bucket:
        yield tuple(bucket)


def whole_summary(reasons: Mapping[str, str]) -> str:
    """Line for the log on tensors that every rank of a cell is given whole (name -> reason); empty if there is none.

    A star stands for the number of a layer or an expert.
    """
    names: dict[str, dict[str, None]] = {}
    for name, reason in sorted(reasons.items()):
        names.setdefault(reason, {})[NUMBER.sub(".*", name)] = None
    whole = "; ".join(f"{', '.join(alike)}: {reason}" for reason, alike in names.items())
    return whole and f"{len(reasons)} tensors are published whole to every rank: {whole}"


def actor_shards(
    slots: Sequence[Slot], architecture: Architecture, *, tp: int, tp_rank: int, ep: int = 1, ep_rank: int = 0
) -> Iterator[tuple[Slot, Rectangle]]:
    """Shards of an actor's rank with these parameters: each rectangle is contiguous in its flat parameter.

    `tp` and `ep` ranks share what is no expert's and the experts, as in segments().
    """
    place = {"tp": tp, "tp_rank": tp_rank, "ep": ep, "ep_rank": ep_rank}
    for slot in slots:
        stop = math.prod(shard_shape(slot, architecture, tp=tp, ep=ep))
        for rectangle in rectangles(slot, architecture, **place, start=0, stop=stop):
            yield slot, rectangle


def actor_stacks(
    slots: Sequence[Slot], architecture: Architecture, **place: int
) -> Iterator[tuple[Slot, tuple[Rectangle, ...]]]:
    """`actor_shards`, grouped by what is published as one shard (`stack_of`); `place` as there."""
    held = list(actor_shards(slots, architecture, **place))
    for run in runs((_shard_of(rectangle), slot.parameter, rectangle.start) for slot, rectangle in held):
        yield held[run[0]][0], tuple(held[number][1] for number in run)


def stack_of(rectangles: Sequence[Rectangle]) -> Shard:
    """The shard as which rectangles of neighbouring experts, or a single rectangle, are published."""
    return stacked([_shard_of(rectangle) for rectangle in rectangles])


def _shard_of(rectangle: Rectangle) -> Shard:
    return Shard(rectangle.source.name, rectangle.offsets, rectangle.sizes)


def engine_shards(slots: Iterable[Slot], architecture: Architecture, *, tp: int, rank: int) -> Iterator[Shard]:
    """Shards of rank `rank` of a vLLM engine over `tp` ranks, by arithmetic, for callers that have no vLLM to ask.

    Like the actor's, but that query, key and value are cut by heads, that key and value heads are copied where `tp` is
    more than they are, and that every rank has a part of the columns of all experts. ValueError for a cut that vLLM
    makes in a way that is not known here.
    """
    for slot in slots:
        if slot.cut is Cut.EXPERTS:
            yield from _engine_experts(slot, architecture, tp=tp, rank=rank)
            continue
        if slot.cut is Cut.HEADS:  # as Megatron's ranks
            whole = (Shard(source.name, (0,) * len(source.shape), source.shape) for source in slot.sources)
            held, pieces = tuple(whole), group_rows(slot, tp=tp, tp_rank=rank)
            yield from (held[piece.source].part(0, piece.start, piece.stop - piece.start) for piece in pieces)
            continue
        sources = slot.sources
        # Matrices that a folder holds fused lie one below the other in a single tensor.
        above = 0
        for number, (rows, start, stop) in enumerate(_engine_rows(slot, architecture, tp=tp, rank=rank)):
            source = sources[min(number, len(sources) - 1)]
            offsets = tuple(above + start if dim == slot.dim else 0 for dim in range(len(source.shape)))
            sizes = tuple(stop - start if dim == slot.dim else size for dim, size in enumerate(source.shape))
            yield Shard(source.name, offsets, sizes)
            above += rows * (len(sources) == 1)


def engine_layer_shapes(architecture: Architecture, *, tp: int) -> set[tuple[int, int]]:
    """Outputs and inputs of the linear layers that a rank of such an engine has, its head among them."""
    shapes = set()
    for slot in stage_slots(architecture, (architecture.num_layers,), 0):
        sizes = [shard.sizes for shard in engine_shards([slot], architecture, tp=tp, rank=0)]
        if slot.cut is not Cut.EXPERTS and all(len(size) == 2 for size in sizes):
            shapes.add((sum(rows for rows, _ in sizes), sizes[0][1]))
    return shapes


def _engine_experts(slot: Slot, architecture: Architecture, *, tp: int, rank: int) -> Iterator[Shard]:
    """A rank's slice of the feed-forward dimension of every expert; whole experts where the folder stacks them."""
    named, size = architecture.traits.experts, architecture.expert_ffn // tp
    assert named is not None, architecture.family
    for source in slot.sources[: len(slot.sources) // architecture.num_experts]:
        sizes = architecture.num_experts, *source.shape
        whole = Shard(stack_name(source.name), (0,) * len(sizes), sizes)
        if named.biased:  # vLLM's loader transposes them, so every rank is sent all of them
            yield whole
        else:
            yield whole.part(2 if source.name.endswith(f".{named.down}.weight") else 1, size * rank, size)


def _engine_rows(slot: Slot, architecture: Architecture, *, tp: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """Rows (or columns) of every matrix of a parameter, and from where to where a rank of the engine has them."""
    rows = slot.sources[0].shape[slot.dim]
    if slot.cut is Cut.ROWS and architecture.traits.engine_cuts_norms:
        shares = min(tp, rows // architecture.head_dim)
        each, share = rows // shares, rank // (tp // shares)
        yield rows, each * share, each * (share + 1)
    elif slot.cut in (Cut.WHOLE, Cut.ROWS):  # norms over all heads, which are ROWS to Megatron, are else whole in vLLM
        yield rows, 0, rows
    elif slot.cut is Cut.COLUMNS:
        yield rows, rows // tp * rank, rows // tp * (rank + 1)
    elif slot.cut is Cut.GATE_UP:
        ffn = gate_rows(slot)
        yield from [(ffn, ffn // tp * rank, ffn // tp * (rank + 1))] * 2
    elif slot.cut is Cut.VOCAB:
        each = padded_vocab_size(rows, tp) // tp
        yield rows, min(each * rank, rows), min(each * (rank + 1), rows)
    elif slot.cut is Cut.QKV:
        queries = architecture.num_heads * (2 if architecture.gated else 1)  # with the gate of each
        heads = slot.heads
        assert heads is not None, slot.parameter
        for count in (queries, heads.kv_heads, heads.kv_heads):  # a key without a value is loaded as both
            shares = min(tp, count)
            each, share = count * heads.size // shares, rank // (tp // shares)
            yield count * heads.size, each * share, each * (share + 1)
    else:
        raise ValueError(f"{slot.sources[0].name}: how vLLM cuts what is {slot.cut.value} is not known here")
