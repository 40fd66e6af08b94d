"""One finished run as a small JSON file: its source, its inputs, and what it measured.

The file is small enough to be committed and copied between machines (below 20 kB for a few hundred steps); the run
folder itself is not needed any more. Everything but `seconds` and `machine` repeats exactly when the run is repeated.
The runs of a grid without a missing one are packed into one file, runs.jsonl.
"""

import json
import math
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from hacpo_lab.experiments.comparison import right_answers
from hacpo_lab.experiments.grid import Cell, Stage
from hacpo_mega.config.tables.section import Section
from hacpo_mega.logbook.console import phase_seconds
from hacpo_mega.logbook.files.json_lines import LARGEST, MOST
from hacpo_mega.logbook.files.metrics import StepMetrics, read_metrics
from hacpo_mega.logbook.steps.held_out import are_accuracies, held_out, held_out_skills
from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.replacing import replace_file

# Left out of a diagnosis: metrics that follow from the configuration, checks of a run, those kept at every evaluation.
NO_DIAGNOSIS = re.compile(r".*/(lr|first_ratio_error|verdict/.*|view/.*|accuracy.*|eval/.*|num_[^/]*.*)")
WINDOW = 10
PACKED = "runs.jsonl"
MOST_VALUES = 600  # of a diagnosis: long runs and many agents get longer windows, not larger files
GREEDY, SAMPLED = "greedy", "sampled"
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
# By skill: right answers as bits, first prompt first, the last byte filled with 0, as hexadecimal.
Bits = dict[str, Annotated[str, Field(pattern=r"^(?:[0-9a-f]{2})+$")]]


class Machine(Section):
    """Where a run was made: another processor multiplies matrices in another order, so numbers drift apart."""

    cpu: str
    """Model name of the processor."""
    cores: int
    """Logical cores."""


class Diagnosis(Section):
    """Metrics of training over windows of steps; None where a window has none, or one that is not finite."""

    steps_per_window: Annotated[Count, Field(ge=1)]
    """Steps of a window; the last one may be shorter."""
    values: dict[str, tuple[Number | None, ...]]
    """By metric name, four digits: the mean of a window's steps, of names that end in _max or _min their extreme."""


class Curves(Section):
    """Accuracies, and the answers and updates spent so far, by agent, at the steps of `Result.steps`."""

    accuracy: dict[str, tuple[Number, ...]]
    """Over all held-out prompts: the mean reward."""
    accuracy_by_skill: dict[str, dict[str, tuple[Number, ...]]]
    """By agent and skill; empty for prompts without skills."""
    is_graded: bool = False
    """Tells whether a reward lay between 0 and 1, so that the mean reward is no accuracy."""
    generated_answers: dict[str, tuple[Count, ...]]
    """Answers that the agent has sampled for training."""
    trained_answers: dict[str, tuple[Count, ...]]
    """Answers that the agent has been trained on, own and others'; empty when the run did not count them."""
    updates: dict[str, tuple[Count, ...]]
    """Optimizer updates that the agent has made; empty when the run did not count them."""


class Measured(Section):
    """The numbers that are kept of a finished run's folder."""

    agents: tuple[str, ...]
    """In the order of the configuration."""
    steps: tuple[Count, ...]
    """Evaluated steps; step 0 is before training."""
    seconds: tuple[Number, ...]
    """From the first evaluation to each evaluated step, evaluations not counted."""
    curves: Curves
    diagnosis: Diagnosis


class Identity(Section):
    """Equal for two runs of one method; `held_out` for two of one regime, `models` for two of one regime and seed."""

    config: str
    """Digest of configuration, training files, own code, without run_dir, seed, learning rates, checkpoint, logging."""
    held_out: str
    """Digest of the held-out prompts and golds, in order, and of how their answers are cut and judged, by what code."""
    models: dict[str, str]
    """Digest of every agent's model folder, by its name: the warm start."""


class FinalAnswers(Section):
    """The right answers of every agent to the test set, after the last step; an unjudged answer is not right."""

    prompts: str
    """Digest of the test set's prompts and golds, in order."""
    num_prompts: dict[str, Count]
    """By skill."""
    greedy: dict[str, Bits]
    """By agent."""
    sampled: dict[str, Bits]
    """By agent; empty for conversations between roles, whose sampled answers are those of training."""

    def right(self, sampling: str, agent: str) -> dict[str, np.ndarray]:
        """By skill, 1 for a right answer of an agent and 0 for another, float64 [num_prompts]; GREEDY or SAMPLED."""
        by_skill = getattr(self, sampling)[agent]
        return {skill: right_answers(bits, self.num_prompts[skill]) for skill, bits in by_skill.items()}


class Result(Measured):
    """A finished run: what it measured, its source, and its inputs."""

    format: Literal[1] = 1
    """The format of this file."""
    regime: str
    method: str
    learning_rate: Number
    seed: Count
    stage: Stage
    commit: str | None
    """The commit of the source; with `+` and a digest when files differed from it, None outside a checkout."""
    versions: dict[str, str]
    """The versions of the packages that a result depends on."""
    machine: Machine
    config_file: str
    """The regime's configuration."""
    overrides: tuple[str, ...]
    """The changes that the run made in it, except run_dir."""
    identity: Identity
    final: FinalAnswers | None = None
    """Right answers to the test set at the end; None of a run that only tunes, or whose task has no test set."""

    @model_validator(mode="after")
    def _fits_itself(self) -> Self:
        curves, final = self.curves, self.final
        tables = (curves.accuracy, curves.generated_answers, curves.trained_answers, curves.updates)
        every = [values for table in (*tables, *curves.accuracy_by_skill.values()) for values in table.values()]
        if not self.steps or {len(self.seconds), *map(len, every)} != {len(self.steps)}:
            raise ValueError("its curves and its steps have other lengths")
        if not self.agents or set(self.agents) != curves.accuracy.keys():
            raise ValueError("its agents are not those of its curves")
        if final is None:
            return self
        sizes = {skill: -(-number // 8) * 2 for skill, number in final.num_prompts.items()}
        answered = [*final.greedy.values(), *final.sampled.values()]
        if not sizes or any({skill: len(bits) for skill, bits in skills.items()} != sizes for skills in answered):
            raise ValueError("its final answers are not as many as its prompts")
        if final.greedy.keys() != set(self.agents) or final.sampled.keys() not in (set(self.agents), set()):
            raise ValueError("the agents of its final answers are others")
        return self

    @property
    def cell(self) -> Cell:
        return Cell(self.regime, self.method, self.learning_rate, self.seed, self.stage)

    @property
    def mean_accuracy(self) -> tuple[float, ...]:
        """Mean over all agents, at every evaluated step."""
        return tuple(fmean(values) for values in zip(*self.curves.accuracy.values(), strict=True))

    @property
    def score(self) -> float:
        """The number that tuning compares: accuracy on the validation set at the end, mean over all agents."""
        return self.mean_accuracy[-1]


def measure(run_dir: Path, agents: Sequence[str], every_steps: int) -> Measured | None:
    """Reads the measurements of a finished run folder; None when an evaluation is missing or judged no answer.

    Evaluations are due before training, every `every_steps` steps, and after the last step.
    """
    metrics = read_metrics(run_dir / "metrics.jsonl")
    due = tuple(step for step in metrics if step % every_steps == 0 or step == max(metrics))
    by_agent = {agent: [held_out(metrics[step].values, agent) for step in due] for agent in agents}
    if any(None in points for points in by_agent.values()):
        return None
    curves = Curves(
        accuracy={agent: tuple(round(point.value, 6) for point in points) for agent, points in by_agent.items()},
        accuracy_by_skill={agent: skills for agent in agents if (skills := _by_skill(metrics, due, agent))},
        is_graded=not are_accuracies(point for points in by_agent.values() for point in points),
        generated_answers=_totals(metrics, due, agents, "num_answers"),
        trained_answers=_totals(metrics, due, agents, "num_trained_answers"),
        updates=_totals(metrics, due, agents, "num_updates"),
    )
    return Measured(
        agents=tuple(agents), steps=due, seconds=_seconds(metrics, due), curves=curves, diagnosis=diagnose(metrics)
    )


def diagnose(metrics: Mapping[int, StepMetrics]) -> Diagnosis:
    """The metrics of training over windows of WINDOW steps, or of more where a file would grow too large."""
    steps = [step for step in metrics if step > 0]
    names = sorted({name for step in steps for name in metrics[step].values if not NO_DIAGNOSIS.fullmatch(name)})
    most_windows = max(1, min(10, MOST_VALUES // max(1, len(names))))
    size = max(WINDOW, -(-len(steps) // most_windows))
    windows = [steps[start : start + size] for start in range(0, len(steps), size)]
    values = {name: tuple(_window_value(metrics, window, name) for window in windows) for name in names}
    return Diagnosis(steps_per_window=size, values=values)


def window_sizes(result: Measured) -> Iterator[int]:
    """Training steps of each window of a diagnosis; the last one may be shorter."""
    last, size = result.steps[-1], result.diagnosis.steps_per_window
    return (min(size, last - start) for start in range(0, last, size))


def this_machine() -> Machine:
    """This machine, with the processor's name as Linux reports it."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    return Machine(cpu=named[1] if named else platform.machine(), cores=os.cpu_count() or 1)


def write_result(folder: Path, result: Result) -> Path:
    """Writes FOLDER/<name of the cell>.json whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.cell.name}.json"
    table = result.model_dump(mode="json")
    replace_file(
        path,
        "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()) + "\n}\n",
        synced=True,
    )
    return path


def pack_results(folder: Path, results: Collection[Result]) -> Path:
    """Puts results into FOLDER/runs.jsonl, one a line in order of name, in place of a file for each.

    Runs of other grids stay there, packed or in their files. ValueError for a broken line among them.
    """
    by_cell = {}
    for result in (*read_packed(folder), *results):
        if isinstance(result, ValueError):
            raise result
        by_cell[result.cell] = result
    ordered = sorted(by_cell.values(), key=lambda result: (result.cell.name, result.stage))
    packed = folder / PACKED
    lines = (f"{json.dumps(result.model_dump(mode='json'))}\n" for result in ordered)
    replace_file(packed, "".join(lines), synced=True)
    for result in results:
        (folder / f"{result.cell.name}.json").unlink(missing_ok=True)
    return packed


def read_packed(folder: Path) -> Iterator[Result | ValueError]:
    """The results of FOLDER/runs.jsonl, none without such a file; a ValueError in place of a line that is no result."""
    path = folder / PACKED
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        yield ValueError(f"{path}: cannot be read ({error.strerror})")
        return
    for number, line in enumerate(lines, 1):
        try:
            yield parsed_result(line, f"{path}:{number}")
        except ValueError as error:
            yield error


def parsed_result(content: Any, where: str) -> Result:
    """The result in the bytes of JSON, or in its parsed value. ValueError, one line that begins with `where`."""
    try:
        return (Result.model_validate_json if isinstance(content, bytes) else Result.model_validate)(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = one_line(".".join(map(str, first["loc"])))
        raise ValueError(
            f"{where}: not the result of a run ({field or 'all'}: {first['msg']}); remove it, and its run is made again"
        ) from error


def read_result(path: Path) -> Result:
    """The result in a file. ValueError, one line, for a file that is no result, or that has not the name of its run."""
    try:
        result = parsed_result(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if path.name != f"{result.cell.name}.json":
        raise ValueError(f"{path}: holds the run {result.cell.name}; expected it as {result.cell.name}.json")
    return result


def _by_skill(metrics: Mapping[int, StepMetrics], steps: Sequence[int], agent: str) -> dict[str, tuple[float, ...]]:
    found = {
        skill: [held_out(metrics[step].values, agent, skill) for step in steps]
        for skill in held_out_skills(metrics[steps[0]].values, agent)
    }
    return {
        skill: tuple(round(point.value, 6) for point in points) for skill, points in found.items() if None not in points
    }


def _totals(
    metrics: Mapping[int, StepMetrics], steps: Sequence[int], agents: Sequence[str], count: str
) -> dict[str, tuple[int, ...]]:
    """A count added up to each of the steps, for every agent that has it."""
    totals = {}
    for agent in agents:
        name = f"agent/{agent}/{count}"
        if any(name in m.values for m in metrics.values()):
            counted = {step: m.values.get(name, 0.0) for step, m in metrics.items()}
            totals[agent] = tuple(int(sum(number for at, number in counted.items() if at <= step)) for step in steps)
    return totals


def _seconds(metrics: Mapping[int, StepMetrics], steps: Sequence[int]) -> tuple[float, ...]:
    start = metrics[0].timing["time_unix_s"]
    evaluating = {step: phase_seconds(m).get("evaluate", 0.0) for step, m in metrics.items() if step > 0}
    return tuple(
        round(metrics[step].timing["time_unix_s"] - start - sum(s for at, s in evaluating.items() if at <= step), 3)
        for step in steps
    )


def _window_value(metrics: Mapping[int, StepMetrics], steps: Sequence[int], name: str) -> float | None:
    """The value of a metric over a window: its mean, or its extreme. One number that is not finite makes it None."""
    values = [metrics[step].values[name] for step in steps if name in metrics[step].values]
    if not values or not all(map(math.isfinite, values)):
        return None
    reduce = {"_max": max, "_min": min}.get(name[-4:], fmean)
    return float(f"{reduce(values):.4g}")
