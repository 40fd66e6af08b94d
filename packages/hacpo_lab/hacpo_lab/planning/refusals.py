"""The reasons why a configuration cannot run on a cluster, with the arithmetic, and the nearest layout that can."""

from collections.abc import Iterator, Mapping
from itertools import count, islice

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Planned, Work
from hacpo_lab.planning.plan import Plan, make_plan
from hacpo_lab.planning.search import (
    MOST_GIB,
    BudgetCache,
    JobLayout,
    JobLayouts,
    find_layouts,
    lightest,
    with_more_nodes,
)
from hacpo_mega.config.checks.checks import batch_problems, named_models
from hacpo_mega.config.checks.device_memory import memory_problems

GROWTH = (2, 4, 8, 16)  # factors of nodes, tried in turn to find the nearest cluster that is enough
MOST_TRIES = 4  # steps of 1 GiB of memory, each of which is a search


def refusals(planned: Planned, plan: Plan, work: Mapping[str, Work], layouts: JobLayouts) -> list[str]:
    """A line for every reason, the last one with advice; empty where the configuration can run."""
    problems = list(_problems(planned, plan))
    if problems:
        problems[-1] += f". {_nearest(planned, plan.cluster, work, layouts)}"
    return problems


def runnable(planned: Planned, work: Mapping[str, Work], cluster: Cluster, layouts: JobLayouts) -> JobLayouts:
    """The layouts of a search that would not be refused if they were the configuration's."""
    return JobLayouts(tuple(layout for layout in layouts.frontier if _runs(planned, work, cluster, layout)))


def _runs(planned: Planned, work: Mapping[str, Work], cluster: Cluster, layout: JobLayout) -> bool:
    config = layout.applied(planned.config)
    if batch_problems(config) or named_models(config)[1]:
        return False
    changed = Planned(config, planned.models)
    return not any(_problems(changed, make_plan(changed, work, cluster)))


def _problems(planned: Planned, plan: Plan) -> Iterator[str]:
    cluster, config = plan.cluster, planned.config
    if plan.ranks.world_size > cluster.num_devices:
        yield (
            f"{plan.ranks.world_size} processes ({plan.ranks.arithmetic()}) need a device each, and the cluster has "
            f"{cluster.nodes} nodes x {cluster.devices_per_node} = {cluster.num_devices}"
        )
    for agent in config.agents:
        for problem in memory_problems(config, agent, planned.models[agent.name], on_cpu=cluster.on_cpu, advises=False):
            yield f"agents.{agent.name}: {problem}"
    if config.checkpoint.asynchronous and (host := plan.host_gib()) > cluster.host.memory_gib:
        yield (
            f"checkpoint.asynchronous copies {host:.1f} GiB to the host of a node, which has "
            f"{cluster.host.memory_gib:g} (host.memory_gib); false writes without a copy"
        )


def _nearest(planned: Planned, cluster: Cluster, work: Mapping[str, Work], layouts: JobLayouts) -> str:
    if layouts.best is not None:
        best = layouts.best
        return f"Here fits: {' '.join(best.overrides())} ({best.num_devices} devices, {best.wall_s:.0f} s a step)"
    budgets: BudgetCache = {}
    for factor in GROWTH:
        larger = with_more_nodes(cluster, factor)
        if (best := runnable(planned, work, larger, find_layouts(planned, work, larger, budgets)).best) is not None:
            return f"No layout fits here, but with nodes = {larger.nodes}: {' '.join(best.overrides())}"
    largest = with_more_nodes(cluster, GROWTH[-1])
    found = [lightest(planned, agent, largest) for agent in planned.config.agents]
    if None in found:
        return f"No memory up to {MOST_GIB} GiB is enough either, whatever the share of the engines"
    most = max(found, key=lambda least: least.memory_gib)
    return (
        f"No number of devices is enough: {most.agent.name} needs {most.memory_gib} GiB at tp {most.agent.tp}, cp "
        f"{most.agent.cp}, {f'ep {most.agent.ep}, ' if most.agent.ep > 1 else ''}pp {most.agent.pp}, recompute full, "
        f"{most.num_devices} devices{_advice_for_all(planned, largest, work, most.memory_gib)}"
    )


def _advice_for_all(planned: Planned, cluster: Cluster, work: Mapping[str, Work], least: int) -> str:
    """The end of the advice: the memory of a device with which all agents fit side by side.

    Tried from `least` on, which the largest agent needs alone, above the cluster's own memory, which is too little.
    """
    for gib in islice(count(max(least, int(cluster.device.memory_gib) + 1)), MOST_TRIES):
        sized = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_gib": float(gib)})})
        config = planned.config.model_copy(update={"device_memory_gib": float(gib)})
        changed = Planned(config, planned.models)
        if runnable(changed, work, sized, find_layouts(changed, work, sized)).best is not None:
            return f". Nearest: device.memory_gib = {gib} with nodes = {cluster.nodes}"
    return ", and all agents together more"
