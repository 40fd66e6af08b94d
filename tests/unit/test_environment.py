"""A local job and the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from repository import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.toml"


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_ranks_end_with_a_killed_launcher(tmp_path):
    """SIGKILL cannot be handled by the launcher: its ranks must see by themselves that it is gone."""
    command = [sys.executable, "-m", "hacpo_mega.cli", "init", str(QUICKSTART)]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_for(lambda: len(children(launcher.pid)) >= 2, 600.0)
    time.sleep(2.0)  # the ranks are past their first line
    ranks = children(launcher.pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    try:
        assert wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 600.0)
    finally:
        for rank in ranks:
            if Path(f"/proc/{rank}").exists():
                os.kill(rank, signal.SIGKILL)
