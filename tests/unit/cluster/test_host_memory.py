"""Host memory that nodes can pin for offload, said before a model is loaded, alike on every rank; the limits that
count, and whether the kernel has killed a process for want of memory: on files that show a node, and in a real cgroup.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import ROOT

from hacpo_mega.cluster import turns
from hacpo_mega.cluster.machine.machine_limits import free_memory, num_cores, num_memory_kills
from hacpo_mega.cluster.turns import require_host_memory

MIB = 1 << 20
V1 = "12:devices:/a\n4:cpu,memory:/slurm/uid_0/job_5/step_0\n0::/\n"
V2 = "0::/slurmstepd.scope/job_5/step_0\n"


def refusal(
    monkeypatch, *ranks: tuple[str, int, int], shares_devices: bool = False, limit: str = "", copied: int = 0
) -> str | None:
    """The message to a job whose ranks are (node, MiB that it pins, MiB that are free there), None where all is well.

    Each also copies `copied` MiB for a checkpoint.

    They speak one after another, and the last one, which has heard all, is listened to.
    """
    payloads, said = [], None
    rank_map = SimpleNamespace(shares_devices=shares_devices)
    place = SimpleNamespace(rank_map=rank_map, gather_job=lambda payload: payloads.append(payload) or payloads)
    for node, size, free in ranks:
        monkeypatch.setattr(socket, "gethostname", lambda node=node: node)
        monkeypatch.setattr(turns, "free_memory", lambda free=free: (free * MIB, limit))
        try:
            require_host_memory(place, size * MIB, copied * MIB)
            said = None
        except ValueError as error:
            said = str(error)
    return said


def test_the_ranks_of_a_node_share_its_memory(monkeypatch):
    assert refusal(monkeypatch, ("a", 300, 1000), ("a", 700, 1010), ("b", 1000, 1000)) is None
    assert refusal(monkeypatch, ("a", 301, 1000), ("a", 700, 1010), ("b", 1000, 1000)) == (
        "agents.*.offload wants 1001 MiB of pinned memory on a, where 1000 MiB are free. Offload fewer agents "
        "(offload = 'none'), or spread them over more nodes"
    )


def test_a_limit_that_is_not_the_machines_is_named(monkeypatch):
    said = refusal(monkeypatch, ("a", 600, 500), limit="SLURM_MEM_PER_NODE")
    assert "on a, where 500 MiB are free (SLURM_MEM_PER_NODE). Offload fewer agents" in said


def test_agents_that_take_turns_wait_in_one_nodes_memory(monkeypatch):
    assert refusal(monkeypatch, ("a", 600, 1000), ("a", 600, 1000), shares_devices=True) == (
        "placement = 'shared' wants 1200 MiB of pinned memory on a, where 1000 MiB are free. Give agents devices of "
        "their own (placement = 'split')"
    )


def test_copies_for_checkpoints_take_what_is_not_pinned(monkeypatch):
    ranks = ("a", 300, 1000), ("a", 300, 1000)
    assert refusal(monkeypatch, *ranks, copied=200) is None
    assert refusal(monkeypatch, *ranks, copied=201) == (
        "checkpoint.asynchronous wants 402 MiB of memory for copies on a, where 400 MiB are free. Set it to false, or "
        "spread the agents over more nodes"
    )


def test_a_node_where_nothing_leaves_is_never_short(monkeypatch):
    assert refusal(monkeypatch, ("a", 0, 0), ("b", 5, 5)) is None


def machine(root: Path, cgroup: str, files: Mapping[str, str], available_mib: int = 1000) -> Path:
    """The kernel's files of a machine, whose cgroups hold `files`; sizes in them are words such as 30M."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {available_mib * 1024} kB\n",
        "proc/self/cgroup": cgroup,
        "proc/vmstat": "pgfault 7\noom_kill 9\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(" ".join(_bytes(word) for word in text.split(" ")))
    return root


def _bytes(word: str) -> str:
    number, rest = word.rstrip("\n").removesuffix("M"), "\n" * word.count("\n")
    return f"{int(number) * MIB}{rest}" if word.rstrip("\n") == f"{number}M" and number.isdigit() else word


JOB1, JOB2 = "memory/slurm/uid_0/job_5", "slurmstepd.scope/job_5"
STEP1 = {f"{JOB1}/step_0/memory.limit_in_bytes": "9223372036854771712\n", f"{JOB1}/step_0/memory.usage_in_bytes": "9M"}
STEP2 = {f"{JOB2}/step_0/memory.max": "max\n", f"{JOB2}/step_0/memory.current": "9M\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "task", "left", "who"),
    [
        (V1, {}, {}, 1000, ""),
        (V2, {}, {}, 1000, ""),
        (V1, STEP1, {}, 1000, ""),
        (V2, STEP2, {}, 1000, ""),
        (
            V1,
            STEP1 | {f"{JOB1}/memory.limit_in_bytes": "300M\n", f"{JOB1}/memory.usage_in_bytes": "120M\n"},
            {},
            180,
            "job_5/memory.limit_in_bytes",
        ),
        (
            V2,
            STEP2
            | {f"{JOB2}/memory.max": "300M\n", f"{JOB2}/memory.current": "120M\n"}
            | {f"{JOB2}/memory.stat": "anon 30M\ninactive_file 20M\n"},
            {},
            200,
            "job_5/memory.max",
        ),
        (V2, {"memory.max": "50M\n", "memory.current": "60M\n"}, {}, 0, "cgroup/memory.max"),
        ("0::/../..\n", {"memory.max": "50M\n", "memory.current": "6M\n"}, {}, 44, "cgroup/memory.max"),
        (V2, {}, {"SLURM_PROCID": "0", "SLURM_MEM_PER_NODE": "400"}, 400, "SLURM_MEM_PER_NODE"),
        (V2, {}, {"SLURM_MEM_PER_NODE": "400"}, 1000, ""),
        (V2, {}, {"SLURM_PROCID": "0", "SLURM_MEM_PER_NODE": "0"}, 1000, ""),
        (
            V2,
            {},
            {"SLURM_PROCID": "0", "SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "3"},
            300,
            "SLURM_MEM_PER_CPU",
        ),
        (
            V2,
            {},
            {"SLURM_PROCID": "0", "SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_ON_NODE": "2"},
            200,
            "SLURM_MEM_PER_GPU",
        ),
    ],
)
def test_the_least_limit_counts(tmp_path, cgroup, files, task, left, who):
    """Limits are the kernel's, those of each cgroup above the process by both versions, and Slurm's."""
    found, says = free_memory(machine(tmp_path, cgroup, files), task)
    assert (found, says.endswith(who)) == (left * MIB, True) and bool(says) == bool(who), says


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        (V2, {}, 64),
        (V2, {"cpu.max": "max 100000\n", f"{JOB2}/cpu.max": "350000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        (V1, {f"cpu/{JOB1[7:]}/cpu.cfs_quota_us": "-1\n", f"cpu/{JOB1[7:]}/cpu.cfs_period_us": "100000\n"}, 64),
        ("4:cpu,cpuacct:/docker/a\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_a_quota_of_processors_counts(tmp_path, monkeypatch, cgroup, files, cores):
    """A container that may keep some busy is still bound to all of its machine's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert num_cores(machine(tmp_path, cgroup, files)) == cores


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        (V1, {}, 9),
        (V2, {"slurmstepd.scope/job_5/step_0/memory.events": "low 0\noom 4\noom_kill 3\n"}, 3),
        (V1, {f"{JOB1}/step_0/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, 2),
        (V1, {"memory/memory.oom_control": "oom_kill_disable 0\noom_kill 5\n"}, 5),
        (V2, {"memory.events": "oom_kill 6\n"}, 6),
    ],
)
def test_the_kernels_counter_is_found(tmp_path, cgroup, files, kills):
    """By the launcher in Python and by the job's shell alike; in a container its own cgroup is the top."""
    root = machine(tmp_path, cgroup, files)
    assert num_memory_kills(root) == kills
    asked = ["bash", "-c", 'source "$0"; memory_kills "$1"', ROOT / "launch/node.sh", root]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == f"{kills}\n"


@pytest.fixture
def narrow() -> Iterator[Path]:
    """A cgroup of 200 MiB; skips where none can be made."""
    tops = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    top = next((top for top in tops if (top / "cgroup.procs").exists()), None)
    folder = (top or tops[0]) / f"hacpo_mega_test_{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.max" if top == tops[1] else "memory.limit_in_bytes")
        limit.write_text(str(200 * MIB)) if limit.exists() else pytest.skip("this cgroup limits no memory")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"needs the right to make a cgroup of memory: {error}")
    yield folder
    for _ in range(100):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


# The rank is Python's own timeit, which takes as much memory as it is told to.
LAUNCHER = """
import sys
from hacpo_mega.jobs import local
local.MODULE = "timeit"
sys.exit(local.run_on_this_machine(["-n1", "-r1", "b'a' * (1 << 30)"], 1))
"""


@pytest.mark.nightly
def test_a_rank_that_the_kernel_killed_is_said_to_have_had_no_memory(narrow, tmp_path):
    """A real one, in a cgroup: by the launcher of one machine, and in the log of a rank that srun started."""
    inside = ["bash", "-c", f'echo $$ >{narrow}/cgroup.procs && exec "$@"', "inside"]
    greedy = [sys.executable, "-m", "timeit", "-n1", "-r1", "b'a' * (1 << 30)"]
    done = subprocess.run([*inside, sys.executable, "-c", LAUNCHER], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "rank 0 was killed by the kernel: out of memory" in done.stderr, done.stderr
    srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "node1"}
    done = subprocess.run([*inside, "bash", ROOT / "launch/rank.sh", tmp_path, *greedy], env=os.environ | srun)
    assert done.returncode == 137
    assert "rank 1 was killed by the kernel: out of memory" in (tmp_path / "rank_1.log").read_text()
    shown = [
        *inside,
        sys.executable,
        "-c",
        "from hacpo_mega.cluster.machine import machine_limits as m; print(*m.free_memory())",
    ]
    left, _, who = subprocess.run(shown, capture_output=True, text=True, cwd=ROOT, check=True).stdout.partition(" ")
    assert 0 < int(left) < 200 * MIB and str(narrow) in who
    # who is killed by somebody else, beside it, has had no such reason
    quiet = [*inside, "bash", ROOT / "launch/rank.sh", tmp_path, "bash", "-c", "kill -9 $$"]
    (tmp_path / "rank_1.log").unlink()
    assert subprocess.run(quiet, env=os.environ | srun).returncode == 137
    assert "memory" not in (tmp_path / "rank_1.log").read_text()
