"""The charts of the catalogue as figures of a run; nothing where the run lacks their numbers.

One colour per agent on every figure. A chart of agents alone is a small panel among its neighbours; others have a
figure each. canvas.py has their looks. The timeline is one step of all agents as bars on a common axis: a trace
shows when each rank did what, and for whom it waited. Seconds of phases alone show how long each agent took, not when:
they are drawn one after the other.
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
    dressed,
    entitle,
    label_ends,
    legend,
    line,
    panels,
    smooth,
    span_of,
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

MOST_ROWS = 24
ORDER = tuple(PHASE_COLOURS)  # as phases follow each other in a step
THINNEST = 1 / 2000  # of the width: a bar that is thinner would not be seen, and many of them make a heavy page
BESIDE = 1 / 120  # of the axis: between the points of two agents at a step, so that no interval hides another
FEW = 8  # answers: points of fewer are pale


def draw_held_out(run: Run, spec: ChartSpec) -> Figure | None:
    """Held-out accuracy, or mean reward, with its 95 % interval: the chart of the other measure is none."""
    curves = {agent: found for agent in run.agents if (found := accuracies(run, agent))}
    measure = measure_of(point for found in curves.values() for point in found)
    if not curves or measure.replace(" ", "_") != spec.id:
        return None
    figure, (axis,) = panels(1, 1, 3.4, steps=run.span)
    ends = []
    for place, (agent, found) in enumerate(curves.items()):
        series = Series(tuple(point.step for point in found), tuple(point.value for point in found))
        colour = agent_colour(run, agent)
        aside = (place - (len(curves) - 1) / 2) * BESIDE * (run.num_steps + 1)
        dots(axis, series, [point.interval for point in found], colour, aside)
        ends.append((series, f"{agent} {series.values[-1]:.3f}", colour))
    axis.set_ylabel(f"{measure} on held-out prompts")
    label_ends(axis, ends)
    return figure


def draw_reward(run: Run, spec: ChartSpec) -> Figure | None:
    """Mean reward of the answers that an agent gave in a step, raw and smoothed."""
    curves = {agent: found for agent in run.agents if (found := run.series(f"agent/{agent}/reward_mean"))}
    if not curves:
        return None
    figure, (axis,) = panels(1, 1, 3.0, steps=run.span)
    ends, judged = [], []
    for agent, series in curves.items():
        colour = agent_colour(run, agent)
        trend = smooth(series)
        line(axis, series, colour, alpha=0.3, linewidth=1)
        line(axis, trend, colour)
        ends.append((trend, agent, colour))
        judged += _judged(run, agent)
    axis.set_ylabel(f"mean reward of own answers{f', {span_of(judged)} a step' if judged else ''}")
    label_ends(axis, ends)
    return figure


def _judged(run: Run, agent: str) -> list[float]:
    """Number of an agent's answers behind a step's mean reward."""
    unjudged = dict(zip(*vars(run.series(f"agent/{agent}/num_unjudged")).values()))
    answers = run.series(f"agent/{agent}/num_answers")
    return [number - unjudged.get(step, 0.0) for step, number in zip(answers.steps, answers.values)]


def draw_by_learner(run: Run, spec: ChartSpec) -> Figure | None:
    """A panel per learner, a curve per source in the source's colour, and below it the answers that it is over."""
    pattern = spec.patterns[0]
    curves = {(k, j): found for k, j in run.pairs if (found := run.series(pattern.format(a=k, b=j)))}
    learners = [agent for agent in run.agents if any(learner == agent for learner, _ in curves)]
    if not learners:
        return None
    figure, axes = panels(len(learners), 3 if len(learners) != 4 else 2, 2.7, steps=run.span)
    counts = []
    for learner, axis in zip(learners, axes):
        entitle(axis, f"{learner} learns from")
        if spec.level is not None:
            axis.axhline(spec.level, color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        of_learner = {source: series for (who, source), series in curves.items() if who == learner}
        for source, series in of_learner.items():
            line(axis, series, agent_colour(run, source), alpha=0.95)
        counts.append(
            [(_trained(run, learner, source, of_learner), agent_colour(run, source)) for source in of_learner]
        )
    if spec.share:
        as_share(axes[0], room=0.02)
    if "/from/" in pattern:  # else it is of no answer alone
        counts_below(axes, counts)
        for learner, axis, of_panel in zip(learners, axes, counts):
            entitle(axis, f"{learner} learns from{_answers(of_panel)}")
    for learner, axis in zip(learners, axes):  # when the shared y limits are known
        ends = [(s, source, agent_colour(run, source)) for (who, source), s in curves.items() if who == learner]
        label_ends(axis, ends)
    axes[0].set_ylabel(spec.title.lower())
    delta = run.setting("algorithm", "delta")
    if spec.id == "ratio" and isinstance(delta, float):  # the band of a step's first update
        for axis in axes:
            axis.axhspan(1 - delta, 1.0, color=BAND_COLOURS["inside"], alpha=0.12, linewidth=0)
    return figure


def _trained(run: Run, learner: str, source: str, curves: dict[str, Series]) -> dict[int, float]:
    """Number of a source's answers behind the points of its curve, by step."""
    numbers, shown = run.series(f"agent/{learner}/from/{source}/view/num_trained"), set(curves[source].steps)
    return {step: n for step, n in zip(numbers.steps, numbers.values) if step in shown}


def _answers(counts: list[tuple[dict[int, float], str]]) -> str:
    """Draws the number of answers behind the points of a panel, below its title; nothing if nobody counted them."""
    numbers = [n for by_step, _ in counts for n in by_step.values()]
    return f"\n{span_of(numbers)} answer{'s' if max(numbers) > 1 else ''} a step" if numbers else ""


def draw_bands(run: Run, spec: ChartSpec) -> Figure | None:
    """Draws the position of cross answers, below, inside or above the band, stacked to one, and their number."""
    shares = {(k, j): [run.series(f"agent/{k}/from/{j}/{side}") for side in spec.parts] for k, j in run.pairs}
    shares = {pair: sides for pair, sides in shares.items() if all(sides) and len({s.steps for s in sides}) == 1}
    if not shares:
        return None
    figure, axes = _pair_panels(run, len(shares))
    counts = []
    for ((learner, source), sides), axis in zip(shares.items(), axes):
        counts.append([(_trained(run, learner, source, {source: sides[0]}), FAINT)])
        entitle(axis, f"{learner} from {source}{_answers(counts[-1])}")
        table = dict(zip(sides[0].steps, zip(*(side.values for side in sides))))
        few = dict.fromkeys(step for step in table if counts[-1][0][0].get(step, FEW) < FEW)
        for steps, alpha in (([step for step in table if step not in few], 1.0), (list(few), 0.35)):
            layers = [[table[step][n] for step in steps] for n in range(len(sides))]
            stack(axis, steps, layers, list(BAND_COLOURS.values()), alpha)
    as_share(axes[0])
    counts_below(axes, counts)
    axes[0].set_ylabel("share of cross answers")
    legend(figure, list(BAND_COLOURS), list(BAND_COLOURS.values()))
    return figure


def _pair_panels(run: Run, num: int) -> tuple[Figure, list[Axes]]:
    return panels(num, 4 if num > 6 else 3 if num > 2 else 2, 2.3, steps=run.span)


def draw_fates(run: Run, spec: ChartSpec) -> Figure | None:
    """Draws the fate of others' answers on their way to a learner, counted; a panel per pair."""
    tables = {pair: found for pair in run.pairs if (found := run.fates(*pair))}
    if not tables:
        return None
    seen = {fate for table in tables.values() for fates in table.values() for fate, n in counted(fates).items() if n}
    order = [fate for fate in FATE_COLOURS if fate in seen]
    figure, axes = _pair_panels(run, len(tables))
    for ((learner, source), table), axis in zip(tables.items(), axes):
        whole = Fates.total(table.values())
        share = "" if whole.share is None else f": {whole.share:.0%} teach"
        entitle(axis, f"{learner} from {source}{share}")
        layers = [[counted(fates).get(fate, 0) for fates in table.values()] for fate in order]
        stack(axis, list(table), layers, [FATE_COLOURS[fate] for fate in order])
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("answers of a step")
    legend(figure, [FATE_NAMES[fate] for fate in order], [FATE_COLOURS[fate] for fate in order])
    return figure


def counted(fates: Fates) -> dict[str, int]:
    """Answers by the names of FATE_COLOURS."""
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
        phases = phase_series(run, agent, "phase_mean")
        bars, begin = [], 0.0
        for phase in sorted((phase for phase in phases if step in phases[phase]), key=_place_in_step):
            bars.append(Bar(phase, begin, phases[phase][step], is_wait=False))
            begin += phases[phase][step]
        rows.append(Row(agent, agent, tuple(bars)))
    return f"step {step} by the seconds of its phases (logging.trace shows who waits when)", rows


def _place_in_step(phase: str) -> int:
    return ORDER.index(phase) if phase in ORDER else len(ORDER)


def draw_panels(run: Run, specs: Sequence[ChartSpec]) -> Figure | None:
    """A small panel per chart, a curve per agent, or one of the whole job."""
    charts = [(spec, curves) for spec in specs if (curves := _curves(run, spec))]
    if not charts:
        return None
    figure, axes = panels(len(charts), 2, 2.2, share_y=False, steps=run.span)
    for (spec, curves), axis in zip(charts, axes):
        axis.set_title(f"{spec.title} ({spec.unit})" if spec.unit not in ("", "bytes") else spec.title)
        for n, (_, series, colour) in enumerate(curves):
            line(axis, series, colour, alpha=0.9 if colour not in [curve[2] for curve in curves[:n]] else 0.45)
        if spec.unit == "bytes":
            axis.yaxis.set_major_formatter(EngFormatter("B"))
        if spec.share:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        if spec.unit not in ("", "bytes", "s"):
            axis.yaxis.set_major_formatter(as_number)
        if spec.id != "length":
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # else a constant is drawn as noise
        label_ends(axis, [(series, name, colour) for name, series, colour in curves])
    return figure


def _curves(run: Run, spec: ChartSpec) -> list[tuple[str, Series, str]]:
    """Name, numbers and colour of a panel's curves: those of its patterns without {b}."""
    by_what: dict[str, list[tuple[str, Series, str]]] = {}
    patterns = [pattern for pattern in spec.patterns if "{b}" not in pattern]
    ends = {pattern: pattern.rpartition("/")[2].removesuffix("_bytes").replace("_", " ") for pattern in patterns}
    for pattern, what in ends.items():
        if list(ends.values()).count(what) > 1:  # of all answers, and of an agent's own alone
            what = "own" if "/self/" in pattern else ""
        job = [("", run.series(pattern), INK)]
        agents = [(agent, run.series(pattern.format(a=agent)), agent_colour(run, agent)) for agent in run.agents]
        if found := [curve for curve in (agents if "{a}" in pattern else job) if curve[1]]:
            by_what[what] = by_what.get(what, []) + found
    return [
        (f"{name} {what}".strip() if len(by_what) > 1 else name, *rest)
        for what, found in by_what.items()
        for name, *rest in found
    ]


@dataclass(frozen=True)
class Picture:
    """A figure of the report. `stem` names its PNG file, `note` explains it; the SVG is for the page.

    verdicts   sentences about what it shows, as (level, text)
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
NOTES = {  # further notes, about what these figures alone have
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
    pictures, said = [], verdicts(run)
    with dressed():
        for section in SECTIONS:
            for specs in figures_of(section):
                if (figure := draw(run, *specs)) is not None:
                    named, note = (specs[0], specs[0].note) if len(specs) == 1 else (section, "")
                    told = [one for one in said if any(one["chart"] == spec.id for spec in specs)]
                    pictures.append(_picture(figure, named.id, named.title, note, told))
        if (figure := draw_timeline(run)) is not None:
            note = "Bars are phases; pale inside one, the rank waits."
            pictures.append(_picture(figure, "timeline", "One step of all agents", note))
    return pictures


def _picture(figure: Figure, stem: str, title: str, note: str, told: Sequence[Mapping[str, str]] = ()) -> Picture:
    whole = " ".join(filter(None, (note, NOTES.get(stem))))
    pairs = tuple((one["level"], one["text"]) for one in told)
    return Picture(stem, title, whole, to_png(figure), to_inline_svg(figure, stem), pairs)
