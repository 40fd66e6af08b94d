"""Weight sync: how an agent's weights reach its engines, and the check that they did.

Every rank of a cell announces once which shards its actor holds and which shards its engine needs. All ranks derive the
same plan from that. Where cells share experts, the plan spans that block of cells, and "cell" below means the block.
Tensors that an engine takes only through vLLM's own loaders follow as full tensors (`fallback`).
Where engines have ranks of their own, training ranks need nothing and engine ranks hold nothing: it is the same kind of
plan, in which every piece crosses ranks. Such an engine has the new weights when all ranks of its cell have confirmed
the step. Until then, and after an error, it refuses to generate.
Verification reads the tensors that the engine multiplies with, located by the layers' own attributes and not by the
loaders that the plan comes from. It compares a checksum of every piece, which any changed bit changes.

Elsewhere: when weights are synced, and what is on the devices then (devices.py).
"""

import json
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from hacpo_mega.cluster.groups.tree import broadcast
from hacpo_mega.cluster.place import Place
from hacpo_mega.logbook.run.provenance import installed_versions
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.weights.hf_reader import dtype_of
from hacpo_mega.megatron.weights.publish import ActorShards, Exchange, NoShards
from hacpo_mega.models.sharding.publish_plan import Piece, WeightSyncPlan, publish_plan
from hacpo_mega.models.sharding.shards import Shard, stacked_shapes
from hacpo_mega.rollout.engine import Engine
from hacpo_mega.rollout.weights.engine_weights import Receiver
from hacpo_mega.rollout.weights.held_weights import HeldPart
from hacpo_mega.rollout.weights.parts import fallback_summary

BLOCK = 1 << 22  # numbers of a tensor that are summed at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = 0x5851F42D4C957F2D  # of Knuth's linear congruential generator


class WeightSync:
    """Weight sync from the actor of this rank's cell into its engines. Every rank of the cell calls every method.

    fallback    tensors that every engine rank is given whole, and why
    step        the step whose weights the engines have; None while a sync is incomplete
    """

    def __init__(self, place: Place, actor: Actor | None, engine: Engine | None) -> None:
        """Makes the plan. `engine` is awake, or None on a training rank; `actor` is None on an engine rank.

        Collective over the agent.
        """
        self._place, self._actor, self._engine = place, actor, engine
        self._shards = self._actor_shards()
        self._parts = None if engine is None else engine.weights(self._shards.published)
        if self._parts is not None:
            names = (name for name in self._shards.published if self._dtype(name) != self._shards.dtype)
            self._parts.use_fallback(dict.fromkeys(names, "the engine has it in float32"))
        self.fallback: dict[str, str] = {}
        # Tensors that an engine quantizes: its own loader alone can compute the numbers that it should hold.
        self._converted: set[str] = set()
        mine = [{}, []] if self._parts is None else [dict(self._parts.fallback), sorted(self._parts.quantized)]
        for payload in place.gather_block(json.dumps([*mine, engine is not None and engine.quantizes]).encode()):
            fallback, quantized, quantizes = json.loads(payload)
            self.fallback |= fallback
            self._converted |= {*quantized, *fallback} if quantizes else set()
        if self._parts is not None:
            self._parts.use_fallback(self.fallback)
        self.plan = self._plan([] if self._parts is None else [part.shard for part in self._parts.parts])
        timeout = timedelta(0) if actor is None else actor.timeout  # unused: an engine rank has a weights group already
        self._exchange = Exchange(self.plan, self._shards.dtype, place.device, timeout, place.weights_group)
        self._verified: WeightSyncPlan | None = None
        self.step: int | None = None

    def _actor_shards(self) -> "ActorShards | NoShards":
        """Shards of this rank's actor; without an actor, the leader's list of the model's tensors. Collective."""
        shards = None if self._actor is None else ActorShards(self._actor.model)
        if self._place.weights_group is None:
            return shards
        model = [] if shards is None else [list(shards.published.items()), str(shards.dtype).removeprefix("torch.")]
        published, dtype = json.loads(self._place.gather_block(json.dumps(model).encode())[0])
        return shards or NoShards({name: tuple(shape) for name, shape in published}, getattr(torch, dtype))

    def require_step(self, step: int) -> None:
        """RuntimeError unless the engines have all weights after `step`; called before every generation."""
        if self.step != step:
            found = "none that are whole" if self.step is None else f"those after step {self.step}"
            raise RuntimeError(f"answers of the weights after step {step} are asked for, and the engine has {found}")

    @property
    def summary(self) -> str:
        """Line for the startup log on fallback tensors, and on a vLLM version that is not the locked one; or ""."""
        return fallback_summary(self.fallback, installed_versions())

    def publish(self, step: int = 0) -> None:
        """Syncs the actor's weights after `step` into the engine, which has at least its weights on the device."""
        spans, shards = self._place.spans, self._shards
        shards.settle()
        self.step = None  # until the sync is complete
        with nullcontext() if self._engine is None else self._engine.receiving(self._parts) as receiver:

            def on_written(piece: Piece) -> None:
                self._place.progress()
                spans.sent("engine", piece.shard.size * shards.dtype.itemsize)
                receiver.wrote(piece.target_shard, piece.shard.size)

            def on_complete(bucket: int) -> None:
                if receiver is not None:
                    receiver.settled(self.plan.last_of_bucket[bucket])

            self._exchange.run(
                lambda piece: shards.view(piece.source_shard, piece.shard),
                lambda piece: receiver.view(piece.target_shard, piece.shard, shards.dtype),
                on_written,
                spans.sent,
                on_complete,
            )
            if self.fallback:
                self._load_full_tensors(self.fallback, receiver)
            self._require_all_done(step)
        self.step = step

    def _require_all_done(self, step: int) -> None:
        """RuntimeError, on all ranks, unless all have reached `step`; no check where engines share the ranks."""
        if self._place.weights_group is None:
            return
        steps = [int(payload) for payload in self._place.gather_block(str(step).encode())]
        if len(set(steps)) > 1:
            raise RuntimeError(f"the ranks of a cell publish the weights of different steps: {steps}")

    def _load_full_tensors(self, wanted: Container[str], receiver: Receiver | Engine | None) -> None:
        """Loads full tensors into this rank's `receiver`; without one the rank takes part in their broadcasts."""
        tensors = self._full_tensors(wanted)
        if receiver is not None:
            receiver.load(tensors)
        for _ in tensors:  # collective: also those that the receiver has not taken
            pass

    def _full_tensors(self, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, on every rank of the cell; the leader broadcasts them to engine ranks."""
        place, published = self._place, self._shards.published
        if self._actor is not None:
            tensors = self._actor.weights(only=wanted)
        else:
            names = (name for name in published if name in wanted)
            tensors = (
                (name, torch.empty(published[name], dtype=self._dtype(name), device=place.device)) for name in names
            )
        for name, tensor in tensors:
            place.progress()
            if place.weights_group is not None:
                # The other training ranks have the tensor, so what they receive is dropped.
                keeps = place.coordinate.block_rank == 0 or self._actor is None
                broadcast(place.weights_group, tensor if keeps else torch.empty_like(tensor))
            if self._engine is not None:
                place.spans.sent("engine", tensor.nbytes)
            yield name, tensor

    def _dtype(self, name: str) -> torch.dtype:
        return dtype_of(name, self._shards.dtype)

    def differences(self) -> list[str]:
        """A line for every piece in which this rank's engine differs from the actor's current weights.

        A layer that quantizes holds other numbers: its tensors are compared with a fresh quantization of the actor's
        full tensors, which the engine has afterwards.
        """
        self._shards.settle()
        with nullcontext([]) if self._engine is None else self._engine.held() as held:
            published = self._shards.published.items()
            # An engine holds these as they are published.
            shapes = stacked_shapes({name: shape for name, shape in published if name not in self._converted})
            held = [part for part in held if part.name in shapes or not self._converted]
            if self._verified is None:
                if self._engine is not None:
                    _require_same_tensors(shapes.keys(), {part.name for part in held})
                self._verified = self._plan([part.shard(shapes[part.name]) for part in held])
            lines = list(self._piece_differences(self._verified, held))
        return lines + (self._changed_by_reload() if self._converted else [])

    def _changed_by_reload(self) -> list[str]:
        """Lines on converted tensors (numbers, scales and others of a layer) whose bytes change in a fresh load."""
        before = self._converted_sums()
        self._load_full_tensors(self._shards.published, self._engine)
        after = self._converted_sums()
        return [
            f"{name}: not what a fresh load of the actor's weights makes"
            for name in after
            if before[name] != after[name]
        ]

    def _converted_sums(self) -> dict[str, int]:
        if self._engine is None:
            return {}
        with self._engine.held():
            tensors = dict(self._parts.converted_tensors())
            sums = _checksums((tensor.contiguous().view(torch.uint8), 1) for tensor in tensors.values())
        return dict(zip(tensors, sums[:, 0].tolist(), strict=True))

    def _piece_differences(self, plan: WeightSyncPlan, held: Sequence[HeldPart]) -> Iterator[str]:
        """A line for every piece of which the engine's checksum is not the actor's. Collective over the cell."""
        rank, shards = self._place.coordinate.block_rank, self._shards
        read = ((shards.view(p.source_shard, p.shard), p.shard.num_members) for p in plan.pieces if p.source == rank)
        payloads = self._place.gather_block(_checksums(read).tobytes())
        sums = [np.frombuffer(payload, np.int64).reshape(-1, 2) for payload in payloads]
        mine, expected, taken = [], [np.empty((0, 2), np.int64)], [0] * plan.num_ranks
        for piece in plan.pieces:
            start, source = taken[piece.source], piece.source
            taken[source] += piece.shard.num_members
            if piece.target == rank:
                mine.append(piece)
                expected.append(sums[source][start : taken[source]])
        views = (
            (held[piece.target_shard].view(piece.shard).to(self._dtype(piece.shard.name)), piece.shard.num_members)
            for piece in mine
        )
        rows = ((piece, number) for piece in mine for number in range(piece.shard.num_members))
        for (piece, number), (found, _), (wanted, is_finite) in zip(
            rows, _checksums(views), np.concatenate(expected), strict=True
        ):
            # A packed weight is read by a product, which spreads NaN and infinity.
            if found != wanted and (is_finite or not held[piece.target_shard].is_packed):
                member = piece.shard.member(number)
                yield f"{member.name}: not what rank {piece.source} of the cell has of {member}"

    def _plan(self, needed: Sequence[Shard]) -> WeightSyncPlan:
        """Makes the plan from what all ranks hold and need. Collective over the cell."""
        own = [[(one.name, one.offsets, one.sizes) for one in shards] for shards in (self._shards.shards, needed)]
        cell = [json.loads(payload) for payload in self._place.gather_block(json.dumps(own).encode())]
        sources, targets = (
            [[Shard(name, tuple(offsets), tuple(sizes)) for name, offsets, sizes in rank[side]] for rank in cell]
            for side in (0, 1)
        )
        shape = self._place.rank_map.agents[self._place.agent]
        return publish_plan(sources, targets, self._shards.dtype.itemsize, cell_size=shape.cell_size)


def _require_same_tensors(published: Set[str], held: Set[str]) -> None:
    if lost := sorted(published ^ held):
        raise ValueError(f"{len(lost)} tensors are published or held by the engine and not both, first {lost[:4]}")


def _checksums(tensors: Iterable[tuple[Tensor, int]]) -> np.ndarray:
    """Checksum of each row of every (tensor, number of rows M), and whether the row is finite: int64 [sum of M, 2].

    A checksum changes with any bit and with the order of the numbers.
    """
    sums = [_checksums_of_rows(tensor, num_rows) for tensor, num_rows in tensors]
    return torch.cat(sums).cpu().numpy() if sums else np.empty((0, 2), np.int64)


def _checksums_of_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Sum modulo 2^64 of each number's bits times an odd factor of its place, and 1 if all are finite: int64 [M, 2]."""
    # Adding 0.0 removes the sign of zeros, which a product does not show. Bytes are taken as they are.
    values_MN = (tensor if tensor.dtype is torch.uint8 else tensor.add(0.0)).reshape(num_rows, -1)
    bits_MN = values_MN.view(INTEGERS[values_MN.itemsize])
    total_M, finite_M = bits_MN.new_zeros(num_rows, dtype=torch.int64), bits_MN.new_ones(num_rows, dtype=torch.bool)
    width = max(1, BLOCK // num_rows)
    for start in range(0, bits_MN.shape[1], width):
        block = bits_MN[:, start : start + width].to(torch.int64)
        places = torch.arange(start, start + block.shape[1], dtype=torch.int64, device=bits_MN.device)
        total_M += (block * (places * MULTIPLIER * 2 + 1)).sum(dim=1)
        finite_M &= values_MN[:, start : start + width].isfinite().all(dim=1)
    return torch.stack([total_M, finite_M.to(torch.int64)], dim=1)
