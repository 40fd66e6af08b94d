"""Launcher environment of this process: its rank, its node, and the address of the job's first process. No torch.

Read from the environment once; torchrun's names come before Slurm's. The launcher learns the end of a rank, and with it
of the job, by the exit statuses below: docs/reference/exit-codes.md has the table. Elsewhere: the role of a rank
(rank_map.py).
"""

import itertools
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hacpo_mega.models.files.documents import short

# torchrun sets the left names; under srun every task has the right ones.
RANK_VARIABLES = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID"))
MOST_NODES = 2**20  # of one job: a longer list is a slip, or would fill the memory
STORE_FILE = "HACPO_MEGA_STORE"  # where a launcher of ours on one machine has made the job's store
FAILED, REFUSED, STOPPED, STALLED, SIGNALLED = 1, 2, 3, 4, 128  # SIGNALLED + n: ended by signal n
RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: ended by a signal, the run is on disk; start it again to resume

# srun sets one of these for its tasks; a batch script has none of them, though it has a SLURM_PROCID.
OF_SRUN = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST")


class Unreachable(Exception):
    """Raised if the job's store cannot be reached, or a rank has not arrived in time."""


@dataclass(frozen=True)
class LauncherEnv:
    """One process as its launcher sees it.

    node         Slurm's name of this node, or the host's    num_local    processes of the job on it
    nodes        all nodes of the step by name; empty where the launcher does not list them
    address, port          where the job's store is
    launcher_keeps_store   torchrun does; else the job's rank 0 does
    store_file             the store is a file; then nobody keeps it
    """

    rank: int
    world_size: int
    local_rank: int
    num_local: int
    node: str
    nodes: tuple[str, ...]
    address: str
    port: int
    launcher_keeps_store: bool
    store_file: Path | None = None

    @classmethod
    def find(cls) -> Self:
        """The launcher environment of this process. ValueError if no launcher has set it."""
        require_srun()
        rank, world_size, local_rank = (from_launcher(name, slurm) for name, slurm in RANK_VARIABLES)
        if rank >= world_size:
            raise ValueError(f"RANK ({rank}) must be below WORLD_SIZE ({world_size}): ranks are counted from 0")
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} not set: export MASTER_ADDR (the first node's name) and MASTER_PORT (a free "
                "port there) before srun, or start with torchrun"
            )
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            num_local=num_local(world_size),
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            nodes=expand_nodes(node_list()),
            address=os.environ["MASTER_ADDR"],
            port=number_of("MASTER_PORT", os.environ["MASTER_PORT"], 65535),
            launcher_keeps_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store_file=Path(os.environ[STORE_FILE]) if STORE_FILE in os.environ else None,
        )

    @property
    def is_first_of_node(self) -> bool:
        """True if this process acts for its node."""
        return self.local_rank == 0


def node_list() -> str:
    """Slurm's list of this step's nodes; of the job's where it is heterogeneous: the step's may be one component's."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if "SLURM_HET_SIZE" in os.environ:
        names = names[::-1]
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def size_variable() -> str:
    """The variable with the number of the job's processes."""
    return "SLURM_NTASKS" if os.environ.get("SLURM_NTASKS") and not os.environ.get("WORLD_SIZE") else "WORLD_SIZE"


def in_batch_script() -> bool:
    """True if this process is a Slurm batch script, or started by it without srun and without another launcher."""
    has_step = any(os.environ.get(name) not in (None, "batch") for name in OF_SRUN)
    return {"SLURM_JOB_ID", "SLURM_PROCID"} <= os.environ.keys() and "RANK" not in os.environ and not has_step


def require_srun() -> None:
    """ValueError in a batch script of several tasks, which would wait as one rank for others that nobody starts."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if tasks != "1" and in_batch_script():
        asked = f"SLURM_NTASKS is {tasks}" if tasks else "SLURM_NTASKS is not set"
        raise ValueError(
            f"this is the batch script of job {os.environ['SLURM_JOB_ID']} and no task of srun ({asked}, SLURM_STEP_ID "
            f"is not set): put srun before the command ({f'srun --ntasks={tasks}' if tasks else 'srun --ntasks=N'} "
            "hacpo-mega ...), or start all ranks of one node with launch/local.sh"
        )


def from_launcher(name: str, slurm_name: str) -> int:
    """A number that torchrun or srun has set. ValueError when neither has."""
    value = os.environ.get(name) or os.environ.get(slurm_name)
    if value is None:
        raise ValueError(
            f"neither {name} nor {slurm_name} is set: start with launch/local.sh, torchrun or srun, or let "
            "hacpo_mega.train start the ranks of a script or notebook"
        )
    return number_of(name if os.environ.get(name) else slurm_name, value)


def number_of(name: str, value: str, most: int = 2**31 - 1) -> int:
    """The value of a variable. ValueError, which names it, for anything but a number from 0 to `most`."""
    if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) > most:
        raise ValueError(f"{name} must be a number from 0 to {most}, found {value[:80]!r}")
    return int(value)


def expand_nodes(names: str) -> tuple[str, ...]:
    """Slurm's list of nodes, one by one: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7, login.

    ValueError for more than MOST_NODES.
    """
    # a comma inside brackets separates numbers, outside it separates names
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names)
    nodes = tuple(itertools.islice((node for part in parts for node in _expand(part)), MOST_NODES + 1))
    if len(nodes) > MOST_NODES:
        raise ValueError(f"a list of more than {MOST_NODES:,} nodes: {short(names)}")
    return nodes


def _expand(part: str) -> Iterator[str]:
    brackets = re.search(r"\[([^\]]*)\]", part)
    if brackets is None:
        yield part
        return
    head, tail = part[: brackets.start()], part[brackets.end() :]
    for span in brackets[1].split(","):
        first, _, last = span.partition("-")
        if not re.fullmatch(r"[0-9]{1,18}(-[0-9]{1,18})?", span):
            raise ValueError(f"{short(part)} is no list of nodes as Slurm writes it, such as gpu[01-03,7]")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{head}{str(number).zfill(len(first))}{tail}")


def tasks_of_nodes(counts: str) -> list[int]:
    """Processes of the step on every node, from Slurm's "2(x3),1".

    SLURM_NTASKS_PER_NODE is wrong in a job of several components. ValueError for more than MOST_NODES nodes.
    """
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    if sum(int(times or 1) for _, times in runs) > MOST_NODES:
        raise ValueError(f"a list of more than {MOST_NODES:,} nodes: {short(counts)}")
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def num_local(world_size: int) -> int:
    """Number of processes of this node; all of the job if the launcher does not say."""
    if local := os.environ.get("LOCAL_WORLD_SIZE"):
        return number_of("LOCAL_WORLD_SIZE", local)
    counts = tasks_of_nodes(os.environ.get("SLURM_TASKS_PER_NODE", ""))
    node = number_of("SLURM_NODEID", os.environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else world_size


def is_on_one_machine() -> bool:
    """True if the launcher says that all processes of the job are on this machine."""
    world_size = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS")
    if local := os.environ.get("LOCAL_WORLD_SIZE"):
        return local == world_size
    return [str(count) for count in tasks_of_nodes(os.environ.get("SLURM_TASKS_PER_NODE", ""))] == [world_size]
