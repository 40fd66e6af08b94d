"""What a person sees while a run goes on: a bar with the phase on a terminal, plain lines in a Slurm log.

One line per step, for example
    step 12/40 | qwen reward .42 ratio .87 in-band 63% | llama reward .51 | roll out 0.5 judge 0.1 learn 1.4 s | safe 10
Not here: what is measured (metrics.py). A number that a step does not have is left out of its line.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from statistics import fmean
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hacpo_mega.logbook.metrics import StepMetrics
from hacpo_mega.models.visible import one_line, say

PHASES = ("roll_out", "judge", "score", "exchange", "learn", "publish")


class Console:
    """The console of a job: rank 0's; the other ranks have a `quiet` one. `file` defaults to standard output."""

    def __init__(self, num_steps: int, steps_done: int = 0, *, file: TextIO | None = None, quiet: bool = False) -> None:
        self._num_steps = num_steps
        self._rich = RichConsole(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._rich,
            disable=quiet or not self._rich.is_terminal,  # a bar needs a terminal
            transient=True,
        )
        self._run = self._bar.add_task("run", total=num_steps, completed=steps_done, phase="")
        self._step = self._bar.add_task(f"step {steps_done + 1}", total=len(PHASES), phase="")

    def phase(self, phase: str) -> None:
        """Shows the phase that begins now; the six of a step move its bar, others (evaluate, save) only show."""
        done = {"completed": PHASES.index(phase)} if phase in PHASES else {}
        self._bar.update(self._step, phase=phase.replace("_", " "), **done)

    def step(self, step: int, metrics: StepMetrics, safe_step: int | None = None) -> None:
        """Prints the line of a finished step and moves the bar of the run.

        `safe_step` is the step that the run would go on from if it died now; None where it would begin again.
        """
        safe = "" if safe_step is None else f" | safe {safe_step}"
        self.say(f"step {step}/{self._num_steps}{format_step(metrics)}{safe}")
        self._bar.update(self._run, completed=step)
        self._bar.reset(self._step, description=f"step {step + 1}", phase="")

    def say(self, text: str) -> None:
        """Prints one line, made visible, above a bar; a full disk below, or a reader that is gone, ends no run."""
        with suppress(OSError):
            self._rich.print(one_line(text))
            self._rich.file.flush()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def warn(text: str) -> None:
    """One line on standard error, made visible; as for `Console.say`, it may be that nobody can read it."""
    with suppress(OSError):
        say(one_line(text), file=sys.stderr)


def format_step(metrics: StepMetrics) -> str:
    """The numbers of a step's line, each part led by ` | `."""
    parts = [f"{name} {numbers}" for name in agent_names(metrics) if (numbers := _format_agent(name, metrics.values))]
    if seconds := phase_seconds(metrics):
        parts.append(" ".join(f"{phase.replace('_', ' ')} {value:.1f}" for phase, value in seconds.items()) + " s")
    return "".join(f" | {part}" for part in parts)


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


def _format_agent(name: str, values: dict[str, float]) -> str:
    prefix = f"agent/{name}/"
    ratios = _over_sources(values, prefix, "ratio_mean")
    inside = _over_sources(values, prefix, "inside")
    parts = []
    if f"{prefix}accuracy" in values:
        parts.append(f"accuracy {_short(values[f'{prefix}accuracy'])}")
    if f"{prefix}reward_mean" in values:
        parts.append(f"reward {_short(values[f'{prefix}reward_mean'])}")
    if values.get(f"{prefix}num_unjudged"):
        parts.append(f"unjudged {values[f'{prefix}num_unjudged'] / values[f'{prefix}num_answers']:.0%}")
    if ratios:
        parts.append(f"ratio {_short(fmean(ratios))}")
    if inside:
        parts.append(f"in-band {fmean(inside):.0%}")
    return " ".join(parts)


def _over_sources(values: dict[str, float], prefix: str, name: str) -> list[float]:
    """One number per source; their plain mean is what a line has room for, the pairs are in metrics.jsonl."""
    return [value for key, value in values.items() if key.startswith(f"{prefix}from/") and key.endswith(f"/{name}")]


def _short(value: float) -> str:
    """Three decimals without the leading zero: .423, 1.000, -.050."""
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"
