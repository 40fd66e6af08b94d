"""The charts of the catalogue as figures of a run; a chart is left out where the run lacks its numbers.

One colour per agent on every figure. Charts with one curve per agent are small panels that share a figure with their
neighbours; each other chart has its own figure. The timeline is one step of all agents as bars on a common axis. A
trace shows when each rank did what, and for whom it waited. Without a trace only the seconds of phases are known, not
when they began: they are drawn one after the other. Elsewhere: the style (canvas.py).
"""

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from hacpo_mega.config.checks.run_dirs import TRACES
from hacpo_mega.logbook.console import in_step_order
from hacpo_mega.logbook.files.json_lines import is_number
from hacpo_mega.logbook.steps.sharing import Fates
from hacpo_mega.models.files.documents import MAX_JSON_BYTES, parse_json, short
from hacpo_mega.report.canvas import (
    FAINT,
    INK,
    PAPER,
    as_number,
    as_share,
    counts_below,
    dots,
    entitle,
    label_ends,
    legend,
    line,
    panels,
    range_text,
    report_style,
    smooth,
    stack,
    to_inline_svg,
    to_png,
)
from hacpo_mega.report.catalogue import (
    BAND_COLOURS,
    FATE_COLOURS,
    FATE_NAMES,
    PHASE_COLOURS,
    SECTIONS,
    ChartSection,
    ChartSpec,
    agent_colour,
    phase_colour,
)
from hacpo_mega.report.run import Run, Series, accuracies, measure_of, phase_series
from hacpo_mega.report.verdicts import verdicts

MOST_ROWS = 24  # of a timeline
ORDER = tuple(PHASE_COLOURS)  # as phases follow each other in a step
THINNEST = 1 / 2000  # of the width: thinner bars are left out, since they cannot be seen and make a heavy page
AGENT_OFFSET = 1 / 120  # of the axis, between the points of two agents at a step: no interval hides another
FEW_ANSWERS = 8  # bars of fewer answers are pale


def draw_held_out(run: Run, spec: ChartSpec) -> Figure | None:
    """Held-out accuracy, or mean reward, with its 95 % interval; None for the one that the run did not measure."""
    curves = {agent: evaluated for agent in run.agents if (evaluated := accuracies(run, agent))}
    measure = measure_of(point for evaluated in curves.values() for point in evaluated)
    if not curves or measure.replace(" ", "_") != spec.id:
        return None
    figure, (axis,) = panels(1, 1, 3.4, steps=run.span)
    ends = []
    for index, (agent, evaluated) in enumerate(curves.items()):
        series = Series(tuple(point.step for point in evaluated), tuple(point.value for point in evaluated))
        colour = agent_colour(run, agent)
        offset = (index - (len(curves) - 1) / 2) * AGENT_OFFSET * (run.num_steps + 1)
        dots(axis, series, [point.interval for point in evaluated], colour, offset)
        ends.append((series, f"{agent} {series.values[-1]:.3f}", colour))
    axis.set_ylabel(f"{measure} on held-out prompts")
    label_ends(axis, ends)
    return figure


def draw_reward(run: Run, spec: ChartSpec) -> Figure | None:
    """Mean reward of the answers that an agent gave in a step, raw and smoothed."""
    curves = {agent: series for agent in run.agents if (series := run.series(f"agent/{agent}/reward_mean"))}
    if not curves:
        return None
    figure, (axis,) = panels(1, 1, 3.0, steps=run.span)
    ends, num_judged = [], []
    for agent, series in curves.items():
        colour = agent_colour(run, agent)
        trend = smooth(series)
        line(axis, series, colour, alpha=0.3, linewidth=1)
        line(axis, trend, colour)
        ends.append((trend, agent, colour))
        num_judged += _num_judged(run, agent)
    axis.set_ylabel(f"mean reward of own answers{f', {range_text(num_judged)} a step' if num_judged else ''}")
    label_ends(axis, ends)
    return figure


def _num_judged(run: Run, agent: str) -> list[float]:
    """Number of an agent's answers behind each step's mean reward."""
    num_unjudged = run.series(f"agent/{agent}/num_unjudged").by_step
    num_answers = run.series(f"agent/{agent}/num_answers").by_step
    return [number - num_unjudged.get(step, 0.0) for step, number in num_answers.items()]


def draw_by_learner(run: Run, spec: ChartSpec) -> Figure | None:
    """A panel per learner, a curve per source in its colour, and below the curves the number of answers behind them."""
    pattern = spec.patterns[0]
    curves = {(k, j): series for k, j in run.pairs if (series := run.series(pattern.format(a=k, b=j)))}
    learners = [agent for agent in run.agents if any(learner == agent for learner, _ in curves)]
    if not learners:
        return None
    figure, axes = panels(len(learners), 3 if len(learners) != 4 else 2, 2.7, steps=run.span)
    counts = []
    for learner, axis in zip(learners, axes):
        entitle(axis, f"{learner} learns from")
        if spec.level is not None:
            axis.axhline(spec.level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        counts.append([])
        for source in (j for j in run.agents if (learner, j) in curves):
            series, colour = curves[learner, source], agent_colour(run, source)
            line(axis, series, colour, alpha=0.95)
            counts[-1].append((_num_trained(run, learner, source, series.steps), colour))
    if spec.share:
        as_share(axes[0], room=0.02)
    if "/from/" in pattern:  # other metrics of a pair are not means over answers
        counts_below(axes, counts)
        for learner, axis, of_panel in zip(learners, axes, counts):
            entitle(axis, f"{learner} learns from{_answers_line(of_panel)}")
    for learner, axis in zip(learners, axes):  # last, when the shared y limits are known
        ends = [(series, source, agent_colour(run, source)) for (k, source), series in curves.items() if k == learner]
        label_ends(axis, ends)
    axes[0].set_ylabel(spec.title.lower())
    delta = run.setting("algorithm", "delta")
    if spec.id == "ratio" and isinstance(delta, float):  # the band of a step's first update
        for axis in axes:
            axis.axhspan(1 - delta, 1.0, color=BAND_COLOURS["inside"], alpha=0.12, linewidth=0)
    return figure


def _num_trained(run: Run, learner: str, source: str, steps: Sequence[int]) -> dict[int, float]:
    """Number of a source's answers that trained the learner, by step, for those of the `steps` that have counts."""
    by_step, shown = run.series(f"agent/{learner}/from/{source}/view/num_trained").by_step, set(steps)
    return {step: number for step, number in by_step.items() if step in shown}


def _answers_line(counts: list[tuple[dict[int, float], str]]) -> str:
    """A title's second line: how many answers are behind the points of a panel; empty where the run has no counts."""
    numbers = [number for by_step, _ in counts for number in by_step.values()]
    return f"\n{range_text(numbers)} answer{'s' if max(numbers) > 1 else ''} a step" if numbers else ""


def draw_bands(run: Run, spec: ChartSpec) -> Figure | None:
    """Shares of cross answers below, inside and above the band, stacked to one, and the number of these answers."""
    shares = {(k, j): [run.series(f"agent/{k}/from/{j}/{side}") for side in spec.parts] for k, j in run.pairs}
    shares = {pair: sides for pair, sides in shares.items() if all(sides) and len({s.steps for s in sides}) == 1}
    if not shares:
        return None
    figure, axes = _pair_panels(run, len(shares))
    counts = []
    for ((learner, source), sides), axis in zip(shares.items(), axes):
        num_trained = _num_trained(run, learner, source, sides[0].steps)
        counts.append([(num_trained, FAINT)])
        entitle(axis, f"{learner} from {source}{_answers_line(counts[-1])}")
        enough = [step for step in sides[0].steps if num_trained.get(step, FEW_ANSWERS) >= FEW_ANSWERS]
        few = [step for step in sides[0].steps if num_trained.get(step, FEW_ANSWERS) < FEW_ANSWERS]
        tables = [side.by_step for side in sides]
        for steps, alpha in ((enough, 1.0), (few, 0.35)):
            layers = [[table[step] for step in steps] for table in tables]
            stack(axis, steps, layers, list(BAND_COLOURS.values()), alpha)
    as_share(axes[0])
    counts_below(axes, counts)
    axes[0].set_ylabel("share of cross answers")
    legend(figure, list(BAND_COLOURS), list(BAND_COLOURS.values()))
    return figure


def _pair_panels(run: Run, num: int) -> tuple[Figure, list[Axes]]:
    return panels(num, 4 if num > 6 else 3 if num > 2 else 2, 2.3, steps=run.span)


def draw_fates(run: Run, spec: ChartSpec) -> Figure | None:
    """Numbers of others' answers by their fate on the way to a learner, stacked; a panel per pair."""
    tables = {pair: fates for pair in run.pairs if (fates := run.fates(*pair))}
    if not tables:
        return None
    counts = [_count_by_fate(fates) for table in tables.values() for fates in table.values()]
    order = [fate for fate in FATE_COLOURS if any(count.get(fate) for count in counts)]
    figure, axes = _pair_panels(run, len(tables))
    for ((learner, source), table), axis in zip(tables.items(), axes):
        total = Fates.total(table.values())
        share = "" if total.share is None else f": {total.share:.0%} teach"
        entitle(axis, f"{learner} from {source}{share}")
        layers = [[_count_by_fate(fates).get(fate, 0) for fates in table.values()] for fate in order]
        stack(axis, list(table), layers, [FATE_COLOURS[fate] for fate in order])
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("answers of a step")
    legend(figure, [FATE_NAMES[fate] for fate in order], [FATE_COLOURS[fate] for fate in order])
    return figure


def _count_by_fate(fates: Fates) -> dict[str, int]:
    """Numbers of answers by the names of FATE_COLOURS."""
    return {"reached": fates.reached, **fates.lost}


def draw_phases(run: Run, spec: ChartSpec) -> Figure | None:
    """Seconds per training step, stacked by phase, a panel per agent. Loading belongs to no step and is left out."""
    tables = {}
    for agent in run.agents:
        by_step = {
            phase: {step: s for step, s in seconds.items() if step}
            for phase, seconds in phase_series(run, agent, spec.phases).items()
        }
        if phases := {phase: seconds for phase, seconds in by_step.items() if seconds and phase != "load"}:
            tables[agent] = phases
    if not tables:
        return None
    order = in_step_order({phase for phases in tables.values() for phase in phases})
    colours = [phase_colour(phase) for phase in order]
    figure, axes = panels(len(tables), 3 if len(tables) == 3 else 2, 2.6, steps=run.span)
    for (agent, phases), axis in zip(tables.items(), axes):
        steps = sorted({step for by_step in phases.values() for step in by_step})
        entitle(axis, agent, color=agent_colour(run, agent), fontweight="bold")
        stack(axis, steps, [[phases.get(phase, {}).get(s, 0.0) for s in steps] for phase in order], colours)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("seconds per step")
    legend(figure, [phase.replace("_", " ") for phase in order], colours)
    return figure


@dataclass(frozen=True)
class Bar:
    """A phase of a row's rank, or a wait inside a phase: from `begin_s` on, `length_s` long."""

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
    phases = sorted({bar.phase for row in shown for bar in row.bars if not bar.is_wait}, key=_phase_index)
    legend(figure, [phase.replace("_", " ") for phase in phases], [phase_colour(phase) for phase in phases])
    return figure


def _draw_rows(axis: Axes, run: Run, rows: list[Row]) -> None:
    end = max(bar.begin_s + bar.length_s for row in rows for bar in row.bars)
    for number, row in enumerate(rows):
        visible = [bar for bar in row.bars if bar.length_s >= end * THINNEST]
        # A wait is a lower, pale bar on the bar of its phase.
        for is_wait, height, style in ((False, 0.72, {}), (True, 0.44, {"alpha": 0.78})):
            bars = [bar for bar in visible if bar.is_wait == is_wait]
            spans = [(bar.begin_s, bar.length_s) for bar in bars]
            colours = [PAPER if is_wait else phase_colour(bar.phase) for bar in bars]
            axis.broken_barh(spans, (number - height / 2, height), facecolors=colours, linewidth=0, **style)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows):
        label.set_color(agent_colour(run, row.agent))
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.set_xlim(0, end)
    axis.set_xlabel("seconds since the step began", color=FAINT)


def _traced_step(path: Path) -> tuple[str, list[Row]]:
    """Title and a row per rank. ValueError for a file that is not the trace of a step."""
    try:
        with gzip.open(path) as packed:  # read up to a limit: it may unpack to a thousand times its size
            table = parse_json(packed.read(MAX_JSON_BYTES))
        events, facts = table["traceEvents"], table["otherData"]
        agents = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        bars: dict[tuple[int, int], list[Bar]] = {}
        for event in events:
            if event["ph"] == "X" and event["cat"] in ("phase", "wait"):
                if not (isinstance(event["name"], str) and is_number(event["ts"]) and is_number(event["dur"])):
                    raise ValueError(f"an event {short(event)}")
                bar = Bar(event["name"], event["ts"] / 1e6, event["dur"] / 1e6, is_wait=event["cat"] == "wait")
                bars.setdefault((event["pid"], event["tid"]), []).append(bar)
        accuracy = max(facts["clock_accuracy_s"].values())
        title = f"step {facts['step']} as traced; clocks known to {accuracy * 1000:.2f} ms"
        rows = [Row(agents[pid], f"{agents[pid]}, rank {tid}", tuple(bars[pid, tid])) for pid, tid in sorted(bars)]
    except (OSError, EOFError, zlib.error, ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of a step ({error}); remove it") from error
    return title, rows


def _measured_step(run: Run) -> tuple[str, list[Row]]:
    """Title and a row per agent: the phases of the last step, mean over the agent's ranks."""
    step = run.num_steps
    rows = []
    for agent in run.agents:
        phases = phase_series(run, agent, "phase_mean")
        bars, begin = [], 0.0
        for phase in sorted((phase for phase in phases if step in phases[phase]), key=_phase_index):
            bars.append(Bar(phase, begin, phases[phase][step], is_wait=False))
            begin += phases[phase][step]
        rows.append(Row(agent, agent, tuple(bars)))
    return f"step {step} by the seconds of its phases (logging.trace shows who waits when)", rows


def _phase_index(phase: str) -> int:
    return ORDER.index(phase) if phase in ORDER else len(ORDER)


def draw_panels(run: Run, specs: Sequence[ChartSpec]) -> Figure | None:
    """A small panel per chart, with a curve per agent or one of the whole job."""
    charts = [(spec, curves) for spec in specs if (curves := _curves(run, spec))]
    if not charts:
        return None
    figure, axes = panels(len(charts), 2, 2.2, share_y=False, steps=run.span)
    for (spec, curves), axis in zip(charts, axes):
        axis.set_title(f"{spec.title} ({spec.unit})" if spec.unit not in ("", "bytes") else spec.title)
        drawn: set[str] = set()
        for _, series, colour in curves:
            line(axis, series, colour, alpha=0.45 if colour in drawn else 0.9)  # an agent's further curves are paler
            drawn.add(colour)
        if spec.unit == "bytes":
            axis.yaxis.set_major_formatter(EngFormatter("B"))
        if spec.share:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        if spec.unit not in ("", "bytes", "s"):
            axis.yaxis.set_major_formatter(as_number)
        if spec.id != "length":
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # else rounding of a constant fills the panel
        label_ends(axis, [(series, name, colour) for name, series, colour in curves])
    return figure


def _curves(run: Run, spec: ChartSpec) -> list[tuple[str, Series, str]]:
    """Name, numbers and colour of a panel's curves: those of its patterns without {b}."""
    by_quantity: dict[str, list[tuple[str, Series, str]]] = {}
    patterns = [pattern for pattern in spec.patterns if "{b}" not in pattern]
    quantities = {pattern: pattern.rpartition("/")[2].removesuffix("_bytes").replace("_", " ") for pattern in patterns}
    for pattern, quantity in quantities.items():
        if list(quantities.values()).count(quantity) > 1:  # of all answers, and of an agent's own only
            quantity = "own" if "/self/" in pattern else ""
        if "{a}" in pattern:
            named = [(agent, run.series(pattern.format(a=agent)), agent_colour(run, agent)) for agent in run.agents]
        else:
            named = [("", run.series(pattern), INK)]
        if curves := [curve for curve in named if curve[1]]:
            by_quantity[quantity] = by_quantity.get(quantity, []) + curves
    return [
        (f"{name} {quantity}".strip() if len(by_quantity) > 1 else name, series, colour)
        for quantity, curves in by_quantity.items()
        for name, series, colour in curves
    ]


@dataclass(frozen=True)
class Picture:
    """A figure of the report. `stem` names its PNG file, `note` explains it; the SVG is for the page.

    verdicts   (level, text) of those about its charts
    """

    stem: str
    title: str
    note: str
    png: bytes
    svg: str
    verdicts: tuple[tuple[str, str], ...] = ()


DRAWINGS: dict[str, Callable[[Run, ChartSpec], Figure | None]] = {
    "accuracy": draw_held_out,
    "mean_reward": draw_held_out,
    "reward": draw_reward,
    "fates": draw_fates,
    "bands": draw_bands,
    "phases": draw_phases,
    "wait": draw_phases,
}
NOTES = {  # further notes, on details that only these figures have
    "reward": "Thin as measured, thick smoothed.",
    "bands": "Grey bars: how many there are; pale: fewer than 8.",
    "ratio": "The shade is the band of the first update.",
}


def draw(run: Run, *specs: ChartSpec) -> Figure | None:
    """The figure of one chart, or of small ones that share a figure."""
    if drawing := DRAWINGS.get(specs[0].id):
        return drawing(run, specs[0])
    return draw_panels(run, specs) if _is_small(specs[0]) else draw_by_learner(run, specs[0])


def _is_small(spec: ChartSpec) -> bool:
    return spec.id not in DRAWINGS and "{b}" not in spec.patterns[0]


def figures_of(section: ChartSection) -> Iterator[tuple[ChartSpec, ...]]:
    """The charts of each figure of a section: neighbours that are small share one."""
    for is_small, charts in groupby(section.charts, _is_small):
        together = tuple(charts)
        yield from [together] if is_small else ((spec,) for spec in together)


def draw_pictures(run: Run) -> list[Picture]:
    """Every chart that this run has numbers for, in the order of the catalogue, and the timeline of a step."""
    pictures, every = [], verdicts(run)
    with report_style():
        for section in SECTIONS:
            for specs in figures_of(section):
                if (figure := draw(run, *specs)) is not None:
                    named, note = (specs[0], specs[0].note) if len(specs) == 1 else (section, "")
                    about = [verdict for verdict in every if any(verdict["chart"] == spec.id for spec in specs)]
                    pictures.append(_picture(figure, named.id, named.title, note, about))
        if (figure := draw_timeline(run)) is not None:
            note = "Bars are phases; pale inside one, the rank waits."
            pictures.append(_picture(figure, "timeline", "One step of all agents", note))
    return pictures


def _picture(figure: Figure, stem: str, title: str, note: str, about: Sequence[Mapping[str, str]] = ()) -> Picture:
    notes = " ".join(filter(None, (note, NOTES.get(stem))))
    pairs = tuple((verdict["level"], verdict["text"]) for verdict in about)
    return Picture(stem, title, notes, to_png(figure), to_inline_svg(figure, stem), pairs)
