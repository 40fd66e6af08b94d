"""A plan held against this machine: layouts of a configuration measured in turns, beside what was planned for each.

Ranks may share cores, as four do on two. So what is compared are processor seconds of an agent's busiest rank, all its
threads, with what was planned for it without waiting for another pipeline stage. Memory is the highest peak of a rank
above what it had before its models, beside the plan of micro-batches as large as they were, not as they may be. Not
compared: judging, which other processes do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.lab.planning.cluster_file import Cluster
from hacpo_mega.lab.planning.comparison import OTHER, work_of_run
from hacpo_mega.lab.planning.configuration import Planned
from hacpo_mega.lab.planning.plan import AgentPlan, make_plan
from hacpo_mega.lab.planning.seconds import PHASES
from hacpo_mega.lab.planning.work import Lengths
from hacpo_mega.lab.throughput.measure import MeasuredStep, means
from hacpo_mega.lab.throughput.table import markdown_table

START = "start"
COMPARED = tuple(phase for phase in PHASES if phase != "judge")
# What a process of the CPU takes beside its tensors once it has started: pages of code, groups, Python's objects. The
# quickstart took 157 to 160 MiB with 512 answers a step, and 127 to 129 with 256.
PROCESS_BYTES = 140 * 2**20
# What a pipeline stage waits for others takes no processor.
WAITED = "bubble"


@dataclass(frozen=True)
class Calibrated:
    """An agent in a layout: planned and measured processor seconds of a rank by phase, and bytes of memory.

    spread   of the measured seconds of each phase over the rounds: highest over lowest
    """

    layout: str
    agent: str
    planned_s: Mapping[str, float]
    measured_s: Mapping[str, float]
    spread: Mapping[str, float]
    planned_bytes: float
    measured_bytes: float | None

    def error(self, phase: str) -> float:
        """Of the plan, as a share of what was measured."""
        return self.planned_s[phase] / self.measured_s[phase] - 1.0


def calibrate(
    layout: str, planned: Planned, rounds: Sequence[Sequence[MeasuredStep]], cluster: Cluster
) -> list[Calibrated]:
    """Every agent of a layout, planned with the answers and lengths that were measured, on cores of one node."""
    steps = [step for block in rounds for step in block]
    work = work_of_run(planned.config, Lengths(), steps)
    work = {name: replace(each, longest=each.answer_tokens) for name, each in work.items()}  # all are equally long
    here = cluster.model_copy(update={"nodes": 1, "devices_per_node": RankMap.of(planned.config).world_size})
    return [_of_agent(layout, agent, rounds) for agent in make_plan(planned, work, here).agents]


def _of_agent(layout: str, agent: AgentPlan, rounds: Sequence[Sequence[MeasuredStep]]) -> Calibrated:
    by_round = [_measured_s([step.agents[agent.name].cpu_highest_s for step in block]) for block in rounds]
    peaks = [step.agents[agent.name].peak_bytes for block in rounds for step in block]
    above = [max(peak.values()) - peak[START] for peak in peaks if START in peak]
    return Calibrated(
        layout=layout,
        agent=agent.name,
        planned_s={
            phase: sum(s for term, s in terms.items() if term != WAITED) for phase, terms in agent.phases.items()
        },
        measured_s=means(by_round),
        spread={phase: max(r[phase] for r in by_round) / min(r[phase] for r in by_round) for phase in COMPARED},
        planned_bytes=_peak(agent),
        measured_bytes=max(above) if above else None,
    )


def _peak(agent: AgentPlan) -> int:
    actor, work = agent.budget.actor, agent.work
    in_update = work.trained / work.sources / actor.dp / work.updates * work.length
    filled = replace(actor, num_tokens=min(actor.num_tokens, round(in_update)))
    return replace(agent.budget, actor=filled).peak + PROCESS_BYTES


def _measured_s(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By the phases of a plan."""
    found = means(steps)
    other = sum(found.get(phase, 0.0) for phase in OTHER)
    return {phase: other if phase == "other" else found[phase] for phase in COMPARED}


def calibration_table(found: Sequence[Calibrated]) -> list[str]:
    """Planned / measured seconds and the error of every phase, then memory, as lines of Markdown."""
    rows = [(row.layout, row.agent, *(_against(row, phase) for phase in COMPARED), _memory(row)) for row in found]
    return [*markdown_table(("layout", "agent", *COMPARED, "memory, MiB"), rows), "", *_worst(found)]


def _against(row: Calibrated, phase: str) -> str:
    return f"{row.planned_s[phase]:.3f} / {row.measured_s[phase]:.3f} ({row.error(phase):+.0%})"


def _memory(row: Calibrated) -> str:
    planned = row.planned_bytes / 2**20
    if row.measured_bytes is None:
        return f"{planned:.0f} / not told here"
    return f"{planned:.0f} / {row.measured_bytes / 2**20:.0f} ({row.planned_bytes / row.measured_bytes - 1.0:+.0%})"


def _worst(found: Sequence[Calibrated]) -> Iterator[str]:
    """For each phase the mean size of the error, the largest, and how far rounds of one layout are apart."""
    head = ("phase", "mean error", "largest", "rounds apart, mean")
    rows = [
        (
            phase,
            f"{fmean(abs(row.error(phase)) for row in found):.0%}",
            f"{max((row.error(phase) for row in found), key=abs):+.0%}",
            f"{fmean(row.spread[phase] - 1.0 for row in found):.0%}",
        )
        for phase in COMPARED
    ]
    yield from markdown_table(head, rows)
