"""Engines that quantize what is published: in every bit what fp8 is by its definition, and verified with its scales.

`fp8_per_channel` is the one online kind whose kernels the CPU build of vLLM has everywhere; gpu/test_quantized_gpu.py
runs the others.
"""

import functools

import pytest
import torch
from job import run_script
from tiny_models import make_model

from hacpo_mega.config.checks.pass_through import OFFLINE_QUANTIZATION

# tp, pp, ranks of an engine, ranks that only answer
COLOCATED, APART = ((2, 1, 2, 0), (1, 2, 1, 0)), (1, 1, 1, 1)
each_layout = pytest.mark.parametrize("layout", COLOCATED)
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    """Observations of both processes in a layout, by rank."""
    sizes = {"num_heads": 2, "head_dim": 32, "tied": False, "dtype": torch.bfloat16}
    folder = make_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", **sizes)

    @functools.cache
    def visit(layout):
        out = tmp_path_factory.mktemp("saw")
        run_script("quantized_job", 2, folder, out, "fp8_per_channel", *layout)
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in (0, 1)]

    return visit


@each_layout
def test_what_is_published_is_quantized_on_the_way(saw, layout):
    """After every publish, of two policies: no bit differs, nothing goes as full tensors, no byte more than planned."""
    for seen in saw(layout):
        assert seen["left over"] == {} and seen["buckets"] > 10
        assert seen["differing"] == [[], []]
        assert seen["sent"][0] == seen["sent"][1]
        assert (seen["sent"][0] > 0) == (layout[1] > 1)


@each_layout
def test_scales_and_numbers_are_verified(saw, layout):
    """Equal after each publish; after an update without one they differ, matrices and scales both; then they do not."""
    for rank, seen in enumerate(saw(layout)):
        assert seen["differences"] == [[], []]
        behind = {line.partition(": ")[0] for line in seen["behind"]}
        quantized = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in (
            "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")}  # fmt: skip
        assert {f"{name}.{kind}" for name in quantized for kind in ("weight", "weight_scale")} <= behind
        assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= behind
        assert seen["mended"] == []
        name, found = seen["flipped"]
        assert found == ([f"{name}: not what a fresh load of the actor's weights makes"] if rank == 1 else [])


def test_an_engine_on_its_own_rank_quantizes_its_weights_and_is_verified(saw):
    """Nothing of it goes as full tensors; its actor's rank has no engine, and holds nothing that could differ."""
    trains, answers = saw(APART)
    assert answers["left over"] == {} and answers["differing"] == [[], []] and trains["differing"] == []
    sent, planned = trains["sent"]
    assert 0 < planned <= sent < planned + 64, "which step it is, too"
    assert answers["sent"][1] == 0
    for seen in (trains, answers):
        assert seen["differences"] == [[], []] and seen["mended"] == []
    behind = {line.partition(": ")[0] for line in answers["behind"]}
    quantized = {f"model.layers.0.mlp.down_proj.{kind}" for kind in ("weight", "weight_scale")}
    assert quantized | {"model.embed_tokens.weight"} <= behind
    name, found = answers["flipped"]
    assert found == [f"{name}: not what a fresh load of the actor's weights makes"]
    assert trains["behind"] == trains["flipped"][1] == []


@each_layout
def test_the_engine_answers_with_the_policy_up_to_fp8(saw, layout):
    """Nats a token: weights and activations of three bits behind the leading one, through two layers."""
    for seen in saw(layout):
        assert all(0 < gap < 0.25 for gaps in seen["gaps"] for gap in gaps)


def test_kinds_that_need_a_quantized_folder_are_those_that_are_refused(saw):
    """By vLLM's own classes (config/checks/pass_through.py reads none)."""
    assert saw(COLOCATED[0])[0]["of quantized folders"] == OFFLINE_QUANTIZATION
