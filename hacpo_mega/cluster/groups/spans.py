"""Trace of this process: named spans of its own clock, and bytes sent by phase and group.

Spans are recorded only while a step is traced. Bytes are always counted where they are sent, from tensor sizes, without
asking a device. A collective knows its group and its number in it, so that the spans of all members can be aligned to
show who came last and who waited (logbook/files/trace.py).

The offset of this process's clock to that of the job's rank 0 is measured through the job's store by Cristian's method:
a rank asks rank 0 what time it is, and knows that the answer was written between question and arrival. The middle of
the fastest round is the estimate, and half of that round bounds its error, whatever the way to and fro took. Rank 0
answers one rank after the other: rounds x ranks small messages.
"""

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

WATCHED = ("allgather", "allreduce", "barrier", "broadcast", "gather")
SENDING = ("allgather", "broadcast", "gather", "send")
ROUNDS = 8  # the fastest counts; the first one also waits until rank 0 serves this rank


class Span(NamedTuple):
    """One interval, in seconds of the recording clock; `turn` counts the collectives of a group from 0."""

    name: str
    kind: str  # phase, part or collective
    begin_s: float
    end_s: float
    group: str = ""
    turn: int = 0


class Spans:
    """The recorder of one process. While recording is off, a span costs one check of a flag.

    owner    what the process is called in names of groups that are its agent's alone
    settle   waits for the device's queued work, so that a span ends when its work does. Called at the end of every
             recorded span, never while nothing is recorded
    """

    def __init__(
        self,
        owner: str = "",
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.owner, self.is_on = owner, False
        self._settle, self._clock = settle, clock
        self._recorded: list[Span] = []
        self._turns: Counter[str] = Counter()
        self._phase = ""
        self._sent: Counter[tuple[str, str]] = Counter()

    def start(self) -> None:
        """Records from now on; all members of a group start between the same two of its collectives."""
        self.is_on, self._recorded, self._turns = True, [], Counter()

    def stop(self) -> list[Span]:
        """Ends recording; the spans since `start`, in the order in which they ended."""
        self.is_on = False
        return self._recorded

    @contextmanager
    def span(self, name: str, kind: str = "part", group: str = "") -> Iterator[None]:
        """Records its body as a span, unless recording is off. A collective names its group."""
        if kind == "phase":
            self._phase = name
        if not self.is_on:
            yield
            return
        turn = self._turns[group]
        self._turns[group] += bool(group)
        begin = self._clock()
        try:
            yield
        finally:
            self._settle()
            self._recorded.append(Span(name, kind, begin, self._clock(), group, turn))

    def sent(self, whom: str, num_bytes: int) -> None:
        """Counts bytes that this process has sent: to a kind of group (lane, cell, row, job, tp, pp), to the engine."""
        self._sent[self._phase, whom] += num_bytes

    def take_sent(self) -> dict[tuple[str, str], int]:
        """Bytes by phase and by receiver since the last call."""
        sent, self._sent = self._sent, Counter()
        return dict(sent)


class WatchedGroup:
    """A process group that records its collectives as spans and counts their bytes; everything else is the group's own.

    A recorded collective is over when it returns: nobody here starts one to do something else meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, spans: Spans) -> None:
        self._group, self._name, self._spans = group, name, spans

    def __getattr__(self, attribute: str) -> Any:
        method = getattr(self._group, attribute)
        watched = attribute in SENDING or (attribute in WATCHED and self._spans.is_on)
        return partial(self._watch, attribute, method) if watched else method

    def _watch(self, operation: str, method: Callable[..., dist.Work], *arguments: Any) -> dist.Work:
        if operation in SENDING:
            self._spans.sent(self._name.partition("/")[0], self._sent_bytes(operation, arguments))
        if operation not in WATCHED or not self._spans.is_on:
            return method(*arguments)
        with self._spans.span(operation, "collective", self._name):
            work = method(*arguments)
            work.wait()
        return work

    def _sent_bytes(self, operation: str, arguments: Sequence[Any]) -> int:
        """Bytes that this rank sends, whichever way the library takes: around a ring, along a tree.

        A broadcast's are all its root's, though a tree's inner nodes pass them on.
        """
        (tensor,) = arguments[1 if operation in ("allgather", "gather") else 0]
        others, is_root = self._group.size() - 1, self._group.rank() == 0
        copies = {"allgather": others, "broadcast": others * is_root, "gather": not is_root, "send": 1}
        return copies[operation] * tensor.nbytes


class ClockOffset(NamedTuple):
    """Rank 0's clock is this process's plus `offset_s`, to `accuracy_s` seconds; both 0 on rank 0."""

    offset_s: float
    accuracy_s: float


def measure_offset(
    store: dist.Store, rank: int, world_size: int, clock: Callable[[], float] = time.perf_counter
) -> ClockOffset:
    """This rank's offset; a collective over all ranks that share `store`; it leaves no key there."""
    if rank == 0:
        for other in range(1, world_size):
            for turn in range(ROUNDS):
                store.get(f"{other}/{turn}/asked")
                store.set(f"{other}/{turn}/time", struct.pack("<d", clock()))
        return ClockOffset(0.0, 0.0)
    rounds = []
    for turn in range(ROUNDS):
        asked = clock()
        store.set(f"{rank}/{turn}/asked", b"")
        (answer,) = struct.unpack("<d", store.get(f"{rank}/{turn}/time"))
        arrived = clock()
        rounds.append((arrived - asked, answer - (asked + arrived) / 2))
        for key in ("asked", "time"):
            store.delete_key(f"{rank}/{turn}/{key}")
    took, offset = min(rounds)
    return ClockOffset(offset, took / 2)
