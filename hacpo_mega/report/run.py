"""The data of a run folder as the report reads them: metrics, configuration and starts.

A run may be unfinished, without evaluations, of one agent or of many. A number that it lacks is absent here, never 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.config.checks.run_dirs import TRACES
from hacpo_mega.logbook.files.json_lines import COUNT, TABLE, TEXT, list_of, wrong_field
from hacpo_mega.logbook.files.metrics import StepMetrics, read_metrics
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.logbook.steps.held_out import ROUNDING, HeldOut, are_accuracies, held_out, held_out_skills, is_graded
from hacpo_mega.logbook.steps.sharing import Fates, fates_of
from hacpo_mega.models.files.documents import toml_file
from hacpo_mega.models.files.links import require_inside

# Files and folders of a run that a report reads, and the folder that it writes into the run.
USED = ("config.toml", "metrics.jsonl", "starts.jsonl", "rollouts", TRACES, "evaluations", "report")
AGENT = {"name": TEXT.if_given, **dict.fromkeys(("tp", "cp", "pp"), COUNT.if_given)}
Z = 1.959963984540054  # standard errors to each side of a 95 % interval


@dataclass(frozen=True)
class Series:
    """One metric over the steps that have it."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def by_step(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values))

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True)
class Run:
    """Data of a run. `config` is its resolved TOML, empty if the folder has none."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    steps: dict[int, StepMetrics]
    agents: tuple[str, ...]
    starts: list[dict[str, Any]]

    def series(self, name: str) -> Series:
        """A metric over steps, of values or of timing; NaN and infinities are kept."""
        points = [
            (step, table[name]) for step, m in self.steps.items() for table in (m.values, m.timing) if name in table
        ]
        return Series(tuple(step for step, _ in points), tuple(value for _, value in points))

    def setting(self, *keys: str) -> Any:
        """One entry of the configuration, None when it is not known."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def num_steps(self) -> int:
        """Finished training steps."""
        return max(self.steps)

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last step of the run: the range of steps of all its figures."""
        return min(self.steps), self.num_steps

    def fates(self, learner: str, source: str) -> dict[int, Fates]:
        """By step, the fate of the answers of `source` on their way to `learner`; empty where the run has no counts."""
        found = {step: fates_of(metrics.values, learner, source) for step, metrics in self.steps.items()}
        return {step: fates for step, fates in found.items() if fates is not None}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Ordered pairs (learner, source) of different agents."""
        return [(learner, source) for learner in self.agents for source in self.agents if learner != source]


def load_run(folder: Path) -> Run:
    """Reads a run folder. Raises ValueError for one that is none, or whose files are broken."""
    path, config_file = folder / "metrics.jsonl", folder / "config.toml"
    require_inside(folder, *(folder / name for name in USED))
    if not path.is_file():
        problem = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {problem}: give the run_dir of a run that has finished at least one step")
    steps = read_metrics(path)
    if not steps:
        raise ValueError(f"{path} has no finished line yet: the run has not finished a step; look into its logs")
    config, config_text = {}, ""
    if config_file.exists():
        config, config_text = toml_file(config_file, "the run_dir of a run"), config_file.read_text(encoding="utf-8")
    if problem := _config_problem(config):
        raise ValueError(f"{config_file} is not the configuration of a run: {problem}")
    names = (name for metrics in steps.values() for name in (*metrics.values, *metrics.timing))
    return Run(folder, config, config_text, steps, agents_of(config, names), read_starts(folder))


def _config_problem(config: dict[str, Any]) -> str | None:
    """The first setting whose type the report cannot use; None if there is none. Most settings are shown as text."""
    if problem := wrong_field(config, {"agents": list_of(TABLE).if_given}):
        return problem
    for number, agent in enumerate(config.get("agents", ())):
        if problem := wrong_field(agent, AGENT, f"agents[{number}]."):
            return problem
    return None


def agents_of(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Agents in the order of a configuration; those that only the `names` of metrics know follow by name."""
    tables = config.get("agents")
    given = [table.get("name") for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    measured = sorted({name.split("/")[1] for name in names if name.startswith("agent/")})
    return tuple(dict.fromkeys([*(name for name in given if isinstance(name, str)), *measured]))


@dataclass(frozen=True)
class PairedGain:
    """Gain per prompt since the run's first evaluation, over the prompts judged in both: its mean and mean square."""

    mean: float
    square: float
    num_pairs: int


@dataclass(frozen=True)
class Accuracy:
    """Mean reward of an agent's held-out answers at one step.

    num_evaluated   None when the run did not record it
    square          mean squared reward; None where rewards are 0 or 1
    gain            since the run's first evaluation, by prompt; None where the run did not compare them
    """

    step: int
    value: float
    num_evaluated: int | None
    square: float | None = None
    gain: PairedGain | None = None

    @property
    def is_graded(self) -> bool:
        """True if some reward lay between 0 and 1: then the mean is no accuracy."""
        return is_graded(self.value, self.square)

    @property
    def all_equal(self) -> bool:
        """True if all answers earned the same reward between 0 and 1: their spread then says nothing of the error."""
        return self.is_graded and self.square - self.value * self.value <= ROUNDING

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval: Wilson's (1927) for an accuracy; for graded rewards the mean and its standard error.

        Graded rewards that are all equal get Wilson's, too: their spread says nothing about other prompts. Where all
        rewards lie in [0, 1], so does the interval.
        """
        n, mean = self.num_evaluated, self.value
        if not n:
            return None
        # Rewards in [0, 1] have squares that are no larger than they.
        is_bounded = 0.0 <= mean <= 1.0 and (self.square is None or self.square <= mean + ROUNDING)
        variance = 0.0 if self.square is None else max(self.square - mean * mean, 0.0)
        if not is_bounded or (self.is_graded and variance > ROUNDING):
            half = Z * math.sqrt(variance / n)
            return (max(0.0, mean - half), min(1.0, mean + half)) if is_bounded else (mean - half, mean + half)
        middle = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
        return max(0.0, middle - half), min(1.0, middle + half)

    def is_paired(self, later: "Accuracy") -> bool:
        """True if this is the run's first evaluation, and `later` judged nearly the same prompts."""
        needed = 0.9 * max(self.num_evaluated or 0, later.num_evaluated or 0)
        return self.step == 0 and later.gain is not None and later.gain.num_pairs >= needed

    def gain_interval(self, later: "Accuracy") -> tuple[float, float] | None:
        """95 % interval of later - self: prompt by prompt where `is_paired`, else as of two independent samples.

        Pairs: Agresti and Min (2005), the normal interval after half a prompt is added to each of the four outcomes,
        which makes two more prompts, one of them with a difference of +-1. Independent: Newcombe (1998), method 10.
        """
        if self.is_paired(later):
            n = later.gain.num_pairs + 2
            mean = later.gain.mean * later.gain.num_pairs / n
            square = (later.gain.square * later.gain.num_pairs + 1) / n
            half = Z * math.sqrt(max(square - mean * mean, 0.0) / n)
            return mean - half, mean + half
        if None in (self.interval, later.interval) or self.all_equal or later.all_equal:
            return None
        (low, high), (later_low, later_high), gain = self.interval, later.interval, later.value - self.value
        return (
            gain - math.hypot(later.value - later_low, high - self.value),
            gain + math.hypot(later_high - later.value, self.value - low),
        )


def accuracies(run: Run, agent: str, skill: str | None = None) -> list[Accuracy]:
    """The evaluations of an agent, by step; of one skill (or benchmark) if given."""
    points = ((step, held_out(metrics.values, agent, skill)) for step, metrics in run.steps.items())
    gains = _gains(run, agent, f"/{skill}" if skill else "")
    return [Accuracy(step, *point, gains.get(step)) for step, point in points if point is not None]


def _gains(run: Run, agent: str, suffix: str) -> dict[int, PairedGain]:
    means, squares, numbers = (
        run.series(f"agent/{agent}/{name}{suffix}")
        for name in ("held_out_gain", "held_out_gain_square", "num_held_out_pairs")
    )
    columns = zip(means.steps, means.values, squares.values, numbers.values)
    return {step: PairedGain(mean, square, int(number)) for step, mean, square, number in columns}


def evaluated_skills(run: Run) -> list[str]:
    """The skills that any agent was evaluated on, in order of name."""
    return sorted({s for m in run.steps.values() for agent in run.agents for s in held_out_skills(m.values, agent)})


def measure_of(evaluations: Iterable[Accuracy]) -> str:
    """The measure that these evaluations report: "accuracy", or "mean reward" where some reward is graded."""
    points = [HeldOut(point.value, point.num_evaluated, point.square) for point in evaluations]
    return "accuracy" if are_accuracies(points) else "mean reward"


def phase_series(run: Run, agent: str, kind: str = "phase") -> dict[str, dict[int, float]]:
    """Seconds by phase and step, of the `kind` "phase" (slowest rank), "phase_mean" (mean rank), or "wait" (waited)."""
    prefix = f"agent/{agent}/{kind}/"
    phases: dict[str, dict[int, float]] = {}
    for step, metrics in run.steps.items():
        for name, seconds in metrics.timing.items():
            if name.startswith(prefix):
                phases.setdefault(name[len(prefix) :].removesuffix("_s"), {})[step] = seconds
    return phases
