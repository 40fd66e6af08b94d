"""Queries to Slurm on the machine that submits: the jobs of a run, and the nodes of partitions. Imports no torch.

A run's jobs have a name of their own, so that a second submission finds them, and --dependency=singleton lets only one
of them run at a time. Elsewhere: the job script (jobs/slurm_script.py), the request (jobs/slurm_plan.py).
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.cluster.machine.environment import outside_of_jobs
from hacpo_mega.models.files.visible import one_line, say

QUERY_S = 60.0  # limit of one call of a Slurm program
# How long calls are repeated while the controller is away (a restart, a failover), and the interval between them.
CONTROLLER_S, RETRY_S = 300.0, 5.0
AWAY = re.compile(
    "(?i)contact|connect|timed out|standby|communication|transmi|temporarily|unexpected|munge|authentication"
)
JOB_FIELDS = ("%i", "%T", "%r", "%M", "%L", "%N", "%o")  # the last may hold any character, the separator too
PARTITION_FIELDS = ("%P", "%D", "%c", "%G", "%m")


@dataclass(frozen=True)
class QueuedJob:
    """A waiting or running job of the run, in Slurm's terms: `elapsed` and `left` are times, `nodes` a node list.

    script   path of its job script, whose name has the number of the submission
    """

    number: str
    state: str
    reason: str
    elapsed: str
    left: str
    nodes: str
    script: str

    def __str__(self) -> str:
        if self.state == "PENDING":
            return f"job {self.number} PENDING ({self.reason})"
        return f"job {self.number} {self.state} on {self.nodes} for {self.elapsed}, {self.left} left"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that are alike: their number, and processors, GPUs and memory of each as Slurm counts."""

    num_nodes: int
    cpus: int
    gpus: int
    memory_mib: int = 0


def job_name(run_dir: Path, *, held: bool = False) -> str:
    """The name of all jobs of a run and of no other run's: its folder's name and a digest of its real path. Jobs that
    hold nodes for the run (`held`) have another."""
    folder = os.path.realpath(run_dir)
    digest = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', os.path.basename(folder))[:40]}-{digest}{'-held' * held}"


def jobs_of(run_dir: Path, patience_s: float = 0.0, *, held: bool = False) -> list[QueuedJob] | None:
    """Jobs of a run, or with `held` those that hold nodes for it, of any user, running ones first; None if squeue does
    not answer."""
    options = ("--noheader", f"--name={job_name(run_dir, held=held)}", f"--format={'|'.join(JOB_FIELDS)}")
    output = _ask("squeue", *options, patience_s=patience_s)
    if output is None:
        return None
    lines = [line.split("|", len(JOB_FIELDS) - 1) for line in output.splitlines()]
    jobs = [QueuedJob(*line) for line in lines if len(line) == len(JOB_FIELDS)]
    return sorted(jobs, key=lambda job: job.state == "PENDING")


def partitions() -> dict[str, list[NodeGroup]]:
    """The nodes of every partition by its name; the default one also by "". Empty if sinfo does not answer."""
    groups: dict[str, list[NodeGroup]] = {}
    options = ("--noheader", "--exact", f"--format={'|'.join(PARTITION_FIELDS)}")
    for line in (_ask("sinfo", *options, patience_s=CONTROLLER_S) or "").splitlines():
        name, num_nodes, cpus, gres, memory = (line.split("|") + [""] * 5)[:5]
        if not (num_nodes.isdigit() and cpus.isdigit()):
            continue
        group = NodeGroup(int(num_nodes), int(cpus), num_gpus(gres), int(memory) if memory.isdigit() else 0)
        for partition in {name.rstrip("*"), *([""] if name.endswith("*") else [])}:
            groups.setdefault(partition, []).append(group)
    return groups


def num_gpus(gres: str) -> int:
    """The GPUs in Slurm's text on a node's generic resources: 8 in "gpu:h100:8(S:0-1),tmp:1"."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def ask(
    command: Sequence[str],
    patience_s: float = CONTROLLER_S,
    script: str = "",
    new_jobs: Callable[[], Sequence[str] | None] = tuple,
) -> subprocess.CompletedProcess:
    """Runs a Slurm program and returns its result; repeats the call for `patience_s` while the controller is away.

    `new_jobs` gives the numbers of jobs that a call made whose answer was lost; None if that is not known at present.
    """
    end = time.monotonic() + patience_s
    has_warned = False
    numbers: Sequence[str] | None = ()
    while True:
        if numbers is not None:  # else the call might make a second job
            try:
                pipes = {"input": script, "capture_output": True, "text": True}
                done = subprocess.run(command, env=outside_of_jobs(), timeout=QUERY_S, **pipes)
            except subprocess.TimeoutExpired:
                done = subprocess.CompletedProcess(command, 1, "", f"timed out after {QUERY_S:.0f} s")
        if done.returncode == 0 or not AWAY.search(done.stderr) or time.monotonic() >= end:
            return done
        if not has_warned:
            error = one_line(done.stderr.strip().splitlines()[-1])
            say(f"Slurm does not answer ({error}): asking again, for {patience_s:.0f} s at most", file=sys.stderr)
            has_warned = True
        time.sleep(RETRY_S)
        if numbers := new_jobs():
            return subprocess.CompletedProcess(command, 0, numbers[0], "")


def ask_sbatch(
    command: Sequence[str], run_dir: Path, script: str = "", *, held: bool = False
) -> subprocess.CompletedProcess:
    """`ask` for sbatch, without a second job of the run if the answer to the first call was lost."""
    before = jobs_of(run_dir, CONTROLLER_S, held=held)

    def new_jobs() -> list[str] | None:
        now = jobs_of(run_dir, held=held)
        if before is None or now is None:
            return None
        numbers = {job.number for job in now} - {job.number for job in before}
        return [number.partition("+")[0] for number in sorted(numbers)]

    return ask(command, script=script, new_jobs=new_jobs)


def _ask(program: str, *options: str, patience_s: float) -> str | None:
    """Output of a Slurm program; None if it is not installed, fails, or does not answer in time."""
    if shutil.which(program) is None:
        return None
    try:
        done = ask([program, *options], patience_s)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def job_line(jobs: Sequence[QueuedJob]) -> str:
    """The jobs in one line."""
    return "; ".join(map(str, jobs))
