"""Processors and memory that this machine gives a job's processes: how many it can hold, and which cores each uses.

`hacpo-mega train` asks before it starts all ranks here: a typo in tp or lanes would start hundreds, and the machine
would no longer respond. Ranks started by torchrun or srun are not checked. The memory left is the least of that of the
kernel, of the cgroups around this process and of Slurm.
`srun --cpu-bind=cores` gives every process processors of its own, on sockets of Slurm's choice. The GPUs of a node are
attached to its sockets, so a process may run on another socket than its GPU's; here the processes of a node divide the
same processors anew, each near its GPU. Each process computes the same division by itself. This runs before any thread
starts and imports no torch. Elsewhere: placement of ranks (rank_map.py), how many processors a
process gets (slurm_plan.py).
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hacpo_mega.cluster.launcher_env import number_of
from hacpo_mega.cluster.rank_map import RankMap

# Ranks take turns on a core; beyond this a step of the smallest model takes minutes.
RANKS_PER_CORE = 16
# Memory of its own (not shared with others) that a rank of the quickstart's models has with its engine: 817 and 857 MiB
# after 40 steps on the CPU; and the smallest grading process: 7 MiB.
RANK_BYTES = 800 << 20
GRADER_BYTES = 7 << 20
MASK = re.compile(r"0x[0-9A-Fa-f]+")


def require_processes(ranks: RankMap, num_graders: int) -> None:
    """ValueError, one line with the arithmetic, for more processes than this machine has cores and free memory for.

    `num_graders` is the number of grading processes of each cell.
    """
    world_size, cells = ranks.world_size, sum(shape.cells_per_lane for shape in ranks.agents) * ranks.lanes
    cores, free = num_cores(), free_memory_bytes()
    needed = world_size * RANK_BYTES + cells * num_graders * GRADER_BYTES
    if world_size <= RANKS_PER_CORE * cores and needed <= free:
        return
    raise ValueError(
        f"this configuration would start {world_size} ranks here ({ranks.arithmetic()}) and {cells * num_graders} "
        f"grading processes: at least {needed >> 20} MiB, {free >> 20} MiB are free; {cores} cores hold at most "
        f"{RANKS_PER_CORE * cores} ranks. Use fewer lanes, cells or graders, or start it on more machines"
    )


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use; a cgroup's quota (docker --cpus, a pod's limit) is rounded up to whole ones."""
    return min([len(os.sched_getaffinity(0)), *_cgroup_cores(root)])


def free_memory_bytes(root: Path = Path("/"), task: Mapping[str, str] = os.environ) -> int:
    """Memory that this process can have without swapping and without being killed; see `free_memory`."""
    return free_memory(root, task)[0]


def free_memory(root: Path = Path("/"), task: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The least memory left: of the kernel, of every cgroup of this process, and of Slurm's limit for the job on the
    node.

    With its origin: "" for the kernel. `root` holds /proc and /sys; `task` has the variables of a Slurm task.
    """
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([(free, ""), *_cgroup_memory_left(root), *_slurm_limits(task)], key=lambda found: found[0])


def num_memory_kills(root: Path = Path("/")) -> int:
    """Number of out-of-memory kills in this process's cgroup, or on the machine outside of one."""
    files = [folder / name for folder in _cgroups(root, "memory") for name in ("memory.events", "memory.oom_control")]
    for file in (*files, root / "proc/vmstat"):
        if "oom_kill" in (counts := _counts(file)):
            return counts["oom_kill"]
    return 0


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of a controller's cgroup of this process and of all its parents."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    if not lines:
        return []
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    own = [path for controllers, path in paths.items() if controller in controllers.split(",")]
    # cgroup v1 has a tree for each controller, v2 one for all, without a name here
    top, path = root / "sys/fs/cgroup" / (controller if own else ""), own[0] if own else paths.get("", "/")
    parts = [part for part in path.split("/") if part not in ("", "..")]
    folders = [top.joinpath(*parts[:number]) for number in range(len(parts), -1, -1)]
    # A container may show its own cgroup as the top, and name it by its path outside.
    return [folder for folder in folders if folder.is_dir()]


def _cgroup_memory_left(root: Path) -> Iterator[tuple[int, str]]:
    """Memory left in each cgroup of this process; unused file pages can be dropped."""
    versions = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in _cgroups(root, "memory"):
        for limit, used, droppable in versions:
            with suppress(OSError, ValueError):  # no such file, or "max"
                allowed = int((folder / limit).read_text(encoding="ascii"))
                in_use = int((folder / used).read_text(encoding="ascii"))
                dropped = _counts(folder / "memory.stat").get(droppable, 0)
                yield max(0, allowed - max(0, in_use - dropped)), f"limit of {folder / limit}"


def _cgroup_cores(root: Path) -> Iterator[int]:
    """Cores that each cgroup of this process may keep busy; none where it may use all."""
    for folder in _cgroups(root, "cpu"):
        of_v1 = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, _, period = (_read(folder / "cpu.max") or " ".join(of_v1)).partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):  # not "max", nor -1
            yield max(1, -(-int(quota) // int(period)))


def _slurm_limits(task: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The job's memory on this node; a shell that only allocated nodes has the variables, too, but no task."""
    if "SLURM_PROCID" not in task:
        return
    for name, counter in (("NODE", None), ("CPU", "SLURM_CPUS_ON_NODE"), ("GPU", "SLURM_GPUS_ON_NODE")):
        each, count = task.get(f"SLURM_MEM_PER_{name}", ""), "1" if counter is None else task.get(counter, "")
        if each.isdigit() and count.isdigit() and int(each) * int(count):  # 0: all memory of the node
            yield int(each) * int(count) << 20, f"SLURM_MEM_PER_{name}"


def _counts(path: Path) -> dict[str, int]:
    """The kernel's counters in a file, by name; none where there is no such file."""
    lines = [line.split() for line in _read(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def num_threads(task: Mapping[str, str], num_local: int, allowed: int) -> int:
    """Number of threads for one of `num_local` processes; this one may use `allowed` processors.

    Without a binding `allowed` counts those of all processes of the node.
    """
    if own := number_of("SLURM_CPUS_PER_TASK", task.get("SLURM_CPUS_PER_TASK", "0")):
        return max(1, min(own, allowed))
    is_bound = allowed < number_of("SLURM_CPUS_ON_NODE", task.get("SLURM_CPUS_ON_NODE", str(allowed)))
    return max(1, allowed if is_bound else allowed // num_local)


def stay_near_gpu(task: Mapping[str, str], root: Path = Path("/")) -> None:
    """Moves this process to processors near its GPU, where every process of the node keeps as many as it has.

    `root` holds the kernel's /sys and /proc. Slurm's own binding stays where something is unknown.
    """
    if "SLURM_LOCALID" not in task:
        return
    local_rank = int(task["SLURM_LOCALID"])
    masks = [_processors(mask) for mask in MASK.findall(task.get("SLURM_CPU_BIND_LIST", ""))]
    buses = _gpu_buses(task, root)
    if not local_rank < len(masks) <= len(buses):
        return
    homes = [_near_gpu(bus, root) for bus in buses[: len(masks)]]
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


def _near_gpu(bus: str, root: Path) -> set[int]:
    """The processors of a GPU's socket; empty where the kernel does not know it."""
    node = _read(root / "sys/bus/pci/devices" / bus.lower() / "numa_node")
    return set() if node.startswith("-") else listed(_read(root / f"sys/devices/system/node/node{node}/cpulist"))


def _core(processor: int, root: Path) -> int:
    siblings = listed(_read(root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"))
    return min(siblings, default=processor)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # this kernel does not tell
        return ""


def listed(text: str) -> set[int]:
    """The kernel's list of processors: "0-3,8" is 0, 1, 2, 3 and 8."""
    spans = [span.partition("-") for span in text.split(",") if span]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def _processors(mask: str) -> set[int]:
    bits = int(mask, 16)
    return {number for number in range(bits.bit_length()) if bits >> number & 1}
