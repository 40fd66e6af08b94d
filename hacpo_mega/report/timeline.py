"""One step of all agents as bars on a common axis: from its trace where there is one, else from the phases' seconds.

A trace shows when each rank did what, and for whom it waited. Seconds alone show how long each agent took for a phase,
not when: phases are drawn one after the other, and waits inside a phase are not seen.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hacpo_mega.config.checks.run_dirs import TRACES
from hacpo_mega.logbook.files.json_lines import is_number
from hacpo_mega.models.files.documents import MAX_JSON_BYTES, parse_json, short
from hacpo_mega.report.canvas import FAINT, PAPER, legend
from hacpo_mega.report.colours import PHASE_COLOURS, agent_colour, phase_colour
from hacpo_mega.report.run import Run

MOST_ROWS = 24
ORDER = tuple(PHASE_COLOURS)  # as phases follow each other in a step
THINNEST = 1 / 2000  # of the width: a bar that is thinner would not be seen, and many of them make a heavy page


@dataclass(frozen=True)
class Bar:
    """An activity of a row's rank from `begin_s` on, `length_s` long. A wait lies on the phase that it is part of."""

    phase: str
    begin_s: float
    length_s: float
    is_wait: bool


@dataclass(frozen=True)
class Row:
    """The bars of one rank, or of an agent."""

    agent: str
    name: str
    bars: tuple[Bar, ...]


def draw_timeline(run: Run) -> Figure | None:
    """The newest traced step, or the run's last step by its phases; None where the run has neither."""
    traces = sorted((run.folder / TRACES).glob("step_*.json.gz"))
    title, rows = _traced_step(traces[-1]) if traces else _measured_step(run)
    rows = [row for row in rows if row.agent in run.agents and row.bars]
    if not rows:
        return None
    shown = rows[:: -(-len(rows) // MOST_ROWS)]
    if len(shown) < len(rows):
        title += f"; {len(shown)} of {len(rows)} ranks"
    figure = Figure(figsize=(8.6, 0.9 + 0.34 * len(shown)), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title)
    _draw_rows(axis, run, shown)
    phases = sorted({bar.phase for row in shown for bar in row.bars if not bar.is_wait}, key=_place_in_step)
    legend(figure, [phase.replace("_", " ") for phase in phases], [phase_colour(phase) for phase in phases])
    return figure


def _draw_rows(axis: Axes, run: Run, rows: list[Row]) -> None:
    end = max(bar.begin_s + bar.length_s for row in rows for bar in row.bars)
    for place, row in enumerate(rows):
        seen = [bar for bar in row.bars if bar.length_s >= end * THINNEST]
        for is_wait, height, style in ((False, 0.72, {}), (True, 0.44, {"alpha": 0.78})):
            bars = [bar for bar in seen if bar.is_wait == is_wait]
            spans = [(bar.begin_s, bar.length_s) for bar in bars]
            colours = [PAPER if is_wait else phase_colour(bar.phase) for bar in bars]
            axis.broken_barh(spans, (place - height / 2, height), facecolors=colours, linewidth=0, **style)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows):
        label.set_color(agent_colour(run, row.agent))
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.set_xlim(0, end)
    axis.set_xlabel("seconds since the step began", color=FAINT)


def _traced_step(path: Path) -> tuple[str, list[Row]]:
    """Title and a row per rank. ValueError for a file that is no trace of ours."""
    try:
        with gzip.open(path) as packed:  # it may unpack to a thousand times its size
            table = parse_json(packed.read(MAX_JSON_BYTES))
        events, facts = table["traceEvents"], table["otherData"]
        agents = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        bars: dict[tuple[int, int], list[Bar]] = {}
        for event in events:
            if event["ph"] == "X" and event["cat"] in ("phase", "wait"):
                if not (isinstance(event["name"], str) and is_number(event["ts"]) and is_number(event["dur"])):
                    raise ValueError(f"an event {short(event)}")
                begin, length = event["ts"] / 1e6, event["dur"] / 1e6
                bar = Bar(event["name"], begin, length, event["cat"] == "wait")
                bars.setdefault((event["pid"], event["tid"]), []).append(bar)
        accuracy = max(facts["clock_accuracy_s"].values())
        title = f"step {facts['step']} as traced; clocks known to {accuracy * 1000:.2f} ms"
        rows = [Row(agents[pid], f"{agents[pid]}, rank {tid}", tuple(bars[pid, tid])) for pid, tid in sorted(bars)]
    except (OSError, EOFError, zlib.error, ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of a step ({error}); remove it") from error
    return title, rows


def _measured_step(run: Run) -> tuple[str, list[Row]]:
    """Title and a row per agent, of the mean over its ranks."""
    step = run.num_steps
    rows = []
    for agent in run.agents:
        prefix = f"agent/{agent}/phase_mean/"
        seconds = {
            name.removeprefix(prefix).removesuffix("_s"): value
            for name, value in run.steps[step].timing.items()
            if name.startswith(prefix)
        }
        bars, begin = [], 0.0
        for phase in sorted(seconds, key=_place_in_step):
            bars.append(Bar(phase, begin, seconds[phase], is_wait=False))
            begin += seconds[phase]
        rows.append(Row(agent, agent, tuple(bars)))
    return f"step {step} by the seconds of its phases (logging.trace shows who waits when)", rows


def _place_in_step(phase: str) -> int:
    return ORDER.index(phase) if phase in ORDER else len(ORDER)
