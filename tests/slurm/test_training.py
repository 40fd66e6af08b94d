"""Runs in a real Slurm of four nodes: whatever ends an attempt, the result is that of launch/local.sh, to the last bit.

Two agents of unequal size and layout: tensor parallel 2 on one node, one rank on the other.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
from cluster import CONTROL
from repository import ROOT
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

from hacpo_mega.checkpoint import committed_steps
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.logbook.provenance import exported_steps, read_starts
from hacpo_mega.logbook.rollout_log import read_rollouts

pytestmark = pytest.mark.slow

NUM_STEPS = 3
SIGNAL_S = 240


@pytest.fixture(scope="module")
def config(tmp_path_factory, python) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "narrow", "llama", CHARACTERS + PAIRS),
    ]
    return write_config(
        folder,
        agents,
        num_steps=NUM_STEPS,
        algorithm={"delta": 0.9},
        checkpoint={"every_steps": 1},
        slurm={"gpus_per_node": 2, "time": "60", "signal_s": SIGNAL_S, "python": str(python)},
    )


@pytest.fixture(scope="module")
def reference(slurm, config, python) -> Path:
    """The same configuration by launch/local.sh, on this machine."""
    run_dir = config.parent / "reference"
    environment = os.environ | slurm.environment | {"PYTHON": str(python)}
    command = [ROOT / "launch/local.sh", config, f"run_dir={run_dir}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return run_dir


@pytest.fixture(scope="module")
def limited(slurm, config) -> tuple[Path, str]:
    """A run that twice reaches its limit of time: its folder and the number of its job."""
    run_dir, cluster = config.parent / "limited", slurm.cluster
    number = slurm.submit(config, f"run_dir={run_dir}")
    log = run_dir / "slurm" / f"{number}.log"
    for attempt in (1, 2):
        cluster.wait(lambda attempt=attempt: len(committed_steps(run_dir)) >= attempt, f"step {attempt}, see {log}")
        minutes = elapsed_minutes(cluster.job(number)["RunTime"]) + SIGNAL_S // 60
        cluster.on(CONTROL, "scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
        cluster.wait(lambda attempt=attempt: int(cluster.job(number)["Restarts"]) == attempt, f"attempt, see {log}")
        cluster.on(CONTROL, "scontrol", "update", f"JobId={number}", "TimeLimit=60")
    assert slurm.wait_for_end(number, log) == "COMPLETED", log.read_text()
    return run_dir, number


@pytest.fixture(scope="module")
def disturbed(slurm, config) -> dict:
    """A run whose first job is cancelled in a step, and whose second one, of two partitions, loses a node in a step."""
    run_dir, cluster = config.parent / "disturbed", slurm.cluster
    first = slurm.submit(config, f"run_dir={run_dir}")
    cluster.wait(lambda: committed_steps(run_dir), f"a step, see {run_dir}/slurm/{first}.log")
    cluster.on(CONTROL, "scancel", first)
    told = {"state": slurm.wait_for_end(first, run_dir), "run_dir": run_dir}
    cluster.wait(lambda: cluster.states() == ["idle"] * 4, "the nodes to be free")
    told["left"] = processes_of(run_dir)
    told["committed"] = max(committed_steps(run_dir))

    placing = ("slurm.agents.wide.partition=new", "slurm.agents.narrow.partition=old")
    number = told["job"] = slurm.submit(config, f"run_dir={run_dir}", *placing)
    log = told["log"] = run_dir / "slurm" / f"{number}.log"
    cluster.wait(lambda: max(committed_steps(run_dir)) > told["committed"], f"a step, see {log}")
    told["safe"], lost = max(committed_steps(run_dir)), cluster.job(f"{number}+1")["NodeList"]
    cluster.power_off(lost)
    told["lost_at"], told["lost"] = time.time(), lost
    try:
        told["end"] = slurm.wait_for_end(number, log)
    finally:
        cluster.power_on(lost)
    assert told["end"] == "COMPLETED", log.read_text()
    return told


def elapsed_minutes(clock: str) -> int:
    hours, minutes, seconds = (int(part) for part in clock.rpartition("-")[2].split(":"))
    return hours * 60 + minutes + (seconds > 0)


def processes_of(run_dir: Path) -> list[int]:
    """Processes anywhere that name the run's folder in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run_dir / "slurm").encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def assert_same_run(run_dir: Path, reference: Path) -> None:
    one, other = (read_metrics(folder / "metrics.jsonl") for folder in (reference, run_dir))
    assert list(other) == list(range(NUM_STEPS + 1))
    assert [step.values for step in other.values()] == [step.values for step in one.values()]
    assert all(read_rollouts(run_dir, n) == read_rollouts(reference, n) for n in range(1, NUM_STEPS + 1))
    for name in ("wide", "narrow"):
        weights = [folder / "agents" / name / "model.safetensors" for folder in (reference, run_dir)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert exported_steps(run_dir) == NUM_STEPS


def test_three_attempts_are_one_run(limited, reference):
    run_dir, number = limited
    assert_same_run(run_dir, reference)
    assert len(read_starts(run_dir)) == 3
    said = (run_dir / "slurm" / f"{number}.log").read_text()
    assert [said.count(line) for line in ("the time limit is near", "queues again", "] done")] == [2, 2, 1]
    for attempt in (1, 2, 3):
        logs = run_dir / "logs" / f"attempt_{attempt}"
        assert sorted(path.name for path in logs.glob("*.log")) == ["rank_0.log", "rank_1.log", "rank_2.log"]
        nodes = [(logs / f"rank_{rank}.log").read_text().split(" on ")[1].split(",")[0] for rank in range(3)]
        assert nodes[0] == nodes[1] != nodes[2], "a tensor parallel group on one node"


def test_a_cancelled_job_leaves_a_step_and_no_process(disturbed):
    assert disturbed["state"] == "CANCELLED" and disturbed["left"] == []
    assert disturbed["committed"] >= 1


def test_a_lost_node_costs_no_committed_step(disturbed, reference):
    assert_same_run(disturbed["run_dir"], reference)
    starts = read_starts(disturbed["run_dir"])
    assert [start["steps_done"] for start in starts] == [0, disturbed["committed"], disturbed["safe"]]
    again = disturbed["run_dir"] / "logs" / "attempt_3" / "rank_0.log"
    assert disturbed["lost"] not in again.read_text().split("\n")[0]
    print(f"on again after {starts[2]['time_unix_s'] - disturbed['lost_at']:.0f} s: {again.read_text()[:100]}")


def test_agents_of_two_partitions_are_on_their_nodes(disturbed):
    for attempt in (2, 3):
        logs = disturbed["run_dir"] / "logs" / f"attempt_{attempt}"
        nodes = [(logs / f"rank_{rank}.log").read_text().split(" on ")[1].split(",")[0] for rank in range(3)]
        assert nodes[0] == nodes[1] and nodes[0] in ("node3", "node4") and nodes[2] in ("node1", "node2")
