"""Console output of a run: a bar with the phase on a terminal, plain lines in a Slurm log.

One line per step, for example
    step 12/40 | qwen reward .420 ratio .870 shared 63% | llama reward .512 | learn 1.4 of 2.1 s | 0:01:02 left | safe 9
within the terminal's columns, at most 120: what is left out of a longer one (SHORTENINGS) is in metrics.jsonl. A number
keeps its place from the first step that has it, and the place is blank where a step has none.
Elsewhere: what is measured (metrics.py).
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from statistics import fmean
from textwrap import fill
from typing import NamedTuple, Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hacpo_mega.logbook.files.metrics import StepMetrics
from hacpo_mega.logbook.steps.held_out import are_accuracies, held_out
from hacpo_mega.logbook.steps.sharing import fates_of_learner
from hacpo_mega.models.files.visible import one_line, say

PHASES = ("roll_out", "judge", "score", "exchange", "learn", "publish")
WIDTH = 120
AGENT_CELLS = ("reward", "held-out", "unjudged", "ratio", "in-band", "shared")
CELLS = (*AGENT_CELLS, "phases", "mfu", "tokens", "left", "safe")  # in the order of a line
END_GROUPS = ("phases", "tokens", "left", "safe")  # of a line, after those of the agents
# Parts that a line longer than its width loses, in this order. Without "words" another line once names the numbers.
SHORTENINGS = ("in-band", "shorter phases", "words", "second phase", "ratio", "phases", "tokens", "unjudged", "left",
               "safe", "shared")  # fmt: skip
SHOWN_SHARE = 0.05  # of a step: shorter phases are not shown
MAX_PHASES = 2  # of a line with little room; with even less room the longest alone
STEPS_AVERAGED = 8  # for the time that is left
CLEARING_S = 0.5  # most seconds that an ending process waits for its bars to stop


class Console:
    """The console of a job: rank 0's; the other ranks have a `quiet` one. `file` defaults to standard output.

    names   the agents in the order of their configuration; those that only the metrics know follow
    """

    def __init__(
        self,
        num_steps: int,
        steps_done: int = 0,
        *,
        names: Sequence[str] = (),
        file: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        self._num_steps = num_steps
        self._step_ends: list[float] = []
        self._rich = RichConsole(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._rich,
            disable=quiet or not self._has_terminal,
            transient=True,
        )
        self._run = self._bar.add_task("run", total=num_steps, completed=steps_done, phase="")
        self._step = self._bar.add_task(f"step {steps_done + 1}", total=len(PHASES), phase="")
        self._line = StepLine(names, min(WIDTH, self._rich.width) if self._has_terminal else WIDTH)

    @property
    def _has_terminal(self) -> bool:
        """True if a bar can be drawn; rich believes FORCE_COLOR, which Jupyter sets for a pipe into a cell's output."""
        return self._rich.is_terminal and self._rich.file.isatty()

    def phase(self, phase: str) -> None:
        """Shows the phase that begins now; the six of a step move its bar, others (evaluate, save) only show."""
        done = {"completed": PHASES.index(phase)} if phase in PHASES else {}
        self._bar.update(self._step, phase=phase.replace("_", " "), **done)

    def step(self, step: int, metrics: StepMetrics, safe_step: int | None = None) -> None:
        """Prints the line of a finished step and moves the bar of the run.

        `safe_step` is the step that the run would go on from if it died now; None where it would begin again.
        """
        end = {} if (left := self._time_left(step)) is None else {"left": f"{left} left"}
        end |= {} if safe_step is None else {"safe": f"safe {safe_step}"}
        begin = f"step {step}/{self._num_steps}".ljust(len(f"step {self._num_steps}/{self._num_steps}"))
        for line in self._line.of(begin, metrics, end):
            self.say(line)
        self._bar.update(self._run, completed=step)
        self._bar.reset(self._step, description=f"step {step + 1}", phase="")

    def say(self, text: str) -> None:
        """Prints one escaped line above the bar; a full disk or a closed pipe ends no run.

        On a terminal it is broken between words.
        """
        text = one_line(text)
        if self._has_terminal and len(text) > self._rich.width:
            text = fill(text, self._rich.width, break_long_words=False, break_on_hyphens=False)
        with suppress(OSError):
            self._rich.print(text)
            self._rich.file.flush()

    def clear(self) -> None:
        """Takes the bars off the terminal and gives the cursor back, for a process that ends at once, in any thread."""
        if self._bar.disable:
            return
        # In a thread: the main one may hold the lock of the bars for good.
        stop = threading.Thread(target=self._bar.stop, daemon=True)
        stop.start()
        stop.join(CLEARING_S)

    def _time_left(self, step: int) -> timedelta | None:
        """Time that the remaining steps take at the pace of the last ones; None before there is one."""
        self._step_ends = [*self._step_ends[-STEPS_AVERAGED:], time.monotonic()]
        if len(self._step_ends) < 2 or step >= self._num_steps:
            return None
        pace_s = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return timedelta(seconds=round(pace_s * (self._num_steps - step)))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def warn(text: str) -> None:
    """One line on standard error, with control characters escaped. A closed pipe ends no run, as for `Console.say`."""
    with suppress(OSError):
        say(one_line(text), file=sys.stderr)


class Cell(NamedTuple):
    """A number of a line with its word before it; either may be empty."""

    word: str
    number: str


class StepLine:
    """Lays out the lines of steps as columns: every number keeps its place, which only ever widens.

    names   the agents in the order of their configuration; those that only the metrics know follow
    width   columns of a line; one that cannot be made short enough is broken between its groups
    """

    def __init__(self, names: Sequence[str] = (), width: int = WIDTH) -> None:
        self._names, self._width = tuple(names), width
        self._num_shortenings = 0  # applied by now; it only grows
        self._names_shown: list[str] = []  # numbers of lines without words, as last named
        self._widths: dict[str, dict[str, tuple[int, int]]] = {}  # of word and number, by group and cell

    def of(self, begin: str, metrics: StepMetrics, end: Mapping[str, str] | None = None) -> list[str]:
        """The lines of a step, from `begin` to the parts of its `end`; in most cases one."""
        while True:
            groups = self._groups(metrics, end or {})
            line = self._layout(begin, groups)
            if len(line) <= self._width or self._num_shortenings == len(SHORTENINGS):
                break
            self._num_shortenings += 1
            if SHORTENINGS[self._num_shortenings - 1] in ("shorter phases", "second phase"):
                self._widths.pop("phases", None)
        lines = [line] if len(line) <= self._width else _wrapped(line, self._width)
        shown = [cell for cell in AGENT_CELLS if any(cell in cells for cells in self._shown(groups))]
        if "words" in self._shortened and shown != self._names_shown:
            self._names_shown = shown
            lines.insert(0, f"from here on the numbers of each agent are: {', '.join(shown)}")
        return lines

    @property
    def _shortened(self) -> tuple[str, ...]:
        return SHORTENINGS[: self._num_shortenings]

    def _groups(self, metrics: StepMetrics, end: Mapping[str, str]) -> dict[str, dict[str, Cell]]:
        """The cells of every group of a line; a group that is left out has none."""
        names = list(dict.fromkeys([*self._names, *agent_names(metrics)]))
        groups = {name: _agent_cells(name, metrics.values, names) for name in names}
        most = MAX_PHASES if "shorter phases" in self._shortened else None
        groups["phases"] = _phase_cells(metrics, 1 if "second phase" in self._shortened else most)
        groups["tokens"] = _rate_cells(metrics)
        return groups | {part: {part: Cell("", end[part])} if part in end else {} for part in ("left", "safe")}

    def _shown(self, groups: Mapping[str, Mapping[str, Cell]]) -> Iterator[list[str]]:
        """The cells of each group that have a place, in their order."""
        for group in groups:
            cells = () if group in self._shortened else self._widths[group]
            yield sorted((cell for cell in cells if cell not in self._shortened), key=CELLS.index)

    def _layout(self, begin: str, groups: Mapping[str, Mapping[str, Cell]]) -> str:
        for group, cells in groups.items():
            widths = self._widths.setdefault(group, {})
            for name, cell in cells.items():
                widths[name] = tuple(map(max, widths.get(name, (0, 0)), map(len, cell)))
        parts = [begin]
        for (group, cells), shown in zip(groups.items(), self._shown(groups)):
            if shown:
                label = [] if group in END_GROUPS else [group]
                parts.append(" ".join([*label, *(self._padded(group, name, cells.get(name)) for name in shown)]))
        return " | ".join(parts).rstrip(" |")

    def _padded(self, group: str, name: str, cell: Cell | None) -> str:
        """A cell in its place; blank where the step has none."""
        word, number = cell or ("", "")
        word_width, width = self._widths[group][name]
        if name == "phases":
            return number.ljust(width)
        if not word_width or ("words" in self._shortened and group not in END_GROUPS):
            return number.rjust(width)
        return f"{word:<{word_width}} {number:>{width}}"


def _wrapped(line: str, width: int) -> list[str]:
    """Splits a line into parts of at most `width` columns where groups allow it; parts align below the first group."""
    begin, *groups = line.split(" | ")
    lines = [begin]
    for group in groups:
        if len(lines[-1]) + 3 + len(group) > width and lines[-1] != begin:
            lines.append(" " * len(begin))
        lines[-1] += f" | {group}"
    return lines


def agent_names(metrics: StepMetrics) -> list[str]:
    """The agents that a step speaks of, in order of name."""
    names = [*metrics.values, *metrics.timing]
    return sorted({name.split("/")[1] for name in names if name.startswith("agent/")})


def phase_seconds(metrics: StepMetrics) -> dict[str, float]:
    """Seconds of every phase, of the slowest agent, in the order of a step."""
    seconds: dict[str, float] = {}
    for name, value in metrics.timing.items():
        _, _, phase = name.partition("/phase/")
        if phase:
            phase = phase.removesuffix("_s")
            seconds[phase] = max(value, seconds.get(phase, 0.0))
    return {phase: seconds[phase] for phase in in_step_order(seconds)}


def in_step_order(phases: Iterable[str]) -> list[str]:
    """Phases in the order of a step; those outside it (evaluate, load) come last, by name."""
    rank = {phase: i for i, phase in enumerate(PHASES)}
    return sorted(phases, key=lambda phase: (rank.get(phase, len(rank)), phase))


def _phase_cells(metrics: StepMetrics, most: int | None) -> dict[str, Cell]:
    """The longest phases, at most `most`, with the step's seconds: one cell, since they change from step to step."""
    names = agent_names(metrics)
    step_s = max((metrics.timing.get(f"agent/{name}/step_s", 0.0) for name in names), default=0.0)
    long = {phase: s for phase, s in phase_seconds(metrics).items() if s > SHOWN_SHARE * step_s and phase != "other"}
    if most is not None:
        longest = sorted(long.values())[-most:]
        long = {phase: s for phase, s in long.items() if s in longest}
    text = " ".join(f"{phase.replace('_', ' ')} {s:.1f}" for phase, s in long.items())
    of_all = f" of {step_s:.1f}" if step_s else ""
    return {"phases": Cell("", f"{text}{of_all} s")} if text else {}


def _rate_cells(metrics: StepMetrics) -> dict[str, Cell]:
    """Tokens of the answers of all agents per second, where GPUs are known of each, and how well learning uses them."""
    names = agent_names(metrics)
    if (per_gpu := metrics.timing.get("rate/answer_tokens_per_gpu_s")) is not None:
        mfu = metrics.timing.get("rate/learn_mfu")
        used = {} if mfu is None else {"mfu": Cell("MFU", f"{mfu:.0%}")}
        return used | {"tokens": Cell("", f"{per_gpu:,.0f} tok/s/GPU")}
    step_s = max((metrics.timing.get(f"agent/{name}/step_s", 0.0) for name in names), default=0.0)
    numbers = ((f"agent/{name}/num_answers", f"agent/{name}/answer_tokens_mean") for name in names)
    tokens = sum(metrics.values.get(count, 0.0) * metrics.values.get(mean, 0.0) for count, mean in numbers)
    return {"tokens": Cell("", f"{tokens / step_s:,.0f} tok/s")} if tokens and step_s else {}


def _agent_cells(name: str, values: Mapping[str, float], names: Sequence[str]) -> dict[str, Cell]:
    """An agent's part of a line, by AGENT_CELLS."""
    prefix = f"agent/{name}/"
    ratios = _over_sources(values, prefix, "ratio_mean")
    inside = _over_sources(values, prefix, "inside")
    cells = {}
    if f"{prefix}reward_mean" in values:
        cells["reward"] = Cell("reward", _short(values[f"{prefix}reward_mean"]))
    if (evaluation := held_out(values, name)) is not None:
        cells["held-out"] = Cell("accuracy" if are_accuracies([evaluation]) else "held-out", _short(evaluation.value))
    if values.get(f"{prefix}num_unjudged"):
        share = values[f"{prefix}num_unjudged"] / values[f"{prefix}num_answers"]
        cells["unjudged"] = Cell("unjudged", f"{share:.0%}")
    if ratios:
        cells["ratio"] = Cell("ratio", _short(fmean(ratios)))
    if inside:
        cells["in-band"] = Cell("in-band", f"{fmean(inside):.0%}")
    fates = fates_of_learner(values, name, names)
    if fates is not None and fates.share is not None:
        cells["shared"] = Cell("shared", f"{fates.share:.0%}")
    return cells


def _over_sources(values: Mapping[str, float], prefix: str, name: str) -> list[float]:
    """One number per source; a line has room for their plain mean, the pairs are in metrics.jsonl."""
    return [value for key, value in values.items() if key.startswith(f"{prefix}from/") and key.endswith(f"/{name}")]


def _short(value: float) -> str:
    """Three decimals without the leading zero: .423, 1.000, -.050."""
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"
