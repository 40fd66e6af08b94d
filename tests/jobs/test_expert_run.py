"""A whole run with an agent of experts, which its two cells share, beside one of adapters: trained, resumed, exported.
One is an image checkpoint, whose layers have two kinds of heads and experts beside their feed-forwards.

It reduces gradients inside backward, gathers weights during forward, replays the routing of its engines, each of which
gets half of the experts from the other cell, and has its optimizer away while these answer.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from job import start_command
from run_cases import (
    CHARACTERS,
    GRADER,
    OVERLAP,
    PAIRS,
    agent_table,
    require_exported_as_by_the_run,
    require_same_in_two_parts,
    require_same_weights,
    train,
    weights_of,
    write_watched_config,
)
from tiny_models import CPU_LATENT, GPT_OSS_ROPE, LATENT_ROPE, auto_class

from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.models.files.weight_files import text_name

pytestmark = pytest.mark.nightly

LORA = {"rank": 4, "alpha": 8.0}
# Family of the agent beside each family; SIZES below has the sizes that a family must have.
BESIDE = {"qwen3_moe": "llama", "glm4_moe": "smollm3", "gpt_oss": "gemma4_text", "qwen3_5_moe_text": "qwen3_5_text",
          "deepseek_v3": "qwen3", "gemma4_text": "qwen3"}  # fmt: skip
# With adapters itself, as the agent beside it always is.
ADAPTED = "deepseek_v3"
IMAGES = "gemma4_text"
# With shared experts no routing is replayed.
REPLAYS = "qwen3_moe", "gpt_oss"
DEEPSEEK = {**CPU_LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
SIZES = {
    "smollm3": {"said": {"no_rope_layers": [1, 0]}},
    "gpt_oss": {"attention_bias": True, "window": 9, "rope_scaling": GPT_OSS_ROPE},
    "deepseek_v3": {"rope_scaling": LATENT_ROPE, "said": DEEPSEEK},
    "gemma4_text": {"window": 9, "images": True, "said": {"enable_moe_block": True}},
    "qwen3_5_moe_text": {"said": {"rms_norm_eps": 1e-2}},
    "qwen3_5_text": {"said": {"rms_norm_eps": 1e-2}},
}
# Sizes of a family's member without experts.
DENSE = {"gemma4_text": {"window": 9}}


@pytest.fixture(scope="module", params=BESIDE)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def config(tmp_path_factory, family) -> Path:
    folder = tmp_path_factory.mktemp(family)
    options = {"data_parallel": OVERLAP, "offload": "optimizer", "router_replay": family in REPLAYS}
    layout = {"cells_per_lane": 2, "ep": 2, **options, **({"lora": LORA} if family == ADAPTED else {})}
    other = BESIDE[family]
    agents = [
        agent_table(folder, "sparse", family, CHARACTERS, SIZES.get(family), **layout),
        agent_table(folder, "dense", other, CHARACTERS + PAIRS, DENSE.get(other, SIZES.get(other)), lora=LORA),
    ]
    return write_watched_config(folder, agents)


@pytest.fixture(scope="module")
def undisturbed(config) -> Path:
    train(config)
    return config.parent / "run"


def test_it_learns_from_the_other_and_its_engine_holds_its_weights(family, undisturbed):
    metrics = read_metrics(undisturbed / "metrics.jsonl")
    for step in (1, 2):
        values = metrics[step].values
        assert values["agent/sparse/self/first_ratio_error"] == 0.0
        assert values["agent/sparse/from/dense/ratio_mean"] > 0.0
        for agent in ("sparse", "dense"):
            assert 0.0 < values[f"agent/{agent}/engine_gap_max"] < 1e-4, "of weights that were published to each cell"
        assert 1 / 4 <= values["agent/sparse/fullest_expert_share"] < 1.0
        assert 0.0 < values["agent/sparse/expert_entropy"] <= 1.0
        if family in REPLAYS:  # in float32 engine and actor choose alike but for ties
            assert 0.0 <= values["agent/sparse/replay_changed"] < 0.01
        assert not {"agent/dense/expert_entropy", "agent/dense/replay_changed"} & values.keys()
    start, end = weights_of(undisturbed.parent / "sparse"), weights_of(undisturbed / "agents" / "sparse")
    assert start.keys() == end.keys()
    for name in start:
        # A router's bias stays as it was loaded, beside adapters all of it.
        if re.search(r"\.(experts|gate|router|sinks|shared_expert_gate)\b", name):
            stays = name.endswith("e_score_correction_bias") or (family == ADAPTED and ".experts." not in name)
            assert torch.equal(start[name], end[name]) == stays, name
        if family == IMAGES:  # the scale of a layer stays, too, and the tower
            is_fixed = name.endswith("layer_scalar") or text_name(name) is None
            assert torch.equal(start[name], end[name]) == is_fixed, name
    auto_class(family == IMAGES).from_pretrained(undisturbed / "agents" / "sparse")


def test_a_run_in_two_parts_is_the_same_bit_for_bit(config, undisturbed):
    require_same_in_two_parts(config, undisturbed, num_shards=3)


def test_engines_on_ranks_of_their_own_change_no_bit(config, undisturbed):
    """Experts go from two cells to an engine of each, merged adapters to one; all of it is verified."""
    run_dir = config.parent / "apart"
    counts = ("agents.sparse.rollout_gpus=1", "agents.dense.rollout_gpus=1")
    train(config, f"run_dir={run_dir}", "placement=apart", "agents.sparse.offload=none", *counts)
    one, other = (read_metrics(run / "metrics.jsonl") for run in (undisturbed, run_dir))
    assert [step.values for step in other.values()] == [step.values for step in one.values()]
    for name in ("sparse", "dense"):
        require_same_weights(run_dir / "agents" / name, undisturbed / "agents" / name)


def test_a_checkpoint_is_exported_as_the_run_exports(undisturbed, tmp_path):
    require_exported_as_by_the_run(undisturbed, "sparse", tmp_path / "out")


def test_its_export_is_evaluated(family, undisturbed, tmp_path):
    if family not in ("gpt_oss", "qwen3_5_moe_text", "deepseek_v3", IMAGES):
        return
    rows = [{"prompt": f"{index}+{index}", "answer": "1"} for index in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("num_answers=2", f"reward.kind={GRADER}:share_of_ones", "max_answer_tokens=12", "max_prompt_tokens=8")
    model = undisturbed / "agents" / "sparse"
    process = start_command("eval", model, tmp_path / "sums.jsonl", "--out", tmp_path / "out", *options)
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    (found,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["benchmarks"]
    assert (found["num_answers"], found["num_unjudged"], found["num_dropped"]) == (4 * 2, 0, 0)
    assert 0.0 < found["scores"]["avg@2"]["value"] < 1.0
