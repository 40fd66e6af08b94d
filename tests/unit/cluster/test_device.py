"""The device that a process gets and a node's words on its GPUs, on machines that this one is not.

The device table is faked, and NVIDIA's tool is a script.
"""

from pathlib import Path

import pytest
import torch
from device_table import DeviceTable

from hacpo_mega.cluster.machine.device import rank_device, send
from hacpo_mega.cluster.machine.environment import compiler_problems
from hacpo_mega.cluster.machine.visible_gpus import visible_gpus
from hacpo_mega.preflight.node_report import _device_facts


@pytest.mark.parametrize(
    "uuids, local_rank, index",
    [(("a", "b"), 0, 0), (("a", "b"), 1, 1), (("a",), 0, 0), (("a",), 3, 0)],
    ids=["first of two", "second of two", "the only one", "a launcher that shows each task its own"],
)
def test_a_process_takes_its_own_gpu(monkeypatch, tmp_path, uuids, local_rank, index):
    chosen = DeviceTable(uuids).install(monkeypatch, tmp_path)
    assert rank_device(local_rank) == torch.device("cuda", index)
    assert chosen == [index]


def test_more_processes_than_gpus_are_refused(monkeypatch, tmp_path):
    chosen = DeviceTable(("a", "b")).install(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="process 2 of this node has no GPU of its own: 2 are visible"):
        rank_device(2)
    assert chosen == []


@pytest.mark.parametrize(
    "refusal",
    [
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver.",
        "The NVIDIA driver on your system is too old (found version 12080).\nUpdate it.",
        "No CUDA GPUs are available",
    ],
)
def test_a_cuda_environment_without_a_usable_gpu_says_why(monkeypatch, tmp_path, refusal):
    """It would train in fp32 on the CPU, until its vLLM dies of an empty device string."""
    DeviceTable(refusal=refusal, has_node=True).install(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"is the CUDA 13\.0 build, but no GPU can be used here") as refused:
        rank_device(0)
    said = str(refused.value)
    assert refusal.split("\n")[0].rstrip(".") in said and "R580" in said
    assert "\n" not in said


def test_a_cpu_environment_leaves_gpus_alone_only_when_asked(monkeypatch, tmp_path):
    """`make env` on a login node without a driver makes one, and the job then runs where there are GPUs."""
    DeviceTable(build=None, has_node=True).install(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"has a GPU, but torch .* is the CPU build: make env FLAVOUR=cuda"):
        rank_device(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rank_device(0) == torch.device("cpu")


def test_a_cpu_environment_on_a_machine_without_gpus_is_the_cpu(monkeypatch, tmp_path):
    DeviceTable(build=None).install(monkeypatch, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rank_device(1) == torch.device("cpu")


H100 = "{index}, GPU-{index}, NVIDIA H100 80GB HBM3, 81559, {used}, 580.95.05, 1980, 2619"
TWO = {
    "devices": "2 x NVIDIA H100 80GB HBM3 with 81559 MiB", "driver": "580.95.05", "highest clocks": "1980 / 2619 MHz",
}  # fmt: skip
NONE = {"devices": "no GPU"}


@pytest.mark.parametrize(
    "script, facts, problems",
    [
        ([f"echo '{H100.format(index=index, used=used)}'" for index, used in enumerate((4, 8155))], TWO, []),
        (
            [f"echo '{H100.format(index=index, used=used)}'" for index, used in enumerate(("[N/A]", 8157))],
            TWO,
            ["GPU 1: 8157 of 81559 MiB are in use by another process"],
        ),
        (["echo 'No devices were found'", "exit 6"], NONE, ["nvidia-smi fails: No devices were found"]),
        (["exit 9"], NONE, ["nvidia-smi fails: no word"]),
        (None, NONE, []),
    ],
    ids=["free", "in use", "fails", "fails silently", "not installed"],
)
def test_what_a_node_says_of_its_gpus(script, facts, problems, tmp_path: Path, monkeypatch):
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text("\n".join(["#!/bin/sh", *script]), encoding="utf-8")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus, found = visible_gpus(None)
    assert _device_facts(gpus) == facts
    assert found == problems


def test_a_node_without_a_compiler_or_headers_says_so(monkeypatch, tmp_path):
    """Triton would after minutes of start: "Failed to find C compiler"."""
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    compiler, header = compiler_problems()
    assert "a C compiler" in compiler and f"{tmp_path}/Python.h" in header
    (tmp_path / "Python.h").touch()
    (tmp_path / "clang").touch(mode=0o755)
    assert compiler_problems() == []


def test_what_is_sent_arrives_as_it_was():
    """Tensors keep dtype, shape and values, None stays None, and parts begin where kernels may read."""
    given = (
        torch.arange(7, dtype=torch.int16).view(7, 1), None, torch.tensor([True, False, True]),
        torch.arange(6.0).view(2, 3).T, torch.empty(0, dtype=torch.int64), torch.tensor([2**40, -1]),
    )  # fmt: skip
    sent = send(given, torch.device("cpu"))
    for tensor, found in zip(given, sent, strict=True):
        assert (found is None) if tensor is None else (torch.equal(found, tensor) and found.dtype == tensor.dtype)
    assert all(found.storage_offset() * found.element_size() % 16 == 0 for found in sent if found is not None)
    assert send((None,), torch.device("cpu")) == [None]
