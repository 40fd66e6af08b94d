"""A run of an agent that learns by adapters beside one that learns with all its weights, from `train` to what leaves.

Its two tensor ranks overlap reduction with backward, and have the optimizer away while the engine answers. It goes on
bit for bit, on one rank by rounding, and leaves as its base with the adapters merged, and as the adapters alone.
"""

import json
import re

import pytest
import torch
from job import run_command, run_here
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.megatron.merging import merged
from hacpo_mega.models.lora import factor_names

pytestmark = pytest.mark.nightly

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
NAMES = ("adapted", "whole")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 400}
# Rounding errors themselves, and greedy answers of weights that Adam has moved by signs.
OF_A_LAYOUT = re.compile("engine_|num_microbatches|accuracy")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    options = {"tp": 2, "lora": LORA, "data_parallel": OVERLAP, "offload": "optimizer"}
    agents = [
        agent_table(folder, "adapted", "qwen3", CHARACTERS, **options),
        agent_table(folder, "whole", "llama", CHARACTERS + PAIRS),
    ]
    training = {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256}
    looked_at = {"diagnose_every": 1, "verify_weights_every": 1}
    return write_config(
        folder,
        agents,
        algorithm={"kl_coef": 0.01},
        checkpoint={"every_steps": 1, "keep_every": 1},
        training=training | looked_at,
    )


@pytest.fixture(scope="module")
def undisturbed(config):
    train(config)
    return config.parent / "run"


def test_it_learns_beside_a_whole_one(undisturbed):
    """Of the other, too; its engine has what was published to the last bit (verify_weights_every)."""
    metrics = read_metrics(undisturbed / "metrics.jsonl")
    for step in (1, 2):
        values = metrics[step].values
        assert values["agent/adapted/self/first_ratio_error"] == 0.0
        assert values["agent/adapted/from/whole/ratio_mean"] > 0.0
        assert 0.0 < values["agent/adapted/engine_gap_max"] < 1e-4, "of weights that were merged for the engine"
    # before its first update the agent is the reference
    assert metrics[2].values["agent/adapted/kl"] > 0.0


def test_its_end_is_the_base_with_the_adapters_merged(config, undisturbed):
    base = load_file(config.parent / "adapted" / "model.safetensors")
    end = undisturbed / "agents" / "adapted"
    weights, factors = load_file(end / "model.safetensors"), load_file(end / "adapter" / "adapter_model.safetensors")
    assert all(factor.any() for factor in factors.values())
    for name, weight in weights.items():
        down, up = factor_names(name)
        expected = merged(base[name], factors[up], factors[down], 2.0) if down in factors else base[name]
        assert torch.equal(weight, expected), name
    said = json.loads((end / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 8.0, LORA["targets"])


def test_a_run_in_two_parts_is_the_same_bit_for_bit(config, undisturbed):
    """What is stored is of the adapters alone."""
    run_dir = config.parent / "in_two"
    run_command(3, "train", config, f"run_dir={run_dir}", "--from", folder_of(undisturbed, 1))
    one, other = (read_checkpoint(folder_of(run, 2)) for run in (undisturbed, run_dir))
    shards = [path for path in one.files if path.endswith(".distcp")]
    assert len(shards) == 3
    assert [other.files[path] for path in shards] == [one.files[path] for path in shards]
    sizes = {
        name: sum(one.files[path].num_bytes for path in shards if path.startswith(name))
        for name in ("adapted", "whole")
    }
    assert 4 * sizes["adapted"] < sizes["whole"]


def test_one_rank_goes_on_by_rounding(config, undisturbed):
    run_dir = config.parent / "alone"
    apart = ["agents.adapted.tp=1", "agents.adapted.offload=none", "agents.adapted.data_parallel={}"]
    run_command(2, "train", config, f"run_dir={run_dir}", *apart, "--from", folder_of(undisturbed, 1))
    expected, found = (read_metrics(run / "metrics.jsonl")[2].values for run in (undisturbed, run_dir))
    assert found.keys() == expected.keys()
    for key in expected.keys() - {key for key in expected if OF_A_LAYOUT.search(key)}:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key


def test_a_checkpoint_leaves_merged_and_as_adapters(undisturbed, tmp_path):
    """Both in every byte as at the run's end."""
    end, step = undisturbed / "agents" / "adapted", folder_of(undisturbed, 2)
    file = "adapter_model.safetensors"
    for source in (undisturbed, step):
        for flag, ours, its in (((), "model.safetensors", end), (("--adapter",), file, end / "adapter")):
            out = tmp_path / f"{source.name}{len(flag)}"
            done = run_here("export", source, "--agent", "adapted", "--out", out, *flag)
            assert (done.returncode, done.stderr) == (0, "")
            found, expected = load_file(out / ours), load_file(its / ours)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert sorted(path.name for path in out.iterdir()) == sorted(
                {path.name for path in its.iterdir() if path.is_file()} | {"README.md"}
            )
    done = run_here("export", step, "--agent", "whole", "--out", tmp_path / "none", "--adapter")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("Export it without --adapter")
