"""A plan: every agent's memory, messages and seconds in a layout on a cluster, and who waits for whom in a step.

Agents meet in a step (hacpo_mega/trainer/trainer.py) when answers are judged, when they are scored, when they are
exchanged, and at its end. Each time all wait for the slowest: a step lasts the sum of these, and an agent waits for as
much of the step as it is not busy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Planned, Work
from hacpo_lab.planning.seconds import Demand, Terms, phase_seconds
from hacpo_lab.planning.traffic import Message, Spread, spread_of
from hacpo_mega.checkpoint.disk_space import CHECKPOINT_BYTES_PER_PARAMETER
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.memory.actor_bytes import trained_parts
from hacpo_mega.memory.budget import GIB, Budget
from hacpo_mega.models.sharding.layout import Layout

# Phases between two meetings.
STRETCHES = (("roll_out", "judge"), ("score",), ("exchange",), ("learn", "publish", "other"))


@dataclass(frozen=True)
class AgentPlan:
    """The plan of one agent. `phases` are seconds by phase and term, such as compute, memory or link."""

    name: str
    agent: AgentConfig
    budget: Budget
    work: Work
    messages: tuple[Message, ...]
    phases: Mapping[str, Terms]
    num_devices: int
    answers_at_once: float

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of every phase."""
        return {phase: sum(terms.values()) for phase, terms in self.phases.items()}

    @property
    def stretches_s(self) -> tuple[float, ...]:
        """Seconds of work between two meetings with the other agents."""
        return stretches(self.phases_s)

    @property
    def busy_s(self) -> float:
        """Seconds of work in a step."""
        return sum(self.phases_s.values())

    @property
    def bound_by(self) -> tuple[str, str, float]:
        """(phase, term, share of the agent's seconds) of the largest term."""
        seconds, phase, term = max(
            (s, phase, term) for phase, terms in self.phases.items() for term, s in terms.items()
        )
        return phase, term, seconds / self.busy_s


@dataclass(frozen=True)
class Plan:
    """All agents on a cluster."""

    cluster: Cluster
    ranks: RankMap
    agents: tuple[AgentPlan, ...]

    @property
    def wall_s(self) -> float:
        """Seconds of a step."""
        return wall_seconds([agent.stretches_s for agent in self.agents])

    def idle_share(self, agent: AgentPlan) -> float:
        """The share of a step that an agent waits for others."""
        return max(0.0, 1.0 - agent.busy_s / self.wall_s)  # of the slowest one it is 0 up to rounding

    def host_gib(self) -> float:
        """GiB of a node's host for the copy from which an asynchronous checkpoint is written.

        The node is one whose devices are all of the agent that needs most for each.
        """
        bytes_per_device = [
            CHECKPOINT_BYTES_PER_PARAMETER
            * sum(trained_parts(replace(agent.budget.actor, layout=Layout())))
            / agent.num_devices
            for agent in self.agents
        ]
        return max(bytes_per_device) * self.cluster.devices_per_node / GIB


def stretches(phases_s: Mapping[str, float]) -> tuple[float, ...]:
    """Seconds between two meetings, from those of the phases."""
    return tuple(sum(phases_s[phase] for phase in phases) for phases in STRETCHES)


def wall_seconds(agents: Sequence[Sequence[float]]) -> float:
    """Seconds of a step whose agents have these stretches: the sum of the slowest of each."""
    return sum(max(seconds) for seconds in zip(*agents, strict=True))


def plan_agent(
    config: Config, agent: AgentConfig, budget: Budget, work: Work, cluster: Cluster, spread: Spread
) -> AgentPlan:
    """The plan of one agent with its memory `budget`, and the `spread` of its groups over nodes."""
    requests = agent.vllm.get("max_num_seqs", cluster.device.max_requests)
    demand = Demand(budget, work, config.lanes, spread, config.reward.num_workers, requests)
    return AgentPlan(
        name=agent.name,
        agent=agent,
        budget=budget,
        work=work,
        messages=demand.messages(),
        phases=phase_seconds(demand, cluster),
        num_devices=config.lanes * agent.cells_per_lane * agent.cell_size,
        answers_at_once=demand.at_once,
    )


def make_plan(planned: Planned, work: Mapping[str, Work], cluster: Cluster) -> Plan:
    """The plan of a configuration as it is; `work` by agent. Elsewhere: whether it fits (refusals.py)."""
    config, ranks = planned.config, RankMap.of(planned.config)
    agents = tuple(
        plan_agent(
            config,
            agent,
            agent_budget(config, agent, planned.models[agent.name], on_cpu=cluster.on_cpu),
            work[agent.name],
            cluster,
            spread_of(ranks, index, cluster.devices_per_node),
        )
        for index, agent in enumerate(config.agents)
    )
    return Plan(cluster, ranks, agents)
