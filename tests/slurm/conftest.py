"""One cluster and one preloaded interpreter for all tests of this folder; both end with the tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import CONTROL, Cluster, why_not
from repository import ROOT

HERE = Path(__file__).parent


class Submitter:
    """`hacpo-mega slurm` on the controlling machine of a cluster, and what becomes of a job."""

    def __init__(self, cluster: Cluster, socket: Path) -> None:
        self.cluster = cluster
        self.environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
            "FORKED_PYTHON": str(socket),
            "HOME": os.environ.get("HOME", "/"),
        }

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess:
        """`hacpo-mega slurm ARGUMENTS`, whatever comes of it."""
        words = [sys.executable, "-m", "hacpo_mega.cli", "slurm", *map(str, arguments)]
        return self.cluster.on(CONTROL, *words, check=False, **self.environment)

    def submit(self, *arguments: str | Path) -> str:
        """The number of the job."""
        done = self.run(*arguments, f"slurm.python={HERE / 'forked_python.py'}")
        assert done.returncode == 0, done.stderr
        return next(line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith("job "))

    def wait_for_end(self, number: str, log: Path) -> str:
        """The state that a job ends in: COMPLETED, FAILED, CANCELLED, ..."""
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "NODE_FAIL")
        self.cluster.wait(lambda: self.cluster.job(number)["JobState"] not in going, f"job {number}, see {log}")
        return self.cluster.job(number)["JobState"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"a Slurm of its own {reason}")
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def slurm(cluster) -> Iterator[Submitter]:
    """Submits jobs whose interpreter is forked from a preloaded one."""
    socket = cluster.root / "python.socket"
    server = subprocess.Popen(
        [sys.executable, HERE / "forked_python.py", "--serve", socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests/support'}", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert server.stdout.readline() == "ready\n"
        yield Submitter(cluster, socket)
    finally:
        server.kill()
        server.wait()
