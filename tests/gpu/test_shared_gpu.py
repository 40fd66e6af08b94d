"""Agents that take turns on one GPU: an actor that leaves it, and a run of two whose engines have most of it each."""

import os
from unittest import mock

import pytest
import torch
from actor_cases import full_weights, make_actor, objective, one_rank, random_samples
from bf16_cases import make_folder
from job import run_command
from offload_cases import ADAM
from run_cases import CHARACTERS, PAIRS, agent_table, write_config

from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.megatron.train.optimizer import ActorOffload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_an_actor_leaves_the_device_and_comes_back(tmp_path):
    with one_rank("nccl"):
        actor = make_actor(make_folder(tmp_path / "model", "qwen3"), optimizer=ADAM, offload_mode="everything")
        whole = ActorOffload(actor.model, actor.optimizer)
        actor.learn(random_samples(4, seed=1), objective)
        expected, held = full_weights(actor), torch.cuda.memory_allocated()
        # weights in two bytes; gradients, main weights and both moments in four
        size = sum(buffer.numel for buffer in actor.model.buffers)
        whole.offload()
        assert held - torch.cuda.memory_allocated() > 17 * size
        with pytest.raises(RuntimeError, match="gradient buffers have left"):
            actor.learn(random_samples(4, seed=2), objective)
        whole.onload(to_learn=True)
        returned = full_weights(actor)
        assert all(torch.equal(returned[name], expected[name]) for name in expected)
        actor.learn(random_samples(4, seed=3), objective)


def test_a_run_of_two_agents_takes_turns(tmp_path):
    """Each engine has more than half of the GPU; what it holds is compared with its actor's weights every step."""
    vllm = {"gpu_memory_utilization": 0.6, "enforce_eager": True}
    agents = [
        agent_table(tmp_path, "one", "qwen3", CHARACTERS, vllm=vllm),
        agent_table(tmp_path, "two", "llama", CHARACTERS + PAIRS, vllm=vllm),
    ]
    config = write_config(tmp_path, agents, placement="shared", checkpoint={"every_steps": 1})
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}):
        run_command(2, "train", config, "training.verify_weights_every=1")
    total = torch.cuda.get_device_properties(0).total_memory
    for step, metrics in read_metrics(tmp_path / "run" / "metrics.jsonl").items():
        for name in ("one", "two"):
            assert step == 0 or metrics.timing[f"agent/{name}/asleep_bytes"] < 0.3 * total
            assert step == 0 or metrics.values[f"agent/{name}/engine_gap_mean"] < 0.1
