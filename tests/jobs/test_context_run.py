"""A whole run with an agent whose two ranks share the tokens of its micro-batches, beside one that learns by adapters.

The first reduces gradients inside backward, gathers weights during forward and has its optimizer away while its engine,
which is over both ranks, answers. It goes on bit for bit, on one rank by rounding, and is exported as it is. The second
is published and exported with its adapters merged, and as the adapters alone; what is stored of it are these.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from hacpo_kernels import merge_adapter
from job import run_command, run_here
from run_cases import (
    CHARACTERS,
    OVERLAP,
    PAIRS,
    agent_table,
    require_exported_as_by_the_run,
    require_same_in_two_parts,
    train,
    write_watched_config,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.megatron.weights.hf_writer import ADAPTER
from hacpo_mega.models.sharding.lora import factor_names

pytestmark = pytest.mark.nightly

NAMES = ("long", "adapted")
FACTORS = "adapter_model.safetensors"
# Rounding errors themselves, and greedy answers of weights that Adam has moved by signs.
OF_A_LAYOUT = re.compile("engine_|num_microbatches|/eval/")
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    agents = [
        agent_table(folder, "long", "qwen3", CHARACTERS, cp=2, data_parallel=OVERLAP, offload="optimizer"),
        agent_table(folder, "adapted", "llama", CHARACTERS + PAIRS, lora=LORA),
    ]
    return write_watched_config(folder, agents, diagnose_every=1, algorithm={"kl_coef": 0.01})


@pytest.fixture(scope="module")
def undisturbed(config) -> Path:
    train(config)
    return config.parent / "run"


def test_it_learns_from_the_other_and_its_engine_holds_its_weights(undisturbed):
    metrics = read_metrics(undisturbed / "metrics.jsonl")
    for step in (1, 2):
        values = metrics[step].values
        assert values["agent/long/self/first_ratio_error"] == 0.0
        assert values["agent/long/from/adapted/ratio_mean"] > 0.0
        assert 0.0 < values["agent/long/engine_gap_max"] < 1e-4, "of weights that were published to both ranks"
        assert values["agent/adapted/self/first_ratio_error"] == 0.0
        assert values["agent/adapted/from/long/ratio_mean"] > 0.0
        assert 0.0 < values["agent/adapted/engine_gap_max"] < 1e-4, "of weights that were merged"
    assert metrics[2].values["agent/adapted/kl"] > 0.0, "to the model without its adapters"
    start, end = (
        load_file(folder / "model.safetensors")
        for folder in (undisturbed.parent / "long", undisturbed / "agents" / "long")
    )
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    AutoModelForCausalLM.from_pretrained(undisturbed / "agents" / "long")


def test_a_run_in_two_parts_is_the_same_bit_for_bit(config, undisturbed):
    require_same_in_two_parts(config, undisturbed, num_shards=3)


def test_one_rank_goes_on_by_rounding(config, undisturbed):
    run_dir = config.parent / "alone"
    apart = ["agents.long.cp=1", "agents.long.offload=none", "agents.long.data_parallel={}"]
    run_command(2, "train", config, f"run_dir={run_dir}", *apart, "--from", folder_of(undisturbed, 1))
    expected, found = (read_metrics(run / "metrics.jsonl")[2].values for run in (undisturbed, run_dir))
    assert found.keys() == expected.keys()
    for key in expected.keys() - {key for key in expected if OF_A_LAYOUT.search(key)}:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key


def test_a_checkpoint_is_exported_as_the_run_exports(undisturbed, tmp_path):
    require_exported_as_by_the_run(undisturbed, "long", tmp_path / "out")


def test_an_adapted_agent_ends_as_its_base_with_the_adapters_merged(config, undisturbed):
    """The adapters alone are stored."""
    base = load_file(config.parent / "adapted" / "model.safetensors")
    end = undisturbed / "agents" / "adapted"
    weights, factors = load_file(end / "model.safetensors"), load_file(end / ADAPTER / FACTORS)
    assert all(factor.any() for factor in factors.values())
    for name, weight in weights.items():
        down, up = factor_names(name)
        expected = merge_adapter(base[name], factors[up], factors[down], 2.0) if down in factors else base[name]
        assert torch.equal(weight, expected), name
    said = json.loads((end / ADAPTER / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 8.0, LORA["targets"])
    files = read_checkpoint(folder_of(undisturbed, 2)).files.items()
    long, adapted = (sum(f.num_bytes for path, f in files if path.startswith(f"{name}/")) for name in NAMES)
    assert 4 * adapted < long


def test_an_adapted_agent_leaves_merged_and_as_adapters(undisturbed, tmp_path):
    """From the run's end and from a checkpoint, in every byte of a weight as the run exports it."""
    end = undisturbed / "agents" / "adapted"
    for source in (undisturbed, folder_of(undisturbed, 2)):
        for flag, file, its in (((), "model.safetensors", end), (("--adapter",), FACTORS, end / ADAPTER)):
            out = tmp_path / f"{source.name}{len(flag)}"
            done = run_here("export", source, "--agent", "adapted", "--out", out, *flag)
            assert (done.returncode, done.stderr) == (0, "")
            found, expected = load_file(out / file), load_file(its / file)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            names = {path.name for path in its.iterdir() if path.is_file()}
            assert {path.name for path in out.iterdir()} == names | {"README.md"}
    done = run_here("export", undisturbed, "--agent", "long", "--out", tmp_path / "none", "--adapter")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("Export it without --adapter")
