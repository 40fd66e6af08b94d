"""What keeps a configuration from running on a cluster, with the arithmetic, and the nearest thing that works."""

from collections.abc import Iterator, Mapping

from hacpo_mega.config.device_memory import memory_problems
from hacpo_mega.lab.planning.cluster_file import Cluster
from hacpo_mega.lab.planning.configuration import Planned
from hacpo_mega.lab.planning.plan import Plan
from hacpo_mega.lab.planning.search import MOST_GIB, Ways, find_ways, grown, lightest
from hacpo_mega.lab.planning.work import Work

# How much larger a cluster is looked at for the nearest one that works.
GROWTH = (2, 4, 8, 16)


def refusals(planned: Planned, plan: Plan, work: Mapping[str, Work], ways: Ways) -> list[str]:
    """A line for everything that does not fit, the last one with what would; empty where the configuration can run."""
    problems = list(_problems(planned, plan))
    if problems:
        problems[-1] += f". {_nearest(planned, plan.cluster, work, ways)}"
    return problems


def _problems(planned: Planned, plan: Plan) -> Iterator[str]:
    cluster, config = plan.cluster, planned.config
    if plan.ranks.world_size > cluster.num_devices:
        yield (
            f"{plan.ranks.world_size} processes ({plan.ranks.arithmetic()}) need a device each, and the cluster has "
            f"{cluster.nodes} nodes x {cluster.devices_per_node} = {cluster.num_devices}"
        )
    for agent in config.agents:
        for problem in memory_problems(config, agent, planned.models[agent.name], on_cpu=cluster.on_cpu):
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
    for factor in GROWTH:
        larger = grown(cluster, factor)
        if (best := find_ways(planned, work, larger).best) is not None:
            return f"No layout fits here, but with nodes = {larger.nodes}: {' '.join(best.overrides())}"
    found = [lightest(planned, agent, grown(cluster, GROWTH[-1])) for agent in planned.config.agents]
    if None in found:
        return f"No memory up to {MOST_GIB} GiB is enough either: lower vllm.gpu_memory_utilization"
    largest = max(found, key=lambda least: least.memory_gib)
    agent, needed = largest.agent, largest.memory_gib
    return (
        f"No number of devices is enough: {agent.name} needs {needed} GiB at tp {agent.tp}, cp {agent.cp}, "
        f"{f'ep {agent.ep}, ' if agent.ep > 1 else ''}pp {agent.pp}, recompute full, {largest.num_devices} devices. "
        f"Nearest: device.memory_gib = {needed}"
    )
