"""Number of a run's processes that one machine can hold; asked by `hacpo-mega train` before it starts them all here.

A typo in tp or lanes would start hundreds, and the machine would no longer respond. Ranks started by torchrun or srun
are not checked. The memory left is the least of that of the kernel, of the cgroups around this process and of Slurm.
Not here: placement of ranks (rank_map.py).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hacpo_mega.cluster.rank_map import RankMap

# Ranks take turns on a core; beyond this a step of the smallest model takes minutes.
RANKS_PER_CORE = 16
# Memory of its own (not shared with others) that a rank of the quickstart's models has with its engine: 817 and 857 MiB
# after 40 steps on the CPU; and the smallest grading process: 7 MiB.
RANK_BYTES = 800 << 20
GRADER_BYTES = 7 << 20


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


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


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
    return min([(free, ""), *_left_in_cgroups(root), *_given_by_slurm(task)], key=lambda found: found[0])


def num_memory_kills(root: Path = Path("/")) -> int:
    """Number of out-of-memory kills in this process's cgroup, or on the machine outside of one."""
    files = [folder / name for folder in _memory_cgroups(root) for name in ("memory.events", "memory.oom_control")]
    for file in (*files, root / "proc/vmstat"):
        if "oom_kill" in (counts := _counts(file)):
            return counts["oom_kill"]
    return 0


def _memory_cgroups(root: Path) -> list[Path]:
    """The folders of the memory cgroup of this process and of all its parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    of_memory = [path for controllers, path in paths.items() if "memory" in controllers.split(",")]
    # version 1 has a tree of each controller, version 2 one of all, which has no name here
    top = root / ("sys/fs/cgroup/memory" if of_memory else "sys/fs/cgroup")
    parts = [part for part in (*of_memory, paths.get("", "/"))[0].split("/") if part not in ("", "..")]
    folders = [top.joinpath(*parts[:number]) for number in range(len(parts), -1, -1)]
    # A container may show its own cgroup as the top, and name it by its path outside.
    return [folder for folder in folders if folder.is_dir()]


def _left_in_cgroups(root: Path) -> Iterator[tuple[int, str]]:
    """Memory left in each cgroup of this process; unused file pages can be dropped."""
    versions = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in _memory_cgroups(root):
        for limit, used, droppable in versions:
            with suppress(OSError, ValueError):  # no such file, or "max"
                allowed = int((folder / limit).read_text(encoding="ascii"))
                in_use = int((folder / used).read_text(encoding="ascii"))
                dropped = _counts(folder / "memory.stat").get(droppable, 0)
                yield max(0, allowed - max(0, in_use - dropped)), f"limit of {folder / limit}"


def _given_by_slurm(task: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The job's memory on this node; a shell that only allocated nodes has the variables, too, but no task."""
    if "SLURM_PROCID" not in task:
        return
    for name, times in (("NODE", None), ("CPU", "SLURM_CPUS_ON_NODE"), ("GPU", "SLURM_GPUS_ON_NODE")):
        number, each = task.get(f"SLURM_MEM_PER_{name}", ""), "1" if times is None else task.get(times, "")
        if number.isdigit() and each.isdigit() and int(number) * int(each):  # 0: all memory of the node
            yield int(number) * int(each) << 20, f"SLURM_MEM_PER_{name}"


def _counts(path: Path) -> dict[str, int]:
    """The kernel's counters in a file, by name; none where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
