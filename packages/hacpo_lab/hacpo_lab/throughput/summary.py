"""The summary of a schedule's measured steps: per step, per answer and per FLOP."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any

from hacpo_lab.throughput.flops import phase_flops
from hacpo_lab.throughput.measure import MeasuredStep, means, percentile
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.lora import Lora


@dataclass(frozen=True)
class AgentSummary:
    """One agent under one schedule, means over its steps.

    phases_s            seconds of its slowest rank, by phase
    idle_share          of the step's wall time, in which it waited; None where its phases hold waiting for its turn
    generated_per_s, trained_per_s   tokens of answers per second of the step
    trained_answers     in a step
    seconds_per_1000    seconds of the step for 1,000 trained answers of this learner
    flops_per_s         model FLOP/s of the phases in which the model computes, on all its ranks together
    cpu_s, cpu_highest_s   processor seconds of a rank by phase: mean over ranks, and of the busiest one
    peak_bytes          by phase, of its fullest rank, the highest of all steps
    sent_bytes          in a step, by "phase/whom"; to `engine` are the weights that are published
    """

    phases_s: Mapping[str, float]
    idle_share: float | None
    generated_per_s: float
    trained_per_s: float
    trained_answers: float
    seconds_per_1000: float
    flops_per_s: Mapping[str, float]
    cpu_s: Mapping[str, float]
    cpu_highest_s: Mapping[str, float]
    peak_bytes: Mapping[str, float]
    sent_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Summary:
    """One schedule.

    wall_s, p50_s, p95_s   seconds of a step: mean, median, 95th percentile
    by_round_s             mean seconds of a step in each round
    together               how many times faster than one agent after the other on devices that make none faster;
                           None for one agent after the other
    """

    name: str
    num_steps: int
    wall_s: float
    p50_s: float
    p95_s: float
    by_round_s: tuple[float, ...]
    together: float | None
    agents: Mapping[str, AgentSummary]

    def table(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def summarize(
    name: str,
    rounds: Sequence[Sequence[MeasuredStep]],
    models: Mapping[str, Architecture],
    *,
    adapters: Mapping[str, Lora | None] = MappingProxyType({}),
    takes_turns: bool = False,
) -> Summary:
    """All measured steps of a schedule. `models` are the agents', by name, and `adapters` of those that have some;
    `takes_turns`: they share devices."""
    steps = [step for block in rounds for step in block]
    walls = [step.wall_s for step in steps]
    return Summary(
        name=name,
        num_steps=len(steps),
        wall_s=fmean(walls),
        p50_s=percentile(walls, 0.5),
        p95_s=percentile(walls, 0.95),
        by_round_s=tuple(fmean(step.wall_s for step in block) for block in rounds),
        together=None if takes_turns else sum(step.one_after_the_other_s for step in steps) / sum(walls),
        agents={
            agent: _agent_summary(agent, steps, model, adapters.get(agent), takes_turns)
            for agent, model in models.items()
        },
    )


def _agent_summary(
    agent: str, steps: Sequence[MeasuredStep], model: Architecture, lora: Lora | None, takes_turns: bool
) -> AgentSummary:
    wall_s = fmean(step.wall_s for step in steps)
    mine = [step.agents[agent] for step in steps]
    answers, trained = fmean(step.answers for step in mine), fmean(step.trained_answers for step in mine)
    tokens, trained_tokens = fmean(step.tokens for step in mine), fmean(step.trained_tokens for step in mine)
    phases_s = means([step.phases_s for step in mine])
    flops = phase_flops(
        model,
        num_prompts_answered=answers,
        num_scored=fmean(step.scored_answers for step in mine),
        num_trained=trained,
        length=mine[0].prompt_tokens + tokens / answers,
        # others' answers are encoded anew
        trained_length=mine[0].prompt_tokens + trained_tokens / trained if trained else 0.0,
        lora=lora,
    )
    working_s = phases_s | {"roll_out": phases_s.get("roll_out", 0.0) + fmean(step.hidden_s for step in mine)}
    return AgentSummary(
        phases_s=phases_s,
        idle_share=None if takes_turns else 1.0 - fmean(step.busy_s for step in mine) / wall_s,
        generated_per_s=tokens / wall_s,
        trained_per_s=trained_tokens / wall_s,
        trained_answers=trained,
        seconds_per_1000=1000.0 * wall_s / trained if trained else float("inf"),
        flops_per_s={phase: count / working_s[phase] for phase, count in flops.items() if working_s.get(phase)},
        cpu_s=means([step.cpu_s for step in mine]),
        cpu_highest_s=means([step.cpu_highest_s for step in mine]),
        peak_bytes=_highest([step.peak_bytes for step in mine]),
        sent_bytes=means([step.sent_bytes for step in mine]),
    )


def _highest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: max(each.get(key, 0.0) for each in found) for key in means(found)}
