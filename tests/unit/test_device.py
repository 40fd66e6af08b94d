"""Which device a process gets, on machines that this one is not: the device table is faked."""

import pytest
import torch
from device_table import DeviceTable

from hacpo_mega.cluster.device import rank_device


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
