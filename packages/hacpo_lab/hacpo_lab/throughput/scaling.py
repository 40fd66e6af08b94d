"""The same step with other numbers of agents and lanes, to see which costs of a rank grow with them.

A lane has the same prompts and answers at every size, so a rank has the same work, except the part that depends on the
number of agents. Processes share cores and wait for each other, so work is measured in processor seconds of a rank,
over all its threads, and not by a clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hacpo_lab.throughput.bench import Block
from hacpo_lab.throughput.measure import MeasuredStep, means
from hacpo_lab.throughput.workload import Workload
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.tables.methods import METHODS

# (agents, lanes), each held against (2, 1).
SIZES = ((2, 1), (2, 2), (2, 4), (1, 1), (3, 1))
PHASES = ("roll_out", "judge", "score", "exchange", "learn", "publish", "write")


def scaling_blocks(config: Config, workload: Workload) -> list[Block]:
    """A block per size; the first agent of the file is the first in each. ValueError for a method that needs peers."""
    if METHODS[config.algorithm.method].needs_peers:
        raise ValueError(
            f"--scaling takes a step of one agent, too, and algorithm.method={config.algorithm.method} is nothing for "
            "one alone. Nearest: algorithm.method=hacpo"
        )
    return [Block(f"{n} agents, {lanes} lanes", _sized(config, n, lanes), workload) for n, lanes in SIZES]


def _sized(config: Config, num_agents: int, lanes: int) -> Config:
    """The configuration with so many agents and lanes, and as many prompts per lane as before."""
    training = config.training
    of_step = {
        key: getattr(training, key) // config.lanes * lanes for key in ("prompts_per_step", "prompts_per_update")
    }
    agents = tuple(_agent(config.agents, number) for number in range(num_agents))
    return config.model_copy(update={"agents": agents, "lanes": lanes, "training": training.model_copy(update=of_step)})


def _agent(agents: Sequence[AgentConfig], number: int) -> AgentConfig:
    """Agent `number` of a size: the agents of the file, then copies of them under other names."""
    copy, index = divmod(number, len(agents))
    agent = agents[index]
    return agent.model_copy(update={"name": f"{agent.name}_{copy + 1}"}) if copy else agent


def scaling_rows(
    blocks: Sequence[Block], found: Mapping[str, Sequence[Sequence[MeasuredStep]]]
) -> list[dict[str, Any]]:
    """A row per size, of the first agent: processor seconds of a rank by phase, and bytes of a leader or of the job."""
    rows = []
    for block in blocks:
        steps = [step for measured in found[block.name] for step in measured]
        ranks = RankMap.of(block.config)
        name = block.config.agents[0].name
        cpu_s = means([step.agents[name].cpu_s for step in steps])
        sent = means([step.agents[name].sent_bytes for step in steps])
        leaders = block.config.lanes * block.config.agents[0].cells_per_lane
        of_job = [step.agents[agent].sent_bytes.get("write/job", 0.0) for step in steps for agent in step.agents]
        work = sum(agent.trained_answers for step in steps for agent in step.agents.values())
        spent = sum(_core_seconds(step, ranks) for step in steps)
        rows.append(
            {
                "agents": len(block.config.agents),
                "lanes": block.config.lanes,
                "ranks": ranks.world_size,
                "trained_per_core_s": work / spent,
                "cpu_s": {phase: cpu_s.get(phase, 0.0) for phase in PHASES},
                "lane_bytes": sent.get("exchange/lane", 0.0) / leaders,
                "capability_bytes": sent.get("exchange/row", 0.0) / leaders,
                "metrics_bytes": sum(of_job) / len(steps),
                "published_bytes": sent.get("publish/engine", 0.0) / (leaders * block.config.agents[0].cell_size),
            }
        )
    return rows


def _core_seconds(step: MeasuredStep, ranks: RankMap) -> float:
    """Processor seconds of all ranks."""
    of_agent = {shape.name: ranks.agent_world_size(number) for number, shape in enumerate(ranks.agents)}
    return sum(of_agent[name] * sum(agent.cpu_s.values()) for name, agent in step.agents.items())
