"""The reasons why a configuration cannot run on a cluster, with the arithmetic, and the nearest thing that works."""

from collections.abc import Iterator, Mapping
from itertools import count, islice

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Planned, Work
from hacpo_lab.planning.plan import Plan, make_plan
from hacpo_lab.planning.search import MOST_GIB, HeldByLayout, Way, Ways, find_ways, grown, lightest
from hacpo_mega.config.checks.checks import batch_problems, named_models
from hacpo_mega.config.checks.device_memory import memory_problems

# Factors by which a larger cluster is tried for the nearest one that works.
GROWTH = (2, 4, 8, 16)
MOST_TRIES = 4  # GiB more, each of which is a search


def refusals(planned: Planned, plan: Plan, work: Mapping[str, Work], ways: Ways) -> list[str]:
    """A line for everything that does not fit, the last one with what would; empty where the configuration can run."""
    problems = list(_problems(planned, plan))
    if problems:
        problems[-1] += f". {_nearest(planned, plan.cluster, work, ways)}"
    return problems


def tried(planned: Planned, work: Mapping[str, Work], cluster: Cluster, ways: Ways) -> Ways:
    """The ways of a search that would not be refused if they were the configuration."""
    return Ways(tuple(way for way in ways.frontier if _works(planned, work, cluster, way)))


def _works(planned: Planned, work: Mapping[str, Work], cluster: Cluster, way: Way) -> bool:
    config = way.applied(planned.config)
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


def _nearest(planned: Planned, cluster: Cluster, work: Mapping[str, Work], ways: Ways) -> str:
    if ways.best is not None:
        best = ways.best
        return f"Here fits: {' '.join(best.overrides())} ({best.num_devices} devices, {best.wall_s:.0f} s a step)"
    held: HeldByLayout = {}
    for factor in GROWTH:
        larger = grown(cluster, factor)
        if (best := tried(planned, work, larger, find_ways(planned, work, larger, held)).best) is not None:
            return f"No layout fits here, but with nodes = {larger.nodes}: {' '.join(best.overrides())}"
    largest = grown(cluster, GROWTH[-1])
    found = [lightest(planned, agent, largest) for agent in planned.config.agents]
    if None in found:
        return f"No memory up to {MOST_GIB} GiB is enough either, whatever the share of the engines"
    most = max(found, key=lambda least: least.memory_gib)
    return (
        f"No number of devices is enough: {most.agent.name} needs {most.memory_gib} GiB at tp {most.agent.tp}, cp "
        f"{most.agent.cp}, {f'ep {most.agent.ep}, ' if most.agent.ep > 1 else ''}pp {most.agent.pp}, recompute full, "
        f"{most.num_devices} devices{_of_all(planned, largest, work, most.memory_gib)}"
    )


def _of_all(planned: Planned, cluster: Cluster, work: Mapping[str, Work], least: int) -> str:
    """The memory of a device with which all agents fit side by side, from what the largest needs alone on.

    None of the cluster's own memory does.
    """
    for gib in islice(count(max(least, int(cluster.device.memory_gib) + 1)), MOST_TRIES):
        sized = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_gib": float(gib)})})
        config = planned.config.model_copy(update={"device_memory_gib": float(gib)})
        changed = Planned(config, planned.models)
        if tried(changed, work, sized, find_ways(changed, work, sized)).best is not None:
            return f". Nearest: device.memory_gib = {gib} with nodes = {cluster.nodes}"
    return ", and all agents together more"
