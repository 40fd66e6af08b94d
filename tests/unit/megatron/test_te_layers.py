"""TransformerEngine's layers, as far as a machine without a GPU can hold them: the choice, and a stand-in's interface.

The stand-in (stand_ins/te_stand_in.py) declares what TransformerEngine 2.17 declares. Their numbers are in
tests/gpu/test_te_layers_gpu.py.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from memory_cases import EXPERTS, GLM4, LLAMA, OLMO2, QWEN2, learn_of_budget, learn_of_trace, plan_of
from memory_trace import TracedMemory
from repository import ROOT, SOURCES
from safetensors.torch import load_file
from tiny_models import SCALED_ROPE, make_model

from hacpo_mega.megatron.model.te_layers import chosen_transformer
from hacpo_mega.memory.actor_bytes import actor_memory

pytestmark = pytest.mark.nightly

# family and what makes it different: a bias of query, key and value; norms of query and key; a bias of the output;
# experts; queries that grow with their position
MODELS = {"qwen2": {"tied": True}, "qwen3": {"tied": False}, "llama": {"tied": True, "attention_bias": True},
          "qwen3_moe": {"tied": True}, "ministral3": {"tied": False, "rope_scaling": SCALED_ROPE}}  # fmt: skip
NAMES = tuple(MODELS)
DENSE = tuple(name for name in NAMES if name != "qwen3_moe")
HEAD = 4 * 2048 * 64 * 2  # bytes of one head of 64 numbers, in the four layers of the plans below
NORM = 4 * (1024 * 512 * 2 + 1024 * 4)  # of a norm's output and scale on one of two ranks, likewise
# Traced plans, and the bytes that each keeps less than the local layers. With norms of queries and keys these keep the
# fused projection whole, and a copy of its queries where they are not at equal distances; TransformerEngine's norms
# keep copies of both, and nothing the projection. With the norm a part of the feed-forward, `mlp` keeps none of it.
PLANS = {
    "qwen3, tp 2": (plan_of(tp=2), 1 * HEAD),
    "qwen3, tp 1": (plan_of(), (2 + 8) * HEAD),
    "qwen3, mlp": (plan_of(tp=2, recompute="mlp"), 1 * HEAD + NORM),
    "qwen2, full": (plan_of(QWEN2, tp=2, recompute="full"), 0),
    "llama": (plan_of(LLAMA), 0),
    "experts": (plan_of(EXPERTS, tp=2, ep=2), 1 * HEAD),
    "llama, 1,536 tokens": (replace(plan_of(LLAMA, tp=2), num_tokens=1536), 0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("te")
    for family, sizes in MODELS.items():
        make_model(root / "models" / family, family, **sizes)
    (root / "plans.pickle").write_bytes(pickle.dumps([plan for plan, _ in PLANS.values()]))
    return root


@pytest.fixture(scope="module")
def found(models):
    """In a process of its own: Megatron sees what is installed when it is imported."""
    support = ROOT / "tests" / "support"
    paths = [str(path) for path in (*SOURCES, support, support / "cases")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(support / "stand_ins" / "te_stand_in.py"), str(models)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(models / "found.pt")


# ---- the choice

ON_CUDA = {"dtype": torch.bfloat16, "on_cuda": True, "version": "2.17.1"}


@pytest.mark.parametrize(
    "changed, chosen",
    [
        ({}, {"auto": "te", "te": "te", "local": "local"}),
        ({"version": None}, {"auto": "local", "local": "local"}),
        ({"on_cuda": False}, {"auto": "local", "local": "local"}),
        ({"dtype": torch.float32}, {"auto": "local", "local": "local"}),
    ],
)
def test_auto_takes_what_is_there(changed, chosen):
    assert {asked: chosen_transformer(asked, LLAMA, **ON_CUDA | changed) for asked in chosen} == chosen


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"version": None}, 'transformer = "te", but TransformerEngine is not installed here: build it'),
        ({"on_cuda": False}, "is for bfloat16 on CUDA, and this actor is bfloat16 on the CPU"),
        ({"dtype": torch.float32}, "is for bfloat16 on CUDA, and this actor is float32 on CUDA"),
    ],
)
def test_te_where_it_cannot_be_is_one_line(changed, said):
    with pytest.raises(ValueError, match=said) as refusal:
        chosen_transformer("te", LLAMA, **ON_CUDA | changed)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model", [OLMO2, GLM4, replace(LLAMA, windows=(8,) * 4)], ids=["olmo2", "glm4", "window"])
def test_what_transformer_engines_layers_lack_has_local_ones(model):
    assert chosen_transformer("auto", model, **ON_CUDA) == "local"
    with pytest.raises(ValueError, match=f'transformer = "te" is not for this {model.family} model, whose norms or'):
        chosen_transformer("te", model, **ON_CUDA)


# ---- names and shapes


@pytest.mark.parametrize("layout", [(2, 1, 0), (1, 2, 0), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("model", NAMES)
def test_every_parameter_has_its_name_and_shape(found, model, layout):
    """Tensor parallel 2, and both stages of a pipeline."""
    shapes = found[model]["shapes"][layout]
    assert shapes["parameters"] == shapes["slots"]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in shapes["parameters"]
    norm = "linear_fc1.layer_norm_weight" if model in DENSE else "router.weight"
    assert f"decoder.layers.0.mlp.{norm}" in shapes["parameters"]
    assert not any("input_layernorm" in name for name in shapes["parameters"])
    assert any("pre_mlp" in name for name in shapes["parameters"]) == (model not in DENSE)


@pytest.mark.parametrize("model", NAMES)
def test_gradients_of_norms_are_summed_over_tensor_ranks(found, model):
    """Each rank sees a slice of the tokens; Megatron adds what has this flag, and nothing else is replicated."""
    replicated = {name for name in found[model]["shapes"][2, 1, 0]["parameters"] if "norm" in name}
    whole = ("linear_proj.bias", "router.weight")
    replicated |= {name for name in found[model]["shapes"][2, 1, 0]["parameters"] if name.endswith(whole)}
    assert found[model]["shapes"][2, 1, 0]["summed over tensor ranks"] == replicated


@pytest.mark.parametrize("model", NAMES)
def test_what_is_published_is_what_the_folder_holds(found, models, model):
    stored = load_file(models / "models" / model / "model.safetensors")
    for way in ("published", "taken up"):  # to the engine; by local layers from a checkpoint
        weights = found[model][way]
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[name], stored[name]) for name in stored)


# ---- the wires


@pytest.mark.parametrize("model", NAMES)
def test_weights_and_sequences_are_where_they_belong(found, model):
    """By the definitions of norm, product and attention, within float32's rounding; another wire is off by far more."""
    hidden = found[model]["hidden"]
    assert float(hidden["local"].std()) > 0.1
    torch.testing.assert_close(hidden["te"], hidden["local"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("model", NAMES[:3])
def test_what_the_classes_are_given(found, model):
    """Word for word, for a layer of tp 1; a name that TransformerEngine does not declare is a TypeError already."""
    made = found[model]["made"]
    common = {"sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_size": 1, "params_dtype": torch.float32}
    unset = {
        "parameters_split": None, "ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "delay_wgrad_compute": False, "symmetric_ar_type": None,
        "name": None, "device": "device", "tp_group": "ProcessGroup", "get_rng_state_tracker": "function",
        "init_method": "partial",
    }  # fmt: skip
    row = {"parallel_mode": "row", "rng_tracker_name": None, "save_original_input": False, "ub_name": None}
    has_bias = model == "llama"
    projection, down = made["Linear"][:2]
    assert projection == common | unset | row | {
        "in_features": 64, "out_features": 64, "bias": has_bias, "return_bias": has_bias
    }  # fmt: skip
    assert down == common | unset | row | {"in_features": 96, "out_features": 64, "bias": False, "return_bias": False}
    column = {
        "parallel_mode": "column", "normalization": "RMSNorm", "eps": 1e-6, "zero_centered_gamma": False,
        "return_layernorm_output": False, "return_layernorm_output_gathered": False, "return_bias": False,
        "ub_name": None, "in_features": 64,
    }  # fmt: skip
    qkv, gate_up = made["LayerNormLinear"][:2]
    assert qkv == common | unset | column | {"out_features": 128, "bias": model != "qwen3"}
    assert gate_up == common | unset | column | {"out_features": 192, "bias": False}
    attention = {key: value for key, value in made["DotProductAttention"][0].items() if value is not None}
    assert attention == {
        "num_attention_heads": 4, "kv_channels": 16, "num_gqa_groups": 2, "attention_dropout": 0.0,
        "qkv_format": "sbhd", "attn_mask_type": "causal", "sequence_parallel": False, "tp_size": 1,
        "get_rng_state_tracker": "function", "tp_group": "ProcessGroup", "layer_number": 1, "attention_type": "self",
        "cp_comm_type": "p2p", "softmax_type": "vanilla", "return_max_logit": False,
    }  # fmt: skip
    widths = [norm["normalized_shape"] for norm in made["RMSNorm"]]
    assert widths == ([16, 16] * 2 if model == "qwen3" else []) + [64]


# ---- memory


@pytest.mark.parametrize("name", PLANS)
def test_the_budget_of_the_local_layers_is_enough(found, models, name):
    """Every tensor that TransformerEngine's source makes and keeps (stand_ins/te_memory.py), against the budget."""
    traces = pickle.loads((models / "traces.pickle").read_bytes())
    plan, less = PLANS[name]
    memory, budget = TracedMemory(**traces[tuple(PLANS).index(name)]), actor_memory(plan)
    assert memory.saved == pytest.approx(budget.kept - less, rel=2e-3)
    assert learn_of_trace(memory) <= learn_of_budget(budget)
    assert memory.gather_buffer + memory.score <= budget.gather_buffer + budget.forward
    assert memory.update == pytest.approx(budget.step, rel=2e-3)
