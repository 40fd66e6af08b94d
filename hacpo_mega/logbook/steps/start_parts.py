"""Seconds of a start by part: printed once, and written with the metrics of the first step.

    imports   from the command to here: interpreter, configuration, libraries     groups   this rank's place in the job
    data      tokenizers, prompts, judge                   actor, engine, weights   Megatron, vLLM, its first weights
Elsewhere: what a step's seconds went into (metrics.py), and a step on the clock of all ranks (trace.py).
"""

import time

from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.cluster.machine.environment import used_since_begin
from hacpo_mega.logbook.files.metrics import Metrics

PARTS = ("imports", "groups", "data", "actor", "engine", "weights")


class StartParts:
    """The parts of this rank's start, the last ones as spans of those names."""

    def __init__(self) -> None:
        """Made when this rank has imported what it needs, before it builds anything."""
        self._now = time.perf_counter()
        self._seconds = {"imports": used_since_begin().clock_s}

    def joined(self, spans: Spans) -> None:
        """Notes that the rank has its place in the job; from here on its `spans` are recorded."""
        self._seconds["groups"] = time.perf_counter() - self._now
        spans.start()

    def finish(self, spans: Spans, metrics: Metrics) -> str:
        """Writes the slowest rank's parts to `metrics` when the rank is ready; a line with this rank's own."""
        for span in spans.stop():
            if span.name in PARTS:
                self._seconds[span.name] = self._seconds.get(span.name, 0.0) + span.end_s - span.begin_s
        for part, seconds in self._seconds.items():
            metrics.highest(f"start/{part}_s", seconds)
        used = used_since_begin()
        metrics.highest("start/processor_s", used.processor_s)
        parts = ", ".join(f"{part} {self._seconds[part]:.1f}" for part in PARTS if part in self._seconds)
        return f"start: {parts} of {used.clock_s:.1f} s; {used.processor_s:.1f} processor s"
