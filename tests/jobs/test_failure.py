"""A rank that dies, fails or never comes takes the whole job down soon, and everyone names it, its agent and its phase.

The processes are started without torchrun wherever that is possible: a launcher that ends the other ranks would hide
whether they notice by themselves, as they must under srun.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import failing_job
import psutil
import pytest
from job import start_ranks
from processes import descendants, is_running, listening
from repository import ROOT
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

from hacpo_mega.cluster.machine.environment import library_settings, shows_gpus
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.rank_files import read_rank_files

# Only a hang takes this long, not a slow machine: the collectives of the job wait even longer and do not end it.
DEADLINE_S = 600.0

NAMES = (
    "rank 0 (agent A, lane 0, cell 0, pp 0, tp 0)",
    "rank 1 (agent A, lane 0, cell 0, pp 0, tp 1)",
    "rank 2 (agent B, lane 0, cell 0, pp 0, tp 0)",
    "rank 3 (agent C, lane 0, cell 0, pp 0, tp 0)",
)


# For whom each rank waits in the job of failing_job.py when rank 2 does not come.
GATHER = r", waiting for what ranks \[0, 2, 3\] of lane 0 gather"
WAITING = (GATHER, ", waiting for a barrier of all ranks", "", GATHER)


class Job:
    """The four processes as srun starts them, with nobody who looks after them; what they write goes to files."""

    def __init__(self, folder: Path, victim: int, fate: str, timeout_s: float = 1800.0, stall_s: float = 600.0) -> None:
        """Returns when the victim is about to meet its fate."""
        self.folder, ready = folder, folder / "ready"
        self.ranks = start_ranks(4, folder, failing_job.run, victim, fate, timeout_s, ready, stall_s)
        while not ready.exists():
            statuses = [process.exitcode for process in self.ranks]
            assert statuses == [None] * 4 or ready.exists(), (statuses, self.errors())
            time.sleep(0.05)

    def errors(self) -> list[str]:
        files = [self.folder / f"{rank}.err" for rank in range(4)]
        return [file.read_text() if file.exists() else "(did not start)" for file in files]

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, number)

    def wait(self) -> list[int]:
        """The exit status of every rank, all of which must be gone within the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        for process in self.ranks:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        statuses = [process.exitcode for process in self.ranks]
        for process in self.ranks:
            process.kill()
        assert None not in statuses, (statuses, self.errors())
        return statuses

    def assert_everyone_names(self, cause: str) -> None:
        """The pattern `cause` on a line of its own on every rank that could still write one."""
        for rank, (status, errors) in enumerate(zip(self.wait(), self.errors())):
            if status != -signal.SIGKILL:
                line = rf"^{re.escape(NAMES[rank])}, in phase .* of step 12, stops: {cause}$"
                assert status == 1, (rank, status, errors)
                assert re.search(line, errors, re.M), (rank, errors)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, id="keeper-of-the-store", marks=pytest.mark.nightly),
        pytest.param(2, id="in-the-middle"),
        pytest.param(3, id="last", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_is_named_by_all_others(tmp_path, victim):
    job = Job(tmp_path, victim, "sleep")
    job.ranks[victim].kill()
    job.assert_everyone_names(re.escape(f"{NAMES[victim]} died in phase learn of step 12"))
    assert ((tmp_path / ".run.lock").read_text() == "") == (victim != 0), "whoever the watchdog ends gives its lock up"
    # A consequence (a connection closed by the dead peer) must not be reported as if it were a cause.
    assert not any("Traceback" in text for text in job.errors())


@pytest.mark.nightly
def test_a_death_is_named_however_slowly_the_news_travels(tmp_path):
    """The one process that sees the death is stopped, while the peers of the dead one already hold broken collectives.

    And a launcher, which saw the death too, tells two of them to end before they have heard why.
    """
    job = Job(tmp_path, 2, "sleep")
    job.signal(1, signal.SIGSTOP)
    job.ranks[2].kill()
    time.sleep(3.0)
    for rank in (0, 3):
        job.signal(rank, signal.SIGTERM)
    time.sleep(1.0)
    job.signal(1, signal.SIGCONT)
    job.assert_everyone_names(re.escape(f"{NAMES[2]} died in phase learn of step 12"))
    assert not any("Traceback" in text for text in job.errors())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "told, number",
    [((0, 1, 2, 3), signal.SIGTERM), ((3,), signal.SIGINT)],  # from a launcher, and by hand
    ids=["all-SIGTERM", "one-SIGINT"],
)
def test_a_job_that_is_told_to_end_says_so_in_one_line_and_by_its_status(tmp_path, told, number):
    """Whom it was told first is a matter of milliseconds, where all were told."""
    job = Job(tmp_path, 2, "sleep")
    for rank in told:
        job.signal(rank, number)
    assert job.wait() == [128 + number] * 4, job.errors()
    phases = ("exchange", "exchange", "learn", "exchange")
    said = [f"{NAMES[rank]} was told to end ({number.name}) in phase {phases[rank]} of step 12\n" for rank in told]
    assert job.errors()[0] in said and not any(job.errors()[1:]), job.errors()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_second_signal_ends_a_job_that_has_deferred_the_first(tmp_path, number):
    """A signal within a second of the first is its echo; the second signal that counts comes later."""
    job = Job(tmp_path, 2, "defer")
    while all(process.is_alive() for process in job.ranks):
        with suppress(ProcessLookupError):  # it has just ended
            job.signal(3, number)
        time.sleep(0.5)
    assert job.wait() == [128 + number] * 4, job.errors()
    line = f"{NAMES[3]} was told to end ({number.name}) in phase exchange of step 12; started again, it goes on\n"
    assert job.errors() == [line, "", "", ""]


def test_a_rank_ends_though_nothing_of_its_last_words_can_be_written(tmp_path):
    """Its output is on a full disk, as is that of a pipe whose reader has gone; its folder is closed."""
    (rank,) = start_ranks(1, tmp_path, failing_job.unheard, tmp_path / "ready")
    while not (tmp_path / "ready").exists():
        assert rank.exitcode is None
        time.sleep(0.05)
    os.kill(rank.pid, signal.SIGINT)
    rank.join(60.0)
    status = rank.exitcode
    rank.kill()
    assert (status, (tmp_path / "ended").exists()) == (130, True)


@pytest.mark.nightly
def test_a_death_is_named_though_all_were_told_to_end_before(tmp_path):
    """And a launcher, which saw the death, tells them once more."""
    job = Job(tmp_path, 2, "defer")
    for rank in (0, 1, 3):
        job.signal(rank, signal.SIGUSR1)
    time.sleep(1.5)  # what follows is no echo
    job.ranks[2].kill()
    for rank in (0, 1, 3):
        job.signal(rank, signal.SIGTERM)
    job.assert_everyone_names(re.escape(f"{NAMES[2]} died in phase learn of step 12"))


@pytest.mark.nightly
def test_an_error_is_named_by_all_with_its_first_line(tmp_path):
    job = Job(tmp_path, 2, "raise")
    job.assert_everyone_names(re.escape(f"{NAMES[2]} failed in phase learn of step 12: RuntimeError: loss is NaN"))
    assert [text.count("Traceback") for text in job.errors()] == [0, 0, 1, 0]


@pytest.mark.nightly
def test_leaving_early_is_an_error_even_with_status_0(tmp_path):
    job = Job(tmp_path, 1, "exit")
    job.assert_everyone_names(re.escape(f"{NAMES[1]} failed in phase learn of step 12: SystemExit: 0"))


@pytest.fixture(scope="module")
def hanging(tmp_path_factory) -> dict[str, Job]:
    """Jobs that wait for somebody until a limit, all at once: each for its victim."""
    limits = {"limit": (2, {"timeout_s": 20.0}), "stopped": (2, {"stall_s": 10.0})}
    limits |= {f"victim {victim}": (victim, {"stall_s": 10.0}) for victim in (1, 2)}
    found = {}
    for name, (victim, how) in limits.items():
        found[name] = Job(tmp_path_factory.mktemp("hanging"), victim, "sleep", **how)
        if name == "stopped":
            found[name].signal(2, signal.SIGSTOP)
    return found


@pytest.mark.nightly
def test_a_rank_that_never_comes_ends_the_job_at_the_time_limit(hanging):
    """A hang: nobody died, so whoever ran into the limit first is named, with what it waited in."""
    job = hanging["limit"]
    job.assert_everyone_names(r"rank [013] \(agent .*\) failed in phase exchange of step 12: .*Timed out.*")
    # The sleeper is told as well, and its phase shows that it was the one that did not come.
    assert f"{NAMES[2]}, in phase learn of step 12, stops" in job.errors()[2]


def files_when(folder: Path, is_so: Callable[[Mapping[int, dict[str, Any]]], Any]) -> Mapping[int, dict[str, Any]]:
    """Reads the ranks' files until `is_so` of them."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so(files := read_rank_files(folder)):
        assert time.monotonic() < deadline, files
        time.sleep(0.1)
    return files


@pytest.mark.nightly
def test_a_stopped_process_is_not_dead(tmp_path):
    """Only slow: the kernel keeps its connections, and the job ends well when it goes on. Its file stands still."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank_9.json").write_text("{}")  # of a job with more ranks that was killed
    job = Job(tmp_path, 2, "late")
    files = files_when(tmp_path, lambda files: len(files) == 4 and files[3]["waits_for"] and files[2]["num_done"])
    assert {rank: (file["phase"], file["when"]) for rank, file in files.items()} == {
        **dict.fromkeys((0, 1, 3), ("exchange", "of step 12")),
        2: ("learn", "of step 12"),
    }
    assert [f", waiting for {files[rank]['waits_for'] or ''}" for rank in range(4)] == [
        *(GATHER.replace("\\", ""), ", waiting for a barrier of all ranks", ", waiting for ", GATHER.replace("\\", "")),
    ]
    assert {file["num_before"] for file in files.values()} == {None} and files[3]["num_done"] == 0
    job.signal(2, signal.SIGSTOP)
    before = read_rank_files(tmp_path)
    now = files_when(tmp_path, lambda files: files[0]["waited_s"] > before[0]["waited_s"] + 2.0)
    assert now[2] == before[2] and now[0]["phase_s"] >= now[0]["waited_s"] > 2.0
    (tmp_path / "go").touch()
    time.sleep(4.0)
    assert all(process.is_alive() for process in job.ranks)
    job.signal(2, signal.SIGCONT)
    assert job.wait() == [0, 0, 0, 0], job.errors()
    assert not (tmp_path / "ranks").exists()
    assert all((tmp_path / f"{rank}.out").read_text() == "finished\n" for rank in range(4))


@pytest.mark.nightly
def test_a_rank_that_gives_no_sign_of_life_is_named_with_the_stacks_of_all(hanging):
    """It is let go on, to write its own, and says the same as the others."""
    job = hanging["stopped"]
    assert job.wait() == [4, 4, 4, 4], job.errors()
    cause = (
        f"{NAMES[2]} has given no sign of life for 10 s, in phase learn of step 12; stacks of all ranks: "
        f"{job.folder}/logs/rank_*.stack"
    )
    for rank, (name, errors) in enumerate(zip(NAMES, job.errors(), strict=True)):
        phase = "learn" if rank == 2 else "exchange"
        waits = rf"for (\d+) s in phase {phase} of step 12{WAITING[rank]}"
        line = rf"{re.escape(name)}, {waits}, stops: {re.escape(cause)}\n"
        found = re.fullmatch(line, errors)
        assert found and int(found[1]) >= 9, (rank, errors)  # the last sign of life may come just before the stop
        stack = (job.folder / f"logs/rank_{rank}.stack").read_text()
        assert "failing_job.py" in stack, stack
    assert "in gather_bytes" in (job.folder / "logs/rank_0.stack").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [1, 2], ids=["in-a-collective-of-its-agent", "in-the-exchange"])
def test_a_rank_that_runs_but_never_comes_is_named_by_itself(hanging, victim):
    """Its process is well and its heartbeat is heard. A rank waiting inside torch does not blame itself meanwhile."""
    job = hanging[f"victim {victim}"]
    assert job.wait() == [4, 4, 4, 4], job.errors()
    cause = (
        f"{NAMES[victim]} has made no progress for 10 s and is in no collective, in phase learn of step 12; stacks of "
    )
    assert all(f", stops: {cause}all ranks" in errors for errors in job.errors()), job.errors()
    assert ", waiting for what ranks [0, 2, 3] of lane 0 gather, stops: " in job.errors()[3]
    assert "failing_job.py" in (job.folder / f"logs/rank_{victim}.stack").read_text()


@pytest.mark.nightly
def test_a_rank_that_comes_back_in_time_changes_nothing(tmp_path):
    """Stopped twice, together for longer than is allowed; nothing is left in logs/."""
    job = Job(tmp_path, 2, "late", stall_s=12.0)
    for _ in range(2):
        job.signal(2, signal.SIGSTOP)
        time.sleep(6.5)
        job.signal(2, signal.SIGCONT)
        time.sleep(2.4)  # two signs of life
    (tmp_path / "go").touch()
    assert job.wait() == [0, 0, 0, 0], job.errors()
    assert not any(job.errors()) and not list((tmp_path / "logs").iterdir())


@pytest.mark.nightly
def test_under_torchrun_the_job_ends_with_the_name_on_its_output(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += ["--monitor-interval=2", failing_job.__file__, "2", "raise", "1800", str(tmp_path / "ready")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert finished.returncode != 0
    cause = f"stops: {NAMES[2]} failed in phase learn of step 12: RuntimeError: loss is NaN"
    for name in NAMES:
        assert re.search(rf"{re.escape(name)}, in phase .*{re.escape(cause)}\n", finished.stderr), finished.stderr
    assert "finished" not in finished.stdout


@pytest.mark.parametrize("on_cuda", [True] if shows_gpus() else [False, True])
def test_env_sh_says_what_the_launcher_says(on_cuda, tmp_path):
    """Without a driver and with one, of which both see only the command; and what the user has set stays."""
    driver = tmp_path / "nvidia-smi"
    driver.touch(mode=0o755)
    command = ["bash", "-euc", f"source {ROOT}/launch/env.sh; env"]
    environment = {"PATH": "/usr/bin:/bin" + (f":{tmp_path}" if on_cuda else ""), "HF_HUB_OFFLINE": "0"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = dict(line.split("=", 1) for line in printed.splitlines())
    expected = library_settings(on_cuda=on_cuda) | {"HF_HUB_OFFLINE": "0"}
    assert {name: value for name, value in found.items() if name not in ("PATH", "PWD", "SHLVL", "_")} == expected


def ranks_among(pids: set[int]) -> list[int]:
    """The ranks among the launcher's processes, in the order in which it starts them: each leads a session."""
    started = {pid: psutil.Process(pid).create_time() for pid in pids if os.getsid(pid) == pid}
    return sorted(started, key=lambda pid: (started[pid], pid))


def assert_nobody_is_let_in(pids: set[int], temporary: Path) -> None:
    """A job on one machine, whose first agent's engine spans two of its processes, listens to nobody outside it.

    Not at an address of its own on the network either, if this machine has one.
    """
    places = listening(pids)
    assert places and {address for address, _ in places} == {"127.0.0.1"}, places
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # a machine without a network
            probe.connect(("192.0.2.1", 9))  # sends nothing
        outside = probe.getsockname()[0]
    if outside not in ("0.0.0.0", "127.0.0.1"):
        for _, port in places:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((outside, port), timeout=DEADLINE_S).close()
    (folder,) = (path for path in temporary.iterdir() if path.is_dir())
    assert folder.stat().st_mode & 0o777 == 0o700
    # and no socket of the engine's, which has no queue
    assert {path.name for path in folder.iterdir()} == {"launcher", "store"}


@pytest.mark.nightly
def test_a_killed_trainer_leaves_its_finished_steps_and_no_process(tmp_path):
    """A whole run, started as a user starts it and from another folder; its last rank is killed in the middle."""
    agents = [
        agent_table(tmp_path, "qwen", "qwen3", CHARACTERS, tp=2),
        agent_table(tmp_path, "llama", "llama", CHARACTERS + PAIRS),
    ]
    write_config(tmp_path, agents, num_steps=100_000)
    own = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short enough for sockets
    taken = {f"torchinductor_{getpass.getuser()}", f"hacpo_mega-{os.getuid()}", "vllm", "cache", "hacpo_mega-of_his"}
    for name in taken:  # by whoever was first in a folder of all
        (own / name).touch()
    command, environment = [ROOT / "launch/local.sh", "run.toml"], os.environ | {"TMPDIR": str(own)}
    with (tmp_path / "errors").open("w") as errors:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=errors, stderr=errors)
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert job.poll() is None, (tmp_path / "errors").read_text()
        time.sleep(0.5)
    before = read_metrics(metrics)
    family = descendants(job.pid)
    assert_nobody_is_let_in(family | {job.pid}, own)
    victim = ranks_among(family)[2]
    os.kill(victim, signal.SIGKILL)
    assert job.wait(timeout=DEADLINE_S) != 0
    text = (tmp_path / "errors").read_text()
    cause = r"rank 2 \(agent llama, lane 0, cell 0, pp 0, tp 0\) died in phase \w+ of step \d+\n"
    assert re.search(rf"rank 0 \(agent qwen, .*, stops: {cause}", text), text
    end = time.monotonic() + DEADLINE_S  # a judge's worker ends when it finds its rank gone
    while left := [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    after = read_metrics(metrics)
    assert len(before) >= 3
    assert {step: after[step] for step in before} == before
    assert [(tmp_path / name).read_text() for name in (".run.lock", "run/.lock")] == ["", ""], (
        "rank 0 has given them up"
    )
    assert {path.name for path in own.iterdir()} == taken
    shutil.rmtree(own)
