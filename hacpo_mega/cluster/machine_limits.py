"""How many processes of a run one machine can hold: asked by `hacpo-mega train` before it starts them all here.

A typo in tp or lanes would start hundreds, and the machine would answer nobody any more. Who starts the ranks himself,
by torchrun or srun, is not asked. Not here: who runs where (rank_map.py).
"""

import os
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


def free_memory_bytes() -> int:
    """Memory that the kernel says can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
