"""Rotary angles of every kind are transformers' and vLLM's, positions beyond the original ones among them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import LLAMA3_ROPE
from transformers import AutoConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from hacpo_mega.megatron.model.model import transformer_config
from hacpo_mega.megatron.model.rope import cosines_and_sines, rope_frequencies, rope_magnitude
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout

# Three of the kinds are in jobs/test_megatron_layout.py, too, and a refusal in unit/models/test_model_folders.py.
pytestmark = pytest.mark.nightly

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "default": ("qwen3", {"rope_type": "default"}),
    "linear": ("llama", {"rope_type": "linear", "factor": 2.5}),
    "llama3": ("llama", LLAMA3_ROPE),
    "yarn": ("qwen2", YARN),
    "yarn-of-deepseek": ("mistral", {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8.0, "beta_slow": 2.0}),
    "yarn-half-scaled": ("qwen3", {**YARN, "mscale": 1.2}),  # of which neither library takes notice
    "yarn-of-llama.cpp": ("qwen3", {**YARN, "attn_factor": 0.878}),  # nor of this
    "yarn-below-one": ("llama", {**YARN, "attention_factor": 0.85, "truncate": False}),
    "half-a-head": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.75}),
}
# A folder says the same in two ways: as transformers 5 writes it, and as older ones do.
OLD_WAY = [False, True]
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
MAX_POSITIONS, HEAD_DIM = 256, 64


def config_json(family: str, rope: dict, old_way: bool = False) -> dict:
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "phi3": "Phi3"}[family]
    config = {"architectures": [f"{architecture}ForCausalLM"], "model_type": family, **SIZES, "intermediate_size": 96}
    config |= {"vocab_size": 131, "max_position_embeddings": MAX_POSITIONS, "head_dim": HEAD_DIM}
    config |= {"sliding_window": None}
    if old_way:
        rope = dict(rope)
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        scaling = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
        return config | {"rope_theta": 5e3, "rope_scaling": scaling if scaling["type"] != "default" else None}
    return config | {"rope_parameters": {**rope, "rope_theta": 5e3}}


def read(folder: Path, config: dict) -> Architecture:
    config = {name: value for name, value in config.items() if config["model_type"] != "llama" or value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return Architecture.from_folder(folder)


def turns(architecture: Architecture) -> torch.Tensor:
    """[positions, rotary_dim], a pair's cosines and then its sines, as attention multiplies with them."""
    config = transformer_config(architecture, Layout(), dtype=torch.float32, overrides={})
    positions, frequencies = torch.arange(architecture.max_positions).float(), rope_frequencies(architecture)
    both = cosines_and_sines(positions, frequencies, rope_magnitude(architecture), config)
    return torch.cat([half[:, : len(frequencies)] for half in both.chunk(2, dim=-1)], dim=-1)


@pytest.mark.parametrize("old_way", OLD_WAY)
@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_those_of_transformers_and_of_vllm(tmp_path, kind, old_way):
    family, rope = KINDS[kind]
    config = config_json(family, rope, old_way)
    ours = turns(read(tmp_path, config))
    theirs = AutoConfig.for_model(**{name: value for name, value in config.items() if name != "architectures"})

    rotary = Phi3RotaryEmbedding  # as every family's, and it knows a part of a head
    theirs.rope_parameters = dict(theirs.rope_parameters)
    cosine, sine = rotary(theirs)(torch.zeros(1), torch.arange(MAX_POSITIONS)[None])
    half = cosine.shape[-1] // 2
    torch.testing.assert_close(ours, torch.cat((cosine[0, :, :half], sine[0, :, :half]), dim=-1), atol=2e-5, rtol=0)

    with set_current_vllm_config(VllmConfig()):
        engine = get_rope(HEAD_DIM, MAX_POSITIONS, rope_parameters=theirs.rope_parameters, dtype=torch.float32)
    torch.testing.assert_close(ours, engine.cos_sin_cache[:MAX_POSITIONS], atol=2e-5, rtol=0)


def test_magnitudes_are_not_one_by_chance(tmp_path):
    found = {kind: read(tmp_path, config_json(family, rope)) for kind, (family, rope) in KINDS.items()}
    assert [kind for kind in found if rope_magnitude(found[kind]) != 1.0] == [kind for kind in KINDS if "yarn" in kind]
    factors = {found[kind].rope.attention_factor for kind in KINDS if "yarn" in kind}
    assert len(factors) == 3 and 1.0 not in factors


REFUSED = [
    ("llama", {"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported with llama"),
    ("qwen3", {"rope_type": "longrope"}, "rope type 'longrope' is not supported with qwen3"),
    ("phi3", {"rope_type": "yarn"}, "rope type 'yarn' is not supported with phi3; supported are default"),
    ("qwen2", {"rope_type": "ntk-by-parts"}, "rope type 'ntk-by-parts' is not supported with qwen2"),
    ("llama", {"rope_type": "linear", "factor": 2}, "factor of rope type 'linear' must have a decimal point"),
    ("llama", {"rope_type": "linear", "factor": 0.5}, "factor must be at least 1, found 0.5"),
    ("qwen3", {"rope_type": "yarn", "factor": 4.0}, "the field 'original_max_position_embeddings' is missing"),
    ("qwen3", {**YARN, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta = 0.1 is no field of rope type 'yarn'"),
    ("qwen2", {"rope_type": "default", "mrope_section": [4, 4]}, "mrope_section = [4, 4] is no field of rope type"),
    ("qwen3", {**YARN, "factor": 2.0}, "max_position_embeddings (256) is beyond the 128 positions"),
    ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.33}, "partial_rotary_factor 0.33 turns 21 of the 64"),
    ("mistral", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
]


@pytest.mark.parametrize("family, rope, problem", REFUSED, ids=[problem for *_, problem in REFUSED])
def test_what_the_two_libraries_do_not_share_is_refused_by_name(tmp_path, family, rope, problem):
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/config.json: {re.escape(problem)}"):
        read(tmp_path, config_json(family, rope))


def test_a_head_size_that_is_not_the_hidden_size_over_heads_is_read(tmp_path):
    """As in Mistral Nemo and Small."""
    config = config_json("mistral", {"rope_type": "default"}) | {"head_dim": 32}
    assert read(tmp_path, config).rotary_dim == 32
    assert replace(read(tmp_path, config), rotary_share=0.5).rotary_dim == 16
