"""A whole run with an agent whose two ranks share the tokens of its micro-batches, beside one of a single rank.

It reduces gradients inside backward, gathers weights during forward and has its optimizer away while its engine, which
is over both ranks, answers. It goes on bit for bit, on one rank by rounding, and is exported as it is.
"""

import re
from pathlib import Path

import pytest
import torch
from job import run_command, run_here
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.logbook.metrics import read_metrics

pytestmark = pytest.mark.nightly

NAMES = ("long", "single")
# Rounding errors themselves, and greedy answers of weights that Adam has moved by signs.
OF_A_LAYOUT = re.compile("engine_|num_microbatches|accuracy")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    agents = [
        agent_table(folder, "long", "qwen3", CHARACTERS, cp=2, data_parallel=OVERLAP, offload="optimizer"),
        agent_table(folder, "single", "llama", CHARACTERS + PAIRS),
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
def undisturbed(config) -> Path:
    train(config)
    return config.parent / "run"


def test_it_learns_from_the_other_and_its_engine_holds_its_weights(undisturbed):
    metrics = read_metrics(undisturbed / "metrics.jsonl")
    for step in (1, 2):
        values = metrics[step].values
        assert values["agent/long/self/first_ratio_error"] == 0.0
        assert values["agent/long/from/single/ratio_mean"] > 0.0
        assert 0.0 < values["agent/long/engine_gap_max"] < 1e-4, "of weights that were published to both ranks"
    start, end = (
        load_file(folder / "model.safetensors")
        for folder in (undisturbed.parent / "long", undisturbed / "agents" / "long")
    )
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    AutoModelForCausalLM.from_pretrained(undisturbed / "agents" / "long")


def test_a_run_in_two_parts_is_the_same_bit_for_bit(config, undisturbed):
    run_dir = config.parent / "in_two"
    for steps in (1, 2):
        train(config, f"run_dir={run_dir}", f"num_steps={steps}")
    one, other = (read_checkpoint(folder_of(run, 2)) for run in (undisturbed, run_dir))
    shards = [path for path in one.files if path.endswith(".distcp")]
    assert len(shards) == 3
    assert [other.files[path] for path in shards] == [one.files[path] for path in shards]


def test_one_rank_goes_on_by_rounding(config, undisturbed):
    run_dir = config.parent / "alone"
    apart = ["agents.long.cp=1", "agents.long.offload=none", "agents.long.data_parallel={}"]
    run_command(2, "train", config, f"run_dir={run_dir}", *apart, "--from", folder_of(undisturbed, 1))
    expected, found = (read_metrics(run / "metrics.jsonl")[2].values for run in (undisturbed, run_dir))
    assert found.keys() == expected.keys()
    for key in expected.keys() - {key for key in expected if OF_A_LAYOUT.search(key)}:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key


def test_a_checkpoint_is_exported_as_the_run_exports(undisturbed, tmp_path):
    done = run_here("export", folder_of(undisturbed, 2), "--agent", "long", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    found, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "out", undisturbed / "agents" / "long"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
