"""The part of a node that a process may use: processors near its GPU, and the GPUs that it is shown."""

from pathlib import Path

import pytest

from hacpo_mega.cluster.machine import machine_limits
from hacpo_mega.cluster.machine.machine_limits import listed, near_shares
from hacpo_mega.cluster.machine.visible_gpus import visible_gpus
from hacpo_mega.preflight.node_report import NodeReport, report_findings, warnings

CARDS = """\
0, GPU-aa, NVIDIA H100, 81559, 500, 580, 1980, 2619
1, GPU-bb, NVIDIA H100, 81559, 61000, 580, 1980, 2619
"""
LIST = """\
GPU 0: NVIDIA H100 (UUID: GPU-aa)
  MIG 1g.10gb     Device  0: (UUID: MIG-11)
  MIG 1g.10gb     Device  1: (UUID: MIG-22)
GPU 1: NVIDIA H100 (UUID: GPU-bb)
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'E' && exit\n{LIST}E\ncat <<'E'\n{CARDS}E\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize("shown", ["0", "GPU-aa", "GPU-a"])
def test_another_jobs_gpu_is_not_looked_at(smi, shown):
    gpus, problems = visible_gpus(shown)
    assert problems == [] and [gpu.name for gpu in gpus] == ["NVIDIA H100 with 81559 MiB"]


def test_ones_own_is(smi):
    used = "GPU 1: 61000 of 81559 MiB are in use by another process"
    assert visible_gpus("0,1")[1] == [used] == visible_gpus(None)[1]
    assert visible_gpus("") == ([], [])
    assert visible_gpus("0,7")[1] == ["CUDA_VISIBLE_DEVICES names 7, which nvidia-smi does not list"]


def test_slices_are_devices(smi):
    gpus, problems = visible_gpus("MIG-11,MIG-22")
    assert problems == [] and [gpu.name for gpu in gpus] == ["NVIDIA H100 MIG 1g.10gb"] * 2


def test_processes_sit_near_their_gpus_and_keep_their_number_of_processors():
    """Eight processors, 0-3 and 4-7 on two sockets; Slurm gave them in turns, GPUs 0 and 1 hang at the first."""
    turns, sockets = [{0, 1}, {4, 5}, {2, 3}, {6, 7}], [{0, 1, 2, 3}, {4, 5, 6, 7}]
    homes = [sockets[0], sockets[0], sockets[1], sockets[1]]
    assert near_shares(turns, homes, lambda one: one) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    # threads 0 and 2 are of one core: they stay together
    assert near_shares([{0, 1}, {2, 3}], [sockets[0]] * 2, lambda one: one % 2) == [{0, 2}, {1, 3}]
    assert near_shares(turns, [sockets[0]] * 4, lambda one: one) is None, "there are not as many there"
    assert near_shares([{0, 1}], [set()], lambda one: one) is None, "the kernel knows of no socket"
    assert listed("0-3,8") == {0, 1, 2, 3, 8} and listed("") == set()


def report(node: str, **facts) -> NodeReport:
    return NodeReport(node, 0, 1, "A", {"code": "1"}, {}, **{"cores": 12, "threads": 12, "wanted": 6} | facts)


def test_too_few_processors_are_a_nodes_fault_only_where_others_have_more():
    sound = [report("n0"), report("n1")]
    (found,) = report_findings([*sound, report("n2", cores=1)])
    assert (found.node, found.text) == ("n2", "processors of each process: 1; 12 on the other nodes")
    assert warnings(sound) == []
    alike = [report("n0", cores=1), report("n1", cores=1)]
    assert report_findings(alike) == [], "leaving nodes out would not mend it"
    assert [text.partition(" processor(s)")[0] for text in warnings(alike)] == ["warning: n0: 1"] * 2
    assert "12 threads" in warnings(alike)[0] and "4 grading processes" in warnings(alike)[1]


def test_packages_that_differ_are_named():
    usual = {"numpy": "2.1", "torch": "2.13"}
    nodes = [
        report("n0", packages=usual),
        report("n1", packages=usual),
        report("n2", packages=usual | {"numpy": "1.0"}),
    ]
    (found,) = report_findings(nodes)
    assert (found.node, found.text) == ("n2", "installed packages: numpy: 1.0; on 2 other node(s): 2.1")


def test_a_process_moves_near_its_gpu(tmp_path, monkeypatch):
    """A node as the kernel shows it: two GPUs of the second socket, given to this job as numbers 2 and 3."""

    for index in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{index}8:00.0").mkdir(parents=True)
        (bus := tmp_path / f"sys/bus/pci/devices/0000:{index}8:00.0").mkdir(parents=True)
        (bus / "numa_node").write_text(f"{index // 2}\n")
    for node, text in enumerate(("0-3", "4-7")):
        (place := tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (place / "cpulist").write_text(text)
    task = {"SLURM_LOCALID": "1", "SLURM_STEP_GPUS": "2,3", "SLURM_CPU_BIND_LIST": "0x30,0xC0"}
    moved: list[set[int]] = []
    monkeypatch.setattr(machine_limits.os, "sched_setaffinity", lambda pid, where: moved.append(where))
    machine_limits.stay_near_gpu(task, Path(tmp_path))
    machine_limits.stay_near_gpu(task | {"SLURM_CPU_BIND_LIST": "0x3,0xC0"}, Path(tmp_path))  # one would lose two
    machine_limits.stay_near_gpu(task | {"SLURM_STEP_GPUS": "GPU-aa,GPU-bb"}, Path(tmp_path))
    machine_limits.stay_near_gpu({"SLURM_PROCID": "0"}, Path(tmp_path))  # a shell within a task has not all variables
    assert moved == [{6, 7}]
