"""Processes of a real Slurm that binds them: each has its share of the processors, and no more threads than those."""

import os

import pytest
from cluster import Cluster, why_not
from run_cases import CHARACTERS, agent_table, write_config
from submitter import Submitter

pytestmark = pytest.mark.nightly

# Program that writes the processors a process may use, those that Slurm names, the threads that hacpo-mega sets.
LOOKS = """
import os, pathlib
from hacpo_mega.cluster.machine.environment import prepare_environment
if "preflight" not in os.sys.argv:
    os.environ.pop("OMP_NUM_THREADS", None)
    prepare_environment()
    found = [len(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], os.environ.get("SLURM_CPU_BIND_LIST", "")]
    pathlib.Path(os.environ["RUN"], f"found.{os.environ['SLURM_PROCID']}").write_text(" ".join(map(str, found)))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors to bind to")
def test_a_process_has_its_share_of_a_whole_node(tmp_path):
    if reason := why_not():
        pytest.skip(f"a Slurm of its own {reason}")
    agents = [agent_table(tmp_path, name, "qwen3", CHARACTERS) for name in ("a", "b")]
    run_dir, looks = tmp_path / "run", tmp_path / "looks.py"
    looks.write_text(LOOKS)
    whole = {
        "gpus_per_node": 1,
        "preflight": False,
        "sbatch_options": ["--exclusive"],
        "environment": {"RUN": str(run_dir)},
    }
    config = write_config(tmp_path, agents, slurm=whole)
    with Cluster(cpus=2, task_plugin="task/affinity") as cluster:
        slurm = Submitter(cluster)
        python = tmp_path / "python"  # of the processes: looks, and trains nothing
        python.write_text(f'#!/bin/sh\nexec {slurm.environment["PLAIN_PYTHON"]} {looks} "$@"\n')
        python.chmod(0o755)
        number = slurm.submit(config, f"slurm.python={python}")
        log = run_dir / "slurm" / f"{number}.log"
        assert slurm.wait_for_end(number, log) == "COMPLETED", log.read_text()
    found = [(run_dir / f"found.{rank}").read_text().split() for rank in range(2)]
    assert [(cores, threads) for cores, threads, _ in found] == [("2", "2")] * 2
    assert all(int(masks.split(",")[-1], 16) == 3 for *_, masks in found), "what machine_limits.py reads of the others"
