"""How an agent's weights reach its engines, and whether they did.

Every rank of a cell says once what its actor holds and what its engine needs of each tensor; of that all make the same
plan. What an engine takes in no other form than vLLM's loaders follows as full tensors (`left_over`).
Verification looks at what an engine multiplies with, by the layers' own numbers and not by the loaders that the plan
comes from: a checksum of every piece on both sides, in which a single bit shows.
Not here: when that is, and who is on the devices then (devices.py).
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch import Tensor

from hacpo_mega.cluster.place import Place
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.publish import ActorShards, Exchange
from hacpo_mega.models.publish_plan import Piece, PublishPlan, Shard, publish_plan, said_whole
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.held_weights import HeldPart

# Of a piece: its checksum, and whether all of its numbers are finite.
SUM = struct.Struct("<q?")
BLOCK = 1 << 22
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = 0x5851F42D4C957F2D  # of Knuth's linear congruential generator


class Publication:
    """From the actor of this rank's cell into its engines. Every rank of the cell calls every method."""

    def __init__(self, place: Place, actor: Actor, engine: Engine) -> None:
        """`engine` is awake. Makes the plan; collective over the agent."""
        self._place, self._actor, self._engine = place, actor, engine
        self._own = ActorShards(actor.model)
        self._parts = engine.weights(self._own.published)
        for payload in place.gather_cell(json.dumps(dict(self._parts.left_over)).encode()):
            self._parts.leave(json.loads(payload))
        self.plan = self._plan([part.shard for part in self._parts.parts])
        self._exchange = Exchange(self.plan, self._own.dtype, actor.device, actor.timeout)
        self._verified: PublishPlan | None = None

    @property
    def left_over(self) -> dict[str, str]:
        """Tensors that every rank of the cell is given whole, and why."""
        return dict(self._parts.left_over)

    @property
    def said(self) -> str:
        """The same in a line, for people; empty where there is none."""
        return said_whole(self.left_over)

    def publish(self) -> None:
        """The engine, awake or with its weights alone, has the actor's weights afterwards."""
        spans, own = self._place.spans, self._own
        own.settle()
        with self._engine.receiving(self._parts) as receiver:

            def wrote(piece: Piece) -> None:
                self._place.progress()
                spans.sent("engine", piece.what.size * own.dtype.itemsize)
                receiver.wrote(piece.written, piece.what.size)

            self._exchange.run(
                lambda piece: own.view(piece.read, piece.what),
                lambda piece: receiver.view(piece.written, piece.what, own.dtype),
                wrote,
                spans.sent,
                lambda bucket: receiver.settled(self.plan.last_of_bucket[bucket]),
            )
            if self._parts.left_over:
                receiver.load(self._whole())

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._actor.weights(only=self._parts.left_over):
            self._place.progress()
            self._place.spans.sent("engine", tensor.nbytes)
            yield name, tensor

    def differences(self) -> list[str]:
        """A line for every piece of which this rank's engine holds other numbers than the actor would publish now.

        Of a layer that quantizes, and has other numbers on purpose: for every tensor that is not what vLLM makes of the
        actor's full tensors, which the engine has afterwards.
        """
        self._own.settle()
        quantized = self._parts.converted if self._engine.quantizes else frozenset()
        with self._engine.held() as held:
            if quantized:
                held = [part for part in held if part.name in self._own.published.keys() - quantized]
            if self._verified is None:
                self._require_same_tensors(held, quantized)
                self._verified = self._plan([part.shard(self._own.published[part.name]) for part in held])
            found = list(self._compared(self._verified, held))
        return found + (list(self._loaded_afresh()) if quantized else [])

    def _loaded_afresh(self) -> Iterator[str]:
        """Numbers, scales and whatever else a layer keeps, as bytes."""
        before = self._converted_sums()
        self._engine.load(self._actor.weights())
        for name, number in self._converted_sums().items():
            if before[name] != number:
                yield f"{name}: not what a fresh load of the actor's weights makes"

    def _converted_sums(self) -> dict[str, int]:
        with self._engine.held():
            tensors = dict(self._parts.converted_tensors())
            sums = _checksums(tensor.contiguous().view(torch.uint8) for tensor in tensors.values())
        return {name: number for name, (number, _) in zip(tensors, sums, strict=True)}

    def _require_same_tensors(self, held: Sequence[HeldPart], quantized: Set[str]) -> None:
        published, names = self._own.published.keys() - quantized, {part.name for part in held}
        if lost := sorted(published ^ names):
            raise ValueError(f"{len(lost)} tensors are published or held by the engine and not both, first {lost[:4]}")

    def _compared(self, plan: PublishPlan, held: Sequence[HeldPart]) -> Iterator[str]:
        rank, own = self._place.coordinate.cell_rank, self._own
        sums = _checksums(own.view(piece.read, piece.what) for piece in plan.pieces if piece.source == rank)
        payload = b"".join(SUM.pack(*found) for found in sums)
        said = [SUM.iter_unpack(found) for found in self._place.gather_cell(payload)]
        wanted = [(piece, next(said[piece.source])) for piece in plan.pieces]
        mine = [(piece, found) for piece, found in wanted if piece.target == rank]
        views = (held[piece.written].view(piece.what).to(own.dtype) for piece, _ in mine)
        for (piece, (number, finite)), (seen, _) in zip(mine, _checksums(views), strict=True):
            # The product by which a packed weight is read spreads what is not finite.
            if seen != number and (finite or not held[piece.written].is_packed):
                yield f"{piece.what.name}: not what rank {piece.source} of the cell has of {piece.what}"

    def _plan(self, needed: Sequence[Shard]) -> PublishPlan:
        """Collective over the cell."""
        mine = [[_said(shard) for shard in shards] for shards in (self._own.shards, needed)]
        cell = [json.loads(payload) for payload in self._place.gather_cell(json.dumps(mine).encode())]
        sources, targets = ([[_heard(*shard) for shard in rank[side]] for rank in cell] for side in (0, 1))
        return publish_plan(sources, targets, self._own.dtype.itemsize)


def _said(shard: Shard) -> list:
    return [shard.name, shard.offsets, shard.sizes]


def _heard(name: str, offsets: list[int], sizes: list[int]) -> Shard:
    return Shard(name, tuple(offsets), tuple(sizes))


def _checksums(tensors: Iterable[Tensor]) -> list[tuple[int, bool]]:
    """Of each: a sum that changes with any bit and with the order of its numbers, and whether all are finite."""
    found = [torch.stack([*_checksum(tensor)]) for tensor in tensors]
    return [(number, bool(finite)) for number, finite in torch.stack(found).tolist()] if found else []


def _checksum(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Modulo 2^64; every number's bits times an odd number of its own, so that no single change is lost."""
    # of zeros a product shows no sign; of bytes all say something
    values = tensor.reshape(-1) if tensor.dtype is torch.uint8 else tensor.add(0.0).reshape(-1)
    bits = values.view(INTEGERS[values.itemsize])
    total, finite = bits.new_zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool, device=bits.device)
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        places = torch.arange(start, start + len(block), dtype=torch.int64, device=bits.device)
        total += (block * (places * MULTIPLIER * 2 + 1)).sum()
        finite &= values[start : start + BLOCK].isfinite().all()
    return total, finite.to(torch.int64)
