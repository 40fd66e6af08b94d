"""One rank of a preflight: every process plays a node of its own, told so by a launcher's variables, with a fault."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from job import play_command

import hacpo_mega.preflight.command
import hacpo_mega.preflight.meeting


def visit(config: Path, faults: dict[int, str], wait_s: float) -> None:
    """`hacpo-mega preflight CONFIG` on node n<rank>; ends with its exit status."""
    rank = int(os.environ["RANK"])
    nodes = f"n[0-{int(os.environ['WORLD_SIZE']) - 1}]"
    os.environ.update(SLURMD_NODENAME=f"n{rank}", SLURM_STEP_NODELIST=nodes, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    del os.environ["HACPO_MEGA_STORE"]  # nodes share no file
    os.chdir(config.parent)
    fault = faults.get(rank, "")
    if fault == "never comes":
        return
    while fault == "late" and not any(file.stat().st_size for file in config.parent.glob("1.err")):
        # the other has not said that it gives up
        time.sleep(0.1)
    overrides = ["agents.B.model=nowhere"] if fault == "no model" else []
    if fault in FAULTS:
        FAULTS[fault](config.parent)
    play_command("preflight", str(config), "--wait", str(wait_s), *overrides)


def _other_version(folder: Path) -> None:
    described = folder / "other" / "torch-0.0.1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    sys.path.insert(0, str(described.parent))


def _full_disk(folder: Path) -> None:
    found = os.statvfs("/")
    fields = list(found)
    fields[4] = 1  # f_bavail
    real = os.statvfs
    full = os.statvfs_result(fields)
    os.statvfs = lambda path: real(path) if str(path) == "/dev/shm" else full


def _own_run_folder(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")


def _closed_port(folder: Path) -> None:
    """Its listener is announced on a port where nobody listens, as behind a firewall."""
    with socket.create_server(("", 0)) as server:
        closed = server.getsockname()[1]
    start = hacpo_mega.preflight.meeting.ProbeListener.__init__

    def start_behind_a_wall(listener, node, secret):
        start(listener, node, secret)
        listener.port = closed

    hacpo_mega.preflight.meeting.ProbeListener.__init__ = start_behind_a_wall


def _wrong_clock(folder: Path) -> None:
    real = time.time
    time.time = lambda: real() - 1000.0


def _hangs(folder: Path) -> None:
    hacpo_mega.preflight.meeting.GroupTest.run = lambda *_: time.sleep(3600.0)


def _hangs_over_weights(folder: Path) -> None:
    real = hacpo_mega.preflight.meeting.GroupTest._time

    def hang(test, timing, *rest):
        if timing.kind == "weights, all-gather":
            test.stage = (timing.kind, timing.group)
            time.sleep(3600.0)
        real(test, timing, *rest)

    hacpo_mega.preflight.meeting.GroupTest._time = hang


def _stands_still(folder: Path) -> None:
    hacpo_mega.preflight.meeting.GroupTest.run = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "other version": _other_version,
    "full disk": _full_disk,
    "own run folder": _own_run_folder,
    "closed port": _closed_port,
    "wrong clock": _wrong_clock,
    "hangs": _hangs,
    "hangs over weights": _hangs_over_weights,
    "stands still": _stands_still,
}
