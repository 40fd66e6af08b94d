"""Two jobs never write one run folder, and a killed one leaves nothing that keeps the next one out.

Each attack is tried where the kernel locks files and where it does not: there the seam is flock, which answers as
Lustre and NFS do when they are mounted without locks.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hacpo_mega.config.checks.run_dirs import LOCK
from hacpo_mega.logbook.run import run_lock
from hacpo_mega.logbook.run.older_runs import move_aside
from hacpo_mega.logbook.run.run_lock import RunLock, not_the_folder

HOLD = """
import errno, fcntl, os, sys, pathlib
from hacpo_mega.logbook.run import run_lock
def refuse(*_):
    raise OSError(getattr(errno, sys.argv[2]), "no locks here")
if sys.argv[2]:
    fcntl.flock = refuse
if sys.argv[3]:  # as a process of another machine, so far as anybody here can tell
    run_lock._process_scope = lambda: "another boot"
run_lock.BEAT_S, run_lock.QUIET_S = 0.05, float(sys.argv[4])
try:
    lock = run_lock.RunLock(pathlib.Path(sys.argv[1]))
except ValueError as error:
    sys.exit(str(error))
print("held", flush=True)
if sys.stdin.readline() == "leave\\n":
    lock.leave()
    print("left", flush=True)
    sys.stdin.readline()
    os._exit(1)
lock.__exit__()
"""
WITH_AND_WITHOUT = pytest.mark.parametrize("answer", ["", "ENOSYS"])
FOREVER_S = 3600.0


def start(
    run_dir: Path, answer: str = "", *, elsewhere: bool = False, quiet_s: float = FOREVER_S
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(run_dir), answer, "elsewhere" if elsewhere else "", str(quiet_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def holder_of(run_dir: Path, answer: str = "", **options) -> subprocess.Popen[str]:
    process = start(run_dir, answer, **options)
    assert process.stdout.readline() == "held\n", process.stderr.read()
    return process


def refusal(run_dir: Path, answer: str = "", *, quiet_s: float = FOREVER_S, beat_s: float = 0.05) -> str:
    """The error of this process when it does not get the lock."""
    with pytest.MonkeyPatch.context() as patch:
        if answer:
            patch.setattr(run_lock.fcntl, "flock", no_locks)
        patch.setattr(run_lock, "BEAT_S", beat_s)
        patch.setattr(run_lock, "QUIET_S", quiet_s)
        with pytest.raises(ValueError, match=r"^run_dir ") as refused:
            RunLock(run_dir)
    return str(refused.value)


def no_locks(*_: object) -> None:
    raise OSError(38, "no locks here")


@pytest.mark.nightly
@pytest.mark.parametrize("answer", ["", "ENOLCK", "EOPNOTSUPP"])
def test_a_second_job_is_told_the_holder_and_a_killed_job_holds_no_lock(tmp_path, answer):
    run_dir = tmp_path / "run"
    first = holder_of(run_dir, answer)
    assert refusal(run_dir, answer).startswith(f"run_dir {run_dir} is being written by process {first.pid} on ")
    assert not run_dir.exists(), "a lock makes no folder"
    first.kill()
    first.communicate()
    third = holder_of(run_dir, answer)
    third.communicate()
    assert third.returncode == 0


@pytest.mark.nightly
@WITH_AND_WITHOUT
@pytest.mark.parametrize("exists", [True, False])
def test_one_folder_has_one_lock_whatever_it_is_called(tmp_path, monkeypatch, answer, exists):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "run"
    (run_dir if exists else run_dir.parent).mkdir(parents=True)
    (tmp_path / "link").symlink_to(run_dir)
    (tmp_path / "link_to_link").symlink_to("link")
    (tmp_path / "parent").symlink_to("runs")
    first = holder_of(tmp_path / "link", answer)
    names = [run_dir, "link_to_link", "parent/run", "runs/../runs/run", "./runs//run/", "runs/./run/../run"]
    for name in names:
        assert f"is being written by process {first.pid} on " in refusal(Path(name), answer), name
    first.communicate()


@pytest.mark.nightly
@WITH_AND_WITHOUT
def test_a_folder_that_is_mounted_at_two_places_has_one_lock(tmp_path, answer):
    folder, other = tmp_path / "run", tmp_path / "other"
    for path in (folder, other):
        path.mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "--bind", folder, other], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        first = holder_of(folder, answer)
        assert f"is being written by process {first.pid} on " in refusal(other, answer)
        first.communicate()
    finally:
        subprocess.run(["umount", "--lazy", other], check=True)


@WITH_AND_WITHOUT
def test_the_lock_survives_the_folder_that_it_guards(tmp_path, monkeypatch, answer):
    if answer:
        monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("")
    (run_dir / "starts.jsonl").write_text('{"steps_done": 0, "commit": null, "packages": {}}\n')
    with RunLock(run_dir) as lock:
        aside = move_aside(run_dir)
        assert f"process {os.getpid()} on " in lock.path.read_text()
        assert f"by process {os.getpid()} on " in refusal(run_dir, answer)
        assert not lock.is_lost() and not_the_folder(run_dir, lock.token) is not None
        run_dir.mkdir()
        lock.enter(aside)
        assert not lock.is_lost() and not_the_folder(run_dir, lock.token) is None
        lock.path.unlink()
        assert f"by process {os.getpid()} on " in refusal(run_dir, answer), "the lock inside holds by itself"
        with RunLock(aside):
            pass
    with RunLock(run_dir):
        pass


@pytest.mark.nightly
@WITH_AND_WITHOUT
def test_whoever_loses_its_lock_knows_before_it_writes(tmp_path, monkeypatch, answer):
    if answer:
        monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with RunLock(run_dir) as lock:
        (run_dir / LOCK).unlink()
        assert lock.is_lost()
        lock.path.unlink()
        second = holder_of(run_dir, answer)
        assert lock.is_lost()
        run_dir.rename(tmp_path / "away")
        assert not lock.is_lost(), "a folder that is away may come back"
    (tmp_path / "away").rename(run_dir)
    assert f"by process {second.pid} on " in refusal(run_dir, answer), "what the first gave up was not the second's"
    second.communicate()


@pytest.mark.nightly
def test_without_locks_only_a_silent_remote_process_is_given_up(tmp_path):
    run_dir = tmp_path / "run"
    far = holder_of(run_dir, "ENOSYS", elsewhere=True)
    assert f"by process {far.pid} on " in refusal(run_dir, "ENOSYS"), "it gives signs"
    far.kill()
    far.communicate()
    holder_of(run_dir, "ENOSYS", quiet_s=0.3).communicate()


def test_without_locks_a_stopped_process_of_this_machine_keeps_its_folder(tmp_path):
    run_dir = tmp_path / "run"
    first = holder_of(run_dir, "ENOSYS")
    first.send_signal(signal.SIGSTOP)
    assert f"by process {first.pid} on " in refusal(run_dir, "ENOSYS", quiet_s=0.0)
    first.send_signal(signal.SIGCONT)
    first.communicate()
    assert not list(tmp_path.iterdir()), "a lock without the kernel's is a file that goes with it"


@pytest.mark.nightly
def test_locks_that_hold_on_one_machine_alone_do_not_let_a_second_one_in(tmp_path):
    """Lustre and NFS with local locks: the first one's is not seen, but its signs are."""
    run_dir = tmp_path / "run"
    far = holder_of(run_dir, "ENOSYS", elsewhere=True)
    assert f"by process {far.pid} on " in refusal(run_dir, "")
    far.communicate()


@pytest.mark.nightly
def test_of_many_that_find_a_dead_ones_lock_one_gets_it(tmp_path):
    run_dir = tmp_path / "run"
    dead = holder_of(run_dir, "ENOSYS")
    dead.kill()
    dead.communicate()
    many = [start(run_dir, "ENOSYS") for _ in range(4)]
    said = [process.stdout.readline() for process in many]
    assert said.count("held\n") == 1, said
    for process in many:
        process.communicate()


@pytest.mark.parametrize("target", ["precious", "nowhere"])
def test_a_planted_link_is_not_followed(tmp_path, target):
    (tmp_path / "precious").write_text("thesis")
    (tmp_path / ".run.lock").symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=r"^run_dir .*run (cannot be locked \(Too many levels|is being written by)"):
        RunLock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "thesis" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("planted", ["folder", "pipe"])
def test_something_else_by_the_name_of_a_lock_is_one_line(planted, tmp_path):
    (tmp_path / "run").mkdir()
    make = os.mkdir if planted == "folder" else os.mkfifo
    make(tmp_path / "run" / LOCK)
    with pytest.raises(ValueError, match=r"^run_dir .*run cannot be locked \("):
        RunLock(tmp_path / "run")
    (tmp_path / "run" / LOCK).rmdir() if planted == "folder" else (tmp_path / "run" / LOCK).unlink()
    with RunLock(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^run_dir .* cannot be locked \(File exists: .*file") as refused:
        RunLock(tmp_path / "file" / "run")
    assert "\n" not in str(refused.value)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_lock.os, "pwrite", full)
    with pytest.raises(ValueError, match=r"cannot be locked \(No space left on device: .*\.run\.lock\): make room"):
        RunLock(tmp_path / "run")


@pytest.mark.nightly
@WITH_AND_WITHOUT
def test_a_process_that_exits_at_once_frees_its_locks_only_at_its_end(tmp_path, monkeypatch, capsys, answer):
    """As a rank that the watchdog ends: the next attempt, on another machine, waits for no sign of it."""
    if answer:
        monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    (run_dir := tmp_path / "run").mkdir()
    first = holder_of(run_dir, answer, elsewhere=True)
    first.stdin.write("leave\n")
    first.stdin.flush()
    assert first.stdout.readline() == "left\n"
    if not answer:
        assert "is being written by another job" in refusal(run_dir)
    first.communicate("\n")
    with RunLock(run_dir):
        assert "waiting" not in capsys.readouterr().err


def test_a_file_system_that_does_not_answer_holds_up_nobodys_end(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(run_lock, "LEAVE_S", 0.1)
    with RunLock(tmp_path / "run") as lock, monkeypatch.context() as patch:
        patch.setattr(run_lock.os, "ftruncate", lambda *_: answers.wait())
        lock.leave()
        answers.set()


@pytest.mark.nightly
@WITH_AND_WITHOUT
def test_the_second_lock_is_not_waited_for_again(tmp_path, monkeypatch, capsys, answer):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.2)
    monkeypatch.setattr(run_lock, "QUIET_S", 0.6 if answer else FOREVER_S)
    (run_dir := tmp_path / "run").mkdir()
    first = holder_of(run_dir, answer, elsewhere=True)
    first.kill()
    first.communicate()
    now = time.time()  # as if the last signs had come at once, however late the machine was at one of them
    os.utime(tmp_path / ".run.lock", (now, now))
    os.utime(run_dir / LOCK, (now - 0.1, now - 0.1))
    if answer:
        monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    with RunLock(run_dir):
        (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/.run.lock may be another machine's: waiting for a sign of it, ")


@WITH_AND_WITHOUT
@pytest.mark.parametrize(("silent_s", "waits_s"), [(5, (25, 85)), (29, (1, 61)), (31, (0, 59)), (91, (0, 0))])
def test_silence_that_has_passed_is_not_waited_for(tmp_path, monkeypatch, capsys, answer, silent_s, waits_s):
    """Seconds that are still waited for another machine's process, where the kernel locks and where not."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "_process_scope", lambda: "another boot")
        signature = run_lock.signature("x")
    path = tmp_path / ".run.lock"
    path.write_text(signature)
    os.utime(path, times=(0, time.time() - silent_s))
    if answer:
        monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: next(clock))
    with RunLock(run_dir):
        (*_, words) = capsys.readouterr().err.split("sign of it, ") if waits_s[bool(answer)] else ("0 s",)
    assert abs(int(words.split()[0]) - waits_s[bool(answer)]) <= 1


@pytest.mark.nightly
@WITH_AND_WITHOUT
def test_an_earlier_attempt_that_lives_keeps_its_run(tmp_path, answer):
    """A node that only the scheduler has lost: its process gives signs, though no lock of it is seen here."""
    (run_dir := tmp_path / "run").mkdir()
    first = holder_of(run_dir, "ENOSYS", elsewhere=True)
    assert f"is being written by process {first.pid} on " in refusal(run_dir, answer, beat_s=FOREVER_S)
    first.communicate()


STRANGER = """
import fcntl, os, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
for path in sys.argv[1:]:
    try:
        files = [open(path)]
        fcntl.flock(files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("holds", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
        continue
    globals().setdefault("kept", []).extend(files)
sys.stdin.read()
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, and nobody else write."""
    if os.geteuid():
        pytest.skip("needs the right to be another user")
    with tempfile.TemporaryDirectory(prefix="hacpo-mega-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def stranger_at(*paths: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """Another user, who tries to hold the locks, and what came of it."""
    command = [
        shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable,
        "-c",
        STRANGER,
        *map(str, paths),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, [process.stdout.readline().strip() for _ in paths]


@pytest.mark.nightly
def test_another_user_can_hold_no_lock(open_folder):
    (run_dir := open_folder / "run").mkdir()
    paths = (open_folder / ".run.lock", run_dir / LOCK)
    first = holder_of(run_dir)
    other, came = stranger_at(*paths)
    assert came == ["PermissionError"] * 2
    other.communicate()
    first.kill()
    first.communicate()
    other, came = stranger_at(*paths)
    assert came == ["PermissionError"] * 2, "nor those that a killed process has left"
    holder_of(run_dir).communicate()
    other.communicate()
    assert os.listdir(open_folder) == ["run"] and os.listdir(run_dir) == []


def test_who_may_write_the_folder_may_hold_its_lock(tmp_path):
    """A team that shares a run by its group: what a killed job has left keeps no member out."""
    (run_dir := tmp_path / "run").mkdir()
    for folder in (tmp_path, run_dir):
        folder.chmod(0o2770)
    with RunLock(run_dir):
        assert stat.S_IMODE((run_dir / LOCK).stat().st_mode) == 0o660
    tmp_path.chmod(0o3770)  # sticky: nobody takes another's file away there
    with RunLock(run_dir) as lock:
        assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600
