"""The faults that are injected into a run's processes from outside, by signals and resource limits.

    kill-one, kill-all   SIGKILL to one rank, or to all of them at once
    stop                 SIGSTOP to one rank, for good: the job must name it after `stall_s` and end
    pause                SIGSTOP to one rank, and SIGCONT before `stall_s`: the run must go on
    disk                 no rank can write a byte to a file, for a while (RLIMIT_FSIZE: "File too large")
    memory               one rank gets no more memory, for a while (RLIMIT_AS): an exception in whatever phase it is in
    term                 SIGTERM to all ranks, as a scheduler sends it

The trainer has no code for them. Elsewhere: their moments, and the end of the run (campaign.py).
"""

import os
import random
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KINDS = ("kill-one", "kill-all", "stop", "pause", "disk", "memory", "term")
OF_ALL_RANKS = ("kill-all", "disk", "term")
LIMITS = {"disk": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}
LONGEST_PAUSE = 0.5  # share of stall_s; a rank that is silent for longer may be taken for one that hangs


@dataclass(frozen=True)
class Fault:
    """A fault that is planned.

    number     counts over the campaign      kind      one of KINDS
    moment_s   seconds until it strikes      lasts_s   seconds until it is taken back; None: never
    ranks      that it strikes
    """

    number: int
    kind: str
    moment_s: float
    lasts_s: float | None
    ranks: tuple[int, ...]


def draw_fault(
    number: int, seed: int, kinds: Sequence[str], *, world_size: int, window_s: float, step_s: float, stall_s: float
) -> Fault:
    """Fault `number` of the campaign with this seed: any of `kinds`, at any moment of the next `window_s` seconds.

    A fault that is taken back lasts up to three steps, a pause up to half of `stall_s`.
    """
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(list(kinds))
    victim, moment, share = draw.randrange(world_size), draw.random(), draw.random()
    longest_s = {"pause": LONGEST_PAUSE * stall_s, "disk": 3.0 * step_s, "memory": 3.0 * step_s}.get(kind)
    return Fault(
        number,
        kind,
        moment * window_s,
        None if longest_s is None else share * longest_s,
        tuple(range(world_size)) if kind in OF_ALL_RANKS else (victim,),
    )


def strike(fault: Fault, processes: Sequence[int]) -> None:
    """Injects the fault into its ranks; `processes` are all pids, by rank. One that has just ended is left alone."""
    signals = {"kill-one": signal.SIGKILL, "kill-all": signal.SIGKILL, "term": signal.SIGTERM}
    for process in (processes[rank] for rank in fault.ranks):
        with suppress(ProcessLookupError, FileNotFoundError):
            if fault.kind in LIMITS:
                _set_limit(process, fault.kind, 0 if fault.kind == "disk" else _address_space(process))
            else:
                os.kill(process, signals.get(fault.kind, signal.SIGSTOP))


def take_back(fault: Fault, processes: Sequence[int]) -> None:
    """Ends a fault that lasts."""
    for process in (processes[rank] for rank in fault.ranks):
        with suppress(ProcessLookupError):
            if fault.kind in LIMITS:
                _set_limit(process, fault.kind, None)
            else:
                os.kill(process, signal.SIGCONT)


def _set_limit(process: int, kind: str, soft: int | None) -> None:
    """Sets the soft limit of another process; None: as high as it may be."""
    _, hard = resource.prlimit(process, LIMITS[kind])
    resource.prlimit(process, LIMITS[kind], (hard if soft is None else soft, hard))


def _address_space(process: int) -> int:
    """Bytes of address space that a process has now."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
