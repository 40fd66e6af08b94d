"""The measurements of a block's steps, read from the metrics of its run.

In a step an agent is busy or waits. It is busy in all phases except `wait`, the end of the step, and `exchange`, in
which agents wait for each other: there only as long as the last agent to come needs. The rest of the wall time is
waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from hacpo_mega.logbook.console import in_step_order
from hacpo_mega.logbook.files.metrics import StepMetrics, read_metrics

SHARED_PHASE, WAITING = "exchange", "wait"


@dataclass(frozen=True)
class AgentStep:
    """The work of one agent in one step.

    phases_s       seconds of its slowest rank, by phase
    busy_s         seconds it worked
    answers, tokens              that it sampled
    trained_answers, trained_tokens   that it learnt from; tokens of answers only, not of prompts
    prompt_tokens  of a prompt, on average, and scored_answers, those scored before learning: 0 where the run did not
                   count them, as only a benchmark does
    hidden_s       of sampling beside other phases, whose processor seconds then have those of sampling in them
    cpu_s, cpu_highest_s, peak_bytes   by phase, and sent_bytes by "phase/whom": as Measurement says; else empty
    """

    phases_s: Mapping[str, float]
    busy_s: float
    answers: float
    tokens: float
    trained_answers: float
    trained_tokens: float
    prompt_tokens: float
    scored_answers: float
    hidden_s: float = 0.0
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    cpu_highest_s: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredStep:
    """One step: seconds from the end of the one before to its own, and what every agent did in them."""

    wall_s: float
    agents: Mapping[str, AgentStep]

    @property
    def one_after_the_other_s(self) -> float:
        """Seconds of the same work if the agents took turns on devices that do not make them faster."""
        return sum(agent.busy_s for agent in self.agents.values())


def measured_steps(run_dir: Path, agents: Sequence[str], num_warm_up: int) -> list[MeasuredStep]:
    """The steps of a run after the first `num_warm_up`, at least 1, in whose time caches and pools are filled."""
    metrics = read_metrics(run_dir / "metrics.jsonl")
    steps = sorted(step for step in metrics if step > 0)
    ends = {step: metrics[step].timing["time_unix_s"] for step in steps}
    return [
        measured_step(ends[step] - ends[before], metrics[step], agents)
        for before, step in zip(steps[num_warm_up - 1 :], steps[num_warm_up:])
    ]


def measured_step(wall_s: float, metrics: StepMetrics, agents: Sequence[str]) -> MeasuredStep:
    """A step from its reduced metrics."""
    phases = {agent: _by_phase(metrics, f"agent/{agent}/phase/", "_s") for agent in agents}
    shared_s = min(seconds.get(SHARED_PHASE, 0.0) for seconds in phases.values())
    return MeasuredStep(wall_s, {agent: _agent_step(metrics, agent, phases[agent], shared_s) for agent in agents})


def _by_phase(metrics: StepMetrics, prefix: str, unit: str) -> dict[str, float]:
    found = {
        name.removeprefix(prefix).removesuffix(unit): value
        for name, value in metrics.timing.items()
        if name.startswith(prefix) and not name.endswith("/load_s")
    }
    return {phase: found[phase] for phase in in_step_order(found)}


def _agent_step(metrics: StepMetrics, agent: str, phases_s: dict[str, float], shared_s: float) -> AgentStep:
    values = metrics.values
    answers = values[f"agent/{agent}/num_answers"]
    return AgentStep(
        phases_s=phases_s,
        busy_s=sum(s for phase, s in phases_s.items() if phase not in (SHARED_PHASE, WAITING)) + shared_s,
        answers=answers,
        tokens=answers * values[f"agent/{agent}/answer_tokens_mean"],
        scored_answers=values.get(f"agent/{agent}/num_scored", 0.0),
        trained_answers=values.get(f"agent/{agent}/num_trained_answers", 0.0),
        trained_tokens=values.get(f"agent/{agent}/num_trained_tokens", 0.0),
        prompt_tokens=values.get(f"agent/{agent}/prompt_tokens_mean", 0.0),
        hidden_s=metrics.timing.get(f"agent/{agent}/roll_out_hidden_s", 0.0),
        cpu_s=_by_phase(metrics, f"agent/{agent}/cpu/", "_s"),
        cpu_highest_s=_by_phase(metrics, f"agent/{agent}/cpu_highest/", "_s"),
        peak_bytes=_by_phase(metrics, f"agent/{agent}/peak/", "_bytes"),
        sent_bytes=_by_phase(metrics, f"agent/{agent}/sent/", "_bytes"),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a `share` of the values lies, linear between two of them."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each key over all tables, 0 where one lacks it; keys in the order of phases in a step."""
    keys = in_step_order({key for table in tables for key in table})
    return {key: fmean(table.get(key, 0.0) for table in tables) for key in keys}
