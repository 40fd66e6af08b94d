"""A local job and the process that started it; how many queues to its device a process has."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import ROOT

from hacpo_mega.cli.start import no_garbage_collection
from hacpo_mega.cluster.machine import environment
from hacpo_mega.cluster.machine.environment import library_settings, one_queue

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


@pytest.mark.nightly
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


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    "tp, driver, chosen, found",
    [
        (2, "echo 9.0; echo 9.0", None, "1"),
        (8, "echo 8.0", None, "1"),
        (1, "echo 9.0", None, None),
        (2, "echo 10.0; echo 10.0", None, None),
        (2, "echo 12.1", None, None),
        (2, "echo 9.0", "8", "8"),
        (2, "exit 9", None, "1"),
        (2, "echo No devices were found", None, "1"),
    ],
    ids=["Hopper", "Ampere", "tp 1", "Blackwell", "later", "the user's", "a driver that fails", "no word"],
)
def test_one_queue_is_for_tensor_parallelism_before_blackwell(tp, driver, chosen, found, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv(QUEUES, chosen or "")
    if chosen is None:
        monkeypatch.delenv(QUEUES)
    one_queue(tp)
    assert os.environ.get(QUEUES) == found


@pytest.mark.parametrize(
    "there, forks", [((), True), (("nvidia-uvm", "nvidiactl"), True), (("nvidia5",), False)], ids=str
)
def test_a_container_with_a_later_gpu_of_its_machine_has_one(there, forks, tmp_path, monkeypatch):
    """Its number stays, and NVIDIA's tool need not be there: ranks would be forked, and vLLM set up as on a CPU."""
    for name in there:
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "DEVICES", tmp_path)
    assert environment.may_fork_ranks() is forks


def test_nobody_else_decides_it():
    assert QUEUES not in library_settings(on_cuda=True)
    assert QUEUES not in (ROOT / "launch" / "env.sh").read_text(encoding="utf-8")


def test_what_imports_make_is_walked_by_no_collection():
    """Nor is it while it is made; and what comes later is collected as ever."""
    try:
        with no_garbage_collection():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert not {id(thing) for thing in gc.get_objects()} & {id(thing) for thing in made}
    finally:
        gc.unfreeze()
    assert {id(thing) for thing in gc.get_objects()} >= {id(thing) for thing in made}
    gc.freeze()  # as conftest.py leaves it


def test_a_node_whose_name_is_loopback_listens_on_the_way_to_another(monkeypatch):
    """As Debian writes it into /etc/hosts: gloo would wait on 127.0.1.1 for the other nodes."""
    for name, value in {"MASTER_ADDR": "n1", "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-3]"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x3)")
    monkeypatch.setattr(environment, "_interface_towards", {"n1": None, "n2": "eth0"}.__getitem__)
    assert environment._interface_of_job() == "eth0"
