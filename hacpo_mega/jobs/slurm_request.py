"""What a job asks of each of its nodes: processors, memory, GPUs; and what no node of the cluster could give. Pure.

    processors   slurm.cpus_per_rank, else an equal share of a whole node, else those of one of its GPUs
    GPUs         --gpus-per-node, slurm.gres, or nothing where Slurm counts none: then whole nodes

Without them Slurm gives each process one core, and the memory of that core. Not here: who runs where (slurm.py), how
Slurm is asked what it has (slurm_queue.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hacpo_mega.config.slurm import SlurmConfig
from hacpo_mega.jobs.slurm_plan import Component, Plan
from hacpo_mega.jobs.slurm_queue import NodeGroup

UNKNOWN_CPUS = 8  # of a process where nobody says how many a node has: fits nodes of 8 GPUs and 64 cores
WHOLE_NODE = "--exclusive"


@dataclass(frozen=True)
class Request:
    """What the job asks for: `cpus` of each process, and `why` so many; `gpus`, the line of each component or ""."""

    cpus: int
    why: str
    gpus: tuple[str, ...]
    mem: str
    takes_whole_nodes: bool

    def __str__(self) -> str:
        memory = "all memory" if self.mem == "0" else f"{self.mem} of memory"
        whole = ", whole nodes" if self.takes_whole_nodes else ""
        cpus = "1 processor" if self.cpus == 1 else f"{self.cpus} processors"
        return f"each process: {cpus} ({self.why}); each node: {memory}{whole}"


def request_of(plan: Plan, slurm: SlurmConfig, known: Mapping[str, Sequence[NodeGroup]]) -> Request:
    """The request of a plan. `known` are the nodes by partition, "" the default one; empty where nobody could be asked.

    ValueError, in one line, for a partition that does not exist, or has too few nodes, GPUs or processors.
    """
    parts = plan.components
    groups = [_groups(part, known) for part in parts]
    for part, own in zip(parts, groups, strict=True):
        alike = [other for other in parts if other.kind.partition == part.kind.partition]
        _require_nodes(_spoken(part), sum(len(other.counts) for other in alike), own)
    counts_none = any(own and part.kind.gpus and not any(one.gpus for one in own) for part, own in zip(parts, groups))
    asks_none = slurm.gres == "none" or (slurm.gres is None and counts_none)
    whole = asks_none or WHOLE_NODE in slurm.sbatch_options
    gpus = tuple(_gpus_line(part, slurm.gres, asks_none) for part in parts)
    if slurm.cpus_per_rank is not None:
        cpus, why = slurm.cpus_per_rank, "slurm.cpus_per_rank"
    else:
        cpus, why = min(_share(part, own, whole) for part, own in zip(parts, groups, strict=True))
    for part, own in zip(parts, groups, strict=True):
        _require_processors(part, own, cpus)
    return Request(cpus, why, gpus, slurm.mem, whole)


def _groups(part: Component, known: Mapping[str, Sequence[NodeGroup]]) -> Sequence[NodeGroup]:
    """The nodes that a component may get; of several partitions those of all."""
    if not known:
        return ()
    names = (part.kind.partition or "").split(",")
    for name in names:
        if name not in known:
            asked = f"slurm.partition {name}: there is no such partition" if name else "there is no default partition"
            raise ValueError(f"{asked}; there are: {', '.join(sorted(filter(None, known)))}")
    return [group for name in names for group in known[name]]


def _spoken(part: Component) -> str:
    return f"partition {part.kind.partition}" if part.kind.partition else "the default partition"


def _require_nodes(where: str, needed: int, groups: Sequence[NodeGroup]) -> None:
    there = sum(group.num_nodes for group in groups)
    if groups and needed > there:
        raise ValueError(
            f"the job needs {needed} nodes, {where} has {there}: it would wait for ever. Use fewer lanes or cells, "
            "more processes on a node, or another partition"
        )


def _require_processors(part: Component, groups: Sequence[NodeGroup], cpus: int) -> None:
    """Some node must have the processors and the GPUs of the fullest node of a component."""
    ranks, gpus = max(part.counts), part.kind.gpus
    if groups and not any(group.cpus >= ranks * cpus for group in groups):
        most = max(group.cpus for group in groups)
        raise ValueError(
            f"{ranks} processes of {cpus} processors need {ranks * cpus} on a node, the largest of {_spoken(part)} has "
            f"{most}. Nearest: slurm.cpus_per_rank={max(1, most // ranks)}"
        )
    most = max((group.gpus for group in groups), default=0)
    if 0 < most < min(gpus, ranks):
        raise ValueError(f"slurm.gpus_per_node ({gpus}): a node of {_spoken(part)} has {most}. Nearest: {most}")


def _share(part: Component, groups: Sequence[NodeGroup], whole: bool) -> tuple[int, str]:
    """Processors of a process, and why so many: of the smallest node that there may be."""
    if not groups:
        return UNKNOWN_CPUS, "sinfo could not be asked; slurm.cpus_per_rank says another number"
    fits = [group for group in groups if group.gpus >= max(part.counts)] if part.kind.gpus else []
    least = min(fits or groups, key=lambda group: group.cpus)
    if whole:
        return max(1, least.cpus // max(part.counts)), f"{least.cpus} of a node, shared by {max(part.counts)}"
    places = max(part.kind.ranks, least.gpus if part.kind.gpus else 0)
    why = f"{least.cpus} of a node, for each of {places} places" if places > 1 else f"{least.cpus} of a node"
    return max(1, least.cpus // places), why


def _gpus_line(part: Component, gres: str | None, asks_none: bool) -> str:
    """The words that ask for a component's GPUs. ValueError where a typed number is not that of gpus_per_node."""
    if not part.kind.gpus or asks_none:
        return ""
    number = max(part.counts) if part.is_even else part.kind.gpus
    if gres is None:
        return f"gpus-per-node={number}"
    kind, _, given = gres.rpartition(":")
    if int(given) != part.kind.gpus:
        raise ValueError(f"slurm.gres ({gres}) has {given} GPUs, gpus_per_node {part.kind.gpus}: give the same number")
    return f"gres={kind}:{number}"
