"""Gives jobs to the cluster of these tests, as a user does on a login node."""

import os
import subprocess
import sys
from pathlib import Path

from cluster import CONTROL, Cluster
from repository import SOURCES


class Submitter:
    """`hacpo-mega slurm` on the controlling machine of a cluster, and what becomes of a job."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.environment = {
            "PYTHONPATH": ":".join(map(str, SOURCES)),
            "OMP_NUM_THREADS": "1",
            "PLAIN_PYTHON": sys.executable,
            "HOME": os.environ.get("HOME", "/"),
        }

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess:
        """`hacpo-mega slurm ARGUMENTS`, whatever comes of it."""
        words = [sys.executable, "-m", "hacpo_mega.cli", "slurm", *map(str, arguments)]
        return self.cluster.on(CONTROL, *words, check=False, **self.environment)

    def submit(self, *arguments: str | Path) -> str:
        """The number of the job."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return next(line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith("job "))

    def wait_for_end(self, number: str, log: Path) -> str:
        """The state that a job ends in: COMPLETED, FAILED, CANCELLED, ..."""
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "NODE_FAIL")
        self.cluster.wait(lambda: self.cluster.job(number)["JobState"] not in going, f"job {number}, see {log}")
        return self.cluster.job(number)["JobState"]
