"""launch/slurm.sbatch in a real Slurm: what it makes of the ways in which the ranks of an attempt may end.

No rank trains here: ending.sh stands before its command and ends as it is told. Jobs that are queued again wait for
seconds each time: they go at once, and the nodes have room for four.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cluster import CONTROL
from run_cases import CHARACTERS, agent_table, write_config

pytestmark = pytest.mark.nightly

NODES = {"gpus_per_node": 2, "preflight": False}
DEAF = ("slurm.signal_s=30", "slurm.time=60")
ENDING = f'["bash", "{Path(__file__).parent / "ending.sh"}"]'


def configure(folder: Path) -> Path:
    wide = agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2)
    return write_config(folder, [wide, agent_table(folder, "narrow", "llama", CHARACTERS)], slurm=NODES)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return configure(tmp_path_factory.mktemp("endings"))


@pytest.fixture(scope="module")
def going(slurm, config, python, tmp_path_factory) -> Iterator[dict[str, tuple[str, Path]]]:
    """The number and the log of jobs that were submitted together; the node that fails "bad" has another model."""
    elsewhere = configure(tmp_path_factory.mktemp("spoiled"))
    model = str(elsewhere.parent / "wide")
    slurm.cluster.wait_for_idle_nodes()  # a job of another file may be leaving the first
    slurm.cluster.on("node1", "mount", "-t", "tmpfs", "tmpfs", model)
    try:
        yield {
            "again": submit(slurm, config, "again", "1:9 75 1:2"),
            "deaf": submit(slurm, config, "deaf", "deaf 0", *DEAF),
            "circle": submit(slurm, config, "circle", "begun begun begun begun", f"slurm.python={python}"),
            "bad": submit(slurm, elsewhere, "bad", "0 0", "slurm.preflight=true", f"slurm.python={python}"),
        }
    finally:
        slurm.cluster.on("node1", "umount", model)


def submit(slurm, config: Path, name: str, endings: str, *overrides: str, wait_s: int = 1) -> tuple[str, Path]:
    """A job whose attempts end like that: its number and its log."""
    number = slurm.submit(config, *told(config, name, endings, wait_s), *overrides)
    return number, config.parent / name / "slurm" / f"{number}.log"


def told(config: Path, name: str, endings: str, wait_s: int = 1) -> tuple[str, ...]:
    run_dir = config.parent / name
    variables = f'{{ENDINGS = "{endings}", RUN = "{run_dir}", WAIT = "{wait_s}"}}'
    return f"run_dir={run_dir}", f"slurm.environment={variables}", f"slurm.run_with={ENDING}"


def end_of(slurm, number: str, log: Path) -> tuple[str, dict[str, str]]:
    """A job's log, and the state that Slurm gives it in the end."""
    slurm.wait_for_end(number, log)
    return log.read_text(), slurm.cluster.job(number)


def test_a_checkpoint_that_takes_too_long_is_not_waited_for(slurm, config, going):
    number, log = going["deaf"]
    slurm.cluster.wait(lambda: (config.parent / "deaf/logs/attempt_1/rank_2.log").exists(), f"the ranks, see {log}")
    second = assert_a_running_job_keeps_its_run(slurm, config, (*told(config, "deaf", "deaf 0"), *DEAF), number)
    slurm.cluster.on(CONTROL, "scancel", "--batch", "--signal=USR1", number)  # as Slurm does before the time limit
    assert slurm.wait_for_end(number, log) == "COMPLETED"
    assert slurm.wait_for_end(second, log) in ("COMPLETED", "FAILED")
    assert slurm.cluster.job(number)["EndTime"] <= slurm.cluster.job(second)["StartTime"], "one goes at a time"
    said = log.read_text()
    assert said.index("the time limit is near") < said.index("no checkpoint in time") < said.index("] done")


def assert_a_running_job_keeps_its_run(slurm, config: Path, overrides: tuple[str, ...], number: str) -> str:
    """A second submission waits, with its own configuration, and --fresh takes nothing away; the second's number."""
    folder = config.parent / "deaf" / "slurm"
    before = (folder / "config.1.toml").read_text()
    refused = slurm.run(config, *overrides, "--fresh")
    assert refused.returncode == 2 and f"--fresh: job {number} RUNNING on node" in refused.stderr, refused.stderr
    assert f"scancel {number}" in refused.stderr and not (config.parent / "deaf.1").exists()
    added = slurm.run(config, *overrides, 'slurm.environment={ENDINGS = "0", RUN = "/tmp"}', "num_steps=99")
    assert added.returncode == 0 and f"this run has a job already: job {number} RUNNING" in added.stdout, added
    assert (folder / "config.1.toml").read_text() == before != (folder / "config.2.toml").read_text()
    assert oct(folder.stat().st_mode)[-2:] == "55" and oct((folder / "job.2.sbatch").stat().st_mode)[-2:] == "44"
    shown = slurm.run("--status", config.parent / "deaf")
    assert shown.returncode == 0 and f"queue    job {number} RUNNING on node[" in shown.stdout, shown
    assert "PENDING (Dependency)" in shown.stdout and "0 of 2, safe 0" in shown.stdout, "the job's that runs"
    (config.parent / "deaf_link").symlink_to("deaf")
    by_link = (*overrides, f"run_dir={config.parent / 'deaf_link'}")
    refused = slurm.run(config, *by_link, "--fresh")
    assert refused.returncode == 2 and f"scancel {number} " in refused.stderr, "by whatever name it comes"
    assert slurm.run("--status", config.parent / "deaf_link").stdout.count(f"job {number} RUNNING on node[") == 1
    return next(line.split()[1].rstrip(",") for line in added.stdout.splitlines() if line.startswith("job "))


def test_a_job_queues_again_until_starting_again_would_change_nothing(slurm, config, going):
    """A rank fails, then the run is told to end, then its input is wrong: three attempts in one log."""
    said, job = end_of(slurm, *going["again"])
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "2")
    first, second, third = said.split("] attempt ")[1:]
    assert "rank 1 on node1 ended first, with status 9; the end of" in first
    assert first.index("rank_1.log:") < first.index("the reason why") < first.index("queues again")
    assert "ended first" not in second and "queues again" in second
    assert re.search(r"rank 1 on node\d ended first, with status 2; the end of", third) and "the reason why" in third
    assert "ends with status 2; starting again would change nothing" in third and "queues again" not in third
    shown = slurm.run("--status", config.parent / "again")
    assert shown.returncode == 1 and "attempt  3, of which rank 0 has not begun" in shown.stdout, shown
    reason = f"trouble  the reason why\n{'':9}in {config.parent}/again/logs/attempt_3/rank_1.log\n"
    assert f"{reason}{'':9}[slurm " in shown.stdout and "] ends with status 2" in shown.stdout
    logs = config.parent / "again" / "logs" / "attempt_1"
    assert "the reason why" in (logs / "rank_1.log").read_text()
    nodes = [(logs / f"rank_{rank}.ended").read_text().split()[3] for rank in range(3)]
    assert nodes == ["node1", "node1", "node2"]
    assert_told_afresh(config.parent / "again", num_attempts=3)


def assert_told_afresh(run_dir: Path, num_attempts: int) -> None:
    """Every attempt has a secret of its own, in no log, and other steps than the one before it."""
    told = [
        [(run_dir / f"slurm/told/{n}.{rank}").read_text().split() for rank in range(3)] for n in range(num_attempts)
    ]
    assert all(attempt[0] == attempt[1] == attempt[2] for attempt in told)
    steps, cpus, secrets = zip(*(attempt[0] for attempt in told))
    assert set(cpus) == {"2"}, "16 of a node, for each of its 8 GPUs"
    assert len(set(secrets)) == num_attempts and all(len(secret) == 64 for secret in secrets)
    assert all(one != other for one, other in pairwise(steps)), "a lost node may cancel the last attempt's"
    written = "".join(path.read_text() for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "told")
    assert not any(secret in written for secret in secrets)


def test_attempts_have_an_end(slurm, config):
    said, job = end_of(slurm, *submit(slurm, config, "once", "0:gone", "slurm.max_attempts=1"))
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")
    assert "no word from the ranks 0: their node is gone, or they were killed" in said
    assert said.rstrip().endswith("stops: 1 attempts (slurm.max_attempts)")


def test_where_nothing_may_queue_again_the_user_is_told_how(slurm, config):
    """And where Slurm hands nothing down (--export=NONE), the processes find their environment all the same."""
    kept = 'slurm.sbatch_options=["--no-requeue", "--export=NONE"]'
    said, job = end_of(slurm, *submit(slurm, config, "never", "75", kept))
    assert job["JobState"] == "FAILED"
    assert "cannot queue again (" in said and "disabled for job" in said
    assert f"); by hand: sbatch {config.parent}/never/slurm/job.1.sbatch" in said


def test_a_run_that_gets_nowhere_is_stopped_with_the_reason(slurm, going):
    """Three attempts are killed as soon as they have begun; the fourth does not begin."""
    said, job = end_of(slurm, *going["circle"])
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "3:0", "3")
    assert "does not get past step 0: 3 attempts of this job began after it, committed no other and died" in said
    begun = {line for line in said.splitlines() if "begins after step 0; " in line}  # twice where rank 0 ends first
    assert len(begun) == 3 and all("MASTER_ADDR=node1 " in line for line in begun)


def test_a_node_that_fails_the_preflight_is_left_out(slurm, going):
    said, job = end_of(slurm, *going["bad"])
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "1", "node1")
    first, second = said.split("] attempt ")[1:]
    assert "--exclude=node1" in first and "queues again without node1" in first
    assert "on node[2-3]" in second and "] done" in second


def test_configurations_go_one_after_the_other_on_nodes_that_stay(slurm, config):
    """Each with a secret of its own, on the first nodes that are allowed; what ends one starts nothing again."""
    held = slurm.run(config, "--hold", f"run_dir={config.parent / 'held'}", "slurm.partition=new")
    number = held.stdout.partition("job ")[2].split()[0]
    assert f"hacpo-mega slurm CONFIG --job {number}" in held.stdout, held.stderr
    try:
        slurm.cluster.wait(lambda: slurm.cluster.job(number)["JobState"] == "RUNNING", f"job {number}")
        for name, endings, status in (("one", "0", 0), ("two", "1:9", 9), ("three", "75", 75)):
            done = slurm.run(config, "--job", number, *told(config, name, endings))
            assert done.returncode == status, done.stdout + done.stderr
            assert f"job {number} on node3,node4 (3 ranks)" in done.stdout and "queues again" not in done.stdout
            assert_told_afresh(config.parent / name, num_attempts=1)
            assert ("rank 1 on node3 ended first, with status 9; the end of" in done.stdout) == (status == 9)
        secrets = {(config.parent / name / "slurm/told/0.0").read_text().split()[2] for name in ("one", "two", "three")}
        assert len(secrets) == 3
        few = slurm.run(config, "--job", number, *told(config, "few", "0"), "slurm.exclude=node4")
        assert few.returncode == 2 and few.stderr.endswith("it has 1 nodes (node3), the run needs 2\n"), few.stderr
        assert slurm.cluster.job(number)["JobState"] == "RUNNING" and not (config.parent / "few").exists()
    finally:
        slurm.cluster.on(CONTROL, "scancel", number)
    gone = slurm.run(config, "--job", number, *told(config, "few", "0"))
    assert gone.returncode == 2 and f"--job {number}: it is " in gone.stderr, gone.stderr


def test_a_node_that_the_job_cannot_do_without_is_tried_again(slurm, python, tmp_path):
    """Without it Slurm would let the job wait for ever."""
    config, cluster = configure(tmp_path), slurm.cluster
    cluster.on("node2", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "wide"))
    try:
        needs = ("slurm.nodelist=node[1-2]", "slurm.preflight=true", f"slurm.python={python}")
        number, log = submit(slurm, config, "few", "0 0", *needs)
        cluster.wait(lambda: log.exists() and "queues again" in log.read_text(), f"the preflight, see {log}")
    finally:
        cluster.on("node2", "umount", str(tmp_path / "wide"))
    cluster.wait(lambda: cluster.job(number)["JobState"] == "PENDING", "the job to wait")
    cluster.wait(lambda: cluster.job(number).get("Reason") == "BeginTime", "Slurm's reason to wait")
    # not at once: a node takes no job again while the permission of the last attempt may be in use
    cluster.on(CONTROL, "scontrol", "update", f"JobId={number}", "StartTime=now+15")
    said, job = end_of(slurm, number, log)
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "1", "(null)"), said
    assert "too few nodes would remain without node2" in said and "queues again in 10 minutes, with node2" in said


def test_a_rank_that_refuses_its_input_is_not_waited_for(slurm, config):
    """The others would take an hour."""
    said, job = end_of(slurm, *submit(slurm, config, "refused", "2:2", wait_s=3600))
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0") and "rank 2 on node2 ended first" in said, said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["slurm.partition=nope"], "slurm.partition nope: there is no such partition; there are: main, new, old"),
        (["slurm.constraint=nope"], "Slurm refuses the job: allocation failure: Invalid feature specification"),
        (
            ["slurm.cpus_per_rank=9"],
            "2 processes of 9 processors need 18 on a node, the largest of the default partition",
        ),
        (
            ["slurm.partition=old", "lanes=2", "slurm.gpus_per_node=2"],
            "the job needs 3 nodes, partition old has 2: it would wait for ever",
        ),
    ],
)
def test_what_the_cluster_can_never_run_is_said_before_anything_is_written(slurm, config, overrides, said):
    done = slurm.run(config, *overrides, f"run_dir={config.parent / 'nope'}")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (config.parent / "nope").exists()
