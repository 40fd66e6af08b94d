"""One cluster and one preloaded interpreter for all tests of this folder; both end with the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, why_not
from job import interpreter
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
def python(slurm) -> Path:
    """The interpreter of jobs that train: a process of it is forked from one that has imported everything."""
    program, environment = interpreter()
    slurm.environment["FORKED_PYTHON"] = environment["FORKED_PYTHON"]
    return Path(program)
