"""Resources that a job asks of each of its nodes: processors, memory, GPUs; and requests that no node can meet. Pure.

    processors   slurm.cpus_per_rank, else an equal share of a whole node, else those of one of its GPUs
    memory       slurm.mem, else all of a whole node (--mem=0), else the share of what the job takes of its GPUs
    GPUs         --gpus-per-node, slurm.gres, or nothing where Slurm counts none: then whole nodes

Without them Slurm gives each process one core, and the memory of that core; and a job that wants all memory of a node
waits until nobody else is there. Not here: placement of ranks (slurm.py), queries to Slurm (slurm_queue.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hacpo_mega.config.tables.slurm import SlurmConfig
from hacpo_mega.jobs.slurm_plan import Component, Plan
from hacpo_mega.jobs.slurm_queue import NodeGroup

UNKNOWN_CPUS = 8  # of a process where nobody says how many a node has: fits nodes of 8 GPUs and 64 cores
WHOLE_NODE = "--exclusive"


@dataclass(frozen=True)
class Request:
    """Resources of a job: `cpus` of each process, and `why` so many; `gpus`, the line of each component or ""; `mem` of
    a node of each component, and why so much; `problems`, a line for each thing that this cluster could never give."""

    cpus: int
    why: str
    gpus: tuple[str, ...]
    mem: tuple[str, ...]
    why_mem: str
    takes_whole_nodes: bool
    problems: tuple[str, ...]

    def __str__(self) -> str:
        words = {"0": "all memory", "": "memory"}
        memory = " or ".join(words.get(mem, f"{mem} of memory") for mem in dict.fromkeys(self.mem))
        memory += f" ({self.why_mem})" if self.why_mem else ""
        whole = ", whole nodes" if self.takes_whole_nodes else ""
        cpus = "1 processor" if self.cpus == 1 else f"{self.cpus} processors"
        return f"each process: {cpus} ({self.why}); each node: {memory}{whole}"


def request_of(plan: Plan, slurm: SlurmConfig, known: Mapping[str, Sequence[NodeGroup]]) -> Request:
    """The request of a plan. `known` are the nodes by partition, "" the default one; empty if Slurm could not be asked.

    Its problems are a partition that does not exist, or has too few nodes, GPUs or processors.
    """
    parts = plan.components
    groups = [_groups(part, known) for part in parts]
    counts_none = any(own and part.kind.gpus and not any(one.gpus for one in own) for part, own in zip(parts, groups))
    asks_none = slurm.gres == "none" or (slurm.gres is None and counts_none)
    whole = asks_none or WHOLE_NODE in slurm.sbatch_options
    gpus = tuple(_gpus_line(part, slurm.gres, asks_none) for part in parts)
    if slurm.cpus_per_rank is not None:
        cpus, why = slurm.cpus_per_rank, "slurm.cpus_per_rank"
    else:
        cpus, why = min(_share(part, own, whole) for part, own in zip(parts, groups, strict=True))
    problems = [
        line for part, own in zip(parts, groups, strict=True) for line in _problems(part, parts, own, known, cpus)
    ]
    if any(option.startswith("--mem") for option in slurm.sbatch_options):
        mem, why_mem = ("",) * len(parts), "slurm.sbatch_options"
    elif slurm.mem is not None:
        mem, why_mem = (slurm.mem,) * len(parts), "slurm.mem"
    else:
        shares = [_memory(part, own, cpus, whole) for part, own in zip(parts, groups, strict=True)]
        mem, why_mem = (
            tuple(mem for mem, _ in shares),
            "; ".join(dict.fromkeys(filter(None, (why for _, why in shares)))),
        )
    return Request(cpus, why, gpus, mem, why_mem, whole, tuple(dict.fromkeys(problems)))


def _groups(part: Component, known: Mapping[str, Sequence[NodeGroup]]) -> Sequence[NodeGroup]:
    """The nodes that a component may get; of several partitions those of all."""
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
    """Requests that no node could meet for a component, which shares its partitions with other `parts`."""
    for name in _partitions(part) if known else ():
        if name not in known:
            asked = f"slurm.partition {name}: there is no such partition" if name else "there is no default partition"
            yield f"{asked}; there are: {', '.join(sorted(filter(None, known)))}"
    if not groups:
        return
    needed = sum(len(other.counts) for other in parts if other.kind.partition == part.kind.partition)
    there = sum(group.num_nodes for group in groups)
    if needed > there:
        yield (
            f"the job needs {needed} nodes, {_spoken(part)} has {there}: it would wait for ever. Use fewer lanes or "
            "cells, more processes on a node, or another partition"
        )
    yield from _of_fullest_node(part, groups, cpus)


def _spoken(part: Component) -> str:
    return f"partition {part.kind.partition}" if part.kind.partition else "the default partition"


def _of_fullest_node(part: Component, groups: Sequence[NodeGroup], cpus: int) -> Iterator[str]:
    """Some node must have the processors and the GPUs of the fullest node of a component."""
    ranks, gpus = max(part.counts), part.kind.gpus
    if not any(group.cpus >= ranks * cpus for group in groups):
        most = max(group.cpus for group in groups)
        yield (
            f"{ranks} processes of {cpus} processors need {ranks * cpus} on a node, the largest of {_spoken(part)} has "
            f"{most}. Nearest: slurm.cpus_per_rank={max(1, most // ranks)}"
        )
    most = max(group.gpus for group in groups)
    if 0 < most < min(gpus, ranks):
        yield f"slurm.gpus_per_node ({gpus}): a node of {_spoken(part)} has {most}. Nearest: {most}"


def _share(part: Component, groups: Sequence[NodeGroup], whole: bool) -> tuple[int, str]:
    """Processors of a process, and the reason: by the smallest possible node."""
    if not groups:
        return UNKNOWN_CPUS, "sinfo could not be asked; slurm.cpus_per_rank says another number"
    least = min(_fitting(part, groups), key=lambda group: group.cpus)
    if whole:
        return max(1, least.cpus // max(part.counts)), f"{least.cpus} of a node, shared by {max(part.counts)}"
    places = max(part.kind.ranks, least.gpus if part.kind.gpus else 0)
    why = f"{least.cpus} of a node, for each of {places} places" if places > 1 else f"{least.cpus} of a node"
    return max(1, least.cpus // places), why


def _fitting(part: Component, groups: Sequence[NodeGroup]) -> Sequence[NodeGroup]:
    """The nodes with enough GPUs for a component; all where none has."""
    return [group for group in groups if part.kind.gpus and group.gpus >= max(part.counts)] or groups


def _memory(part: Component, groups: Sequence[NodeGroup], cpus: int, whole: bool) -> tuple[str, str]:
    """The value of --mem for a component's nodes, and the reason: the job's share of the smallest node, by GPUs or
    processors."""
    if whole:
        return "0", ""
    if not groups or not all(group.memory_mib for group in groups):
        return "0", "sinfo could not be asked; with others on a node the job waits for it: slurm.mem says less"
    shares = []
    for group in _fitting(part, groups):
        if part.kind.gpus:
            taken, places, what = _num_gpus(part), max(part.kind.ranks, group.gpus), "GPUs"
        else:
            taken, places, what = max(part.counts) * cpus, group.cpus, "processors"
        taken = min(taken, places)
        why = f"{taken} of {places} {what} of a node with {group.memory_mib}M" if taken < places else ""
        shares.append((group.memory_mib * taken // places, why))
    if not any(why for _, why in shares):
        return "0", ""
    mib, why = min(shares)
    return f"{mib}M", why or "the whole of the smallest node"


def _num_gpus(part: Component) -> int:
    """Requested GPUs of each node."""
    return max(part.counts) if part.is_even else part.kind.gpus


def _gpus_line(part: Component, gres: str | None, asks_none: bool) -> str:
    """The option that requests a component's GPUs. ValueError if a typed number is not that of gpus_per_node."""
    if not part.kind.gpus or asks_none:
        return ""
    number = _num_gpus(part)
    if gres is None:
        return f"gpus-per-node={number}"
    kind, _, given = gres.rpartition(":")
    if int(given) != part.kind.gpus:
        raise ValueError(f"slurm.gres ({gres}) has {given} GPUs, gpus_per_node {part.kind.gpus}: give the same number")
    return f"gres={kind}:{number}"
