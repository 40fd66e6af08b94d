"""Runs in a real Slurm of four nodes: whatever ends an attempt, the result is that of launch/local.sh, to the last bit.

Two agents of unequal size and layout: tensor parallel 2 on one node, one rank on the other.
"""

import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import CONTROL
from repository import ROOT
from run_cases import CHARACTERS, GRADER, PAIRS, agent_table, write_config

from hacpo_mega.checkpoint.files import committed_steps
from hacpo_mega.cluster.launcher_env import expand_nodes
from hacpo_mega.jobs.attempts import read_attempts
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import read_rollouts
from hacpo_mega.logbook.run.provenance import exported_steps, read_starts

pytestmark = pytest.mark.nightly

NUM_STEPS = 4
AWAY_S = 60  # of a controller: longer than its programs wait for it
SIGNAL_S = 600  # long before the limit: a crowded machine must have the time to leave by itself
# Judges as graders.py does, but a step's answers only when the file beside the run names at least that step: so a
# run waits in the middle of a step for what happens to it there.
WAITING_GRADER = """
import time
from pathlib import Path

def share_of_ones(prompt, answer, gold):
    done = max((int(path.name[5:11]) for path in Path({run!r}).glob("checkpoints/step_*")), default=0)
    # what the reward is tried on at a start, an empty answer and the gold in some forms, does not wait
    while answer and gold not in answer and done >= int(Path({gate!r}).read_text()):
        time.sleep(0.05)
    return answer.count("1") / len(answer) if answer else None
"""


class Gate:
    """The last step that a run may finish, as its grader reads it; `override` makes the run have that grader."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        self._file = run_dir.with_suffix(".gate")
        grader = run_dir.with_suffix(".py")
        grader.write_text(WAITING_GRADER.format(run=str(run_dir), gate=str(self._file)))
        self.override = f"reward.kind={grader}:share_of_ones"
        self.open(last_step)

    def open(self, last_step: int) -> None:
        fresh = self._file.with_suffix(".fresh")
        fresh.write_text(str(last_step))
        fresh.replace(self._file)


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
        reward={"kind": f"{GRADER}:share_of_ones", "timeout_s": 60.0},  # so long that a run may wait for a node's loss
        checkpoint={"every_steps": 1, "asynchronous": False},
        slurm={"gpus_per_node": 2, "time": "60", "signal_s": SIGNAL_S, "preflight": False, "python": str(python)},
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
    """A run that reaches its limit of time in the middle of a step, and then loses a process; the controller is away
    both times when the attempt ends. Its folder and the number of its job."""
    run_dir, cluster = config.parent / "limited", slurm.cluster
    gate = Gate(run_dir, last_step=1)
    number = slurm.submit(config, f"run_dir={run_dir}", gate.override)
    log = run_dir / "slurm" / f"{number}.log"
    cluster.wait(lambda: committed_steps(run_dir)[-1:] == [1], f"step 1, see {log}")
    # less than SIGNAL_S is left: Slurm, which looks twice a minute, says so when it looks next
    minutes = elapsed_minutes(cluster.job(number)["RunTime"]) + SIGNAL_S // 60
    cluster.on(CONTROL, "scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    cluster.wait(lambda: "the time limit is near" in log.read_text(), f"the signal, see {log}")
    with _controller_away(cluster, log):
        gate.open(2)
    cluster.wait(lambda: int(cluster.job(number)["Restarts"]) == 1, f"attempt 2, see {log}")
    cluster.on(CONTROL, "scontrol", "update", f"JobId={number}", "TimeLimit=60")
    gate.open(3)
    cluster.wait(lambda: committed_steps(run_dir)[-1:] == [3], f"step 3, see {log}")
    with _controller_away(cluster, log):
        kill_rank(run_dir, 1)
    gate.open(NUM_STEPS)
    assert slurm.wait_for_end(number, log) == "COMPLETED", log.read_text()
    return run_dir, number


@contextmanager
def _controller_away(cluster, log: Path) -> Iterator[None]:
    """Inside, until the job script asks it something, and for a minute."""
    asked, end = log.read_text().count("Slurm does not answer"), time.monotonic() + AWAY_S
    cluster.controller_off()
    yield
    cluster.wait(lambda: log.read_text().count("Slurm does not answer") > asked, f"a question, see {log}")
    time.sleep(max(0.0, end - time.monotonic()))
    cluster.controller_on()


def kill_rank(run_dir: Path, rank: int) -> None:
    for number in processes_of(run_dir):
        variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        if b"SLURM_PROCID=%d" % rank in variables and not words[0].endswith(b"bash"):
            os.kill(number, signal.SIGKILL)


def has_begun(run_dir: Path, num_attempts: int) -> bool:
    return len(read_attempts(run_dir)) == num_attempts


@pytest.fixture(scope="module")
def preempted(slurm, config) -> tuple[Path, str]:
    """A run that is queued again from outside three times before it has committed a step."""
    run_dir, cluster = config.parent / "preempted", slurm.cluster
    gate = Gate(run_dir, last_step=0)
    number = slurm.submit(config, f"run_dir={run_dir}", gate.override)
    log = run_dir / "slurm" / f"{number}.log"
    for attempt in (1, 2, 3):
        cluster.wait(functools.partial(has_begun, run_dir, attempt), f"attempt {attempt}, see {log}")
        cluster.on(CONTROL, "scontrol", "requeue", number)
    # The third one has some seconds to end in, in which a fast machine would do all steps.
    cluster.wait(functools.partial(has_begun, run_dir, 4), f"attempt 4, see {log}")
    gate.open(NUM_STEPS)
    assert slurm.wait_for_end(number, log) == "COMPLETED", log.read_text()
    return run_dir, log.read_text()


@pytest.fixture(scope="module")
def disturbed(slurm, config) -> dict:
    """A run whose first job is cancelled in step 2, and whose second one, of two partitions, loses a node in step 3."""
    run_dir, cluster = config.parent / "disturbed", slurm.cluster
    gate = Gate(run_dir, last_step=1)
    first = slurm.submit(config, f"run_dir={run_dir}", gate.override)
    cluster.wait(lambda: committed_steps(run_dir) == [1], f"step 1, see {run_dir}/slurm/{first}.log")
    cluster.on(CONTROL, "scancel", first)
    gate.open(2)
    told = {"run_dir": run_dir, "first": first, "state": slurm.wait_for_end(first, run_dir)}
    cluster.wait_for_idle_nodes()
    told["left"], told["committed"] = processes_of(run_dir), max(committed_steps(run_dir))

    gate.open(told["committed"] + 1)
    placing = ("slurm.agents.wide.partition=new", "slurm.agents.narrow.partition=old")
    number = slurm.submit(config, f"run_dir={run_dir}", gate.override, *placing)
    log, told["second"] = run_dir / "slurm" / f"{number}.log", number
    cluster.wait(lambda: max(committed_steps(run_dir)) > told["committed"], f"a step, see {log}")
    told["safe"], told["lost"] = max(committed_steps(run_dir)), cluster.job(f"{number}+1")["NodeList"]
    cluster.power_off(told["lost"])
    told["lost_at"] = time.time()
    gate.open(NUM_STEPS)
    try:
        told["end"] = slurm.wait_for_end(number, log)
    finally:
        cluster.power_on(told["lost"])
    assert told["end"] == "COMPLETED", log.read_text()
    return told


@pytest.fixture(scope="module")
def interrupted(slurm, config) -> dict:
    """A run that finds drained nodes, is preempted in step 2, and whose rank 0's node loses its link in step 3."""
    run_dir, cluster = config.parent / "interrupted", slurm.cluster
    gate, told = Gate(run_dir, last_step=1), {"run_dir": run_dir}
    control = functools.partial(cluster.on, CONTROL)
    control("scontrol", "update", "NodeName=node[1-4]", "State=DRAIN", "Reason=tests")
    number = slurm.submit(config, f"run_dir={run_dir}", gate.override)
    log = run_dir / "slurm" / f"{number}.log"
    cluster.wait(lambda: "drained" in cluster.job(number)["Reason"].lower(), "Slurm's reason to wait")
    told["drained"] = cluster.job(number)["JobState"]
    control("scontrol", "update", "NodeName=node[2-4]", "State=RESUME")
    cluster.wait(lambda: committed_steps(run_dir) == [1], f"step 1, see {log}")
    control("scontrol", "update", "NodeName=node1", "State=RESUME")

    nodes = cluster.job(number)["NodeList"]
    urgent = ["--parsable", "--partition=urgent", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null"]
    other = control("sbatch", *urgent, "--wrap=sleep 1").stdout.strip()
    cluster.wait(lambda: cluster.job(number)["JobState"] != "RUNNING", f"the preemption, see {log}")
    gate.open(2)
    cluster.wait(lambda: cluster.job(other)["JobState"] == "COMPLETED", "the urgent job")
    cluster.wait(lambda: committed_steps(run_dir)[-1] >= 2 and _restarts(slurm, number) == 1, f"attempt 2, see {log}")

    cluster.wait(lambda: (run_dir / "logs/attempt_2/rank_0.log").exists(), f"rank 0, see {log}")
    told["safe"], told["cut"] = committed_steps(run_dir)[-1], node_of(run_dir, 2, rank=0)
    cluster.link(told["cut"], "down")
    cluster.wait(lambda: _restarts(slurm, number) == 2, f"attempt 3, see {log}")
    cluster.wait(lambda: len(read_starts(run_dir)) == 3, f"the third start, see {log}")
    cluster.link(told["cut"], "up")
    cluster.wait(lambda: cluster.states().count("down") == 0, "the node to be back")
    time.sleep(5)  # in which an srun of the second attempt has Slurm cancel what it believes to be its step
    gate.open(NUM_STEPS)
    told["end"] = slurm.wait_for_end(number, log)
    told["log"] = log.read_text()
    return told


def _restarts(slurm, number: str) -> int:
    return int(slurm.cluster.job(number)["Restarts"])


def elapsed_minutes(clock: str) -> int:
    hours, minutes, _ = (int(part) for part in clock.rpartition("-")[2].split(":"))
    return hours * 60 + minutes


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


def node_of(run_dir: Path, attempt: int, rank: int) -> str:
    """As the first line of its log says."""
    log = run_dir / "logs" / f"attempt_{attempt}" / f"rank_{rank}.log"
    return log.read_text().split(" on ")[1].split(",")[0]


def exit_codes(run_dir: Path, attempt: int) -> list[str]:
    """Exit codes of the ranks, as the shells that started them saw them."""
    logs = run_dir / "logs" / f"attempt_{attempt}"
    return [(logs / f"rank_{rank}.ended").read_text().split()[1] for rank in range(3)]


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
    assert [said.count(line) for line in ("the time limit is near", "queues again", "] done")] == [1, 2, 1]
    assert [attempt["ended"] for attempt in read_attempts(run_dir)[:2]] == ["told", "died"]
    for attempt in (1, 2, 3):
        nodes = [node_of(run_dir, attempt, rank) for rank in range(3)]
        assert nodes[0] == nodes[1] != nodes[2], "a tensor parallel group on one node"
    assert [exit_codes(run_dir, attempt) for attempt in (1, 3)] == [["75"] * 3, ["0"] * 3]
    assert exit_codes(run_dir, 2)[1] == "137"


def test_three_preemptions_before_a_step_end_no_run(preempted, reference):
    run_dir, said = preempted
    assert_same_run(run_dir, reference)
    attempts = read_attempts(run_dir)
    assert [(attempt["step"], attempt["ended"]) for attempt in attempts[:3]] == [(0, "told")] * 3
    assert {attempt["ended"] for attempt in attempts} == {"told"}, "a crowded machine may meet the time limit, too"
    assert "does not get past" not in said and said.count("] done") == 1


def test_a_cancelled_job_leaves_a_step_and_no_process(disturbed):
    assert disturbed["state"] == "CANCELLED" and disturbed["left"] == []
    assert disturbed["committed"] >= 1


def test_a_lost_node_costs_no_committed_step(disturbed, reference):
    run_dir = disturbed["run_dir"]
    assert_same_run(run_dir, reference)
    starts = read_starts(run_dir)
    assert [start["steps_done"] for start in starts] == [0, disturbed["committed"], disturbed["safe"]]
    assert node_of(run_dir, 3, rank=2) != disturbed["lost"]
    assert [start["job"] for start in starts] == [f"slurm {disturbed[name]}" for name in ("first", "second", "second")]
    nodes = [{node_of(run_dir, attempt, rank) for rank in range(3)} for attempt in (1, 2, 3)]
    assert [set(expand_nodes(start["nodes"])) for start in starts] == nodes
    log = (run_dir / "slurm" / f"{disturbed['second']}.log").read_text()
    assert "waiting for a sign" not in log, "rank 0 was ended by the watchdog, and has given its locks up"
    attempts = read_attempts(run_dir)
    seconds = [moment["time_unix_s"] - disturbed["lost_at"] for moment in (attempts[2], starts[2])]
    print(f"the node was lost; rank 0 began again after {seconds[0]:.0f} s, and was loaded after {seconds[1]:.0f} s")


def test_drained_nodes_a_preemption_and_a_lost_link_cost_no_committed_step(interrupted, reference):
    run_dir = interrupted["run_dir"]
    assert interrupted["end"] == "COMPLETED", interrupted["log"]
    assert_same_run(run_dir, reference)
    assert interrupted["drained"] == "PENDING"
    assert "node1" not in {node_of(run_dir, 1, rank) for rank in range(3)}
    assert interrupted["cut"] not in {node_of(run_dir, 3, rank) for rank in range(3)}
    starts = [start["steps_done"] for start in read_starts(run_dir)]
    assert len(starts) == 3 and starts[2] == interrupted["safe"], "a node that came back cost no attempt"
    print(f"committed before each start: {starts}; exit codes of attempt 1: {exit_codes(run_dir, 1)}")


def test_a_script_of_the_users_own_trains_on_two_nodes(slurm, config, python, reference):
    """As docs/guide/slurm.md has it: srun and nothing else, no secret and no address by hand."""
    run_dir, programs = config.parent / "own", config.parent / "programs"
    programs.mkdir()
    (programs / "hacpo-mega").write_text(f'#!/bin/sh\nexec "{python}" -m hacpo_mega.cli "$@"\n')
    (programs / "hacpo-mega").chmod(0o755)
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks=3\n#SBATCH --ntasks-per-node=2\n"
    steps = [f"srun hacpo-mega {command} {config} run_dir={run_dir}" for command in ("preflight", "train")]
    (config.parent / "own.sbatch").write_text(head + " &&\n".join(steps) + "\n")
    log = config.parent / "own.log"
    environment = slurm.environment | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ("sbatch", "--parsable", f"--output={log}", str(config.parent / "own.sbatch"))
    number = slurm.cluster.on(CONTROL, *command, **environment).stdout.strip()
    assert slurm.wait_for_end(number, log) == "COMPLETED", log.read_text()
    assert_same_run(run_dir, reference)
    (start,) = read_starts(run_dir)
    assert start["job"] == f"slurm {number}" and len(expand_nodes(start["nodes"])) == 2
    assert not list(run_dir.parent.glob(".own*")), "neither a secret nor a lock stays"
    done = slurm.run("--status", run_dir)
    assert done.returncode == 0 and f"1 of slurm {number}, began " in done.stdout, done.stdout


def test_agents_of_two_partitions_are_on_their_nodes(disturbed):
    for attempt in (2, 3):
        nodes = [node_of(disturbed["run_dir"], attempt, rank) for rank in range(3)]
        assert nodes[0] == nodes[1] and nodes[0] in ("node3", "node4") and nodes[2] in ("node1", "node2")
