"""A plan held against a run: seconds of every phase, and which layout the measured seconds speak for.

What was measured is read as `hacpo-mega bench` reads it (lab/throughput/measure.py): seconds of an agent's slowest rank,
and of the exchange what the last agent to come needs. Steps count as the run had them: its answers, their lengths, what
was learnt from.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from hacpo_mega.config import Config, config_of_run
from hacpo_mega.lab.planning.plan import Plan
from hacpo_mega.lab.planning.table import aligned
from hacpo_mega.lab.planning.work import Lengths, Work, work_of
from hacpo_mega.lab.throughput.measure import SHARED_PHASE, WAITING, MeasuredStep, mean_phases, measured_steps

# Steps at the start of a run that only fill caches and pools.
NUM_WARM_UP = 1
# What a run has as phases of their own and a plan as one.
OTHER = ("other", "write", "calibrate")


@dataclass(frozen=True)
class Compared:
    """Seconds of a phase of an agent, or of a whole step where `agent` is empty."""

    agent: str
    phase: str
    planned_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the plan, as a share of what was measured."""
        return self.planned_s / self.measured_s - 1.0


def read_run(run_dir: Path, config: Config) -> list[MeasuredStep]:
    """The steps of a run after its warm-up. ValueError when there are none, or it had other agents."""
    names = [agent.name for agent in config.agents]
    found = [agent.name for agent in config_of_run(run_dir).agents]
    if found != names:
        raise ValueError(
            f"--from {run_dir}: its agents are {', '.join(found)}, the configuration's {', '.join(names)}: give a run "
            "of the same agents"
        )
    if not (run_dir / "metrics.jsonl").is_file():
        raise ValueError(f"--from {run_dir}: no metrics.jsonl is there; give a run that has taken steps")
    steps = measured_steps(run_dir, names, NUM_WARM_UP)
    if not steps:
        raise ValueError(
            f"--from {run_dir}: no step is left after {NUM_WARM_UP} of warm-up; give a run of at least "
            f"{NUM_WARM_UP + 1} steps"
        )
    return steps


def work_of_run(config: Config, lengths: Lengths, steps: Sequence[MeasuredStep]) -> dict[str, Work]:
    """What each agent did in a mean step of the run; lengths of prompts only where the run counted them."""
    return {agent.name: _work(work_of(config, lengths), lengths, steps, agent.name) for agent in config.agents}


def _work(planned: Work, lengths: Lengths, steps: Sequence[MeasuredStep], agent: str) -> Work:
    mine = [step.agents[agent] for step in steps]
    answers, counted = fmean(step.answers for step in mine), fmean(step.prompt_tokens for step in mine)
    return replace(
        planned,
        answers=answers,
        pool=planned.pool * answers / planned.answers,
        trained=fmean(step.trained_answers for step in mine),
        prompt_tokens=counted or planned.prompt_tokens,
        answer_tokens=lengths.answer_tokens or fmean(step.tokens / step.answers for step in mine),
    )


def compare(plan: Plan, steps: Sequence[MeasuredStep]) -> list[Compared]:
    """Every phase of every agent, then the step. Phases that a plan does not have are in the step alone."""
    shared_s = fmean(min(s.phases_s.get(SHARED_PHASE, 0.0) for s in step.agents.values()) for step in steps)
    found = []
    for agent in plan.agents:
        measured = _as_planned(mean_phases(steps, agent.name), shared_s)
        found += [
            Compared(agent.name, phase, seconds, measured[phase])
            for phase, seconds in agent.phases_s.items()
            if measured.get(phase, 0.0) > 0.0
        ]
    return [*found, Compared("", "step", plan.wall_s, fmean(step.wall_s for step in steps))]


def _as_planned(measured: Mapping[str, float], shared_s: float) -> dict[str, float]:
    other = sum(measured.get(phase, 0.0) for phase in OTHER)
    plain = {phase: s for phase, s in measured.items() if phase not in (*OTHER, WAITING)}
    return {**plain, SHARED_PHASE: shared_s, "other": other}


def factors_of(compared: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Measured over planned seconds, by agent and phase: what a search multiplies its plans with."""
    factors: dict[str, dict[str, float]] = {}
    for row in compared:
        if row.agent:
            factors.setdefault(row.agent, {})[row.phase] = row.measured_s / row.planned_s
    return factors


def comparison_table(compared: Sequence[Compared]) -> str:
    """The rows as aligned text."""
    return aligned(list(_rows(compared)))


def _rows(compared: Sequence[Compared]) -> Iterator[list[str]]:
    yield ["plan against run", "phase", "planned s", "measured s", "error"]
    for row in compared:
        yield [row.agent, row.phase, f"{row.planned_s:.3f}", f"{row.measured_s:.3f}", f"{row.error:+.0%}"]
