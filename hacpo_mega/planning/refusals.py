"""What keeps a configuration from running on a cluster, with the arithmetic, and the nearest thing that works."""

from collections.abc import Iterator, Mapping

from hacpo_mega.config.device_memory import memory_problems
from hacpo_mega.models.budget import GIB
from hacpo_mega.planning.cluster_file import Cluster
from hacpo_mega.planning.configuration import Planned
from hacpo_mega.planning.plan import Plan
from hacpo_mega.planning.search import Ways, find_ways, grown, lightest
from hacpo_mega.planning.work import Work

# How much larger a cluster is looked at for the nearest one that works.
GROWTH = (2, 4, 8, 16)


def refusals(planned: Planned, plan: Plan, work: Mapping[str, Work], ways: Ways) -> list[str]:
    """A line for everything that does not fit, the last one with what would; empty where the configuration can run."""
    problems = list(_problems(planned, plan))
    if problems:
        problems[-1] += f". Nearest: {_nearest(planned, plan.cluster, work, ways)}"
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
        return f"{' '.join(ways.best.overrides())} ({ways.best.num_devices} devices, {ways.best.wall_s:.0f} s a step)"
    for factor in GROWTH:
        larger = grown(cluster, factor)
        if (best := find_ways(planned, work, larger).best) is not None:
            return f"nodes = {larger.nodes}, with {' '.join(best.overrides())}"
    largest = grown(cluster, GROWTH[-1])
    needs = []
    for agent in planned.config.agents:
        if (plan := lightest(planned, agent, work[agent.name], largest)) is not None:
            layout = plan.budget.actor.layout
            text = f"{agent.name} needs {plan.budget.peak / GIB:.1f} GiB of a device at tp {layout.tp}, pp {layout.pp}"
            needs.append((plan.budget.peak, f"{text}, {plan.num_devices} devices, recompute full"))
    if not needs:
        return "no layout with tp inside a node and this max_tokens_per_microbatch; change devices_per_node"
    peak, text = max(needs)
    return f"device.memory_gib = {-(-peak // GIB)}: no number of devices is enough, since {text}"
