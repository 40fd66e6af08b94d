"""Settings of a process around vLLM's start, whatever the processor; tests/jobs/test_engine.py has the live engine."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from hacpo_mega.rollout.vllm import host_process


class Launcher:
    """As vLLM's executor of one process, which asks this method where its process group is."""

    def _distributed_args(self) -> tuple[str, int, int]:
        return "tcp://its-own:1", 0, 0


class Cycle:
    """As vLLM's engine, which the garbage collector alone can free."""


@pytest.fixture
def group_of_one(monkeypatch):
    monkeypatch.setattr(host_process, "ExecutorWithExternalLauncher", Launcher)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_shared_memory_of_this_engine_loses_its_name(group_of_one, monkeypatch, tmp_path):
    monkeypatch.setattr(host_process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # beside CUDA there is no such memory
    others = [tmp_path / "0123456789abcdef-tp:0-[0-1]-cpushm_0", tmp_path / "torch_1_2"]
    with host_process.joined_to_default_group():
        address, rank, _ = Launcher()._distributed_args()
        scheme, name = address.rsplit(":", 1)
        assert (scheme, rank) == ("env://", 0)
        own = [tmp_path / f"{name}-tp:0-[0-1]-cpushm_{rank}" for rank in range(2)]
        for file in own + others:
            file.touch()
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert Launcher()._distributed_args()[0] == "tcp://its-own:1"


def test_two_engines_never_meet_under_one_name(group_of_one):
    def name() -> str:
        with host_process.joined_to_default_group():
            return Launcher()._distributed_args()[0]

    assert name() != name()


def test_what_imports_made_stays_frozen_through_the_life_of_an_engine():
    """vLLM freezes what there is when it has started, and thaws everything before it collects."""
    gc.collect()
    gc.freeze()
    frozen, cycle = gc.get_freeze_count(), Cycle()
    cycle.itself, is_there = cycle, weakref.ref(cycle)
    with host_process.starting_vllm([]):
        gc.freeze()
    del cycle
    with host_process.collected_once():
        gc.unfreeze()
        gc.collect()
        assert is_there() is not None
    assert is_there() is None  # the engine is freed all the same
    assert gc.get_freeze_count() > 0.99 * frozen  # some have died
