"""`hacpo-mega slurm --status RUN` from files alone, and what a job asks of nodes that sinfo tells of."""

import json
import os
import re
import time

import pytest
from job import run_here

from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import SlurmConfig
from hacpo_mega.jobs.slurm_plan import Plan, request_of
from hacpo_mega.jobs.slurm_queue import NodeGroup, job_name, num_gpus, partitions

KNOWN = {"": [NodeGroup(2, 96, 8)], "gpu": [NodeGroup(2, 96, 8)], "cpu": [NodeGroup(4, 32, 0)]}


def ask(known=KNOWN, tp: int = 8, lanes: int = 1, **slurm):
    table = SlurmConfig.model_validate(slurm)
    return request_of(Plan.of(RankMap(lanes, (AgentShape("a", tp=tp, engine_tp=1),)), table), table, known)


def test_a_process_gets_what_belongs_to_its_gpu():
    assert (ask().cpus, ask().mem, ask().gpus) == (12, ("0",), ("gpus-per-node=8",))
    assert ask(tp=2, gpus_per_node=2).cpus == 12, "a quarter of the node for two of its eight GPUs"
    assert ask(tp=2, gpus_per_node=2, sbatch_options=["--exclusive"]).cpus == 48, "the whole node"
    assert ask(cpus_per_rank=3).cpus == 3 and ask(known={}).cpus == 8
    assert "sinfo could not be asked" in str(ask(known={}))


def test_a_job_takes_all_memory_of_whole_nodes_alone():
    """Else it would wait until nobody else is on its nodes: the share of its GPUs, or processors, of the smallest."""
    gpus = {"": [NodeGroup(2, 96, 8, 800_000), NodeGroup(9, 96, 8, 400_000)]}
    assert ask(gpus).mem == ask(gpus, tp=2, gpus_per_node=2, sbatch_options=["--exclusive"]).mem == ("0",)
    quarter = ask(gpus, tp=2, gpus_per_node=2)
    assert quarter.mem == ("100000M",)
    assert str(quarter).endswith("each node: 100000M of memory (2 of 8 GPUs of a node with 400000M)")
    assert ask(gpus, tp=2, gpus_per_node=2, mem=0).mem == ("0",) and ask(gpus, mem="9G").mem == ("9G",)
    assert "each node: memory (slurm.sbatch_options)" in str(ask(gpus, sbatch_options=["--mem-per-gpu=80G"]))
    larger = {"": [NodeGroup(2, 96, 8, 50_000), NodeGroup(2, 96, 16, 4_000_000)]}
    assert ask(larger).mem == ("50000M",), "on either"
    cpus = {"": [NodeGroup(4, 32, 0, 64_000)]}
    none = {"gpus_per_node": 0, "ranks_per_node": 4, "tp": 4}
    assert ask(cpus, **none).mem == ("0",) and ask(cpus, **none, cpus_per_rank=2).mem == ("16000M",)
    assert ask({}, tp=2, gpus_per_node=2).mem == ask(tp=2, gpus_per_node=2).mem == ("0",)
    assert "all memory (sinfo could not be asked; on a shared node the job waits" in str(ask({}))


def test_gpus_by_type_and_clusters_that_count_none():
    assert ask(gres="h100:8").gpus == ("gres=gpu:h100:8",)
    assert ask(gres="h100:8", tp=4).gpus == ("gres=gpu:h100:4",), "as many as the fullest node uses"
    none = ask(partition="cpu")
    assert (none.gpus, none.takes_whole_nodes, none.cpus) == (("",), True, 4)
    assert ask(gres="none").gpus == ("",)
    with pytest.raises(ValueError, match=r"slurm.gres \(gpu:h100:4\) has 4 GPUs, gpus_per_node 8"):
        ask(gres="h100:4")
    with pytest.raises(ValueError, match="needs a type and a number of GPUs"):
        ask(gres="h100")


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"partition": "gpus"}, "slurm.partition gpus: there is no such partition; there are: cpu, gpu"),
        ({"lanes": 3}, "the job needs 3 nodes, the default partition has 2: it would wait for ever"),
        (
            {"cpus_per_rank": 13},
            "8 processes of 13 processors need 104 on a node, the largest .* has 96. Nearest: .*=12",
        ),
        ({"tp": 16, "gpus_per_node": 16}, r"slurm.gpus_per_node \(16\): a node of the default partition has 8"),
    ],
)
def test_what_no_node_could_give_is_a_problem(slurm, said):
    (problem,) = ask(**slurm).problems
    assert re.match(said, problem), problem
    assert ask().problems == ()


def test_slurms_tables_are_read(tmp_path, monkeypatch):
    assert [num_gpus(text) for text in ("gpu:8", "gpu:h100:8(S:0-1),tmp:1", "(null)", "")] == [8, 8, 0, 0]
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'main*|4|96|gpu:h100:8(S:0-1)|2000000'\necho 'old|2|16|(null)|64000'\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    main, old = [NodeGroup(4, 96, 8, 2_000_000)], [NodeGroup(2, 16, 0, 64_000)]
    assert partitions() == {"main": main, "": main, "old": old}


def test_runs_of_one_name_have_jobs_of_two(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert job_name(tmp_path / "a" / "run") == job_name(tmp_path / "link" / "run") != job_name(tmp_path / "b" / "run")
    (tmp_path / "a" / "run").mkdir()
    (tmp_path / "other").symlink_to("a/run")
    (tmp_path / "more").symlink_to("other")
    for name in ("other", "more", "b/../link/run", "a/run/.", "a/run/../run"):
        assert job_name(tmp_path / name) == job_name(tmp_path / "a" / "run"), name


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of ten steps that is in its sixth, in its second attempt; Slurm is not here."""
    monkeypatch.setenv("PATH", "/usr/bin-without-slurm")
    for name in ("slurm", "logs/attempt_1", "logs/attempt_2", "checkpoints/step_000004"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "slurm/config.1.toml").write_text("num_steps = 10\n")
    now = time.time()
    steps = [{"step": n, "values": {}, "timing": {"time_unix_s": now - 10 * (6 - n)}} for n in range(6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + '\n{"step": 6, "val')
    begun = [{"time_unix_s": now, "job": "slurm 12", "attempt": n, "step": 2 * n} for n in (1, 2)]
    (tmp_path / "logs/attempt_2/rank_0.log").write_text(
        "rank 0 of 2 on node1, process 7\nattempt 2 of job slurm 12 begins after step 4; MASTER_ADDR=node1\n"
    )
    (tmp_path / "logs/attempts.jsonl").write_text("\n".join(map(json.dumps, begun)) + "\n")
    said = "[slurm 2026] rank 1 on node2 ended first, with status 9\n\x1b[31mstep 5/10 | safe 4\n"
    (tmp_path / "slurm/12.log").write_text(said)
    return tmp_path


def test_how_a_run_stands_is_one_screen(run):
    done = run_here("slurm", "--status", run)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert rows["queue"].startswith("unknown: squeue is not on the PATH")
    assert rows["attempt"].startswith("2 (slurm 12), began 20") and rows["attempt"].endswith("after step 4")
    assert rows["step"] == "5 of 10, safe 4" and rows["speed"].startswith("10.0 s a step (median of 5)")
    assert rows["speed"].endswith("about 00:00:50 left")
    assert rows["trouble"].startswith("[slurm 2026] rank 1 on node2 ended first") and rows["in"].endswith(
        "slurm/12.log"
    )


def test_nonsense_beside_a_run_is_passed_over(run):
    steps = ('{"step": 1e999, "timing": {}}', '{"step": 7, "timing": {"time_unix_s": NaN}}', '{"step": 8, "timing": 3}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(["", "[" * 100_000, *steps, "9" * 5000]))
    (run / "slurm/config.2.toml").write_text(f"x = {'[' * 5000}")
    os.mkfifo(run / "slurm/13.log")  # the newest log; nobody writes into it
    done = run_here("slurm", "--status", run)
    assert done.returncode == 0 and done.stderr == ""
    assert "step     5 of 10, safe 4" in done.stdout


def test_its_exit_code_says_whether_anybody_works(run, tmp_path, monkeypatch):
    assert run_here("slurm", "--status", tmp_path / "nothing").returncode == 2
    (run / "squeue").write_text("#!/bin/sh\n")
    (run / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{run}:/usr/bin:/bin")
    done = run_here("slurm", "--status", run)
    assert done.returncode == 1 and "no job of this run waits or runs" in done.stdout
    (run / "squeue").write_text("#!/bin/sh\necho '12|RUNNING|None|1:02|58:58|node[1-2]|/r|n/slurm/job.1.sbatch'\n")
    done = run_here("slurm", "--status", run)
    assert done.returncode == 0 and "job 12 RUNNING on node[1-2] for 1:02, 58:58 left" in done.stdout
    (run / "squeue").write_text("#!/bin/sh\n")
    (run / "finished.json").write_text('{"steps_done": 10}')
    assert run_here("slurm", "--status", run).returncode == 0
    assert os.path.exists(run / "slurm/12.log"), "it only reads"


def shown(run) -> tuple[int, dict[str, str]]:
    done = run_here("slurm", "--status", run)
    assert done.stderr == ""
    return done.returncode, dict(line.split(None, 1) for line in done.stdout.splitlines() if line[0] != " ")


def answer_of_squeue(run, monkeypatch, *lines: str) -> None:
    (run / "squeue").write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    (run / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{run}:/usr/bin:/bin")


def test_a_submission_that_never_ran_changes_nothing_that_is_shown(run, monkeypatch):
    """The run has 10 steps; the newest submission is of 99, and its job waits, was cancelled, or runs."""
    (run / "config.toml").write_text("num_steps = 10\n")
    (run / "slurm/config.2.toml").write_text("num_steps = 99\n")
    first = f"12|RUNNING|None|1:02|58:58|node[1-2]|{run}/slurm/job.1.sbatch"
    second = f"13|PENDING|Dependency|0:00|1:00:00||{run}/slurm/job.2.sbatch"
    answer_of_squeue(run, monkeypatch, first, second)
    code, rows = shown(run)
    assert code == 0 and rows["step"] == "5 of 10, safe 4" and "job 13 PENDING (Dependency)" in rows["queue"]
    (run / "finished.json").write_text('{"steps_done": 10}')
    answer_of_squeue(run, monkeypatch)
    code, rows = shown(run)
    assert code == 0 and rows["run"] == f"{run}, done" and rows["step"] == "5 of 10, safe 4"
    answer_of_squeue(run, monkeypatch, second.replace("PENDING", "RUNNING"))
    code, rows = shown(run)
    assert code == 0 and rows["run"] == str(run) and rows["step"] == "5 of 99, safe 4"
    (run / "config.toml").write_text("num_steps = 99\n")  # it has begun, and was cancelled
    answer_of_squeue(run, monkeypatch)
    code, rows = shown(run)
    assert code == 1 and rows["run"] == str(run) and rows["step"] == "5 of 99, safe 4"


def test_an_attempt_is_shown_with_the_job_that_it_is_of(run, monkeypatch):
    """Attempt 2 was of job 12; then job 14 came, whose rank 0 has not said anything, and then has."""
    (run / "logs/attempt_10").mkdir()
    assert shown(run)[1]["attempt"] == "10, of which rank 0 has not begun"
    with (run / "logs/attempts.jsonl").open("a") as file:
        file.write(json.dumps({"time_unix_s": time.time(), "job": "slurm 14", "attempt": 1, "step": 4}) + "\n")
    (run / "logs/attempt_10/rank_0.log").write_text("attempt 1 of job slurm 14 begins after step 4; \n")
    assert shown(run)[1]["attempt"].startswith("10 (slurm 14), began 20")
    for folder in ("attempt_1", "attempt_2", "attempt_10"):
        for file in (run / "logs" / folder).iterdir():
            file.unlink()
        (run / "logs" / folder).rmdir()
    assert shown(run)[1]["attempt"].startswith("1 of slurm 14, began 20"), "the user's own script makes no folders"


def test_trouble_without_a_log_of_the_job_is_that_of_the_newest_attempt(run):
    """As after starts by --job on nodes of salloc; the tenth attempt comes before the ninth by name."""
    (run / "slurm/12.log").unlink()
    for number, age_s in ((9, 60), (10, 0)):
        (run / f"logs/attempt_{number}").mkdir()
        log = run / f"logs/attempt_{number}/rank_0.log"
        log.write_text(f"ValueError: of attempt {number}\n")
        os.utime(log, (time.time() - age_s,) * 2)
    os.utime(run / "logs/attempt_2/rank_0.log", (time.time() - 120,) * 2)
    assert shown(run)[1]["trouble"] == "ValueError: of attempt 10"


NOISE = "nanobind: leaked 3 types!\n - leaked type vllm.Thing\n[W1126 10:00 socket.cpp] x\n\n"
VERDICT = "[slurm 2026] ends with status 2; starting again would change nothing (docs)\n"


@pytest.mark.parametrize(
    ("log", "ranks", "shown_first"),
    [
        ("rank 1 on node2 ended first, with status 2; the end of {run}/logs/attempt_2/rank_1.log:\nx\n", {1}, 1),
        ("rank 1 on node2 ended first, with status 2; the end of {run}/logs/attempt_2/rank_1.log:\nx\n", {0}, 0),
        ("it says nothing of a rank\n", {0, 1}, 0),
        ("it says nothing of a rank\n", set(), None),
    ],
    ids=["the rank that ended first", "that one said nothing", "before the ranks: rank 0", "nobody said anything"],
)
def test_trouble_begins_with_the_reason(run, log, ranks, shown_first):
    begin = "[slurm 2026] attempt 1: job 12 on node[1-2]\nold Error: x\n[slurm 2026] attempt 2: job 12 on node[1-2]\n"
    (run / "slurm/12.log").write_text(f"{begin}[slurm 2026] {log.format(run=run)}{VERDICT}")
    for rank in (0, 1):
        said = f"a step\nlr was 1, is 2 ({rank})\n{NOISE}" if rank in ranks else NOISE
        (run / f"logs/attempt_2/rank_{rank}.log").write_text(f"rank {rank} of 2 on node1, process 7\n{said}")
    trouble = run_here("slurm", "--status", run).stdout.partition("\ntrouble  ")[2].splitlines()
    assert trouble[-2].strip() == VERDICT.strip() and trouble[-1] == f"{'':9}in {run}/slurm/12.log"
    if shown_first is not None:
        wanted = [f"lr was 1, is 2 ({shown_first})", f"{'':9}in {run}/logs/attempt_2/rank_{shown_first}.log"]
        assert trouble[:2] == wanted
    assert len(trouble) == (2 if shown_first is None else 4)
