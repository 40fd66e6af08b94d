"""The text models of image checkpoints: read as models of their own, and written back beside their tower."""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_folders import edit_config
from tiny_models import SCALED_ROPE, make_model, reference_model
from transformers import AutoConfig

from hacpo_mega.megatron.weights.hf_reader import FolderReader
from hacpo_mega.megatron.weights.hf_writer import copy_beside_weights, write_adapter, write_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.folder import dtype_name, named_ends, with_dtype
from hacpo_mega.models.files.weight_files import StoredTensor, stored_tensors, tower_tensors, weight_problems
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.lora import Lora
from hacpo_mega.models.sharding.segments import all_sources

# As published, less their towers' fields.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA3_27B = GEMMA3_4B | {
    "text_config": {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                    "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                    "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024}
}  # fmt: skip
MINISTRAL3_8B = {
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "vision_feature_layer": -1, "tie_word_embeddings": False,
    "text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
                    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 262144,
                    "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 34,
                    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True,
                    "tie_word_embeddings": False, "vocab_size": 131072,
                    "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                                        "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                                        "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                                        "rope_type": "yarn", "type": "yarn"}},
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
SMALL_31 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "spatial_merge_size": 2, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "vision_feature_layer": -1,
    "text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
                    "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
                    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
                    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
                    "sliding_window": None, "use_cache": True, "vocab_size": 131072},
    "vision_config": {"model_type": "pixtral"},
}  # fmt: skip
QWEN36_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "tie_word_embeddings": False, "video_token_id": 248057, "vision_end_token_id": 248054,
    "vision_start_token_id": 248053, "dtype": "bfloat16",
    "text_config": {"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
                    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
                    "initializer_range": 0.02, "intermediate_size": 17408, "linear_conv_kernel_dim": 4,
                    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
                    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
                    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
                    "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
                    "output_gate_type": "swish", "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
                    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
                    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                        "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                                        "rope_type": "default"}},
    "vision_config": {"model_type": "qwen3_5_vision"},
}  # fmt: skip
QWEN35_35B = QWEN36_27B | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": {"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
                    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
                    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
                    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
                    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
                    "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
                    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_experts": 256,
                    "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
                    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
                    "shared_expert_intermediate_size": 512, "use_cache": True, "vocab_size": 248320,
                    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                                        "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                                        "rope_type": "default"}},
    "vision_config": {"model_type": "qwen3_5_moe"},
}  # fmt: skip
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "gemma4",
    "tie_word_embeddings": True,
    "text_config": {"attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "dtype": "bfloat16",
                    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
                    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
                    "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
                    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
                    "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
                    "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
                    "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
                    "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                                                           "rope_type": "proportional"},
                                        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                    "sliding_window": 1024, "tie_word_embeddings": True, "use_cache": True,
                    "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144},
    "vision_config": {"model_type": "gemma4_vision"},
}  # fmt: skip
GEMMA4_26B = GEMMA4_31B | {
    "text_config": GEMMA4_31B["text_config"] | {
        "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "moe_intermediate_size": 704,
        "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "top_k_experts": 8},
}  # fmt: skip
QWEN35_9B = QWEN36_27B | {
    "text_config": QWEN36_27B["text_config"] | {
        "hidden_size": 4096, "intermediate_size": 12288, "linear_num_value_heads": 32, "num_attention_heads": 16,
        "num_hidden_layers": 32},
}  # fmt: skip
PUBLISHED = {"Qwen3.5-9B": QWEN35_9B, "gemma-4-31B-it": GEMMA4_31B, "gemma-4-26B-A4B-it": GEMMA4_26B,
             "Qwen3.5-35B-A3B": QWEN35_35B, "Qwen3.6-27B": QWEN36_27B,
             "gemma-3-4b-it": GEMMA3_4B, "gemma-3-27b-it": GEMMA3_27B,
             "Ministral-3-8B-Base-2512": MINISTRAL3_8B, "Mistral-Small-3.1-24B-Instruct-2503": SMALL_31}  # fmt: skip
UNSCALED = "gemma-4-31B-it", "gemma-4-26B-A4B-it"
KINDS = {
    "gemma4": {"family": "gemma4_text", "tied": True, "window": 7},
    "gemma3": {"family": "gemma3_text", "tied": True, "window": 7},
    "ministral3": {"family": "ministral3", "tied": False, "rope_scaling": SCALED_ROPE},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("images")
    return {name: make_model(root / name, images=True, **sizes) for name, sizes in KINDS.items()}


@pytest.fixture(params=KINDS)
def folder(request, originals, tmp_path) -> Path:
    """A copy, the test's own."""
    return Path(shutil.copytree(originals[request.param], tmp_path / "model"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_are_read_as_transformers_reads_their_text(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    found, theirs = Architecture.from_folder(tmp_path), AutoConfig.for_model(**PUBLISHED[name]).text_config
    theirs.allow_global_per_layer_attribute_access = True
    assert (found.num_layers, found.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (found.num_heads, found.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (found.head_dim, found.ffn_size or found.shared_ffn) == (
        theirs.head_dim, getattr(theirs, "intermediate_size", getattr(theirs, "shared_expert_intermediate_size", 0))
    )  # fmt: skip
    assert (found.num_experts, found.experts_per_token, found.expert_ffn) == tuple(
        getattr(theirs, names[0], getattr(theirs, names[-1], None)) or 0
        for names in (["num_experts"], ["num_experts_per_tok", "top_k_experts"], ["moe_intermediate_size"])
    )
    assert bool(found.ffn_size) != bool(found.num_experts)
    assert (found.vocab_size, found.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (found.norm_eps, found.rope_theta) == (theirs.rms_norm_eps, rope["rope_theta"])
    assert found.query_beta == rope.get("llama_4_scaling_beta", 0.0)
    assert found.query_scalar == (1 if name in UNSCALED else getattr(theirs, "query_pre_attn_scalar", None))
    assert found.softcap == getattr(theirs, "final_logit_softcapping", None)
    for layer in range(0 if found.full_heads is None else found.num_layers):
        own, heads = theirs.per_layer_config[layer], found.heads_in(layer)
        assert (heads.kv_heads, heads.size) == (own.num_key_value_heads, own.head_dim)
        assert heads.has_values == (theirs.layer_types[layer] == "sliding_attention")
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"]
    assert {window for window in found.windows if window} == ({1024} if "sliding_attention" in kinds else set())
    assert found == public_architecture(name)
    assert dtype_name(tmp_path) == "bfloat16"
    assert named_ends(tmp_path)[1] == tuple(PUBLISHED[name].get("eos_token_id", ()))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18}, "= 256 is not supported with gemma4_text: "
         "Gemma 4 E2B and E4B have"),
        ({"num_kv_shared_layers": 18}, "= 18 is not supported with gemma4_text: Gemma 4 E2B and E4B have"),
        ({"enable_moe_block": True}, "enable_moe_block = True and num_experts = None: transformers reads the first"),
        ({"num_experts": 128}, "enable_moe_block = False and num_experts = 128: transformers reads the first and vLLM"),
        ({"enable_moe_block": True, "num_experts": 128, "moe_intermediate_size": 704}, "'top_k_experts' is missing"),
        ({"enable_moe_block": True, "num_experts": 8, "top_k_experts": 9, "moe_intermediate_size": 704},
         "top_k_experts is 9, and there are 8 experts"),
        ({"layer_types": ["sliding_attention"] * 60}, "the last of layer_types is a layer with a window"),
        ({"use_bidirectional_attention": "all"}, "'all' is not supported, only 'vision'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope type 'default' is not supported"),
        ({"num_global_key_value_heads": 5}, "32 attention heads cannot share 5 key/value heads evenly"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config must give all layers of full_attention the"),
    ],
)  # fmt: skip
def test_what_a_gemma_4_here_is_not_is_one_line(tmp_path, changes, line):
    text = GEMMA4_31B["text_config"] | changes
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4_31B | {"text_config": text}))
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        Architecture.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_heads_by_layer_are_those_of_the_published_fields(tmp_path):
    """And what neither says is E2B's, whose embeddings are refused."""
    text = dict(GEMMA4_31B["text_config"])
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4_31B))
    published = Architecture.from_folder(tmp_path)
    full = [layer for layer, window in enumerate(published.windows) if window is None]
    own = {str(layer): {"head_dim": text["global_head_dim"], "num_key_value_heads": 4} for layer in full}
    for name in ("global_head_dim", "num_global_key_value_heads"):
        del text[name]
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4_31B | {"text_config": text | {"per_layer_config": own}}))
    assert Architecture.from_folder(tmp_path) == published
    del text["hidden_size_per_layer_input"]
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4_31B | {"text_config": text}))
    with pytest.raises(ValueError, match=r"hidden_size_per_layer_input = None .*E2B"):
        Architecture.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("body", "head"),
    [("language_model.model.", "language_model."), ("model.language_model.", ""), ("language_model.", "")],
)
def test_text_is_found_by_every_name_that_transformers_gave_it(folder, body, head):
    file = folder / "model.safetensors"
    tensors, architecture = load_file(file), Architecture.from_folder(folder)
    text = {name: tensors[stored.name] for name, stored in stored_tensors(folder).items()}
    assert text.keys() == {source.name for source in all_sources(architecture)}
    tower = {name: tensors[name] for name in tower_tensors(folder)}
    assert len(tower) + len(text) == len(tensors) and all("language_model" not in name for name in tower)

    def renamed(name: str) -> str:
        return head + name if name.startswith("lm_head.") else body + name.removeprefix("model.")

    save_file(tower | {renamed(name): tensor for name, tensor in text.items()}, file, metadata={"format": "pt"})
    assert stored_tensors(folder).keys() == text.keys() and tower_tensors(folder).keys() == tower.keys()
    write_text(folder, out := folder.parent / "out")
    written = {name: tensor for part in out.glob("*.safetensors") for name, tensor in load_file(part).items()}
    assert written.keys() == text.keys() and all(torch.equal(tensor, text[name]) for name, tensor in written.items())


def write_text(folder: Path, out: Path, base: Path | None = None) -> None:
    """The text model of a folder as one of its own, or beside its tower."""
    out.mkdir()
    copy_beside_weights(folder, out, torch.float32, text_only=base is None)
    sources = list(all_sources(Architecture.from_folder(folder)))
    with ExitStack() as stack:
        reader = FolderReader(folder, stack)
        tensors = ((source.name, reader.read(source, 0, source.shape[0], dim=0)) for source in sources)
        write_weights(tensors, sources, out, torch.float32, base=base, file_bytes=60_000)


def test_both_exports_compute_what_the_checkpoint_does(folder, tmp_path):
    (folder / "preprocessor_config.json").write_text("{}")
    write_text(folder, tmp_path / "whole", base=folder)
    write_text(folder, tmp_path / "text")
    tokens_T = torch.arange(60)[None] % 131
    exact = reference_model(folder)(input_ids=tokens_T).logits
    for out in ("whole", "text"):
        assert torch.equal(reference_model(tmp_path / out)(input_ids=tokens_T).logits, exact), out
    tower = tower_tensors(folder)
    assert tower.keys() == tower_tensors(tmp_path / "whole").keys() and tower_tensors(tmp_path / "text") == {}
    assert bytes_of(folder, tower) == bytes_of(tmp_path / "whole", tower_tensors(tmp_path / "whole"))
    assert (tmp_path / "whole" / "preprocessor_config.json").exists()
    assert not (tmp_path / "text" / "preprocessor_config.json").exists()
    assert Architecture.from_folder(tmp_path / "text") == Architecture.from_folder(folder)
    served = json.loads((tmp_path / "text" / "config.json").read_text()).get("llama_4_scaling")
    expected = {"original_max_position_embeddings": 16, "beta": 0.1}
    assert served == (expected if Architecture.from_folder(folder).query_beta else None)


@pytest.mark.parametrize(
    ("family", "block", "said"),
    [
        ("qwen3_5_moe_text", "layers.1.mlp.experts.", {}),
        ("gemma4_text", "layers.1.experts.", {"enable_moe_block": True}),
    ],
)
def test_a_plain_stack_of_experts_is_read_and_written_again(tmp_path, family, block, said):
    """Beside layers of multi-token prediction, which stay as they are; the text alone has a matrix for each expert of
    Qwen3.5, and stacks of Gemma 4."""
    folder = make_model(tmp_path / "model", family, tied=False, images=True, said=said)
    file = folder / "model.safetensors"
    tensors = {**load_file(file), "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 192, 64)}
    save_file(tensors, file, metadata={"format": "pt"})
    sources = {source.name: source for source in all_sources(Architecture.from_folder(folder))}
    wanted = {name: source.shape for name, source in sources.items()}
    assert weight_problems(folder, wanted, family=family, tied=False) == []
    gate_up, down = (tensors[f"model.language_model.{block}{part}"] for part in ("gate_up_proj", "down_proj"))
    gate, up = gate_up[3].chunk(2)
    with ExitStack() as stack:
        reader = FolderReader(folder, stack)
        for part, stored in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[3])):
            source = sources[f"model.{block}3.{part}.weight"]
            assert torch.equal(reader.read(source, 0, source.shape[0], dim=0), stored), part
    write_text(folder, tmp_path / "whole", base=folder)
    write_text(folder, tmp_path / "text")
    written = {name: t for part in (tmp_path / "whole").glob("*.safetensors") for name, t in load_file(part).items()}
    assert written.keys() == tensors.keys() and all(torch.equal(t, tensors[name]) for name, t in written.items())
    tokens_T = torch.arange(60)[None] % 131
    exact = reference_model(folder)(input_ids=tokens_T).logits
    for out in ("whole", "text"):
        assert torch.equal(reference_model(tmp_path / out)(input_ids=tokens_T).logits, exact), out


def test_an_adapter_is_put_on_the_text_model_alone(folder, tmp_path):
    """By peft's rules: a text is matched with a module's whole name, whose adapter has that name."""
    name = "layers.0.self_attn.q_proj"
    write_adapter({f"base_model.model.model.{name}.lora_A.weight": torch.ones(1)}, LORA, folder, tmp_path)
    assert list(load_file(tmp_path / "adapter_model.safetensors")) == [
        f"base_model.model.model.language_model.{name}.lora_A.weight"
    ]
    target = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    modules = [name for name, _ in reference_model(folder).named_modules()]
    found = {name for name in modules if re.fullmatch(target, name)}
    assert found == {
        f"model.language_model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")
    }


LORA = Lora(1, 1.0, ("q_proj", "up_proj"))


def bytes_of(folder: Path, tensors: dict[str, StoredTensor]) -> dict[str, tuple[str, bytes]]:
    return {
        name: (stored.dtype, (folder / stored.file).read_bytes()[stored.start : stored.stop])
        for name, stored in tensors.items()
    }


def test_a_dtype_is_named_wherever_there_is_one():
    config = {"torch_dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "hidden_size": 8}}
    written = with_dtype(config, "float32")
    assert written == {"torch_dtype": "float32", "text_config": {"torch_dtype": "float32", "hidden_size": 8}}
    # transformers takes the first.
    both = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert with_dtype(both, "float32") == {"dtype": "float32", "torch_dtype": "float32"}
    assert with_dtype({}, "float32") == {"dtype": "float32"}


def test_half_a_checkpoint_is_one_line(folder):
    file = folder / "model.safetensors"
    tensors, tower = load_file(file), tower_tensors(folder)
    wanted = {source.name: source.shape for source in all_sources(Architecture.from_folder(folder))}

    def line_of(kept: dict[str, torch.Tensor]) -> str:
        save_file(kept, file)
        (line,) = weight_problems(folder, wanted, family="x", tied=False)
        return line

    assert "has a text_config and no tensor of a vision tower" in line_of(
        {name: tensor for name, tensor in tensors.items() if name not in tower}
    )
    assert f"lacks {len(wanted)} tensors of this x model: " in line_of({name: tensors[name] for name in tower})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"text_config": [1]}, "text_config must be an object, found [1]"),
        ({"text_config": {"model_type": "gemma3n_text"}}, "'gemma3n_text' is not supported; nearest: gemma3_text;"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "nearest: Gemma3ForConditionalGeneration; supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ({"architectures": ["LlamaForCausalLM"]}, "goes with architecture "),
    ],
)
def test_what_is_no_text_model_here_is_refused_with_the_nearest(folder, changes, line):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        Architecture.from_folder(folder)
    assert str(error.value).startswith(f"{folder / 'config.json'}: ") and "\n" not in str(error.value)
