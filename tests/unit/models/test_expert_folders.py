"""Experts in a config.json, against transformers' own reading, and the names that it saves them by."""

import json
import math
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import GPT_OSS, MIXTRAL, QWEN3_MOE, read
from tiny_models import GPT_OSS_ROPE, make_model, pack_experts, pack_fp8
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hacpo_mega.config.checks.notes import unused_fields
from hacpo_mega.megatron.weights.hf_reader import FolderReader
from hacpo_mega.megatron.weights.hf_writer import copy_beside_weights, write_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import is_tied
from hacpo_mega.models.files.folder import dtype_name
from hacpo_mega.models.files.weight_files import SINGLE, published_names, weight_problems
from hacpo_mega.models.sharding.layout import Layout, layout_problems
from hacpo_mega.models.sharding.segments import all_sources, rectangles, segments, shard_shape, stage_slots


@pytest.mark.parametrize("published", [QWEN3_MOE, MIXTRAL, GPT_OSS])
def test_experts_are_read_as_transformers_reads_them(tmp_path, published):
    config = json.loads(published)
    found, theirs = read(tmp_path, config), AutoConfig.for_model(**config)
    assert (found.num_experts, found.experts_per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert found.expert_ffn == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert found.normalises_experts == getattr(theirs, "norm_topk_prob", True)
    assert found.has_experts and found.ffn_size == 0
    # As the Hub counts them, and the paper of gpt-oss: 30.5, 46.7 and 20.9 billion.
    size = sum(math.prod(source.shape) for source in all_sources(found))
    assert round(size / 1e9, 1) == {"qwen3_moe": 30.5, "mixtral": 46.7, "gpt_oss": 20.9}[found.family]


@pytest.mark.parametrize("said", ["num_experts", "num_local_experts"])
def test_their_number_has_two_names(tmp_path, said):
    config = json.loads(QWEN3_MOE)
    del config["num_experts"]
    assert read(tmp_path, config | {said: 64}).num_experts == 64
    with pytest.raises(ValueError, match="num_experts = 64 and num_local_experts = 32 both say how many experts"):
        read(tmp_path, config | {"num_experts": 64, "num_local_experts": 32})


@pytest.mark.parametrize(
    ("published", "field", "value", "line"),
    [
        (QWEN3_MOE, "mlp_only_layers", [0], r"mlp_only_layers = \[0\] is not supported, only \[\]"),
        (QWEN3_MOE, "decoder_sparse_step", 2, r"decoder_sparse_step = 2 is not supported, only 1"),
        (QWEN3_MOE, "num_experts_per_tok", 129, r"num_experts_per_tok is 129, and there are 128 experts"),
        (QWEN3_MOE, "num_experts", 0, r"num_experts must be an integer of at least 1"),
        (QWEN3_MOE, "norm_topk_prob", 1, r"norm_topk_prob must be true or false"),
        (QWEN3_MOE, "shared_expert_intermediate_size", 64, r"is not supported, only 0"),
        (MIXTRAL, "router_jitter_noise", 0.1, r"an answer that is scored twice would have two scores"),
        (MIXTRAL, "sliding_window", 4096, r"sliding_window = 4096 is not supported, only None"),
        (MIXTRAL, "norm_topk_prob", False, r"is no field of mixtral that is known"),
    ],
)  # fmt: skip
def test_what_would_compute_something_else_is_refused_by_name(tmp_path, published, field, value, line):
    with pytest.raises(ValueError, match=line):
        read(tmp_path, json.loads(published) | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("n_group", 3, r"n_group \(3\) must divide the 8 experts into groups of two or more"),
        ("n_group", 8, r"n_group \(8\) must divide the 8 experts into groups of two or more"),
        ("topk_group", 2, r"topk_group is 2, and there are 1 groups of experts"),
        ("num_experts_per_tok", 9, r"num_experts_per_tok is 9, and there are 8 experts"),
        ("first_k_dense_replace", 2, r"first_k_dense_replace is 2, and there are 2 layers: none"),
        ("n_shared_experts", 0, r"n_shared_experts must be an integer of at least 1"),
        ("scoring_func", "softmax", r"scoring_func = 'softmax' is no field of glm4_moe that is known"),
        ("tie_word_embeddings", True, r"with glm4_moe: vLLM gives it a head of its own"),
    ],
)  # fmt: skip
def test_routers_that_there_cannot_be_are_refused_by_name(tmp_path, field, value, line):
    folder = make_model(tmp_path, "glm4_moe", num_experts=8)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=line):
        Architecture.from_folder(folder)


def test_layers_that_predict_further_tokens_are_left_where_they_are(tmp_path):
    folder = make_model(tmp_path, "glm4_moe", num_experts=8)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    wanted = {source.name: source.shape for source in all_sources(Architecture.from_folder(folder))}
    assert wanted.keys() == published_names(folder, tied=is_tied(folder)) == tensors.keys()
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}, file)
    config = json.loads((folder / "config.json").read_text())
    for count, extra in ((1, set()), (0, {"model.layers.2.eh_proj.weight"})):
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
        assert published_names(folder, tied=is_tied(folder)) == wanted.keys() | extra
        assert len(weight_problems(folder, wanted, family="glm4_moe", tied=True)) == len(extra)
        asked = SimpleNamespace(agents=[SimpleNamespace(name="a", model=folder)])
        assert any("num_nextn_predict_layers = 1, which is not used" in line for line in unused_fields(asked)) == count


def test_prediction_beside_a_model_and_unshared_prompts(tmp_path):
    folder = make_model(tmp_path, "qwen3_next", tied=False)
    file = folder / "model.safetensors"
    wanted = {source.name: source.shape for source in all_sources(Architecture.from_folder(folder))}
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(2, 2)}, file)
    assert published_names(folder, tied=False) == wanted.keys()
    assert weight_problems(folder, wanted, family="qwen3_next", tied=False) == []
    agents = [SimpleNamespace(name="a", model=folder, megatron={})]
    for shares in (True, False):
        asked = SimpleNamespace(agents=agents, training=SimpleNamespace(share_prompts=shares))
        assert any("a: training.share_prompts is not used" in line for line in unused_fields(asked)) == shares


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_a_folder_that_transformers_saves_has_these_tensors(tmp_path, family):
    folder = make_model(tmp_path, family, num_experts=6)
    found = Architecture.from_folder(folder)
    wanted = {source.name: source.shape for source in all_sources(found)}
    assert weight_problems(folder, wanted, family=family, tied=True) == []


def test_ranks_of_ep_have_whole_experts_in_their_order(tmp_path):
    architecture = Architecture.from_folder(make_model(tmp_path, "qwen3_moe", num_experts=6, ffn_size=40))
    _, *_, gate_up, down, _ = stage_slots(architecture, (2,), 0)
    assert shard_shape(gate_up, architecture, tp=2, ep=3) == (2 * 2 * 40, 64)
    assert shard_shape(down, architecture, tp=2, ep=3) == (2 * 64, 40)
    held = [gate_up.sources[piece.source].name.split("experts.")[1]
            for piece in segments(gate_up, architecture, tp=2, tp_rank=1, ep=3, ep_rank=1)]  # fmt: skip
    assert held == [f"{expert}.{part}_proj.weight" for expert in (2, 3) for part in ("gate", "up")]
    # Data parallelism cuts this out of it: the end of an expert's down, and all but the end of the next one's.
    places = {"tp": 1, "tp_rank": 0, "ep": 3, "ep_rank": 2}
    first, second, last = rectangles(down, architecture, **places, start=63 * 40, stop=(64 + 63) * 40 + 7)
    assert first.source.name.endswith("experts.4.down_proj.weight") and first.sizes == (1, 40)
    assert (second.offsets, second.sizes, second.start) == ((0, 0), (63, 40), 64 * 40)
    assert first.offsets == (63, 0)
    assert (last.source, last.offsets, last.sizes) == (second.source, (63, 0), (1, 7))


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout(tp=2, ep=2), None),
        (Layout(tp=2, ep=1), None),
        (Layout(tp=2, cp=2, ep=4), "ep (4) must divide tp x cp (2 x 2 = 4), whose ranks share the experts, and the "
         "model's 6 experts. Nearest: ep = 2"),
        (Layout(ep=2), "ep (2) must divide tp x cp (1 x 1 = 1), whose ranks share the experts, and the model's 6 "
         "experts. Nearest: ep = 1"),
        (Layout(tp=2, ep=6, cells=6), None),
        (Layout(tp=2, ep=6, cells=4), "ep (6) must divide tp x cp (2 x 1 = 2), whose ranks share the experts, or be "
         "that times a divisor of the agent's 4 cells, and the model's 6 experts. Nearest: ep = 2"),
        (Layout(tp=2, engine_tp=2), "engine_tp (2) must divide the model's 33 columns of an expert. Nearest: "
         "engine_tp = 1"),
    ],
)  # fmt: skip
def test_layouts_of_experts(tmp_path, layout, line):
    architecture = Architecture.from_folder(make_model(tmp_path, "mixtral", num_experts=6, ffn_size=33))
    assert layout_problems(architecture, layout) == ([] if line is None else [line])


def test_a_model_without_experts_has_no_ep(tmp_path):
    architecture = Architecture.from_folder(make_model(tmp_path, "qwen3"))
    assert layout_problems(architecture, Layout(tp=2, ep=2)) == [
        "ep (2): a qwen3 model has no experts to share. Nearest: ep = 1"
    ]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A gpt-oss whose experts are random MXFP4, and the tensors that transformers would load of it."""
    folder = tmp_path_factory.mktemp("packed")
    sizes = {"tied": False, "attention_bias": True, "window": 9, "ffn_size": 96, "num_experts": 3}
    make_model(folder, "gpt_oss", rope_scaling=GPT_OSS_ROPE, dtype=torch.bfloat16, **sizes)
    return folder, pack_experts(folder)


def test_mxfp4_is_read_as_transformers_unpacks_it_and_written_as_bfloat16(packed, tmp_path):
    """Every tensor of every expert, with a name of its own; what is written is what transformers would have."""
    folder, expected = packed
    sources = tuple(all_sources(Architecture.from_folder(folder)))
    assert weight_problems(folder, {s.name: s.shape for s in sources}, family="gpt_oss", tied=False) == []
    assert published_names(folder, tied=False) == {source.name for source in sources}
    assert dtype_name(folder) == "bfloat16"
    with ExitStack() as stack:
        reader = FolderReader(folder, stack)
        read_all = ((s.name, reader.read(s, 0, s.shape[0], dim=0).bfloat16()) for s in sources)
        copy_beside_weights(folder, tmp_path, torch.bfloat16)
        write_weights(read_all, sources, tmp_path, torch.bfloat16, base=folder)
    written = load_file(tmp_path / SINGLE)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_fp8_is_read_as_transformers_unpacks_it(tmp_path):
    """Several blocks of rows or columns in every matrix; transformers wants them equal."""
    sizes = {"tied": False, "hidden_size": 256, "ffn_size": 256, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32}
    make_model(tmp_path, "minimax_m2", dtype=torch.bfloat16, num_experts=3, **sizes)
    packed = pack_fp8(tmp_path)
    assert len(packed) == 2 * (4 + 3 * 3)
    sources = tuple(all_sources(Architecture.from_folder(tmp_path)))
    assert weight_problems(tmp_path, {s.name: s.shape for s in sources}, family="minimax_m2", tied=False) == []
    tensors, theirs = load_file(tmp_path / SINGLE), Fp8Dequantize(None)
    with ExitStack() as stack:
        reader = FolderReader(tmp_path, stack)
        for source in sources:
            found, stored = reader.read(source, 0, source.shape[0], dim=0), tensors[source.name]
            if source.name in packed:
                scales = tensors[f"{source.name}_scale_inv"]
                stored = theirs._dequantize_one(stored, scales)
            assert torch.equal(found, stored), source.name
    del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / SINGLE)
    lines = weight_problems(tmp_path, {s.name: s.shape for s in sources}, family="minimax_m2", tied=False)
    assert len(lines) == 1 and "q_proj.weight is stored as F8_E4M3; expected one of" in lines[0]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), "lacks 3 tensors of this gpt_oss model"),
        (lambda t: t.pop("model.layers.0.mlp.experts.gate_up_proj_bias"), "lacks 18 tensors of this gpt_oss model"),
        (lambda t: t.update({"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(3, 64, 5).byte()}),
         r"has 1 tensors unknown to gpt_oss: model.layers.0.mlp.experts.down_proj_blocks"),
        (lambda t: t.update({"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(3, 60)}),
         r"down_proj.bias has shape \(60,\); config.json says \(64,\)"),
        (lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(3)}), r"sinks has shape \(3,\)"),
    ],
)  # fmt: skip
def test_stacks_that_are_not_whole_are_named(packed, tmp_path, change, line):
    folder, _ = packed
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    wanted = {source.name: source.shape for source in all_sources(Architecture.from_folder(tmp_path))}
    assert re.search(line, "\n".join(weight_problems(tmp_path, wanted, family="gpt_oss", tied=False)))
