"""The layouts that let all agents finish together: every tp, cp, ep, pp, engine and number of cells models can have.

For every number of lanes each agent's layouts are judged for themselves, then one agent after the other is put on the
devices that are left; of two ways to use as many devices, one that is nowhere faster is dropped. More devices or
memory only add ways, so the best never gets slower.
"""

import itertools
import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Planned, Work
from hacpo_lab.planning.plan import AgentPlan, plan_agent, stretches, wall_seconds
from hacpo_lab.planning.traffic import Spread, spread_of
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import AgentConfig, Config
from hacpo_mega.config.checks.device_memory import agent_budget
from hacpo_mega.memory.actor_bytes import device_of
from hacpo_mega.memory.budget import GIB, Budget
from hacpo_mega.memory.weight_numbers import num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import FIRST_STAGE, LAST_STAGE, Layout, block_cells, layout_problems

MAX_STAGES = 16
# Beyond it nobody is told that more memory would do.
MOST_GIB = 1024


@dataclass(frozen=True)
class Choice:
    """An agent in one layout: the plan of it, its seconds between meetings, and its engine's share if another's."""

    plan: AgentPlan
    stretches_s: tuple[float, ...]
    engine_share: float | None = None


@dataclass(frozen=True)
class Way:
    """All agents on the devices."""

    lanes: int
    choices: tuple[Choice, ...]

    @property
    def num_devices(self) -> int:
        """Devices that it uses."""
        return sum(choice.plan.num_devices for choice in self.choices)

    @property
    def wall_s(self) -> float:
        """Seconds of a step."""
        return wall_seconds([choice.stretches_s for choice in self.choices])

    def idle_share(self, choice: Choice) -> float:
        """The share of a step that an agent waits for others."""
        return max(0.0, 1.0 - sum(choice.stretches_s) / self.wall_s)

    def overrides(self) -> list[str]:
        """The overrides, as key=value, that make a configuration this one."""
        keys = ("tp", "cp", "ep", "pp", "cells_per_lane", "engine_tp")
        own = [
            f"agents.{choice.plan.name}.{key}={getattr(choice.plan.agent, key)}"
            for choice in self.choices
            for key in keys
            if key != "ep" or choice.plan.budget.actor.architecture.has_experts
        ]
        shares = [
            f"agents.{choice.plan.name}.vllm.gpu_memory_utilization={choice.engine_share:g}"
            for choice in self.choices
            if choice.engine_share is not None
        ]
        return [f"lanes={self.lanes}", *own, *shares]

    def applied(self, config: Config) -> Config:
        """The configuration with all of it."""
        return config.model_copy(
            update={"lanes": self.lanes, "agents": tuple(choice.plan.agent for choice in self.choices)}
        )


@dataclass(frozen=True)
class Ways:
    """The results of a search: the fastest way for every number of devices where more make it faster, best last."""

    frontier: tuple[Way, ...]

    @property
    def best(self) -> Way | None:
        """The fastest; of equally fast ones that with the fewest devices."""
        return self.frontier[-1] if self.frontier else None


# Memory that an agent takes of a device, and its engine's share of the device where it is not the configuration's.
Held = tuple[Budget, float | None]
# By agent, layout and number of cells; None where a device cannot hold it. More nodes change none.
HeldByLayout = dict[tuple[Any, ...], Held | None]


def find_ways(planned: Planned, work: Mapping[str, Work], cluster: Cluster, held: HeldByLayout | None = None) -> Ways:
    """All agents of the configuration on at most the cluster's devices. Empty where no layout of some agent fits.

    `held` carries budgets from one search to the next, which has more nodes of the same devices.
    """
    search = _Search(planned, work, cluster, {} if held is None else held)
    found: list[Way] = []
    for lanes in _divisors(planned.config.prompts_per_update):
        if lanes <= cluster.num_devices:
            found += search.ways_of(lanes)
    frontier: list[Way] = []
    for way in sorted(found, key=lambda way: (way.num_devices, way.wall_s, way.lanes)):
        if not frontier or way.wall_s < frontier[-1].wall_s:
            frontier.append(way)
    return Ways(tuple(frontier))


def held_by_a_device(config: Config, agent: AgentConfig, model: Architecture, on_cpu: bool) -> Held | None:
    """The agent as it is or, where a device cannot hold it, with another share for its engine; None if none fits.

    The largest share that fits, or the least that the engine can work in.
    """
    budget = agent_budget(config, agent, model, on_cpu=on_cpu)
    if budget.fits() and not budget.engine_is_too_small:
        return budget, None
    given, memory = budget.engine.memory_share, budget.capacity
    if given is None or memory is None:
        return None
    awake = [size for phase, size in budget.phases.items() if "engine awake" in budget.parts_of(phase)]
    most = int(100 * (given - max(awake, default=0) / memory + 1)) / 100
    least = int(100 * budget.engine_needs / memory + 1) / 100
    share = least if budget.engine_is_too_small else most
    if not least <= share <= 1:
        return None
    changed = agent_budget(config, _with_share(agent, share), model, on_cpu=on_cpu)
    return (changed, share) if changed.fits() and not changed.engine_is_too_small else None


def _with_share(agent: AgentConfig, share: float | None) -> AgentConfig:
    """The agent with another share of the device for its engine; None: as it is."""
    if share is None:
        return agent
    return agent.model_copy(update={"vllm": {**agent.vllm, "gpu_memory_utilization": share}})


@dataclass
class _Search:
    """One search. Layouts and their budgets, which are of all cells, however they lie in lanes, are made once."""

    planned: Planned
    work: Mapping[str, Work]
    cluster: Cluster
    held: HeldByLayout
    layouts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def ways_of(self, lanes: int) -> list[Way]:
        """Every way with so many lanes that is not beaten by another one on as many devices."""
        config = self.planned.config.model_copy(update={"lanes": lanes})
        partial: list[tuple[Choice, ...]] = [()]
        for agent in config.agents:
            choices = [choices[0] for choices in _undominated([(choice,) for choice in self._choices(config, agent)])]
            partial = [
                (*before, choice) for before in partial for choice in choices if _has_room(before, choice, self.cluster)
            ]
            partial = _undominated(partial)
        return [Way(lanes, choices) for choices in partial]

    def _choices(self, config: Config, agent: AgentConfig) -> Iterator[Choice]:
        """Every layout of an agent that its model can have and a device can hold, on the cluster alone."""
        cluster = self.cluster
        if agent.name not in self.layouts:
            self.layouts[agent.name] = list(_layouts(self.planned, agent, cluster))
        for changes in self.layouts[agent.name]:
            room = cluster.num_devices // (config.lanes * changes["tp"] * changes["cp"] * changes["pp"])
            block = block_cells(changes["ep"], changes["tp"], changes["cp"])
            for cells in _divisors(config.prompts_per_update // config.lanes):
                if cells > room:
                    break
                if config.lanes * cells % block:
                    continue
                seated = agent.model_copy(update={**changes, "cells_per_lane": cells})
                if (held := self._held(config, seated)) is not None:
                    budget, share = held
                    seated = _with_share(seated, share)
                    plan = plan_agent(
                        config, seated, budget, self.work[agent.name], cluster, _spread_alone(config, seated, cluster)
                    )
                    yield Choice(plan, stretches(plan.phases_s), share)

    def _held(self, config: Config, agent: AgentConfig) -> Held | None:
        layout = (agent.tp, agent.cp, agent.ep, agent.pp, agent.engine_tp)
        key = (agent.name, *layout, config.lanes * agent.cells_per_lane)
        if key not in self.held:
            self.held[key] = held_by_a_device(config, agent, self.planned.models[agent.name], self.cluster.on_cpu)
        return self.held[key]


def _spread_alone(config: Config, agent: AgentConfig, cluster: Cluster) -> Spread:
    """Where the groups of an agent lie that begins at a node."""
    alone = config.model_copy(update={"agents": (agent,), "placement": "split"})
    return spread_of(RankMap.of(alone), 0, cluster.devices_per_node)


def _layouts(planned: Planned, agent: AgentConfig, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """tp, cp, ep, pp and engine_tp of a model (models/sharding/layout.py), with the ranks of tp x cp inside a node."""
    model, config = planned.models[agent.name], planned.config
    is_even = FIRST_STAGE not in agent.megatron and LAST_STAGE not in agent.megatron
    node, tokens = cluster.devices_per_node, config.training.max_tokens_per_microbatch
    shares = [(tp, cp) for tp in _divisors(node) for cp in _divisors(node // tp) if tokens % (tp * cp) == 0]
    stages = range(1, MAX_STAGES + 1) if is_even else (agent.pp,)
    inside = _fits_a_node(model, cluster, agent.dtype)
    for (tp, cp), pp in itertools.product(shares, stages):
        sizes = [n for n in _divisors(tp * cp * pp) if node % n == 0 or (not inside and n % node == 0)]
        most = cluster.num_devices // (tp * cp * pp)
        for engine_tp, ep in itertools.product(sizes, _sharing(tp * cp, most) if model.has_experts else (1,)):
            cells = block_cells(ep, tp, cp)
            if not layout_problems(model, Layout.of(tp, pp, agent.megatron, engine_tp, cp, ep, cells=cells)):
                yield {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "engine_tp": engine_tp}


def _sharing(ranks: int, cells: int) -> list[int]:
    """Every ep of `ranks` in a cell, or of all of these in 2, 4, 8 ... of `cells`."""
    return _divisors(ranks) + [ranks << n for n in range(1, cells.bit_length())]


def _fits_a_node(model: Architecture, cluster: Cluster, dtype: str | None) -> bool:
    """Tells whether a node's devices hold an engine's weights in half of their memory; else whole nodes do."""
    number = device_of(dtype, on_cpu=cluster.on_cpu).itemsize
    return num_weights(model, Layout()) * number <= cluster.devices_per_node * cluster.device.memory_gib * GIB / 2


def _has_room(before: Sequence[Choice], choice: Choice, cluster: Cluster) -> bool:
    """Tells whether the choice fits behind the others, with its groups where they were when it was judged for itself.

    Alone it began at a node: an agent of at most a node must not straddle two, a larger one begins with a whole cell.
    """
    first, size = sum(s.plan.num_devices for s in before), choice.plan.num_devices
    node, cell = cluster.devices_per_node, choice.plan.agent.cell_size
    stays = first % node + size <= node if size <= node else first % node == 0 or node % cell == 0 == first % cell
    return first + size <= cluster.num_devices and stays


def _undominated(ways: list[tuple[Choice, ...]]) -> list[tuple[Choice, ...]]:
    """The ways that, among those with as many devices, are faster than each other one between some two meetings."""
    kept: dict[int, list[tuple[tuple[float, ...], tuple[Choice, ...]]]] = {}
    slowest = [(tuple(map(max, zip(*(choice.stretches_s for choice in choices)))), choices) for choices in ways]
    for stretches_s, choices in sorted(slowest, key=lambda pair: pair[0]):
        group = kept.setdefault(sum(choice.plan.num_devices for choice in choices), [])
        if not any(all(map(operator.le, other, stretches_s)) for other, _ in group):
            group.append((stretches_s, choices))
    return [choices for group in kept.values() for _, choices in group]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def grown(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with `factor` times as many nodes."""
    return cluster.model_copy(update={"nodes": cluster.nodes * factor})


@dataclass(frozen=True)
class Lightest:
    """The layout of an agent that needs the least memory of a device, whole GiB, with everything computed again."""

    agent: AgentConfig
    memory_gib: int
    num_devices: int


def lightest(planned: Planned, agent: AgentConfig, cluster: Cluster) -> Lightest | None:
    """The lightest layout of a model on the cluster's devices; None where no memory up to MOST_GIB is enough in any."""
    config = planned.config.model_copy(update={"lanes": 1})
    found: list[Lightest] = []
    for changes in _layouts(planned, agent, cluster):
        size = changes["tp"] * changes["cp"] * changes["pp"]
        block = block_cells(changes["ep"], changes["tp"], changes["cp"])
        most = cluster.num_devices // size
        if fitting := [n for n in _divisors(config.prompts_per_update) if n <= most and n % block == 0]:
            seated = agent.model_copy(update={**changes, "cells_per_lane": fitting[-1], "recompute": "full"})
            bound = min((least.memory_gib for least in found), default=MOST_GIB)
            if (needed := _least_gib(config, seated, planned.models[agent.name], bound, cluster.on_cpu)) is not None:
                found.append(Lightest(seated, needed, fitting[-1] * size))
    return min(found, key=lambda least: (least.memory_gib, least.num_devices), default=None)


def _least_gib(config: Config, agent: AgentConfig, model: Architecture, most: int, on_cpu: bool) -> int | None:
    """Whole GiB of a device that holds the agent; None if `most` are too few."""

    def holds(gib: int) -> bool:
        sized = config.model_copy(update={"device_memory_gib": float(gib)})
        return held_by_a_device(sized, agent, model, on_cpu) is not None

    return 1 + bisect_left(range(1, most), True, key=holds) if holds(most) else None
