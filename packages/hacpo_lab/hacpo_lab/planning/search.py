"""A search for the layouts in which all agents finish together, over tp, cp, ep, pp, engine_tp, cells and lanes.

For every number of lanes the layouts of each agent are planned separately; then one agent after the other is put on
the devices that are left. A candidate that is nowhere faster than another one on as many devices is dropped. More
devices or memory only add candidates, so the best never gets slower.
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
MOST_GIB = 1024  # of a device: more is not advised


@dataclass(frozen=True)
class Choice:
    """An agent in one layout: its plan, its seconds between meetings, and its engine's memory share if changed."""

    plan: AgentPlan
    stretches_s: tuple[float, ...]
    engine_share: float | None = None


@dataclass(frozen=True)
class JobLayout:
    """A layout of every agent, side by side on the devices."""

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
        """The configuration with this layout."""
        return config.model_copy(
            update={"lanes": self.lanes, "agents": tuple(choice.plan.agent for choice in self.choices)}
        )


@dataclass(frozen=True)
class JobLayouts:
    """The results of a search: the fastest layout for every number of devices that is worth its devices, best last."""

    frontier: tuple[JobLayout, ...]

    @property
    def best(self) -> JobLayout | None:
        """The fastest; of equally fast ones that with the fewest devices."""
        return self.frontier[-1] if self.frontier else None


# Memory that an agent takes of a device, and its engine's share of the device where it is not the configuration's.
FittedBudget = tuple[Budget, float | None]
# By agent, layout and number of cells; None where a device cannot hold it. The number of nodes changes none.
BudgetCache = dict[tuple[Any, ...], FittedBudget | None]


def find_layouts(
    planned: Planned, work: Mapping[str, Work], cluster: Cluster, budgets: BudgetCache | None = None
) -> JobLayouts:
    """Layouts of all agents on at most the cluster's devices. Empty where no layout of some agent fits.

    `budgets` carries them from one search to the next, on more nodes of the same devices.
    """
    search = _Search(planned, work, cluster, {} if budgets is None else budgets)
    found: list[JobLayout] = []
    for lanes in _divisors(planned.config.prompts_per_update):
        if lanes <= cluster.num_devices:
            found += search.layouts_with(lanes)
    frontier: list[JobLayout] = []
    for layout in sorted(found, key=lambda layout: (layout.num_devices, layout.wall_s, layout.lanes)):
        if not frontier or layout.wall_s < frontier[-1].wall_s:
            frontier.append(layout)
    return JobLayouts(tuple(frontier))


def fitted_budget(config: Config, agent: AgentConfig, model: Architecture, on_cpu: bool) -> FittedBudget | None:
    """The agent's budget or, where a device cannot hold it, that with another memory share for its engine.

    The share is the largest that fits, or the least that the engine can work in. None if no share fits.
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
    """One search. Layouts and budgets are made once: they depend on the number of cells, not on that of lanes."""

    planned: Planned
    work: Mapping[str, Work]
    cluster: Cluster
    budgets: BudgetCache
    layouts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def layouts_with(self, lanes: int) -> list[JobLayout]:
        """Every layout with so many lanes that no other one on as many devices dominates."""
        config = self.planned.config.model_copy(update={"lanes": lanes})
        partial: list[tuple[Choice, ...]] = [()]
        for agent in config.agents:
            choices = [choices[0] for choices in _undominated([(choice,) for choice in self._choices(config, agent)])]
            partial = [
                (*before, choice) for before in partial for choice in choices if _has_room(before, choice, self.cluster)
            ]
            partial = _undominated(partial)
        return [JobLayout(lanes, choices) for choices in partial]

    def _choices(self, config: Config, agent: AgentConfig) -> Iterator[Choice]:
        """Every layout of an agent that its model allows and a device can hold, if it had the cluster to itself."""
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
                placed = agent.model_copy(update={**changes, "cells_per_lane": cells})
                if (fitted := self._fitted(config, placed)) is not None:
                    budget, share = fitted
                    placed = _with_share(placed, share)
                    plan = plan_agent(
                        config, placed, budget, self.work[agent.name], cluster, _spread_alone(config, placed, cluster)
                    )
                    yield Choice(plan, stretches(plan.phases_s), share)

    def _fitted(self, config: Config, agent: AgentConfig) -> FittedBudget | None:
        layout = (agent.tp, agent.cp, agent.ep, agent.pp, agent.engine_tp)
        key = (agent.name, *layout, config.lanes * agent.cells_per_lane)
        if key not in self.budgets:
            self.budgets[key] = fitted_budget(config, agent, self.planned.models[agent.name], self.cluster.on_cpu)
        return self.budgets[key]


def _spread_alone(config: Config, agent: AgentConfig, cluster: Cluster) -> Spread:
    """The spread of an agent whose first rank is the first of a node."""
    alone = config.model_copy(update={"agents": (agent,), "placement": "split"})
    return spread_of(RankMap.of(alone), 0, cluster.devices_per_node)


def _layouts(planned: Planned, agent: AgentConfig, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Every tp, cp, ep, pp and engine_tp that a model allows, with the ranks of tp x cp inside a node."""
    model, config = planned.models[agent.name], planned.config
    is_even = FIRST_STAGE not in agent.megatron and LAST_STAGE not in agent.megatron
    node, tokens = cluster.devices_per_node, config.training.max_tokens_per_microbatch
    shares = [(tp, cp) for tp in _divisors(node) for cp in _divisors(node // tp) if tokens % (tp * cp) == 0]
    stages = range(1, MAX_STAGES + 1) if is_even else (agent.pp,)
    inside = _fits_a_node(model, cluster, agent.dtype)
    for (tp, cp), pp in itertools.product(shares, stages):
        sizes = [n for n in _divisors(tp * cp * pp) if node % n == 0 or (not inside and n % node == 0)]
        most = cluster.num_devices // (tp * cp * pp)
        for engine_tp, ep in itertools.product(sizes, _ep_sizes(tp * cp, most) if model.has_experts else (1,)):
            cells = block_cells(ep, tp, cp)
            if not layout_problems(model, Layout.of(tp, pp, agent.megatron, engine_tp, cp, ep, cells=cells)):
                yield {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "engine_tp": engine_tp}


def _ep_sizes(ranks: int, cells: int) -> list[int]:
    """Every ep inside the `ranks` of a cell, or over all ranks of 2, 4, 8 ... cells, at most `cells`."""
    return _divisors(ranks) + [ranks << n for n in range(1, cells.bit_length())]


def _fits_a_node(model: Architecture, cluster: Cluster, dtype: str | None) -> bool:
    """Tells whether a node's devices hold an engine's weights in half of their memory; else an engine has nodes."""
    number = device_of(dtype, on_cpu=cluster.on_cpu).number
    return num_weights(model, Layout()) * number <= cluster.devices_per_node * cluster.device.memory_gib * GIB / 2


def _has_room(before: Sequence[Choice], choice: Choice, cluster: Cluster) -> bool:
    """Tells whether the choice fits behind the others, with its groups inside nodes as in its plan.

    In the plan it began at a node: so an agent of at most a node must not straddle two, and in a larger one no cell
    may.
    """
    first, size = sum(s.plan.num_devices for s in before), choice.plan.num_devices
    node, cell = cluster.devices_per_node, choice.plan.agent.cell_size
    has_whole_cells = first % node == 0 or (node % cell == 0 and first % cell == 0)
    is_as_planned = first % node + size <= node if size <= node else has_whole_cells
    return first + size <= cluster.num_devices and is_as_planned


def _undominated(candidates: list[tuple[Choice, ...]]) -> list[tuple[Choice, ...]]:
    """The candidates that are faster than any other on as many devices between some two meetings."""
    kept: dict[int, list[tuple[tuple[float, ...], tuple[Choice, ...]]]] = {}
    slowest = [(tuple(map(max, zip(*(choice.stretches_s for choice in choices)))), choices) for choices in candidates]
    for stretches_s, choices in sorted(slowest, key=lambda pair: pair[0]):
        group = kept.setdefault(sum(choice.plan.num_devices for choice in choices), [])
        if not any(all(map(operator.le, other, stretches_s)) for other, _ in group):
            group.append((stretches_s, choices))
    return [choices for group in kept.values() for _, choices in group]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def with_more_nodes(cluster: Cluster, factor: int) -> Cluster:
    """The cluster with `factor` times as many nodes."""
    return cluster.model_copy(update={"nodes": cluster.nodes * factor})


@dataclass(frozen=True)
class Lightest:
    """The layout of an agent that needs the least memory of a device, in whole GiB, with full recomputation."""

    agent: AgentConfig
    memory_gib: int
    num_devices: int


def lightest(planned: Planned, agent: AgentConfig, cluster: Cluster) -> Lightest | None:
    """The lightest layout of an agent on the cluster's devices; None where all need more than MOST_GIB."""
    config = planned.config.model_copy(update={"lanes": 1})
    found: list[Lightest] = []
    for changes in _layouts(planned, agent, cluster):
        size = changes["tp"] * changes["cp"] * changes["pp"]
        block = block_cells(changes["ep"], changes["tp"], changes["cp"])
        most = cluster.num_devices // size
        if fitting := [n for n in _divisors(config.prompts_per_update) if n <= most and n % block == 0]:
            placed = agent.model_copy(update={**changes, "cells_per_lane": fitting[-1], "recompute": "full"})
            bound = min((least.memory_gib for least in found), default=MOST_GIB)
            if (needed := _least_gib(config, placed, planned.models[agent.name], bound, cluster.on_cpu)) is not None:
                found.append(Lightest(placed, needed, fitting[-1] * size))
    return min(found, key=lambda least: (least.memory_gib, least.num_devices), default=None)


def _least_gib(config: Config, agent: AgentConfig, model: Architecture, most: int, on_cpu: bool) -> int | None:
    """The fewest whole GiB of a device that hold the agent; None if `most` are too few."""

    def holds(gib: int) -> bool:
        sized = config.model_copy(update={"device_memory_gib": float(gib)})
        return fitted_budget(sized, agent, model, on_cpu) is not None

    return 1 + bisect_left(range(1, most), True, key=holds) if holds(most) else None
