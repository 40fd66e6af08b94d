"""Queries to Slurm on the machine that submits: the jobs of a run, and the nodes of partitions. Imports no torch.

A run's jobs have a name of their own, so that a second submission finds them, and --dependency=singleton lets one run
at a time. Elsewhere: the job script (jobs/slurm_script.py), the request (slurm.py).
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

QUEUE_S = 60.0  # after which a controller that does not answer is not waited for
# Patience for a controller that is away (a restart, a failover), and the interval of retries.
CONTROLLER_S, AGAIN_S = 300.0, 5.0
AWAY = re.compile(
    "(?i)contact|connect|timed out|standby|communication|transmi|temporarily|unexpected|munge|authentication"
)
JOB_FIELDS = ("%i", "%T", "%r", "%M", "%L", "%N", "%o")  # the last one may have anything in it
PARTITION_FIELDS = ("%P", "%D", "%c", "%G", "%m")


@dataclass(frozen=True)
class QueuedJob:
    """A waiting or running job of the run, in Slurm's terms: `elapsed` and `left` are times, `nodes` a node list.

    script   what it runs: by its name, which submission of the run it is
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
    """Nodes of a partition that are alike: how many, processors, GPUs and memory of each, as Slurm counts them."""

    num_nodes: int
    cpus: int
    gpus: int
    memory_mib: int = 0


def job_name(run_dir: Path, *, held: bool = False) -> str:
    """The name of all jobs of a run, and of no other: a part for people and a digest, both of the real path. Jobs that
    hold nodes for it have another."""
    folder = os.path.realpath(run_dir)
    digest = hashlib.sha256(folder.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', os.path.basename(folder))[:40]}-{digest}{'-held' * held}"


def jobs_of(run_dir: Path, patience_s: float = 0.0, *, held: bool = False) -> list[QueuedJob] | None:
    """The running, then the waiting jobs of a run, or those that hold nodes for it, of any user; None if squeue does
    not answer."""
    options = ("--noheader", f"--name={job_name(run_dir, held=held)}", f"--format={'|'.join(JOB_FIELDS)}")
    output = _ask("squeue", *options, patience_s=patience_s)
    if output is None:
        return None
    lines = [line.split("|", len(JOB_FIELDS) - 1) for line in output.splitlines()]
    found = [QueuedJob(*line) for line in lines if len(line) == len(JOB_FIELDS)]
    return sorted(found, key=lambda job: job.state == "PENDING")


def partitions() -> dict[str, list[NodeGroup]]:
    """The nodes of every partition; the default one also by the name "". Empty if sinfo cannot be asked."""
    found: dict[str, list[NodeGroup]] = {}
    options = ("--noheader", "--exact", f"--format={'|'.join(PARTITION_FIELDS)}")
    for line in (_ask("sinfo", *options, patience_s=CONTROLLER_S) or "").splitlines():
        name, num_nodes, cpus, gres, memory = (line.split("|") + [""] * 5)[:5]
        if not (num_nodes.isdigit() and cpus.isdigit()):
            continue
        group = NodeGroup(int(num_nodes), int(cpus), num_gpus(gres), int(memory) if memory.isdigit() else 0)
        for known in {name.rstrip("*"), *([""] if name.endswith("*") else [])}:
            found.setdefault(known, []).append(group)
    return found


def num_gpus(gres: str) -> int:
    """The GPUs in Slurm's word for a node's generic resources: "gpu:h100:8(S:0-1),tmp:1" has 8."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def ask(
    command: Sequence[str],
    patience_s: float = CONTROLLER_S,
    script: str = "",
    made: Callable[[], Sequence[str] | None] = tuple,
) -> subprocess.CompletedProcess:
    """Runs a Slurm program and returns its end; retries for `patience_s` while the controller is away.

    `made` gives the numbers that a request has made whose answer was lost; None if nobody knows at present.
    """
    end = time.monotonic() + patience_s
    is_said = False
    found: Sequence[str] | None = ()
    while True:
        if found is not None:
            try:
                pipes = {"input": script, "capture_output": True, "text": True}
                done = subprocess.run(command, env=outside_of_jobs(), timeout=QUEUE_S, **pipes)
            except subprocess.TimeoutExpired:
                done = subprocess.CompletedProcess(command, 1, "", f"timed out after {QUEUE_S:.0f} s")
        if done.returncode == 0 or not AWAY.search(done.stderr) or time.monotonic() >= end:
            return done
        if not is_said:
            words = one_line(done.stderr.strip().splitlines()[-1])
            say(f"Slurm does not answer ({words}): asking again, for {patience_s:.0f} s at most", file=sys.stderr)
            is_said = True
        time.sleep(AGAIN_S)
        if found := made():
            return subprocess.CompletedProcess(command, 0, found[0], "")


def submitted(
    command: Sequence[str], run_dir: Path, script: str = "", *, held: bool = False
) -> subprocess.CompletedProcess:
    """`ask` for sbatch, which must not make a second job of a run where its answer was lost."""
    known = jobs_of(run_dir, CONTROLLER_S, held=held)

    def made() -> list[str] | None:
        now = jobs_of(run_dir, held=held)
        if known is None or now is None:
            return None
        new = {job.number for job in now} - {job.number for job in known}
        return [number.partition("+")[0] for number in sorted(new)]

    return ask(command, script=script, made=made)


def _ask(program: str, *options: str, patience_s: float) -> str | None:
    """Output of a Slurm program; None without it, if it fails, or if it does not answer in time."""
    if shutil.which(program) is None:
        return None
    try:
        done = ask([program, *options], patience_s)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def spoken(jobs: Sequence[QueuedJob]) -> str:
    """The jobs in a line."""
    return "; ".join(map(str, jobs))
