"""What a person sees while a run goes on: a bar with the phase on a terminal, plain lines in a Slurm log.

One line per step, for example
    step 12/40 | qwen reward .42 ratio .87 | llama reward .512 | learn 1.4 of 2.1 s | 850 tok/s | 0:01:02 left | safe 10
within 120 columns: what is left out (LESS) when it would be longer is in metrics.jsonl.
Not here: what is measured (metrics.py).
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from statistics import fmean
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hacpo_mega.logbook.held_out import are_accuracies, held_out
from hacpo_mega.logbook.metrics import StepMetrics
from hacpo_mega.models.visible import one_line, say

PHASES = ("roll_out", "judge", "score", "exchange", "learn", "publish")
WIDTH = 120
# What a line loses first when it is longer than WIDTH: numbers of agents, then groups of its end.
LESS = ("in-band", "shorter phases", "ratio", "phases", "tokens", "unjudged", "reward beside accuracy", "words")
SHOWN_SHARE = 0.05  # of a step: shorter phases are not shown
LONGEST = 2  # phases of a line with little room
STEPS_AVERAGED = 8  # for the time that is left


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
        self._num_steps, self._names = num_steps, tuple(names)
        self._ended: list[float] = []
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

    @property
    def _has_terminal(self) -> bool:
        """Whether a bar can be drawn; rich believes FORCE_COLOR, which Jupyter sets for a pipe into a cell's output."""
        return self._rich.is_terminal and self._rich.file.isatty()

    def phase(self, phase: str) -> None:
        """Shows the phase that begins now; the six of a step move its bar, others (evaluate, save) only show."""
        done = {"completed": PHASES.index(phase)} if phase in PHASES else {}
        self._bar.update(self._step, phase=phase.replace("_", " "), **done)

    def step(self, step: int, metrics: StepMetrics, safe_step: int | None = None) -> None:
        """Prints the line of a finished step and moves the bar of the run.

        `safe_step` is the step that the run would go on from if it died now; None where it would begin again.
        """
        end = [] if (left := self._left(step)) is None else [f"{left} left"]
        end += [] if safe_step is None else [f"safe {safe_step}"]
        self.say(format_step(f"step {step}/{self._num_steps}", metrics, self._names, end))
        self._bar.update(self._run, completed=step)
        self._bar.reset(self._step, description=f"step {step + 1}", phase="")

    def say(self, text: str) -> None:
        """Prints one line, made visible, above a bar; a full disk below, or a reader that is gone, ends no run."""
        with suppress(OSError):
            self._rich.print(one_line(text))
            self._rich.file.flush()

    def _left(self, step: int) -> timedelta | None:
        """How long the steps that are left take at the pace of the last ones; None before there is one."""
        self._ended = [*self._ended[-STEPS_AVERAGED:], time.monotonic()]
        if len(self._ended) < 2 or step >= self._num_steps:
            return None
        pace_s = (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)
        return timedelta(seconds=round(pace_s * (self._num_steps - step)))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def warn(text: str) -> None:
    """One line on standard error, made visible; as for `Console.say`, it may be that nobody can read it."""
    with suppress(OSError):
        say(one_line(text), file=sys.stderr)


def format_step(begin: str, metrics: StepMetrics, names: Sequence[str] = (), end: Sequence[str] = ()) -> str:
    """A step's line between `begin` and the parts of its `end`, with as much of it as WIDTH columns hold."""
    order = dict.fromkeys([*names, *agent_names(metrics)])
    for number in range(len(LESS) + 1):
        less = LESS[:number]
        agents = ((name, _format_agent(name, metrics.values, less)) for name in order)
        parts = [begin, *(f"{name} {numbers}" for name, numbers in agents if numbers), *_pace(metrics, less), *end]
        line = " | ".join(parts)
        if len(line) <= WIDTH:
            break
    return line


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
    """Phases as they follow each other in a step; those outside it (evaluate, load) come last, by name."""
    rank = {phase: i for i, phase in enumerate(PHASES)}
    return sorted(phases, key=lambda phase: (rank.get(phase, len(rank)), phase))


def _pace(metrics: StepMetrics, less: Sequence[str]) -> list[str]:
    """The longest phases with the step's seconds, and tokens of answers per second, of all agents together."""
    agents = agent_names(metrics)
    step_s = max((metrics.timing.get(f"agent/{name}/step_s", 0.0) for name in agents), default=0.0)
    parts = []
    long = [(phase, s) for phase, s in phase_seconds(metrics).items() if s > SHOWN_SHARE * step_s and phase != "other"]
    if "shorter phases" in less:
        longest = sorted(s for _, s in long)[-LONGEST:]
        long = [(phase, s) for phase, s in long if s in longest]
    if long and "phases" not in less:
        of_all = f" of {step_s:.1f}" if step_s else ""
        parts.append(" ".join(f"{phase.replace('_', ' ')} {s:.1f}" for phase, s in long) + f"{of_all} s")
    numbers = ((f"agent/{name}/num_answers", f"agent/{name}/answer_tokens_mean") for name in agents)
    tokens = sum(metrics.values.get(count, 0.0) * metrics.values.get(mean, 0.0) for count, mean in numbers)
    if tokens and step_s and "tokens" not in less:
        parts.append(f"{tokens / step_s:,.0f} tok/s")
    return parts


def _format_agent(name: str, values: Mapping[str, float], less: Sequence[str]) -> str:
    prefix = f"agent/{name}/"
    ratios = _over_sources(values, prefix, "ratio_mean")
    inside = _over_sources(values, prefix, "inside")
    parts = []
    if (found := held_out(values, name)) is not None:
        word = "" if "words" in less else "accuracy " if are_accuracies([found]) else "held-out "
        parts.append(f"{word}{_short(found.value)}")
    if f"{prefix}reward_mean" in values and not (parts and "reward beside accuracy" in less):
        word = "" if "words" in less else "reward "
        parts.append(f"{word}{_short(values[f'{prefix}reward_mean'])}")
    if values.get(f"{prefix}num_unjudged") and "unjudged" not in less:
        parts.append(f"unjudged {values[f'{prefix}num_unjudged'] / values[f'{prefix}num_answers']:.0%}")
    if ratios and "ratio" not in less:
        parts.append(f"ratio {_short(fmean(ratios))}")
    if inside and "in-band" not in less:
        parts.append(f"in-band {fmean(inside):.0%}")
    return " ".join(parts)


def _over_sources(values: Mapping[str, float], prefix: str, name: str) -> list[float]:
    """One number per source; their plain mean is what a line has room for, the pairs are in metrics.jsonl."""
    return [value for key, value in values.items() if key.startswith(f"{prefix}from/") and key.endswith(f"/{name}")]


def _short(value: float) -> str:
    """Three decimals without the leading zero: .423, 1.000, -.050."""
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"
