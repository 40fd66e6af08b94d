"""The bytes that each rank of a cell (or block) moves in a publication, and the least that any publication could move.

The least is counted without a plan: of the numbers that a rank's engine holds, those that its own actor does not.
Tensors that are published whole are not in these bytes; they are named by `whole_tensors`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hacpo_lab.planning.publication import Published
from hacpo_lab.planning.traffic import publication_of
from hacpo_mega.memory.budget import Budget
from hacpo_mega.memory.quantized import KINDS
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout, chunk_layers
from hacpo_mega.models.sharding.publish_plan import actor_stacks, engine_shards, stack_of
from hacpo_mega.models.sharding.segments import Cut, Slot, rank_slots, stage_slots
from hacpo_mega.models.sharding.shards import Shard


@dataclass(frozen=True)
class PublishBytes:
    """The bytes of one publication of an agent, by rank of a cell or block, in which tensor ranks come first."""

    budget: Budget

    @cached_property
    def _moved(self) -> Published:
        return publication_of(self.budget)

    @property
    def sent(self) -> tuple[int, ...]:
        """To other ranks."""
        return self._bytes(self._moved.sent)

    @property
    def received(self) -> tuple[int, ...]:
        """From other ranks."""
        return self._bytes(self._moved.received)

    @cached_property
    def least(self) -> tuple[int, ...]:
        """No publication receives less."""
        actor = self.budget.actor
        return self._bytes(least_received(actor.architecture, actor.layout, self.budget.engine.tp))

    @property
    def copied(self) -> tuple[int, ...]:
        """From a rank's actor into its own engine."""
        written = self._bytes(self._moved.written)
        return tuple(all_of - came for all_of, came in zip(written, self.received, strict=True))

    def _bytes(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number * self.budget.actor.device.number for number in numbers)


def least_received(architecture: Architecture, layout: Layout, engine_tp: int) -> tuple[int, ...]:
    """Numbers, by rank of a cell or block, that engines over `engine_tp` ranks hold there and the actor does not."""
    chunks = chunk_layers(architecture.num_layers, layout)
    whole = stage_slots(architecture, (architecture.num_layers,), 0)
    needed = [_held_by_engine(whole, architecture, engine_tp, rank) for rank in range(engine_tp)]
    total = [sum(shard.size for shards in of_rank.values() for shard in shards) for of_rank in needed]
    found = []
    width = layout.tp * layout.cp
    for rank in range(layout.block_cells * layout.cell_size):
        cell, in_cell = divmod(rank, layout.cell_size)
        stage, place = in_cell // width, rank % engine_tp
        ep_rank = (cell * width + rank % width) % layout.ep
        shares = {"tp": layout.tp, "tp_rank": rank % layout.tp, "ep": layout.ep, "ep_rank": ep_rank}
        slots = rank_slots(architecture, chunks, layout.pp, stage)
        both = {
            overlap
            for own in (stack_of(those) for _, those in actor_stacks(slots, architecture, **shares))
            for shard in needed[place].get(own.name, ())
            if (overlap := shard.overlap(own)) is not None
        }
        found.append(total[place] - sum(shard.size for shard in both))
    return tuple(found)


def whole_tensors(architecture: Architecture, vllm: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that a publication gives to every rank whole, and why: with a `quantization` that changes their form.

    Tensors of a layer that quantizes plain numbers are not among them, except those of experts.
    """
    kind, found = vllm.get("quantization"), {}
    if kind is not None:
        for slot in stage_slots(architecture, (architecture.num_layers,), 0):
            if slot.cut is Cut.EXPERTS or (kind not in KINDS and _is_in_a_layer(slot)):
                reason = f"its layer may hold it in another form (vllm.quantization = {kind!r})"
                found |= dict.fromkeys((source.name for source in slot.sources), reason)
    return found


def _is_in_a_layer(slot: Slot) -> bool:
    """Tells whether a parameter is a matrix that may be quantized, or a bias beside it."""
    return slot.cut in (Cut.QKV, Cut.COLUMNS, Cut.GATE_UP) or slot.parameter.endswith("linear_proj.bias")


def _held_by_engine(slots: Iterable[Slot], architecture: Architecture, tp: int, rank: int) -> dict[str, list[Shard]]:
    held: dict[str, list[Shard]] = {}
    for shard in engine_shards(slots, architecture, tp=tp, rank=rank):
        held.setdefault(shard.name, []).append(shard)
    return held
