"""Liveness of a process's main thread, which a thread beside it cannot show.

A process with a stuck main thread (an endless loop, or a wait before a collective) still runs, and its heartbeat is
heard. So phases of many small steps report every step (an engine's step, a micro-batch, a tensor). A process that has
reported none for `stall_s` seconds and waits for nobody is the one that hangs. Not here: processes that are stopped or
dead, and how a job ends (watchdog.py).
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The others may be long (load, checkpoint, export) or have limits of their own (judge, and evaluate, which judges).
MUST_PROGRESS = ("roll_out", "exchange", "score", "learn", "diagnose", "publish")
# Factor on stall_s for a process inside a collective of its agent: one that has not entered it is named at 1.
WAITING_GRACE = 1.3
INNERMOST_CALLS = 4
COLLECTIVE_FOLDERS = {"distributed", "tensor_parallel", "pipeline_parallel"}  # of torch, vLLM and Megatron


class Progress:
    """Activity of the main thread. `waits_for` names those it waits for in a collective of the job, None outside
    one."""

    def __init__(self) -> None:
        self.waits_for: str | None = None
        self._must_progress = False
        self._num_idle_beats = 0

    def enter(self, phase: str) -> None:
        """A phase begins; its name alone decides whether it must tell its steps."""
        self._must_progress = phase in MUST_PROGRESS
        self._num_idle_beats = 0

    def tick(self) -> None:
        """Reports progress of the phase."""
        self._num_idle_beats = 0

    @contextmanager
    def waiting_for(self, whom: str) -> Iterator[None]:
        """Around a collective of the job: a process that waits for others does not hang, however long they need."""
        self.waits_for = whom
        yield
        self.waits_for = None
        self._num_idle_beats = 0

    def beat(self, beat_s: float, stall_s: float) -> str | None:
        """Counts a heartbeat, every `beat_s` seconds; returns where the main thread is stuck after `stall_s`, else
        None.

        Counted in beats, not by the clock: a process that was stopped has not stood still.
        """
        self._num_idle_beats += 1
        if self.waits_for is not None or not self._must_progress:
            return None
        collective = _collective_of_main_thread()
        idle_s = self._num_idle_beats * beat_s
        if idle_s < stall_s * (1.0 if collective is None else WAITING_GRACE):
            return None
        where = "is in no collective" if collective is None else f"is inside {collective}"
        return f"has made no progress for {idle_s:.0f} s and {where}"


def _collective_of_main_thread() -> str | None:
    """The collective that the main thread is in, as far as its innermost calls show it; None outside."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    for _ in range(INNERMOST_CALLS):
        if frame is None:
            return None
        file = Path(frame.f_code.co_filename)
        if COLLECTIVE_FOLDERS & set(file.parts):
            return f"{frame.f_code.co_name} ({file.name}, line {frame.f_lineno})"
        frame = frame.f_back
    return None
