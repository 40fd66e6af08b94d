"""Sizes of public models by name, so that a plan needs no folder. Imports no torch.

Each row is what the config.json of https://huggingface.co/<name> says (fields num_hidden_layers, hidden_size,
num_attention_heads, num_key_value_heads, head_dim, intermediate_size, vocab_size, tie_word_embeddings,
max_position_embeddings; of experts num_experts, num_experts_per_tok, moe_intermediate_size, norm_topk_prob); tests hold
the number of parameters to the one that the Hub shows for the weights.
Elsewhere: a model that lies in a folder (architecture.py).
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import (
    DEEPSEEK_V3,
    GEMMA3,
    GEMMA4,
    GLM4_MOE_LITE,
    GPT_OSS,
    HY_V3,
    LLAMA,
    MINIMAX_M2,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    SEED_OSS,
    SMOLLM3,
)
from hacpo_mega.models.families.family import Family


def _qwen3(size: str, *, base: bool = True, of_july: bool = False) -> dict[str, int]:
    """The folders of a size and the positions of each, with its base model and the one that follows instructions, of
    July 2025, if there are."""
    names = {f"Qwen/Qwen3-{size}": 40960}
    names |= {f"Qwen/Qwen3-{size}-Base": 32768} if base else {}
    return names | ({f"Qwen/Qwen3-{size}-Instruct-2507": 262144} if of_july else {})


def _qwen2(size: str) -> dict[str, int]:
    return {f"Qwen/Qwen2.5-{size}": 131072, f"Qwen/Qwen2.5-{size}-Instruct": 32768}


def _llama(size: str) -> dict[str, int]:
    return {f"meta-llama/Llama-{size}{kind}": 131072 for kind in ("", "-Instruct")}


def _text(names: Iterable[str], family: Family, *sizes: int, **more: Any) -> dict[str, dict[str, Any]]:
    """A text model, by the names of its folders: fields of their config.json or, of image checkpoints, its text_config.

    `names` may have positions of each. `sizes` are layers, width, width of the feed-forward, heads and key/value heads.
    """
    counts = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    named = {"architectures": [family.image_class or family.architecture], "model_type": family.model_type}
    fields = {**named, **dict(zip(counts, sizes, strict=True)), **more}
    if not isinstance(names, Mapping):
        return dict.fromkeys(names, fields)
    return {name: {**fields, "max_position_embeddings": positions} for name, positions in names.items()}


def _gemma3(size: str) -> list[str]:
    return [f"google/gemma-3-{size}-{kind}" for kind in ("pt", "it")]


def _qwen35(size: str) -> list[str]:
    return [f"Qwen/Qwen3.5-{size}{kind}" for kind in ("", "-Base")]


def _ministral3(size: str) -> list[str]:
    return [f"mistralai/Ministral-3-{size}-{kind}" for kind in ("Base-2512", "Instruct-2512-BF16", "Reasoning-2512")]


_QWEN3 = {"vocab_size": 151936, "rope_theta": 1e6}
_QWEN3_MOE = {**_QWEN3, "head_dim": 128, "norm_topk_prob": True}
_MIXTRAL = {f"mistralai/Mixtral-8x7B{kind}-v0.1": 32768 for kind in ("", "-Instruct")}
_QWEN2 = {"vocab_size": 152064, "rope_theta": 1e6}
_LLAMA31_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}  # fmt: skip
_LLAMA31 = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": _LLAMA31_ROPE}
_LLAMA32 = {**_LLAMA31, "rope_scaling": {**_LLAMA31_ROPE, "factor": 32.0}, "tie_word_embeddings": True}
# In the place of every sixth layer's heads, the size of all of which the family has, there are fewer and larger ones.
_GEMMA4 = {"vocab_size": 262144, "max_position_embeddings": 262144, "sliding_window": 1024, "attention_k_eq_v": True,
           "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}  # fmt: skip
_GEMMA4_NAMES = [f"google/gemma-4-31B{kind}" for kind in ("", "-it")]
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_GEMMA4_MOE_NAMES = [f"google/gemma-4-26B-A4B{kind}" for kind in ("", "-it")]
_LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
_WIDE = {"head_dim": 128, "query_pre_attn_scalar": 168}
_TEKKEN = {"vocab_size": 131072, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}
_LONG = {**_TEKKEN, "max_position_embeddings": 262144}
_SMALL = {**_TEKKEN, "max_position_embeddings": 131072, "rope_theta": 1e9}
_DELTA = {"linear_num_value_heads": 48, "vocab_size": 248320, "max_position_embeddings": 262144, "rope_theta": 1e7}
_DELTA_NAMES = [f"Qwen/Qwen3.{generation}-27B" for generation in (5, 6, 8)]
_DELTA_MOE = {**_DELTA, "linear_num_value_heads": 32}  # and of the 9B
_DELTA_4B = {**_DELTA_MOE, "tie_word_embeddings": True}
_DELTA_SMALL = {**_DELTA_4B, "linear_num_value_heads": 16}
_DELTA_MOE_NAMES = [f"Qwen/Qwen3.{generation}-35B-A3B" for generation in (5, 6)]
_NEXT = {"max_position_embeddings": 262144, "rope_theta": 1e7}
_NEXT_NAMES = [f"Qwen/Qwen3-Next-80B-A3B-{kind}" for kind in ("Instruct", "Thinking")]
_SEED_OSS_NAMES = [f"ByteDance-Seed/Seed-OSS-36B-{kind}" for kind in ("Base", "Base-woSyn", "Instruct")]
_SEED_OSS = {"vocab_size": 155136, "max_position_embeddings": 524288, "rope_theta": 1e7}
_SMOLLM3 = {"vocab_size": 128256, "max_position_embeddings": 65536, "rope_theta": 5e6}
_SMALL_NAMES = [f"mistralai/Mistral-Small-3.{kind}" for kind in
                ("1-24B-Base-2503", "1-24B-Instruct-2503", "2-24B-Instruct-2506")]  # fmt: skip
# Published in fp8.
_DEEPSEEK_NAMES = [f"deepseek-ai/DeepSeek-{kind}" for kind in ("V3", "V3-Base", "V3-0324", "R1", "R1-0528")]
_YARN_40 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
_DEEPSEEK = {"max_position_embeddings": 163840, "rope_scaling": _YARN_40}
_MOONLIGHT_NAMES = [f"moonshotai/Moonlight-16B-A3B{kind}" for kind in ("", "-Instruct")]
_MOONLIGHT = {
    "q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
    "vocab_size": 163840, "max_position_embeddings": 8192, "rope_theta": 50000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
_MODELS = {
    **_text(_qwen3("1.7B"), QWEN3, 28, 2048, 6144, 16, 8, **_QWEN3, tie_word_embeddings=True),
    **_text(_qwen3("4B", of_july=True), QWEN3, 36, 2560, 9728, 32, 8, **_QWEN3, tie_word_embeddings=True),
    **_text(_qwen3("8B"), QWEN3, 36, 4096, 12288, 32, 8, **_QWEN3),
    **_text(_qwen3("14B"), QWEN3, 40, 5120, 17408, 40, 8, **_QWEN3),
    **_text(_qwen3("32B", base=False), QWEN3, 64, 5120, 25600, 64, 8, **_QWEN3),
    **_text(_qwen3("30B-A3B", of_july=True), QWEN3_MOE, 48, 2048, 6144, 32, 4, **_QWEN3_MOE),
    **_text(_qwen3("235B-A22B", base=False, of_july=True), QWEN3_MOE, 94, 4096, 12288, 64, 4, **_QWEN3_MOE,
            moe_intermediate_size=1536),
    **_text(_MIXTRAL, MIXTRAL, 32, 4096, 14336, 32, 8, vocab_size=32000),
    **_text(_qwen2("7B"), QWEN2, 28, 3584, 18944, 28, 4, **_QWEN2),
    **_text(_qwen2("32B"), QWEN2, 64, 5120, 27648, 40, 8, **_QWEN2),
    **_text(_qwen2("72B"), QWEN2, 80, 8192, 29568, 64, 8, **_QWEN2),
    **_text(_llama("3.2-1B"), LLAMA, 16, 2048, 8192, 32, 8, **_LLAMA32),
    **_text(_llama("3.2-3B"), LLAMA, 28, 3072, 8192, 24, 8, **_LLAMA32),
    **_text(_llama("3.1-8B"), LLAMA, 32, 4096, 14336, 32, 8, **_LLAMA31),
    **_text(_llama("3.1-70B"), LLAMA, 80, 8192, 28672, 64, 8, **_LLAMA31),
    **_text(_gemma3("4b"), GEMMA3, 34, 2560, 10240, 8, 4, **_LINEAR),
    **_text(_gemma3("12b"), GEMMA3, 48, 3840, 15360, 16, 8, **_LINEAR),
    **_text(_gemma3("27b"), GEMMA3, 62, 5376, 21504, 32, 16, **_LINEAR, **_WIDE),
    **_text(_GEMMA4_NAMES, GEMMA4, 60, 5376, 21504, 32, 16, num_global_key_value_heads=4, **_GEMMA4),
    **_text(_GEMMA4_MOE_NAMES, GEMMA4, 30, 2816, 2112, 16, 8, num_global_key_value_heads=2, **_GEMMA4, **_GEMMA4_MOE),
    **_text(_ministral3("3B"), MINISTRAL3, 26, 3072, 9216, 32, 8, **_LONG, tie_word_embeddings=True),
    **_text(_ministral3("8B"), MINISTRAL3, 34, 4096, 14336, 32, 8, **_LONG),
    **_text(_ministral3("14B"), MINISTRAL3, 40, 5120, 16384, 32, 8, **_LONG),
    **_text(_DELTA_NAMES, QWEN3_5, 64, 5120, 17408, 24, 4, **_DELTA),
    **_text(_qwen35("9B"), QWEN3_5, 32, 4096, 12288, 16, 4, **_DELTA_MOE),
    **_text(_qwen35("4B"), QWEN3_5, 32, 2560, 9216, 16, 4, **_DELTA_4B),
    **_text(_qwen35("2B"), QWEN3_5, 24, 2048, 6144, 8, 2, **_DELTA_SMALL),
    **_text(_qwen35("0.8B"), QWEN3_5, 24, 1024, 3584, 8, 2, **_DELTA_SMALL),
    **_text(_DELTA_MOE_NAMES, QWEN3_5_MOE, 40, 2048, 512, 16, 2, **_DELTA_MOE),
    **_text(_NEXT_NAMES, QWEN3_NEXT, 48, 2048, 5120, 16, 2, **_NEXT),
    **_text(["Qwen/Qwen3-Coder-Next"], QWEN3_NEXT, 48, 2048, 5120, 16, 2, **_NEXT | {"rope_theta": 5e6}),
    **_text(_SMALL_NAMES, MISTRAL, 40, 5120, 32768, 32, 8, **_SMALL),
    **_text(["HuggingFaceTB/SmolLM3-3B"], SMOLLM3, 36, 2048, 11008, 16, 4, **_SMOLLM3),
    **_text(_SEED_OSS_NAMES, SEED_OSS, 64, 5120, 27648, 80, 8, **_SEED_OSS),
    **_text(["openai/gpt-oss-20b"], GPT_OSS, 24, 2880, 2880, 64, 8, num_local_experts=32),
    **_text(["openai/gpt-oss-120b"], GPT_OSS, 36, 2880, 2880, 64, 8, num_local_experts=128),
    **_text(["MiniMaxAI/MiniMax-M2"], MINIMAX_M2, 62, 3072, 1536, 48, 8, rotary_dim=64),
    **_text(_DEEPSEEK_NAMES, DEEPSEEK_V3, 61, 7168, 18432, 128, 128, **_DEEPSEEK),
    **_text(_MOONLIGHT_NAMES, DEEPSEEK_V3, 27, 2048, 11264, 16, 16, **_MOONLIGHT),
    **_text(["zai-org/GLM-4.7-Flash"], GLM4_MOE_LITE, 47, 2048, 10240, 20, 20, rope_theta=1e6),
    **_text(["tencent/Hy3-preview"], HY_V3, 80, 4096, 13312, 64, 8, max_position_embeddings=262144),
}  # fmt: skip
PUBLIC_NAMES = tuple(_MODELS)


def public_architecture(name: str) -> Architecture:
    """The model of a Hub name, or of a path that ends in its last part, such as models/Qwen3-8B.

    ValueError, with the nearest names, for one that is not in the table.
    """
    found = [known for known in PUBLIC_NAMES if name in (known, _last(known)) or _last(name) == _last(known)]
    if not found:
        by_last = {_last(known).lower(): known for known in PUBLIC_NAMES}
        near = difflib.get_close_matches(_last(name).lower(), by_last, n=3, cutoff=0.0)
        raise ValueError(
            f"{name} is no folder with a config.json and none of the {len(PUBLIC_NAMES)} public models that are known "
            f"by name. Nearest: {', '.join(by_last[last] for last in near)}"
        )
    return Architecture.from_config(Path(found[0]), _MODELS[found[0]])


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
