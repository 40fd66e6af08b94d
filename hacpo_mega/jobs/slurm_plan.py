"""Layout of a Slurm job: the ranks of each node, and the request for a node, by the rank map and the [slurm] table.

Nodes are filled with whole cells in the order of ranks, so that

    the tensor ranks of a cell are on one node, where the fast links are
    its pipeline stages follow each other, and a cell of several nodes fills them
    the agents, and with them the leaders of a lane, are on different nodes as soon as one of them fills a node

Nodes of one kind are an ordinary job. If agents ask for nodes of different kinds the job is heterogeneous. All nodes of
a component then have the same number of processes, since srun spreads unequal numbers as it likes.

The request names processors and memory, since Slurm would give each process one core and the memory of that core:

    processors   slurm.cpus_per_rank, else an equal share of a whole node, else those of one of its GPUs
    memory       slurm.mem, else all of a whole node (--mem=0, for which a job waits until nobody else is there), else
                 the share of the node's GPUs that the job takes
    GPUs         --gpus-per-node, slurm.gres, or nothing where Slurm counts none: then whole nodes

Nothing here reads a file or asks Slurm. Elsewhere: the job script (slurm_script.py), queries to Slurm (slurm_queue.py),
the environment of a process (environment.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config.tables.slurm import SlurmAgentConfig, SlurmConfig
from hacpo_mega.jobs.slurm_queue import NodeGroup
from hacpo_mega.models.files.visible import columns

UNKNOWN_CPUS = 8  # of a process, if a node's number is not known: fits nodes of 8 GPUs and 64 cores
WHOLE_NODE = "--exclusive"
SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


@dataclass(frozen=True)
class NodeKind:
    """Request for a node. `ranks` is its number of processes: one per GPU, if there are any."""

    partition: str | None
    constraint: str | None
    gpus: int
    ranks: int


@dataclass(frozen=True)
class Node:
    """A node of the job, known by its number until Slurm has chosen it, and the global ranks that run there."""

    kind: NodeKind
    first: int
    num_ranks: int

    @property
    def ranks(self) -> str:
        last = self.first + self.num_ranks - 1
        return f"{self.first}" if last == self.first else f"{self.first}-{last}"


@dataclass(frozen=True)
class Component:
    """Nodes of one kind: an ordinary job, or a part of a heterogeneous one. `counts`: each node's processes."""

    kind: NodeKind
    counts: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """True if all nodes have the same number of processes."""
        return len(set(self.counts)) == 1


@dataclass(frozen=True)
class Plan:
    """The nodes of a job, in the order of their ranks."""

    rank_map: RankMap
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, rank_map: RankMap, slurm: SlurmConfig) -> "Plan":
        """The plan of a configuration. ValueError, with the arithmetic, for a layout that does not fit the nodes."""
        if rank_map.shares_devices:
            raise ValueError(
                "placement = 'shared': hacpo-mega slurm gives every process a GPU of its own. In an allocation of one "
                f"node with {rank_map.num_devices} GPUs, without binding tasks to them, say srun "
                f"--ntasks={rank_map.world_size} hacpo-mega train CONFIG"
            )
        kinds = _kinds(rank_map, slurm)
        for shape, kind in zip(rank_map.agents, kinds, strict=True):
            _require_whole_cells(shape, kind, slurm.tp_across_nodes)
        plan = cls(rank_map, tuple(_fill(rank_map, kinds)))
        if slurm.nodes not in (None, len(plan.nodes)):
            raise ValueError(
                f"slurm.nodes ({slurm.nodes}) is not what {rank_map.world_size} ranks ({rank_map.arithmetic()}) fill "
                f"at {_either(sorted({kind.ranks for kind in kinds}))} per node. Nearest: {len(plan.nodes)}"
            )
        return plan

    @property
    def components(self) -> list[Component]:
        """Requested components, in the order of ranks: one for an ordinary job, else parts of equal nodes."""
        if len({node.kind for node in self.nodes}) == 1:
            return [Component(self.nodes[0].kind, tuple(node.num_ranks for node in self.nodes))]
        alike = groupby(self.nodes, key=lambda node: (node.kind, node.num_ranks))
        return [Component(kind, tuple(node.num_ranks for node in nodes)) for (kind, _), nodes in alike]

    def table(self, max_nodes: int = 16) -> str:
        """The nodes as text, one per line, the middle left out beyond `max_nodes`; then the reasons for the layout."""
        shown = [*range(len(self.nodes))]
        if len(shown) > max_nodes:
            shown = [*shown[: max_nodes - 2], -1, shown[-1]]
        rows = [("...", "", "") if number < 0 else self._row(number) for number in shown]
        ranks, nodes = (
            f"{number} {word}{'' if number == 1 else 's'}"
            for number, word in ((self.rank_map.world_size, "rank"), (len(self.nodes), "node"))
        )
        return "\n".join([f"{ranks} on {nodes}", *columns(rows), *self._reasons()])

    def node_of(self, rank: int) -> int:
        """The number of the node that a global rank runs on."""
        return next(n for n, node in enumerate(self.nodes) if node.first <= rank < node.first + node.num_ranks)

    def _row(self, number: int) -> tuple[str, str, str]:
        node = self.nodes[number]
        kind = f" ({node.kind.partition})" if node.kind.partition else ""
        cells_of: dict[str, set[int]] = {}
        for rank in range(node.first, node.first + node.num_ranks):
            coordinate = self.rank_map.coordinate(rank)
            cells_of.setdefault(coordinate.agent_name, set()).add(coordinate.cell)
        agents = "; ".join(f"{name} {_span('cell', cells)}" for name, cells in cells_of.items())
        plural = "s" if node.num_ranks > 1 else ""
        return f"node {number}{kind}", f"rank{plural} {node.ranks}", agents + self._idle(node)

    def _idle(self, node: Node) -> str:
        idle = node.kind.ranks - node.num_ranks
        return f"; {idle} of {node.kind.ranks} places idle" if idle else ""

    def _reasons(self) -> list[str]:
        lines = []
        for agent, shape in enumerate(self.rank_map.agents):
            first = self.rank_map.first_ranks[agent]
            size = self.nodes[self.node_of(first)].kind.ranks
            cells = f"a cell fills {shape.cell_size // size} nodes" if shape.cell_size > size else "cells are whole"
            block = shape.tp * shape.cp
            tensor = f"over {-(-block // size)} nodes" if block > size else "on one node"
            ranks = "tensor" if shape.cp == 1 else "tensor and context"
            stages = f", its {shape.pp} pipeline stages next to each other" if shape.pp > 1 else ""
            lines.append(f"{shape.name}: {cells}, the {ranks} ranks of a cell {tensor}{stages}")
        nodes = {self.node_of(leader) for leader in self.rank_map.leaders(0)}
        lines.append(f"lane 0: its leaders exchange {'over' if len(nodes) > 1 else 'inside'} {_span('node', nodes)}")
        return lines


def seconds_of(time: str) -> int:
    """Seconds of a time limit in Slurm's forms: "90" and "30:00" (minutes first), "12:00:00", "2-12", "1-06:30:00"."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    names = "hms" if dash or len(parts) == 3 else "ms"
    return int(days or 0) * SECONDS["d"] + sum(part * SECONDS[name] for part, name in zip(parts, names))


def _kinds(rank_map: RankMap, slurm: SlurmConfig) -> list[NodeKind]:
    """The nodes that every agent asks for, in the order of agents."""
    names = [shape.name for shape in rank_map.agents]
    for name in slurm.agents:
        if name not in names:
            raise ValueError(f"slurm.agents.{name}: there is no agent of that name; there are: {', '.join(names)}")
    return [_kind(slurm, slurm.agents.get(name, SlurmAgentConfig()), name) for name in names]


def _kind(slurm: SlurmConfig, agent: SlurmAgentConfig, name: str) -> NodeKind:
    gpus = slurm.gpus_per_node if agent.gpus_per_node is None else agent.gpus_per_node
    ranks = gpus or agent.ranks_per_node or slurm.ranks_per_node
    if ranks is None:
        raise ValueError(
            f"slurm.ranks_per_node is not given, and the nodes of agent {name} have no GPUs (gpus_per_node 0): say how "
            "many processes a node takes"
        )
    return NodeKind(agent.partition or slurm.partition, agent.constraint or slurm.constraint, gpus, ranks)


def _require_whole_cells(shape: AgentShape, kind: NodeKind, tp_across_nodes: bool) -> None:
    """ValueError if a tensor group (tp x cp) would cross nodes, or a node's end would cut a cell."""
    key = "gpus_per_node" if kind.gpus else "ranks_per_node"
    block = shape.tp * shape.cp
    name, words = ("tp", f"tp {block}") if shape.cp == 1 else ("tp x cp", f"tp {shape.tp} x cp {shape.cp}")
    fits = kind.ranks % block == 0 or shape.cell_size < kind.ranks
    if not (fits or tp_across_nodes):
        raise ValueError(
            f"agent {shape.name}: {words} would cross nodes of slurm.{key} {kind.ranks}, and every layer would "
            f"wait for the network. Choose {name} {_either(_divisors(kind.ranks))}, or slurm.tp_across_nodes=true"
        )
    small, large = sorted((shape.cell_size, kind.ranks))
    if large % small:
        divisors = [n for n in _divisors(shape.cell_size) if n <= kind.ranks]
        raise ValueError(
            f"slurm.{key} ({kind.ranks}) does not divide the cells of agent {shape.name} ({shape.product} "
            f"= {shape.cell_size} ranks), nor they it: a cell would be cut at a node's end. Nearest: "
            f"{divisors[-1]}"
        )


def _fill(rank_map: RankMap, kinds: Sequence[NodeKind]) -> list[Node]:
    """Nodes with whole cells, by rank; a new node begins with another kind, or with a cell that no longer fits."""
    nodes: list[Node] = []
    rank = 0
    for agent, (shape, kind) in enumerate(zip(rank_map.agents, kinds, strict=True)):
        for _ in range(rank_map.lanes * shape.cells_per_lane):
            left = shape.cell_size
            while left:
                part = min(left, kind.ranks)
                last = nodes[-1] if nodes else None
                if last is not None and last.kind == kind and last.num_ranks + part <= kind.ranks and part == left:
                    nodes[-1] = Node(kind, last.first, last.num_ranks + part)
                else:
                    nodes.append(Node(kind, rank, part))
                rank, left = rank + part, left - part
        assert rank == rank_map.first_ranks[agent + 1], (rank, agent)
    return nodes


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _span(word: str, numbers: set[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"{word} {first}" if first == last else f"{word}s {first}-{last}"


def _either(counts: Sequence[int]) -> str:
    *first, last = map(str, counts)
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class Request:
    """The resources that a job asks for.

    cpus       of each process; cpus_reason   says why so many
    gpus       the option of each component, or ""
    mem        of a node of each component; mem_reason   says why so much
    problems   requests that this cluster could never meet, a line each
    """

    cpus: int
    cpus_reason: str
    gpus: tuple[str, ...]
    mem: tuple[str, ...]
    mem_reason: str
    takes_whole_nodes: bool
    problems: tuple[str, ...]

    def __str__(self) -> str:
        texts = {"0": "all memory", "": "memory"}
        memory = " or ".join(texts.get(mem, f"{mem} of memory") for mem in dict.fromkeys(self.mem))
        memory += f" ({self.mem_reason})" if self.mem_reason else ""
        whole = ", whole nodes" if self.takes_whole_nodes else ""
        cpus = "1 processor" if self.cpus == 1 else f"{self.cpus} processors"
        return f"each process: {cpus} ({self.cpus_reason}); each node: {memory}{whole}"


def request_of(plan: Plan, slurm: SlurmConfig, known: Mapping[str, Sequence[NodeGroup]]) -> Request:
    """The request of a plan. `known` are the nodes by partition, "" the default one; empty if Slurm does not answer.

    Its problems are a partition that does not exist, or has too few nodes, GPUs or processors.
    """
    parts = plan.components
    candidates = [(part, _candidates(part, known)) for part in parts]
    no_gpus = any(groups and part.kind.gpus and not any(group.gpus for group in groups) for part, groups in candidates)
    asks_none = slurm.gres == "none" or (slurm.gres is None and no_gpus)  # Slurm counts no GPUs
    whole = asks_none or WHOLE_NODE in slurm.sbatch_options
    gpus = tuple(_gpus_line(part, slurm.gres, asks_none) for part in parts)
    if slurm.cpus_per_rank is not None:
        cpus, cpus_reason = slurm.cpus_per_rank, "slurm.cpus_per_rank"
    else:
        cpus, cpus_reason = min(_cpus(part, groups, whole) for part, groups in candidates)
    problems = [line for part, groups in candidates for line in _problems(part, parts, groups, known, cpus)]
    if any(option.startswith("--mem") for option in slurm.sbatch_options):
        mem, mem_reason = ("",) * len(parts), "slurm.sbatch_options"
    elif slurm.mem is not None:
        mem, mem_reason = (slurm.mem,) * len(parts), "slurm.mem"
    else:
        shares = [_memory(part, groups, cpus, whole) for part, groups in candidates]
        mem = tuple(mem for mem, _ in shares)
        mem_reason = "; ".join(dict.fromkeys(reason for _, reason in shares if reason))
    return Request(cpus, cpus_reason, gpus, mem, mem_reason, whole, tuple(dict.fromkeys(problems)))


def _candidates(part: Component, known: Mapping[str, Sequence[NodeGroup]]) -> Sequence[NodeGroup]:
    """The nodes that a component may get, of all its partitions."""
    return [group for name in _partitions(part) for group in known.get(name, ())]


def _partitions(part: Component) -> list[str]:
    return (part.kind.partition or "").split(",")


def _problems(
    part: Component,
    parts: Sequence[Component],
    groups: Sequence[NodeGroup],
    known: Mapping[str, Sequence[NodeGroup]],
    cpus: int,
) -> Iterator[str]:
    """Requests of a component that no node could meet; it shares its partitions with other `parts`."""
    for name in _partitions(part) if known else ():
        if name not in known:
            asked = f"slurm.partition {name}: there is no such partition" if name else "there is no default partition"
            yield f"{asked}; there are: {', '.join(sorted(filter(None, known)))}"
    if not groups:
        return
    needed = sum(len(other.counts) for other in parts if other.kind.partition == part.kind.partition)
    available = sum(group.num_nodes for group in groups)
    if needed > available:
        yield (
            f"the job needs {needed} nodes, {_partition_name(part)} has {available}: it would wait for ever. Use fewer "
            "lanes or cells, more processes on a node, or another partition"
        )
    yield from _fullest_node_problems(part, groups, cpus)


def _partition_name(part: Component) -> str:
    return f"partition {part.kind.partition}" if part.kind.partition else "the default partition"


def _fullest_node_problems(part: Component, groups: Sequence[NodeGroup], cpus: int) -> Iterator[str]:
    """A problem if no node has the processors, or the GPUs, of a component's node with the most processes."""
    ranks, gpus = max(part.counts), part.kind.gpus
    if not any(group.cpus >= ranks * cpus for group in groups):
        most = max(group.cpus for group in groups)
        yield (
            f"{ranks} processes of {cpus} processors need {ranks * cpus} on a node, the largest of "
            f"{_partition_name(part)} has {most}. Nearest: slurm.cpus_per_rank={max(1, most // ranks)}"
        )
    most = max(group.gpus for group in groups)
    if 0 < most < min(gpus, ranks):
        yield f"slurm.gpus_per_node ({gpus}): a node of {_partition_name(part)} has {most}. Nearest: {most}"


def _cpus(part: Component, groups: Sequence[NodeGroup], whole: bool) -> tuple[int, str]:
    """Processors of a process, and the reason for so many: a share of the smallest node that may come."""
    if not groups:
        return UNKNOWN_CPUS, "sinfo could not be asked; slurm.cpus_per_rank says another number"
    least = min(_fitting(part, groups), key=lambda group: group.cpus)
    if whole:
        return max(1, least.cpus // max(part.counts)), f"{least.cpus} of a node, shared by {max(part.counts)}"
    places = max(part.kind.ranks, least.gpus if part.kind.gpus else 0)
    reason = f"{least.cpus} of a node, for each of {places} places" if places > 1 else f"{least.cpus} of a node"
    return max(1, least.cpus // places), reason


def _fitting(part: Component, groups: Sequence[NodeGroup]) -> Sequence[NodeGroup]:
    """The nodes with enough GPUs for a component; all nodes if none has."""
    return [group for group in groups if part.kind.gpus and group.gpus >= max(part.counts)] or groups


def _memory(part: Component, groups: Sequence[NodeGroup], cpus: int, whole: bool) -> tuple[str, str]:
    """The value of --mem for a component's nodes, and the reason: the job's share of a node, by GPUs or processors."""
    if whole:
        return "0", ""
    if not groups or not all(group.memory_mib for group in groups):
        return "0", "sinfo could not be asked; on a shared node the job waits for all of it: slurm.mem asks for less"
    shares = []
    for group in _fitting(part, groups):
        if part.kind.gpus:
            taken, total, unit = _num_gpus(part), max(part.kind.ranks, group.gpus), "GPUs"
        else:
            taken, total, unit = max(part.counts) * cpus, group.cpus, "processors"
        taken = min(taken, total)
        reason = f"{taken} of {total} {unit} of a node with {group.memory_mib}M" if taken < total else ""
        shares.append((group.memory_mib * taken // total, reason))
    if not any(reason for _, reason in shares):
        return "0", ""
    mib, reason = min(shares)
    return f"{mib}M", reason or "the whole of the smallest node"


def _num_gpus(part: Component) -> int:
    """Requested GPUs of each node."""
    return max(part.counts) if part.is_even else part.kind.gpus


def _gpus_line(part: Component, gres: str | None, asks_none: bool) -> str:
    """The option that requests a component's GPUs. ValueError if slurm.gres has another number than gpus_per_node."""
    if not part.kind.gpus or asks_none:
        return ""
    number = _num_gpus(part)
    if gres is None:
        return f"gpus-per-node={number}"
    kind, _, given = gres.rpartition(":")
    if int(given) != part.kind.gpus:
        raise ValueError(f"slurm.gres ({gres}) has {given} GPUs, gpus_per_node {part.kind.gpus}: give the same number")
    return f"gres={kind}:{number}"
