"""Offset of this process's clock to that of the job's rank 0, measured through the job's store.

Cristian's method: a rank asks rank 0 what time it is, and knows that the answer was written between question and
arrival. The middle of the fastest round is the estimate, and half of that round bounds its error, whatever the way to
and fro took. Rank 0 answers one rank after the other: rounds x ranks small messages.
"""

import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

ROUNDS = 8  # the fastest counts; the first one also waits until rank 0 serves this rank


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
