"""Limits of one machine: checkpoints on its disk, processes on its cores and in its memory; refused in one line."""

import re
import shutil
from pathlib import Path

import pytest
from job import run_here
from run_cases import CHARACTERS, PAIRS, agent_table, write_config
from transformers import AutoModelForCausalLM

from hacpo_mega.checkpoint import disk_space
from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.cluster.machine import machine_limits
from hacpo_mega.cluster.machine.machine_limits import require_processes
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import load_config
from hacpo_mega.preflight.node_report import report_of


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    agents = [
        agent_table(folder, "tied", "qwen3", CHARACTERS),
        agent_table(folder, "untied", "llama", CHARACTERS + PAIRS),
    ]
    return write_config(folder, agents)


def test_parameters_are_counted_as_hugging_face_counts_them(config_file):
    for agent in load_config(config_file, []).agents:
        model = AutoModelForCausalLM.from_pretrained(agent.model)
        assert disk_space.num_parameters(agent) == model.num_parameters()


def test_a_run_that_cannot_fit_its_disk_is_refused_with_the_arithmetic(config_file, monkeypatch):
    config = load_config(config_file, [])
    number = sum(map(disk_space.num_parameters, config.agents))
    needed = 3 * 13 * number + 4 * number
    usage = shutil.disk_usage("/")._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    done = run_here("train", config_file)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{needed:,} bytes are needed, {needed - 1:,} are free on the disk of {config.run_dir}" in done.stderr
    assert f"3 checkpoints (checkpoint.keep_last + 1, less those that are there) of {13 * number:,}" in done.stderr
    assert not config.run_dir.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    disk_space.require_room(config)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_preflight_asks_for_as_much_room_as_training(goes_on, config_file, tmp_path, monkeypatch):
    """For adapters alone, and less where checkpoints lie there, whose newest says how large the next one is."""
    config = load_config(config_file, [f"run_dir={tmp_path}", "agents.tied.lora.rank=2", "agents.untied.lora.rank=2"])
    trained, number = (sum(map(of, config.agents)) for of in (disk_space.num_trained, disk_space.num_parameters))
    needed = 3 * 13 * trained + 4 * (trained + number)
    if goes_on:
        for step in (10, 20):
            (tmp_path / f"checkpoints/step_{step:06}").mkdir(parents=True)
        (tmp_path / "checkpoints/step_000020/state").write_bytes(bytes(1000))
        needed = 1000 + 4 * (trained + number)
    usage = shutil.disk_usage("/")
    node = LauncherEnv(0, 2, 0, 1, "n0", ("n0", "n1"), "n0", 1, False)
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        report = report_of(node, config, {})
        assert not any(str(tmp_path) in problem for problem in report.problems), report.problems
        if free == needed:
            disk_space.require_room(config)
            assert report.shortage == ""
    with pytest.raises(ValueError, match=f"{needed:,} bytes are needed, {free:,} are free") as refusal:
        disk_space.require_room(config)
    assert report.shortage == str(refusal.value)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_tool_that_fails_is_no_fault_of_a_node_without_a_use_for_gpus(cuda, config_file, tmp_path, monkeypatch):
    """Nodes of one image: the CPU partition has nvidia-smi, too, and no driver."""
    monkeypatch.setattr("hacpo_mega.preflight.node_report.torch_cuda", lambda: cuda)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load_config(config_file, [f"run_dir={tmp_path / 'run'}"])
    found = report_of(LauncherEnv(0, 1, 0, 1, "n0", ("n0",), "n0", 1, False), config, {}).problems
    assert [text for text in found if "nvidia-smi" in text] == ([] if cuda is None else ["nvidia-smi fails: no driver"])


def test_a_run_that_keeps_nothing_needs_no_room(config_file, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    disk_space.require_room(load_config(config_file, ["checkpoint.every_steps=0", "checkpoint.every_minutes=0"]))


def test_more_processes_than_the_machine_holds_are_refused(config_file, monkeypatch):
    monkeypatch.setattr(machine_limits, "num_cores", lambda: 2)
    monkeypatch.setattr(machine_limits, "free_memory_bytes", lambda: 1 << 40)
    # pp cuts a model of two layers in two at most, so a user's typo that gets here is one of lanes or cells
    done = run_here("train", config_file, "lanes=32", "training.prompts_per_step=64", "training.prompts_per_update=64")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("this configuration would start 64 ranks here (tied: 32 lanes x 1 cells x tp 1 x")
    assert "and 64 grading processes" in done.stderr and "2 cores hold at most 32 ranks" in done.stderr


def test_memory_is_a_limit_too(monkeypatch):
    ranks = RankMap(1, (AgentShape("a", cells_per_lane=4),))
    needed = 4 * machine_limits.RANK_BYTES + 8 * machine_limits.GRADER_BYTES
    monkeypatch.setattr(machine_limits, "num_cores", lambda: 64)
    monkeypatch.setattr(machine_limits, "free_memory_bytes", lambda: needed)
    require_processes(ranks, 2)
    monkeypatch.setattr(machine_limits, "free_memory_bytes", lambda: needed - (1 << 20))
    with pytest.raises(ValueError, match=rf"at least {needed >> 20} MiB, {(needed >> 20) - 1} MiB are free"):
        require_processes(ranks, 2)


def test_this_machine_has_cores_and_memory():
    assert machine_limits.num_cores() >= 1
    total = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert 0 < machine_limits.free_memory_bytes() <= int(total[1]) << 10
