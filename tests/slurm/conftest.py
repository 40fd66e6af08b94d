"""One cluster and one preloaded interpreter for all tests of this folder; both end with the tests."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, why_not
from repository import ROOT
from submitter import Submitter


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"a Slurm of its own {reason}")
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def slurm(cluster) -> Submitter:
    return Submitter(cluster)


@pytest.fixture(scope="session")
def python(slurm) -> Iterator[Path]:
    """The interpreter of jobs that train: a process of it is forked from one that has imported everything."""
    program, socket = ROOT / "tests/support/forked_python.py", Path(slurm.environment["FORKED_PYTHON"])
    paths = f"{slurm.environment['PYTHONPATH']}:{ROOT / 'tests/support'}"
    server = subprocess.Popen(
        [sys.executable, program, "--serve", socket],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
    )
    try:
        while not socket.exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield program
    finally:
        server.kill()
        server.wait()
