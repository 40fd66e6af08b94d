"""A job's folder: gone with the job, and what a killed launcher has left goes with the next start of the same user."""

import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from hacpo_mega.cluster.security.private_folder import job_folder

LAUNCHER = """
import sys
from hacpo_mega.cluster.security.private_folder import job_folder
with job_folder() as folder:
    (folder / "store").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def launcher():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], **pipes)
    return process, process.stdout.readline().strip()


def test_what_a_killed_launcher_has_left_goes_and_nothing_else(parent):
    killed, left = launcher()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    alive, in_use = launcher()
    assert not os.path.exists(left) and os.path.exists(in_use)
    others = ["hacpo_mega-new", "hacpo_mega-of.mine", "elsewhere"]  # none has the file that a launcher locks
    for name in others:
        (parent / name).mkdir()
        (parent / name / "kept").touch()
    (parent / "elsewhere" / "launcher").touch()
    (parent / "hacpo_mega-link").symlink_to("elsewhere")
    with job_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert os.path.exists(in_use) and all((parent / name / "kept").exists() for name in others)
    assert not folder.exists()
    alive.communicate("")
    assert not os.path.exists(in_use) and alive.returncode == 0
