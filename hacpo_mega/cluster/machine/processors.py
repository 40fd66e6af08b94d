"""Processors that a process of a Slurm job may use, and those near its GPU. Runs before any thread starts; no torch.

`srun --cpu-bind=cores` gives every process processors of its own, spread over the sockets as Slurm likes. The GPUs of a
node hang at its sockets in groups, so a process may sit across the node from its GPU; here the processes of a node
share the same processors anew, each near its GPU. Everybody computes the same, so that nobody asks anybody.
Not here: how many processors a process gets (slurm_plan.py).
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hacpo_mega.cluster.launcher_env import number_of

MASK = re.compile(r"0x[0-9A-Fa-f]+")


def num_threads(task: Mapping[str, str], num_local: int, allowed: int) -> int:
    """Number of threads for one of `num_local` processes; this one may use `allowed` processors.

    Where nothing binds it, it sees those of all processes of its node.
    """
    if own := number_of("SLURM_CPUS_PER_TASK", task.get("SLURM_CPUS_PER_TASK", "0")):
        return max(1, min(own, allowed))
    is_bound = allowed < number_of("SLURM_CPUS_ON_NODE", task.get("SLURM_CPUS_ON_NODE", str(allowed)))
    return max(1, allowed if is_bound else allowed // num_local)


def stay_near_gpu(task: Mapping[str, str], root: Path = Path("/")) -> None:
    """Moves this process to the processors near its GPU, where that costs no process of the node any.

    `root` holds the kernel's /sys and /proc. Silent where something is not known: Slurm's own binding stays.
    """
    local_rank = int(task["SLURM_LOCALID"])
    masks = [_processors(mask) for mask in MASK.findall(task.get("SLURM_CPU_BIND_LIST", ""))]
    buses = _gpu_buses(task, root)
    if not local_rank < len(masks) <= len(buses):
        return
    homes = [_near(bus, root) for bus in buses[: len(masks)]]
    shares = near_shares(masks, homes, lambda processor: _core(processor, root))
    if shares is not None:
        os.sched_setaffinity(0, shares[local_rank])


def near_shares(
    masks: Sequence[set[int]], homes: Sequence[set[int]], core_of: Callable[[int], int]
) -> list[set[int]] | None:
    """The processors of every process: as many as its mask has, taken from all masks, from its own `homes` first.

    Both threads of a core stay together (`core_of`). None where one would have too few.
    """
    free = sorted(set().union(*masks), key=lambda processor: (core_of(processor), processor))
    shares = []
    for mask, home in zip(masks, homes, strict=True):
        share = [processor for processor in free if processor in home][: len(mask)]
        if len(share) < len(mask):
            return None
        shares.append(set(share))
        free = [processor for processor in free if processor not in shares[-1]]
    return shares


def _gpu_buses(task: Mapping[str, str], root: Path) -> list[str]:
    """The PCI addresses of this node's GPUs of the step, by the number that their processes have; empty if unknown."""
    every = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").glob("*:*"))
    names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
    given = next((task[name] for name in names if task.get(name)), ",".join(map(str, range(len(every)))))
    numbers = given.split(",")
    if not all(number.isdigit() and int(number) < len(every) for number in numbers):
        return []
    return [every[int(number)] for number in numbers]


def _near(bus: str, root: Path) -> set[int]:
    """The processors of a GPU's socket; none where the kernel knows of no such."""
    node = _read(root / "sys/bus/pci/devices" / bus.lower() / "numa_node")
    return set() if node.startswith("-") else listed(_read(root / f"sys/devices/system/node/node{node}/cpulist"))


def _core(processor: int, root: Path) -> int:
    siblings = listed(_read(root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"))
    return min(siblings, default=processor)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # this kernel does not tell
        return ""


def listed(text: str) -> set[int]:
    """The kernel's list of processors: "0-3,8" is 0, 1, 2, 3 and 8."""
    spans = [span.partition("-") for span in text.split(",") if span]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def _processors(mask: str) -> set[int]:
    bits = int(mask, 16)
    return {number for number in range(bits.bit_length()) if bits >> number & 1}
