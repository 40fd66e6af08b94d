"""Two jobs never write one run folder, and a killed one leaves nothing that keeps the next one out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hacpo_mega.logbook.run_lock import RunLock

HOLD = """
import sys, pathlib
from hacpo_mega.logbook.run_lock import RunLock
try:
    lock = RunLock(pathlib.Path(sys.argv[1]))
except ValueError as error:
    sys.exit(str(error))
print("held", flush=True)
sys.stdin.read()
"""


def start(run_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_job_is_refused_by_the_name_of_the_first_and_a_killed_one_holds_nothing(tmp_path):
    run_dir = tmp_path / "run"
    first = start(run_dir)
    assert first.stdout.readline() == "held\n"
    second = start(run_dir)
    _, complaint = second.communicate()
    assert second.returncode == 1
    assert complaint.startswith(f"run_dir {run_dir} is being written by process {first.pid} on ")
    assert not run_dir.exists(), "a lock touches nothing inside the folder"
    first.kill()
    first.communicate()
    third = start(run_dir)
    assert third.stdout.readline() == "held\n", third.stderr.read()
    third.communicate()
    assert third.returncode == 0


def test_the_lock_survives_the_folder_that_it_guards(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with RunLock(run_dir) as lock:
        run_dir.rename(tmp_path / "run.1")
        assert f"process {os.getpid()} on " in lock.path.read_text()
        other = start(run_dir)
        assert other.wait() == 1
        other.communicate()
    with RunLock(run_dir):
        pass


def test_a_folder_that_cannot_be_made_is_an_error_of_its_own(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunLock(tmp_path / "file" / "run")
