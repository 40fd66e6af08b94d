"""A run of an agent that learns by adapters beside one that learns with all its weights, from `train` to what leaves."""

import json
from pathlib import Path

import pytest
import torch
from job import run_here
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file

from hacpo_mega.megatron.merging import merged
from hacpo_mega.models.lora import factor_names

pytestmark = pytest.mark.nightly

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
STEPS = 3
RUN = {
    "num_steps": STEPS,
    "algorithm": {"kl_coef": 0.01},
    "training": {
        "prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256, "verify_weights_every": 1,
    },
    "checkpoint": {"every_steps": 2, "keep_last": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The configuration of a finished run and its metrics: an adapted agent over two ranks, a whole one on one."""
    folder = tmp_path_factory.mktemp("run")
    agents = [
        agent_table(folder, "adapted", "qwen3", CHARACTERS, tp=2, lora=LORA),
        agent_table(folder, "whole", "llama", CHARACTERS + PAIRS),
    ]
    file = write_config(folder, agents, **RUN)
    return file, train(file), folder


def folder_of(run, *, step=None):
    place = run[2] / "run"
    return place if step is None else place / f"checkpoints/step_{step:06}"


def test_it_trains_beside_a_whole_one(run):
    """Both learn, the engine holds what was published to the last bit (verify_weights_every), the KL starts at 0."""
    _, steps, _ = run
    assert list(steps) == list(range(STEPS + 1))
    for name in ("adapted", "whole"):
        assert all(steps[step].values[f"agent/{name}/grad_norm"] > 0.0 for step in range(1, STEPS + 1))


def test_its_end_is_the_base_with_the_adapter_merged(run):
    base = load_file(run[2] / "adapted/model.safetensors")
    end = folder_of(run) / "agents/adapted"
    weights, factors = load_file(end / "model.safetensors"), load_file(end / "adapter/adapter_model.safetensors")
    assert any(factor.any() for name, factor in factors.items() if "lora_B" in name)
    for name, weight in weights.items():
        down, up = factor_names(name)
        expected = merged(base[name], factors[up], factors[down], 2.0) if down in factors else base[name]
        assert torch.equal(weight, expected), name
    said = json.loads((end / "adapter/adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 8.0, ["q_proj", "v_proj", "down_proj"])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
