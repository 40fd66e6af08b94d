"""Executes a weight-sync plan: moves the actor's parameters to the engines of a cell.

One bucket at a time: its data for other ranks goes as one message per pair of ranks, all grouped. While messages
travel, this rank copies what it keeps, and then unpacks the previous bucket. Two buckets are alive at a time.

Elsewhere: the plan (models/sharding/publish_plan.py), the destination (rollout/weights/engine_weights.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hacpo_mega.cluster.groups.spans import WatchedGroup
from hacpo_mega.megatron.model.model import HiddenStateModel, unwrapped
from hacpo_mega.megatron.train.overlap import finish_gather
from hacpo_mega.megatron.weights.lora import HeldWeights
from hacpo_mega.megatron.weights.names import shard_coordinates, slots_of, sources_of
from hacpo_mega.models.sharding.publish_plan import Piece, WeightSyncPlan, actor_stacks, stack_of
from hacpo_mega.models.sharding.shards import Shard

# A piece's memory [*sizes], at the rank that reads it or at the one that writes it.
View = Callable[[Piece], torch.Tensor]


class ActorShards:
    """Shards of the Hugging Face tensors in this rank's part of a model.

    shards      in a fixed order; their numbers are places in it; experts' matrices are stacked
    published   every tensor of the whole model: name -> shape
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        bare: HiddenStateModel = unwrapped(model)
        self._weights = HeldWeights(bare)
        held = actor_stacks(slots_of(bare, bare.pg_collection.pp.rank()), bare.architecture, **shard_coordinates(bare))
        self._places = [(slot.parameter, rectangles) for slot, rectangles in held]
        self.shards = tuple(stack_of(rectangles) for _, rectangles in self._places)
        self.published = {source.name: source.shape for source in sources_of(bare)}
        self.dtype = bare.config.params_dtype

    def settle(self) -> None:
        """Waits for the pending all-gather of updated parameters."""
        finish_gather(self._model)

    def view(self, number: int, what: Shard) -> torch.Tensor:
        """Numbers of the rectangle `what` [*what.sizes] in the shard of this number; with adapters, a copy."""
        parameter, rectangles = self._places[number]
        shard = self.shards[number]
        if shard.member(0) == shard:
            return self._weights.rectangle(parameter, rectangles[0], what.offsets, what.sizes)
        first = what.offsets[0] - shard.offsets[0]
        return self._weights.stack(parameter, rectangles[first:][: what.sizes[0]], what.offsets[1:], what.sizes[1:])


@dataclass(frozen=True)
class NoShards:
    """Empty counterpart of ActorShards on a rank without an actor."""

    published: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    shards: tuple[Shard, ...] = ()

    def settle(self) -> None:
        """Does nothing: no gather is pending."""

    def view(self, number: int, what: Shard) -> torch.Tensor:
        """Raises AssertionError: no plan has a piece of a shard that does not exist."""
        raise AssertionError(f"{what} is read from shard {number} of a rank that has none")


@dataclass
class _Bucket:
    """One rank's work in a bucket: pieces to copy, to send, to receive, by peer."""

    kept: list[Piece] = field(default_factory=list)
    sent: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))


class Exchange:
    """Executor of a plan on one rank of a cell, for any number of syncs; every method is collective over the cell."""

    def __init__(
        self,
        plan: WeightSyncPlan,
        dtype: torch.dtype,
        device: torch.device,
        timeout: timedelta,
        group: WatchedGroup | None = None,
    ) -> None:
        """Numbers are of `dtype`, on `device`; `timeout` bounds waits for other ranks. Collective over the agent.

        `group` is the cell's own where some of its ranks are in no group of Megatron's, else None. RuntimeError if the
        ranks of the cell have made different plans.
        """
        self._direct_group = group
        self._group = group or _cell_group(plan.num_ranks, timeout)
        self._rank, self._dtype, self._device = self._group.rank(), dtype, device
        assert plan.num_ranks == self._group.size(), (plan.num_ranks, self._group.size())
        self._require_one_plan(plan)
        self._buckets = [self._share(bucket) for bucket in plan.buckets]

    def _require_one_plan(self, plan: WeightSyncPlan) -> None:
        """RuntimeError unless all ranks have the same plan.

        Also the group's first collective, which NCCL needs from all ranks before any two of them exchange.
        """
        mine = torch.tensor(list(plan.digest), dtype=torch.uint8, device=self._device)
        all_RB = mine.new_empty(self._group.size() * len(mine))
        if self._direct_group is None:
            dist.all_gather_into_tensor(all_RB, mine, group=self._group)
        else:
            self._direct_group.allgather([list(all_RB.view(-1, len(mine)))], [mine]).wait()
        if not bool((all_RB.view(-1, len(mine)) == mine).all()):
            raise RuntimeError("the ranks of a cell have made different plans to publish: is one of another version?")

    def _share(self, bucket: Iterable[Piece]) -> _Bucket:
        share = _Bucket()
        for piece in bucket:
            if piece.source == piece.target == self._rank:
                share.kept.append(piece)
            elif piece.source == self._rank:
                share.sent[piece.target].append(piece)
            elif piece.target == self._rank:
                share.received[piece.source].append(piece)
        return share

    def run(
        self,
        read: View,
        write: View,
        on_written: Callable[[Piece], None],
        on_sent: Callable[[str, int], None] = lambda *_: None,
        on_complete: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Moves every number once.

        on_written    called for each piece that this rank has written
        on_sent       called with "cell" and the bytes that this rank sends to others of its cell
        on_complete   called with the number of every bucket that this rank has completed. It may be collective over the
                      cell: each rank gets there without the others
        """
        arriving: _Arrivals | None = None
        for number, bucket in enumerate(self._buckets):
            starting = self._start(bucket, read, on_sent)
            kept = bucket.kept
            _write(kept, [read(piece) for piece in kept], write, on_written)
            if arriving is not None:
                arriving.unpack(write, on_written)
                on_complete(number - 1)
            arriving = starting
        if arriving is not None:
            arriving.unpack(write, on_written)
            on_complete(len(self._buckets) - 1)

    def _start(self, bucket: _Bucket, read: View, on_sent: Callable[[str, int], None]) -> "_Arrivals":
        messages = {peer: torch.cat([read(p).reshape(-1) for p in pieces]) for peer, pieces in bucket.sent.items()}
        room = {peer: self._room(pieces) for peer, pieces in bucket.received.items()}
        if self._direct_group is not None:  # it counts the bytes that it sends
            works = send_and_receive(self._direct_group, messages, room)
        else:
            operations = [self._operation(dist.isend, message, peer) for peer, message in messages.items()]
            operations += [self._operation(dist.irecv, buffer, peer) for peer, buffer in room.items()]
            for message in messages.values():
                on_sent("cell", message.nbytes)
            works = dist.batch_isend_irecv(operations) if operations else []
        return _Arrivals(works, messages, [(room[peer], pieces) for peer, pieces in bucket.received.items()])

    def _operation(self, what: Callable[..., dist.Work], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(what, tensor, group=self._group, group_peer=peer)

    def _room(self, pieces: Iterable[Piece]) -> torch.Tensor:
        return torch.empty(sum(piece.shard.size for piece in pieces), dtype=self._dtype, device=self._device)


def send_and_receive(
    group: WatchedGroup, messages: Mapping[int, torch.Tensor], room: Mapping[int, torch.Tensor]
) -> list[dist.Work]:
    """`dist.batch_isend_irecv` of flat tensors [N] by peer, in a group that was made directly (job_groups.py).

    Issued singly, NCCL's would wait for each other.
    """
    if not messages and not room:
        return []
    if group.supports_coalescing:
        group._start_coalescing()
    works = [group.send([message], peer, 0) for peer, message in messages.items()]
    works += [group.recv([buffer], peer, 0) for peer, buffer in room.items()]
    return [group._end_coalescing()] if group.supports_coalescing else works


def _cell_group(size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Group of this cell's ranks, which are neighbours: Megatron's model group, which leaves cp out, or a new one."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == size:
        return group
    cells = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
    groups = [dist.new_group(list(cell), timeout=timeout) for cell in cells]
    return groups[dist.get_rank() // size]


@dataclass
class _Arrivals:
    """A bucket in flight; keeps the sent messages alive."""

    works: list[dist.Work]
    sending: dict[int, torch.Tensor]
    buffers: list[tuple[torch.Tensor, list[Piece]]]

    def unpack(self, write: View, on_written: Callable[[Piece], None]) -> None:
        """Waits for the bucket, and copies it to its destination."""
        for work in self.works:
            work.wait()
        for buffer, pieces in self.buffers:
            parts = buffer.split([piece.shard.size for piece in pieces])
            received = [part.view(piece.shard.sizes) for part, piece in zip(parts, pieces, strict=True)]
            _write(pieces, received, write, on_written)


def _write(pieces: list[Piece], numbers: list[torch.Tensor], write: View, on_written: Callable[[Piece], None]) -> None:
    if pieces:
        torch._foreach_copy_([write(piece) for piece in pieces], numbers)
    for piece in pieces:
        on_written(piece)
