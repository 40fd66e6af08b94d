"""Replaces all gloo groups of one rank by one: they talk to nobody, and each would have threads that keep waking.

Megatron makes some seventeen groups of one rank for an actor of one rank. Each gloo group has a device (a socket and a
thread that polls it every 10 ms) and two worker threads. A group of one rank never waits for a peer, so groups with the
same timeout can be one. Groups with peers stay separate: when several that share a device connect at the same time,
they can wait for each other for ever (two processes, four threads, a group each, torch 2.13: three of four tries hung).
"""

from datetime import timedelta
from typing import Self

from torch.distributed import ProcessGroupGloo, Store


class Gloo(ProcessGroupGloo):
    """A gloo group that torch makes instead of its own class once registered."""

    def __new__(cls, store: Store, rank: int, size: int, timeout: timedelta, **_flags: bool) -> Self:
        """A new group, or the one of this process alone."""
        if size == 1 and timeout in _ALONE:
            return _ALONE[timeout]
        return super().__new__(cls)

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **flags: bool) -> None:
        """`flags` says whether ranks may change later: an argument that torch passes since 2.14."""
        if size > 1:
            super().__init__(store, rank, size, timeout, **flags)
        elif timeout not in _ALONE:
            options = ProcessGroupGloo._Options()
            options._devices, options._threads = [ProcessGroupGloo.create_device(interface="lo")], 1
            options._timeout = timeout
            super().__init__(store, rank, size, options)
            _ALONE[timeout] = self


_ALONE: dict[timedelta, Gloo] = {}
