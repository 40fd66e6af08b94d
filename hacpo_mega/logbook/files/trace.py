"""A step as a Chrome trace: `trace/step_000012.json.gz`, one track per rank, for ui.perfetto.dev or chrome://tracing.

A track shows the phases, inside them the parts of an update and the collectives, and inside a collective its wait: from
this rank's arrival until the arrival of the last rank it needs. That needs one clock: every rank's is measured against
rank 0's at the end of the step, and a wait shorter than the clocks' uncertainty is left out. The file's `otherData`
gives that uncertainty. Elsewhere: the recording and the clocks (cluster/groups/spans.py) and the picture
(report/plots.py).
"""

import gzip
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.cluster.groups.spans import Span
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import Coordinate
from hacpo_mega.config.checks.run_dirs import TRACES
from hacpo_mega.models.files.replacing import replace_file

MICROSECONDS = 1e6


@dataclass(frozen=True)
class Track:
    """One rank's part in a traced step; its spans are in seconds of its own clock, rank 0's is that plus `offset_s`."""

    rank: Coordinate
    offset_s: float
    accuracy_s: float
    spans: tuple[Span, ...]

    def on_shared_clock(self) -> list[Span]:
        """The spans in seconds of rank 0's clock."""
        return [
            span._replace(begin_s=span.begin_s + self.offset_s, end_s=span.end_s + self.offset_s) for span in self.spans
        ]


class StepTrace:
    """Records the chosen steps on every rank; the job's rank 0 writes them, and reports a failure through `say`."""

    def __init__(
        self,
        steps: Collection[int],
        place: Place,
        run_dir: Path,
        say: Callable[[str], None],
        misplaced: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`steps` are recorded; `misplaced` gives the reason why `run_dir` is not the run's folder, None if it is."""
        self._steps = frozenset(steps)
        self._place, self._run_dir, self._say, self._misplaced = place, run_dir, say, misplaced

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Records its body and writes the trace, if this step was chosen. Collective over the job then."""
        if step not in self._steps:
            yield
            return
        self._place.spans.start()
        yield
        self._place.enter_phase("trace", f"of step {step}")
        self._finish(step)

    def _finish(self, step: int) -> None:
        spans, clock = self._place.spans.stop(), self._place.clock_offset()
        payloads = self._place.gather_to_first(json.dumps([*clock, spans]).encode())
        if self._place.coordinate.global_rank == 0:
            tracks = []
            for rank, (offset_s, accuracy_s, rank_spans) in enumerate(map(json.loads, payloads)):
                place = self._place.rank_map.coordinate(rank)
                tracks.append(Track(place, offset_s, accuracy_s, tuple(Span(*span) for span in rank_spans)))
            table = chrome_trace(step, tracks)
            if problem := self._misplaced() or write_trace(self._run_dir, step, table):
                self._say(f"{problem}; training goes on")


def write_trace(run_dir: Path, step: int, table: dict[str, Any]) -> str | None:
    """Writes a trace atomically; returns the error if it could not."""
    path = run_dir / TRACES / f"step_{step:06d}.json.gz"
    content = gzip.compress(json.dumps(table).encode(), mtime=0)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        free = shutil.disk_usage(run_dir).free
        return (
            f"step {step} leaves no trace ({error.strerror}): {path} needs {len(content):,} bytes, the file system has "
            f"{free:,} free; make room there, or name fewer steps in logging.trace_steps"
        )
    return None


def chrome_trace(step: int, tracks: Sequence[Track]) -> dict[str, Any]:
    """The trace of a step in Chrome's format: pid an agent, tid a rank, times in microseconds since the first span."""
    spans = {track.rank.global_rank: track.on_shared_clock() for track in tracks}
    begin = min((span.begin_s for rank_spans in spans.values() for span in rank_spans), default=0.0)
    waits = find_waits(tracks)
    events = list(_names(tracks))
    for place in (track.rank for track in tracks):
        rank = place.global_rank
        for span in sorted(spans[rank] + waits[rank], key=lambda span: (span.begin_s, -span.end_s)):
            event = {"pid": place.agent, "tid": rank, "ph": "X", "name": span.name, "cat": span.kind}
            times = {
                "ts": round((span.begin_s - begin) * MICROSECONDS, 1),
                "dur": round((span.end_s - span.begin_s) * MICROSECONDS, 1),
            }
            events.append(event | times | ({"args": {"group": span.group}} if span.group else {}))
    accuracy = {f"rank {track.rank.global_rank}": track.accuracy_s for track in tracks}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "clock_accuracy_s": accuracy},
    }


def _names(tracks: Sequence[Track]) -> Iterator[dict[str, Any]]:
    for agent, name in sorted({(track.rank.agent, track.rank.agent_name) for track in tracks}):
        yield {"ph": "M", "pid": agent, "name": "process_name", "args": {"name": name}}
    for place in (track.rank for track in tracks):
        name = f"rank {place.global_rank} lane {place.lane} cell {place.cell}{'' if place.trains else ', answers'}"
        yield {"ph": "M", "pid": place.agent, "tid": place.global_rank, "name": "thread_name", "args": {"name": name}}


def find_waits(tracks: Sequence[Track]) -> dict[int, list[Span]]:
    """Per rank the waits inside its collectives, on rank 0's clock."""
    accuracy = {track.rank.global_rank: track.accuracy_s for track in tracks}
    collectives: dict[tuple[str, int], dict[int, Span]] = {}
    for track in tracks:
        for span in track.on_shared_clock():
            if span.kind == "collective":
                collectives.setdefault((span.group, span.turn), {})[track.rank.global_rank] = span
    waits: dict[int, list[Span]] = {track.rank.global_rank: [] for track in tracks}
    for members in collectives.values():
        for rank, span in members.items():
            other = _last_needed(members, rank)
            end = min(members[other].begin_s, span.end_s)
            if end - span.begin_s > accuracy[rank] + accuracy[other]:
                waits[rank].append(Span(f"waits for rank {other}", "wait", span.begin_s, end, span.group, span.turn))
    return waits


def _last_needed(members: dict[int, Span], rank: int) -> int:
    """The member that `rank` waits for: the last, or the sender (the first member) or receiver alone."""
    first = min(members)
    last = max(members, key=lambda member: members[member].begin_s)
    one_way = {"broadcast": first, "gather": last if rank == first else rank}
    return one_way.get(members[rank].name, last)
