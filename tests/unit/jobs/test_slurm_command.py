"""`hacpo-mega slurm` without a cluster: the script, what is refused before sbatch is asked, what an attempt finds."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from job import run_here
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.cli.slurm import begin_attempt
from hacpo_mega.cluster.launcher_env import expand_nodes
from hacpo_mega.cluster.machine.environment import attempt_of_job, from_slurm
from hacpo_mega.config import load_config
from hacpo_mega.jobs import slurm_queue
from hacpo_mega.jobs.attempts import is_crash_loop, read_attempts, record_attempt, record_termination
from hacpo_mega.logbook.run.older_runs import move_aside
from hacpo_mega.logbook.run.provenance import read_starts, record_start


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2),
        agent_table(folder, "narrow", "llama", CHARACTERS),
    ]
    return write_config(folder, agents, slurm={"gpus_per_node": 2})


def test_a_dry_run_prints_a_script_that_bash_reads_and_writes_nothing(config):
    done = run_here("slurm", config, "--dry-run", "slurm.time=12:00:00", "slurm.setup=[\"module load 'x y'\"]")
    assert (done.returncode, done.stderr) == (0, "")
    table, _, script = done.stdout.partition("#!/bin/bash\n")
    assert table.startswith("3 ranks on 2 nodes\nnode 0  ranks 0-1  wide cell 0\n")
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    wanted = {"--time=12:00:00", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--signal=B:USR1@300"}
    assert wanted | {"--requeue", "--open-mode=append"} <= set(directives) and "hetjob" not in directives
    assert "counts=(2 1)" in script and "\neval 'module load" in script
    assert "@directives@" not in script and "@settings@" not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert not (config.parent / "run").exists()


def test_a_dry_run_shows_what_the_cluster_at_hand_could_not_hold(config, monkeypatch, tmp_path):
    """The plan of a scale configuration on a development cluster, and the refusal at its end; submission ends there."""
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'main*|1|16|gpu:8|64000'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for own, said in (
        ((), "the job needs 2 nodes, the default partition has 1"),
        (("slurm.partition=h",), "slurm.par"),
    ):
        done = run_here("slurm", config, "--dry-run", *own)
        assert done.returncode == 0 and done.stdout.startswith("3 ranks on 2 nodes\n") and "#SBATCH" in done.stdout
        assert done.stderr.startswith(f"submission would be refused: {said}") and done.stderr.count("\n") == 1
        done = run_here("slurm", config, *own)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(said), done.stderr


def test_a_dry_run_says_what_a_submission_would_download(config, tmp_path):
    table = {"name": "hub", "model": "Qwen/Qwen3-8B", "tp": 2}
    named = write_config(tmp_path, [agent_table(tmp_path, "narrow", "llama", CHARACTERS), table])
    done = run_here("slurm", named, "--dry-run", "slurm.gpus_per_node=2", "device_memory_gib=80")
    assert done.returncode == 0 and "#SBATCH" in done.stdout
    assert done.stderr == "Qwen/Qwen3-8B would be downloaded first\n"


def test_agents_of_two_partitions_are_components_of_one_job(config):
    own = ("slurm.partition=new", "slurm.agents.wide.partition=old", "slurm.agents.wide.constraint=v100")
    script = run_here("slurm", config, "--dry-run", *own, "slurm.account=team").stdout
    job, first, second = script.replace("#SBATCH --partition=old", "#SBATCH hetjob\n").split("#SBATCH hetjob\n")
    assert "--output" in job and "--output" not in first + second.partition("settings")[0]
    assert "--constraint=v100" in first and "--nodes=1" in first and "--ntasks-per-node=2" in first
    assert "--partition=new" in second and "--ntasks-per-node=1" in second and "--constraint" not in second
    assert all(part.count("--account=team") == 1 and "--requeue" in part for part in (first, second))
    assert "num_components=2" in second and "counts=()" in second


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("slurm.gpus_per_node=1", "agent wide: tp 2 would cross nodes of slurm.gpus_per_node 1"),
        ("slurm.time=5", "slurm.signal_s (300) leaves nothing of slurm.time (5 = 300 seconds) to train in"),
        ("slurm.time=soon", "slurm.time: needs minutes, hours:minutes:seconds or days-hours"),
        ("run_dir=/dev/shm/run", "run_dir /dev/shm/run is on tmpfs, in this machine's memory: 2 nodes need a folder"),
        ("slurm.partion=x", "slurm.partion: unknown key; did you mean 'partition'?"),
    ],
)
def test_what_no_cluster_could_run_is_refused_in_a_line(config, override, said):
    done = run_here("slurm", config, override)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_without_sbatch_nothing_is_written(config, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    done = run_here("slurm", config)
    assert done.returncode == 2
    assert done.stderr.startswith("sbatch is not on the PATH: submit on a login node") and done.stderr.count("\n") == 1
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hold", "--fresh"], "--hold takes nodes and starts nothing on them"),
        (["--hold", "--dry-run"], "--hold takes nodes and starts nothing on them"),
        (["--hold", "--job", "7"], "--job 7: give the number of a job that runs, and no --hold"),
        (["--job", "7;ls"], "--job 7;ls: give the number of a job that runs"),
        (["--job", "7"], "scontrol is not on the PATH: start on a login node of the cluster"),
        (["--hold"], "sbatch is not on the PATH"),
        (["--job", "7", "slurm.agents.wide.constraint=x"], "slurm.agents: nodes of several kinds are a job of their"),
        (["--hold", "slurm.agents.wide.constraint=x"], "slurm.agents: nodes of several kinds are a job of their"),
    ],
)
def test_nodes_that_stay_have_no_other_options(config, monkeypatch, words, said):
    monkeypatch.setenv("PATH", "/nowhere")
    done = run_here("slurm", config, *words)
    assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done.stderr
    assert not (config.parent / "run").exists()


def test_a_run_on_held_nodes_tells_of_its_trouble(config, monkeypatch):
    """The log of the job that holds them says nothing of it."""
    programs, run = config.parent / "bin", config.parent / "run"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/sh\ncat >{programs}/script\necho 12\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    done = run_here("slurm", config, "--hold")
    assert done.returncode == 0, done.stderr
    log = done.stdout.partition("nodes, log ")[2].splitlines()[0]
    assert f'\n#SBATCH --output="{log.replace("12", "%j")}"\n' in (programs / "script").read_text()
    Path(log).write_text("[slurm 2026] job 12 holds node[1-2]\n")
    (run / "logs/attempt_1").mkdir(parents=True)
    (run / "logs/attempt_1/rank_0.log").write_text("ValueError: the reason\n")
    assert "trouble  ValueError: the reason\n" in run_here("slurm", "--status", run).stdout


def test_who_submits_needs_no_torch(config):
    code = (
        "import sys; from hacpo_mega.cli.app import main\ntry: main()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "slurm", config, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("n[03-05,9],x1", "n03"), ("a1,b[2-3]", "a1"), ("r[0-1]n[12-13]x,z", "r0n12x")],
)
def test_the_first_of_slurms_hosts(nodes, first):
    assert expand_nodes(nodes)[0] == first


# Environment of a task of component 0 in a job of node3 (2 tasks) and node[1-2] (1 task each), Slurm 22.05.
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node3",
    "SLURM_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NODEID": "0",
    "SLURM_CPUS_ON_NODE": "16",
}


def test_a_task_finds_rank_0_and_its_share_of_the_processors():
    found = from_slurm(TASK, 16)
    assert (found["MASTER_ADDR"], found["OMP_NUM_THREADS"]) == ("node3", "8")
    assert from_slurm(TASK | {"SLURM_NODEID": "2"}, 16)["OMP_NUM_THREADS"] == "16"
    assert from_slurm(TASK | {"SLURM_CPUS_PER_TASK": "3"}, 16)["OMP_NUM_THREADS"] == "3"
    ports = {from_slurm(TASK | {"SLURM_STEP_ID": step}, 16)["MASTER_PORT"] for step in ("0", "1", "2")}
    assert len(ports) == 3 and all(10_000 <= int(port) < 30_000 for port in ports), "a step finds no port of the last"


def test_threads_are_no_more_than_the_processors_that_srun_binds_to():
    """One core beside the node's share of threads (12 of 96 for 8 ranks) is what a user had."""
    assert from_slurm(TASK, 1)["OMP_NUM_THREADS"] == "1"
    assert from_slurm(TASK, 4)["OMP_NUM_THREADS"] == "4", "bound: what it may use, not the node's share"
    assert from_slurm(TASK | {"SLURM_CPUS_PER_TASK": "12"}, 1)["OMP_NUM_THREADS"] == "1"


JOINED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as Place.join leaves them, for vLLM
HET = {"SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": "node3"}
TORCHRUN = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("variables", "where", "attempt"),
    [
        (TASK | {"SLURM_PROCID": "0"}, {"job": "slurm 4711", "nodes": "node[1-3]"}, ("slurm 4711", 1)),
        (TASK | HET | {"SLURM_PROCID": "0"}, {"job": "slurm 4711", "nodes": "node[1-3]"}, ("slurm 4711", 1)),
        (
            TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "node2", "SLURM_RESTART_COUNT": "4"},
            {"job": "slurm 4711", "nodes": "node2"},
            ("slurm 4711", 5),
        ),
        (
            TASK | TORCHRUN | {"SLURM_PROCID": "0"},
            {"job": "slurm 4711", "nodes": "node[1-3]"},
            ("torchrun x", 2),
        ),
        (TORCHRUN, {"job": "torchrun x"}, ("torchrun x", 2)),
        ({"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node1"}, {}, None),
        ({}, {}, None),
    ],
    ids=["srun", "two components", "some nodes", "torchrun under srun", "torchrun", "the shell of salloc", "by hand"],
)
def test_a_start_is_traced_to_its_job_and_nodes(variables, where, attempt, tmp_path, monkeypatch):
    """Before and after the process has taken its place in the job."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))] + list(JOINED):
        monkeypatch.delenv(name, raising=False)
    for more in (variables, JOINED):
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        record_start(tmp_path, 0, {})
        assert attempt_of_job() == attempt
    starts = read_starts(tmp_path)
    assert [{key: start[key] for key in ("job", "nodes") if key in start} for start in starts] == [where, where]


def test_three_attempts_after_the_same_step_are_a_circle(tmp_path):
    for attempt, step in ((1, 0), (2, 4), (3, 4), (4, 4)):
        assert not is_crash_loop(tmp_path, "slurm 9", attempt, step)
        record_attempt(tmp_path, "slurm 9", attempt, step)
    assert is_crash_loop(tmp_path, "slurm 9", 5, 4)
    assert not is_crash_loop(tmp_path, "slurm 9", 5, 5), "it has committed a step"
    assert not is_crash_loop(tmp_path, "slurm 10", 1, 4), "a new job may try again"


def test_only_attempts_that_died_count(tmp_path, monkeypatch):
    """Under a job script that notes ends, one without a note was ended by Slurm: preempted, say, or with its node."""
    monkeypatch.setenv("HACPO_MEGA_ENDS_NOTED", "1")
    for attempt, how in enumerate(("", "told", "died", "lost", "", "died", "died"), start=1):
        assert not is_crash_loop(tmp_path, "slurm 9", attempt, 0)
        record_attempt(tmp_path, "slurm 9", attempt, 0)
        line = {"time_unix_s": 1, "job": "slurm 9", "attempt": attempt, "ended": how}
        with (tmp_path / "logs" / "attempts.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n" if how else "")
    assert is_crash_loop(tmp_path, "slurm 9", 8, 0) and not is_crash_loop(tmp_path, "slurm 9", 8, 1)
    found = [(line["attempt"], line["step"], line["ended"]) for line in read_attempts(tmp_path)]
    assert found[1:4] == [(2, 0, "told"), (3, 0, "died"), (4, 0, "lost")] and len(found) == 7


def test_a_file_of_before_is_read(tmp_path):
    """Its lines say nothing of ends, and all of them count."""
    (tmp_path / "logs").mkdir()
    lines = [{"time_unix_s": 1.5, "job": "slurm 9", "attempt": number, "step": 4} for number in (1, 2, 3)]
    (tmp_path / "logs" / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert is_crash_loop(tmp_path, "slurm 9", 4, 4)


NO_TIME = json.dumps({"time_unix_s": math.nan, "job": "x", "attempt": 1, "step": 1})


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[1]", '{"time_unix_s": 1, "job": "x", "attempt": 1}', '{"step": 1e400}', "[" * 10_000, NO_TIME),
        '{"time_unix_s": 1, "job": "x", "attempt": 1, "ended": "well"}',
        '{"time_unix_s": 1, "job": "x", "attempt": 1, "ended": 1}',
    ],
)
def test_a_line_that_is_no_attempt_ends_no_job(tmp_path, line):
    """As a disk leaves it that was full: without its end, so that the next line begins on one of its own."""
    for attempt in (1, 2, 3):
        assert not is_crash_loop(tmp_path, "slurm 9", attempt, 0)
        record_attempt(tmp_path, "slurm 9", attempt, 0)
        with (tmp_path / "logs" / "attempts.jsonl").open("a") as file:
            file.write(line)
    assert [attempt["attempt"] for attempt in read_attempts(tmp_path)] == [1, 2, 3]
    assert is_crash_loop(tmp_path, "slurm 9", 4, 0)


def test_restarts_of_torchrun_are_attempts_too(tmp_path, monkeypatch, capsys):
    """As torchrun sets them for a rank; without restarts nobody counts."""
    for name, value in {"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "9"}.items():
        monkeypatch.setenv(name, value)
    for restarts in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        begin_attempt(tmp_path)
        assert f"attempt {restarts + 1} of job torchrun x begins after step 0" in capsys.readouterr().out
        if restarts == 1:
            record_termination(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    begin_attempt(tmp_path)  # one of three was told to end
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    with pytest.raises(typer.Exit) as end:
        begin_attempt(tmp_path)
    assert end.value.exit_code == 3 and "does not get past step 0" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    begin_attempt(tmp_path)
    assert (tmp_path / "logs" / "attempts.jsonl").read_text().count('"step"') == 4


def test_who_submits_asks_again_while_the_controller_is_away(tmp_path, monkeypatch, capsys):
    """And without an answer --fresh takes no folder away that a job may be using."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f"""#!/bin/bash
    echo x >>{tmp_path}/asked
    (($(wc -l <{tmp_path}/asked) > 3)) && echo '7|RUNNING|None|1:00|2:00|node1|job.sbatch' && exit
    echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2
    exit 1
    """)
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_queue, "RETRY_S", 0.01)
    assert slurm_queue.jobs_of(tmp_path) is None and capsys.readouterr().err == "", "a status is shown at once"
    (job,) = slurm_queue.jobs_of(tmp_path, patience_s=600.0)
    assert job.number == "7" and capsys.readouterr().err.count("Slurm does not answer (slurm_load_jobs error: ") == 1


@pytest.mark.parametrize("held", [False, True])
def test_a_job_whose_number_was_lost_on_its_way_is_not_submitted_twice(tmp_path, monkeypatch, held):
    """The controller takes the second request, and neither the answer nor the next question comes through."""
    name = slurm_queue.job_name(tmp_path, held=held)
    programs = {
        "sbatch": """echo x >>asked; (($(wc -l <asked) > 1)) || lost; echo 8 >>queue; lost""",
        "squeue": f"""[[ "$*" == *--name={name}' '* ]] || exit 0
            echo x >>looked; (($(wc -l <looked) == 3)) && lost
            for number in $(cat queue); do echo "$number|PENDING|None|0:00|2:00||job.1.sbatch"; done""",
    }
    for program, text in programs.items():
        lost = "lost() { echo 'Socket timed out on send/recv operation' >&2; exit 1; }"
        (tmp_path / program).write_text(f"#!/bin/bash\ncd {tmp_path}\n{lost}\n{text}\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / "queue").write_text("7\n")  # another submission of the run
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_queue, "RETRY_S", 0.01)
    done = slurm_queue.ask_sbatch(["sbatch"], tmp_path, held=held)
    assert (done.returncode, done.stdout) == (0, "8")
    assert (tmp_path / "queue").read_text().split() == ["7", "8"]


def test_a_job_that_is_submitted_from_a_job_has_nothing_of_it(tmp_path, monkeypatch):
    """srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\nenv | grep -oE '^(SBATCH|SLURM)_[A-Z_]+' | sort")
    sbatch.chmod(0o755)
    chosen = ("SBATCH_EXPORT", "SLURM_CONF")
    for name in ("SLURM_MEM_PER_CPU", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", *chosen):
        monkeypatch.setenv(name, "4")
    assert slurm_queue.ask([str(sbatch)]).stdout.split() == [*chosen]
    monkeypatch.delenv("SLURM_JOB_ID")  # outside of a job they are the user's own wishes
    assert "SLURM_MEM_PER_CPU" in slurm_queue.ask([str(sbatch)]).stdout


@pytest.mark.nightly
def test_a_process_ends_without_taking_its_libraries_down():
    """Functions registered for the end run; Python's own end, where Triton and vLLM print, does not."""
    code = """if True:
        import atexit, sys
        from hacpo_mega import cli
        from hacpo_mega.cli import app
        class Library:
            def __del__(self):
                print("leaked")
        def run():
            cli.library = sys.library = Library()
            atexit.register(print, "registered")
            sys.exit({status})
        app.main = run
        cli.main()
    """
    for status, code_of_it in (("2", 2), ("None", 0), ("'words'", 1)):
        command = [sys.executable, "-c", code.format(status=status)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout) == (code_of_it, "registered\n"), done


def test_a_run_is_moved_aside_and_the_logs_of_its_job_are_not(tmp_path):
    run = tmp_path / "run"
    for name in ("slurm/job.sbatch", "logs/attempt_1/rank_0.log", "logs/attempts.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    move_aside(run)
    assert not (tmp_path / "run.1").exists(), "a job that is about to begin"
    for name in ("config.toml", "logs/rank_0.stack"):
        (run / name).write_text("old")
    (run / "starts.jsonl").write_text('{"steps_done": 0, "commit": null, "packages": {}}\n')
    move_aside(run)
    files = {f"{path.relative_to(tmp_path)}" for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        *("run/slurm/job.sbatch", "run/logs/attempt_1/rank_0.log", "run/logs/attempts.jsonl"),
        *("run.1/config.toml", "run.1/starts.jsonl", "run.1/logs/rank_0.stack"),
    }


def test_another_cluster_is_no_other_run(config):
    """The [slurm] table may change while a run goes on."""
    from hacpo_mega.checkpoint.files import plain
    from hacpo_mega.config.changes import changes, refusals

    before, now = (plain(load_config(config, [f"slurm.{key}"])) for key in ("time=10", "agents.wide.partition=x"))
    found = changes(before, json.loads(json.dumps(now)))
    assert {change.key for change in found} == {"slurm.time", "slurm.agents.wide.partition"}
    assert list(refusals(found, [])) == []
