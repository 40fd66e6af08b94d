"""From Megatron's shards into the live vLLM engine of the same processes: whose policy answers, and whose is trained.

The engine's log-probs of the tokens it sampled must be the actor's, at every layout, after every update.
"""

import functools
import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from job import run_script
from tiny_models import (
    CPU_LATENT,
    GPT_OSS_ROPE,
    LATENT_ROPE,
    SCALED_ROPE,
    YARN_ROPE,
    make_model,
    pack_experts,
    pack_fp8,
)

from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.alarms import EngineAlarm
from hacpo_mega.logbook.steps.step_metrics import add_engine_gap
from hacpo_mega.models.files.weight_files import CORRECTION, EXPERT_BIAS, LAYER_SCALE
from hacpo_mega.records import Rollout, Score, Stop

MODELS = {
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "llama-untied": {"family": "llama", "tied": False, "rope_scaling": YARN_ROPE},
    "phi3": {"family": "phi3", "tied": False, "rope_scaling": {"partial_rotary_factor": 0.5}},
    "olmo2": {"family": "olmo2", "tied": False},
    "olmo3": {"family": "olmo3", "tied": False, "window": 11, "rope_scaling": YARN_ROPE},
    "gemma3": {"family": "gemma3_text", "tied": True, "window": 11},
    "gemma4": {"family": "gemma4_text", "tied": True, "window": 11},
    # Experts beside the feed-forwards, too.
    "gemma4-images": {
        "family": "gemma4_text",
        "tied": True,
        "window": 11,
        "images": True,
        "said": {"enable_moe_block": True},
    },
    "gemma3-images": {"family": "gemma3_text", "tied": True, "window": 11, "images": True},
    "ministral3-images": {"family": "ministral3", "tied": False, "images": True, "rope_scaling": SCALED_ROPE},
    "mistral-window": {"family": "mistral", "tied": False, "window": 11},
    "glm4": {"family": "glm4", "tied": False, "attention_bias": True},
    "smollm3": {"family": "smollm3", "tied": True, "said": {"no_rope_layers": [1, 0]}},
    "seed-oss": {"family": "seed_oss", "tied": False, "attention_bias": True},
    "experts": {"family": "qwen3_moe", "tied": False},
    "gpt-oss": {
        "family": "gpt_oss",
        "tied": False,
        "window": 11,
        "ffn_size": 128,
        "attention_bias": True,
        "rope_scaling": GPT_OSS_ROPE,
    },
    "minimax-m2": {"family": "minimax_m2", "tied": False, "rope_scaling": {"partial_rotary_factor": 0.5}},
    "hy3": {"family": "hy_v3", "tied": False},
    # Packed in fp8; latents of the one size for which vLLM has a kernel on the CPU.
    "deepseek": {
        "family": "deepseek_v3",
        "tied": False,
        "rope_scaling": LATENT_ROPE,
        "said": {**CPU_LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    },
    "glm4.7-flash": {"family": "glm4_moe_lite", "tied": False, "said": {**CPU_LATENT, "q_lora_rank": None}},
    "qwen3.5": {"family": "qwen3_5_text", "tied": True, "said": {"rms_norm_eps": 1e-2}},
    "qwen3.5-images": {"family": "qwen3_5_text", "tied": False, "images": True, "said": {"rms_norm_eps": 1e-2}},
    "qwen3.5-moe": {"family": "qwen3_5_moe_text", "tied": False, "images": True, "said": {"rms_norm_eps": 1e-2}},
    "qwen3-next": {"family": "qwen3_next", "tied": False, "said": {"rms_norm_eps": 1e-2}},
}
# tp, pp, ranks of an engine. The last: two engines in one cell, which must be given the same weights.
LAYOUTS = ((1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 2, 1))
NUM_UPDATES = 2
STACKED = "gpt-oss"
# Tensors in one layer with an up_proj; models without a matrix of that name.
DENSE = re.compile(r"^(?!.*down_proj)")
BESIDE_UP = {
    "experts": re.compile(r"\.experts\."),
    "hy3": re.compile(r"\.experts\.|\.shared_mlp\.(gate|up)_proj"),
    "deepseek": re.compile(r"\.experts\.|\.shared_experts\.(gate|up)_proj"),
    "glm4.7-flash": re.compile(r"\.experts\.|\.shared_experts\.(gate|up)_proj"),
    "qwen3.5-moe": re.compile(r"\.experts\.|\.shared_expert\.(gate|up)_proj"),
    "qwen3-next": re.compile(r"\.experts\.|\.shared_expert\.(gate|up)_proj"),
}
NO_UP = STACKED, "minimax-m2"
# A bias of a sum over ranks.
ADDED_ONCE = re.compile(r"\.experts\.\d+\.down_proj\.bias")
# Where the engine multiplies with the same matrix twice.
KEYS_AND_VALUES = "model.layers.1.self_attn.k_proj.weight"
EVERY_LAYOUT = ("qwen3-tied", "llama-untied")
# The other models show nothing more with whole tensors than with cut ones, unless their folder holds tensors fused.
FUSED = "phi3"
CASES = [
    case
    for case in itertools.product(MODELS, LAYOUTS)
    if case[0] in EVERY_LAYOUT or case[1] == LAYOUTS[1] or case == (FUSED, LAYOUTS[3])
]
each_case = pytest.mark.parametrize("model, layout", CASES)
each_model = pytest.mark.parametrize("model", EVERY_LAYOUT)
# A smaller look by day: what `doctor` compares after an update, and what a run compares after it has published.
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> Callable[[str, tuple[int, int, int]], list[dict]]:
    """Observations of both processes of a model in a layout, by rank; a job of its own, when it is first asked for."""
    models = tmp_path_factory.mktemp("models")
    for name, sizes in MODELS.items():
        make_model(models / name, num_heads=2, head_dim=32, **sizes)
    pack_experts(models / STACKED)
    for packed in ("minimax-m2", "deepseek"):
        pack_fp8(models / packed)

    @functools.cache
    def visit(model: str, layout: tuple[int, int, int]) -> list[dict]:
        out = tmp_path_factory.mktemp("saw")
        run_script("publish_job", 2, models / model, out, *layout)
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in (0, 1)]

    return visit


@pytest.mark.parametrize("rank", (0, 1))
@each_case
def test_the_engine_samples_from_the_policy_that_is_trained(saw, model, layout, rank):
    seen = saw(model, layout)[rank]
    assert len(seen["sampled"]) == NUM_UPDATES + 1
    for sampled, scored in zip(seen["sampled"], seen["scored"], strict=True):
        for by_engine, by_actor in zip(sampled, scored, strict=True):
            np.testing.assert_allclose(by_engine, by_actor, atol=1e-4, rtol=0)


@each_case
def test_every_update_moved_the_policy_far_more_than_that(saw, model, layout):
    """Otherwise a publish that does nothing would pass above."""
    for before, after in itertools.pairwise(saw(model, layout)[0]["fixed"]):
        assert np.abs(after - before).max() > 0.01


def gap_of_step(sampled: list[np.ndarray], scored: list[np.ndarray]) -> dict[str, float]:
    """The metrics of a step in which the engine sampled with these log-probs and the trainer scored those."""
    metrics = Metrics("a", lambda payload: [payload])
    rollouts = [
        Rollout(0, g, np.zeros(len(values), np.int32), "", Stop.LENGTH, values) for g, values in enumerate(sampled)
    ]
    add_engine_gap(metrics, "a", list(zip(rollouts, [Score(0.0, values) for values in scored], strict=True)))
    return metrics.reduce().values


@each_case
def test_an_engine_that_missed_a_publish_is_told_from_one_that_did_not(saw, model, layout):
    """In the gap, in the KL and by the alarm: after steps in order, the trainer learns and nothing is published."""
    seen, alarm = saw(model, layout)[0], EngineAlarm(("a",), (torch.float32,))
    fresh = [gap_of_step(*step) for step in zip(seen["sampled"], seen["scored"], strict=True)]
    stale = [gap_of_step(*step) for step in zip(seen["sampled"], seen["stale"])]
    assert len(stale) == NUM_UPDATES
    for step in fresh:
        assert 0 < step["agent/a/engine_gap_mean"] <= step["agent/a/engine_gap_max"] < 1e-4
        assert 0 <= step["agent/a/engine_kl"] < 1e-8
        assert list(alarm.warnings([step["agent/a/engine_gap_mean"]])) == []
    for step in stale:
        assert step["agent/a/engine_gap_mean"] > 1e-3
        assert step["agent/a/engine_kl"] > 1e-6
    (line,) = alarm.warnings([stale[-1]["agent/a/engine_gap_mean"]])
    assert line.startswith("warning: engine and trainer of a differ by ")


@each_case
def test_one_changed_number_in_an_engine_is_found_by_name_on_its_rank(saw, model, layout):
    """After every publish nothing differs; of rank 1's engine, which got another last bit of a tensor, that one."""
    for rank, seen in enumerate(saw(model, layout)):
        assert seen["differences"] == [[]] * (NUM_UPDATES + 1)
        assert seen["others differ"] == []
        for name, found in seen["mutated"].items():
            if ADDED_ONCE.search(name):  # by rank 0
                assert found == []
                continue
            is_head = name == "model.embed_tokens.weight" and MODELS[model]["tied"]
            twice = 2 if is_head or (name == KEYS_AND_VALUES and model.startswith("gemma4")) else 1
            twice = 2 if name.endswith(".kv_b_proj.weight") else twice  # and as it is absorbed
            assert len(found) == (twice if rank == 1 else 0), (rank, name, found)
            assert all(line.startswith(f"{name}: not what rank ") for line in found)
    assert len(saw(model, layout)[1]["mutated"]) >= 15


@each_case
def test_an_engine_that_missed_a_publish_differs_in_every_tensor(saw, model, layout):
    """And one whose packed output layer was forgotten, in that alone."""
    for rank, seen in enumerate(saw(model, layout)):
        differing = {line.partition(": ")[0] for line in seen["behind"]}
        learned = {name for name in seen["mutated"] if not name.endswith((CORRECTION, EXPERT_BIAS, LAYER_SCALE))}
        assert differing == {name for name in learned if rank == 0 or not ADDED_ONCE.search(name)}
        head = "model.embed_tokens.weight" if MODELS[model]["tied"] else "lm_head.weight"
        stale = {line.partition(": ")[0] for line in seen["stale head"]}
        assert stale == (set() if torch.cuda.is_available() else {head})


@each_case
def test_vllms_loaders_cut_as_the_planner_does(saw, model, layout):
    """And all of them were followed, but for experts that it reads stacked, which it turns."""
    for seen in saw(model, layout):
        recorded, by_arithmetic = seen["shards"]
        if model == STACKED:
            left = {name for name in seen["mutated"] if ".experts." in name}
            assert seen["left over"].keys() == left and len(left) == 2 * 4 * 6
            by_arithmetic = {shard for shard in by_arithmetic if ".experts." not in shard}
        else:
            assert seen["left over"] == {}
        assert recorded == by_arithmetic and len(recorded) >= 15


@pytest.mark.parametrize("model, layout", [case for case in CASES if case[0] not in NO_UP])
def test_what_cannot_be_followed_is_published_whole_and_said_by_name(saw, model, layout):
    """With what else is loaded into the same layer, on all ranks of the cell, whichever of them noticed it."""
    for rank, seen in enumerate(saw(model, layout)):
        found, expected = seen["followed in part"], {}
        for name in seen["mutated"]:
            if name.startswith("model.layers.1.mlp.") and BESIDE_UP.get(model, DENSE).search(name):
                expected[name] = "its loader computes something from it"
        if rank == 1 or layout != (1, 1, 1):
            expected["model.embed_tokens.weight"] = "its loader asks for numbers (RuntimeError)"
        assert found["left over"] == expected
        assert found["said"].startswith(f"{len(expected)} tensors are published whole to every rank: ")
        another = "vLLM 9 of vllm is installed, and the locks have 0.32.0: "
        assert found["said of another"] == another + found["said"]
        assert "up_proj.weight: its loader computes something from it" in found["said"]
        assert f"model.layers.*.mlp.{'experts.*.' * (model in BESIDE_UP)}gate" in found["said"]
        assert found["said"] == saw(model, layout)[1]["followed in part"]["said"] or layout == (1, 1, 1)
        assert {line.partition(": ")[0] for line in found["behind"]} == seen["mutated"].keys()
        assert found["differences"] == []
        assert found["sent"] == found["planned"]


@each_model
def test_engines_of_one_cell_answer_alike(saw, model):
    """pp 2 with engines of one rank: both got every tensor of both stages."""
    first, second = (rank["samples"] for rank in saw(model, (1, 2, 1)))
    for step_first, step_second in zip(first, second, strict=True):
        assert [s.answer_ids.tolist() for s in step_first] == [s.answer_ids.tolist() for s in step_second]


@each_model
def test_layouts_learn_the_same(saw, model):
    """One cell, whichever way it is cut and published, ends at the same policy (answers are the same by seed)."""
    _, *same_cell = (saw(model, layout)[0]["fixed"][-1] for layout in LAYOUTS)
    for other in same_cell[1:]:
        np.testing.assert_allclose(other, same_cell[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("rank", (0, 1))
@each_model
def test_an_engine_in_the_process_does_not_change_training(saw, model, rank):
    """Bit for bit: neither its random streams nor its threads reach the actor."""
    beside, alone = saw(model, LAYOUTS[0])[rank]["scored"][-1], saw(model, LAYOUTS[0])[rank]["alone"]
    for with_engine, without in zip(beside, alone, strict=True):
        np.testing.assert_array_equal(with_engine, without)
