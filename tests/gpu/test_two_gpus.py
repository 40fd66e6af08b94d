"""Tests for two GPUs, or two agents on one: engines over both, a lane and a pipeline over NCCL, a shared device."""

import functools
import importlib
import os
from unittest import mock

import numpy as np
import pytest
import torch
from bf16_cases import check_gradient, check_own_ratios, gradient, make_folder, own_ratios
from job import run_job

from hacpo_mega.cluster.rank_map import AgentShape, RankMap

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)]  # tensor parallel, pipeline, shared tokens, two cells
TWO_AGENTS = RankMap(1, (AgentShape("a"), AgentShape("b")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def in_job(name: str, *arguments):
    """Calls `name(place, *arguments)` of two_gpu_job in a rank; it imports vLLM and so is imported there."""
    return functools.partial(call, name, arguments)


def call(name: str, arguments: tuple, place, _rank_map):
    return getattr(importlib.import_module("two_gpu_job"), name)(place, *arguments)


def check_engine(seen: dict) -> None:
    """The same weights again: bf16 kernels may take another batch apart, but no token is another one."""
    for before, after in zip(seen["awake"], seen["woken"], strict=True):
        np.testing.assert_allclose(after, before, atol=1e-2, rtol=0)
    assert seen["answer"] == seen["answer again"]


@two_gpus
def test_an_engine_over_two_gpus_sleeps_and_wakes(folder):
    ranks = RankMap(1, (AgentShape("a", tp=2),))
    found = run_job(ranks, in_job("engine_sleeps_and_wakes", folder, 2))
    for seen in found:
        check_engine(seen)
        assert seen["agents"] == 1
        assert seen["freed"] > 0.3, "weights and cache were about half of the device"
    assert found[0]["answer"] == found[1]["answer"], "the ranks of an engine answer alike"


@two_gpus
def test_a_lane_of_two_agents_is_nccl(folder):
    found = run_job(TWO_AGENTS, in_job("lane_carries_bytes"))
    assert found == [("nccl", [b"", bytes(range(256)) * 4099])] * 2


def test_two_agents_share_one_gpu(folder):
    """Each has a quarter of it, the lane is gloo, and sleeping looks at nobody else's memory."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}):
        found = run_job(TWO_AGENTS, in_job("engine_sleeps_and_wakes", folder, 1))
    for seen in found:
        check_engine(seen)
        assert (seen["agents"], seen["lane"]) == (2, "gloo")
        assert seen["freed"] > 0.3, "both slept: two quarters of the device came back"


@pytest.fixture(scope="module")
def actors(folder):
    """By layout, what every rank of two saw of the bf16 cases, over NCCL."""
    sizes = {layout: dict(zip(("tp", "pp", "cp"), layout, strict=True)) for layout in LAYOUTS}
    shapes = {layout: AgentShape("a", **size) for layout, size in sizes.items()}
    return {
        layout: run_job(RankMap(2 // shape.cell_size, (shape,)), functools.partial(train, folder, sizes[layout]))
        for layout, shape in shapes.items()
    }


def train(folder, size: dict[str, int], _place, _rank_map):
    return own_ratios(folder, 60, **size), gradient(folder, 60, **size)


@two_gpus
@pytest.mark.parametrize("layout", LAYOUTS)
def test_actors_over_nccl(actors, folder, layout):
    for ratios, _ in actors[layout]:
        check_own_ratios(ratios)
    check_gradient(actors[layout][0][1], folder)
