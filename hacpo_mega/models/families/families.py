"""The families of models that can be trained: one record each, and nothing about a family anywhere else.

Sources: the configuration classes of transformers, whose defaults tests/unit/models/test_families.py compares, and
vllm/model_executor/models. Elsewhere: what a record may say (family.py), public sizes (public.json), names of tensors
(segments.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hacpo_mega.models.families.experts import Experts
from hacpo_mega.models.families.family import AFTER, AROUND, SANDWICH, Family
from hacpo_mega.models.files.folder import PREDICTS, read_config
from hacpo_mega.models.files.weight_files import CORRECTION, EXPERT_BIAS

_WINDOW = {"use_sliding_window": False, "use_mrope": False}
_NO_WINDOW = frozenset({"sliding_window", "max_window_layers"})  # of a window that is not used
_UNTIED = {"tie_word_embeddings": False}
_OWN_HEAD = "vLLM gives it a head of its own, so it would sample from another model than the one that is trained"

LLAMA = Family("llama", "LlamaForCausalLM", "Llama 2 and 3", may_have_bias=True, only={"rope_interleaved": False})
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2, Qwen2.5",
    qkv_bias=True,
    defaults={"num_key_value_heads": 32},
    only=_WINDOW,
    ignores=_NO_WINDOW,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3",
    qk_norm=True,
    defaults={"head_dim": 128, "num_key_value_heads": 32},
    only=_WINDOW,
    ignores=_NO_WINDOW,
    why={
        "attention_bias": "vLLM leaves out the bias of its output projection, so it would sample from another model "
        "than the one that is trained"
    },
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3",
    may_have_bias=True,
    skips_rope=True,
    defaults={
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
        "tie_word_embeddings": True, "no_rope_layer_interval": 4,
    },
    only=_WINDOW,
    ignores=_NO_WINDOW,
)  # fmt: skip
# Its dropouts are of pre-training and stay off: an answer that is scored twice must have one score.
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    "Seed-OSS",
    may_have_bias=True,
    output_bias=False,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    only={"attention_out_bias": False},
    ignores=frozenset({"attention_dropout", "residual_dropout"}),
)
# The loss by which pre-training evened the load of experts, and whether a forward returns what it needs, are not used:
# a loss that answers do not earn would enter every update.
_BALANCE = frozenset({"router_aux_loss_coef", "output_router_logits"})
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, 235B-A22B",
    architecture="Qwen3MoeForCausalLM",
    experts=Experts("mlp", "gate_proj", "up_proj", "down_proj", width="moe_intermediate_size", may_normalise=True),
    defaults={
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    # Qwen3-Coder's config.json also names features that it lacks, and some that all have.
    only={
        **_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 0,
        "use_qk_norm": True, "qkv_bias": False,
    },
    ignores=_NO_WINDOW | _BALANCE,
)  # fmt: skip
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "Mixtral 8x7B, 8x22B",
    experts=Experts("block_sparse_moe", "w1", "w3", "w2", width="intermediate_size", may_normalise=False),
    defaults={
        "num_key_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    only={"sliding_window": None, "router_jitter_noise": 0.0},
    ignores=_BALANCE,
    why={"router_jitter_noise": "an answer that is scored twice would have two scores; only 0.0"},
)
# v0.1 has a window; v0.3, Nemo and Small have null. A config.json without the field has the default, 4096.
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "Mistral 7B, Nemo, Small; text of Small 3.x",
    windows="all",
    image_class="Mistral3ForConditionalGeneration",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    new_config_fields={"sliding_window": None},
)
MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    "text of Ministral 3",
    windows="all",
    image_class=MISTRAL.image_class,
    scales_queries=True,
    rope_kinds=("yarn",),
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    ignores=frozenset({"llama_4_scaling"}),  # the same for vLLM, which reads no other (Architecture.vllm_overrides)
)  # fmt: skip
# Other models of the family have longrope. transformers reads their yarn as longrope.
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "Phi-3 at 4k, Phi-4",
    stored_fused=frozenset({"qkv_proj", "gate_up_proj"}),
    windows="all",
    rope_kinds=("default",),
    may_rotate_a_part=True,
    defaults={"rms_norm_eps": 1e-5},
    ignores=frozenset({"original_max_position_embeddings"}),  # of longrope
    only={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "OLMo 2",
    qk_norm=True,
    whole_qk_norm=True,
    norms=AFTER,
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    models="OLMo 3",
    architecture="Olmo3ForCausalLM",
    windows="some",
    two_ropes=True,
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "window_theta": 5e5, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    only={"sliding_window_pattern": 4},
)  # fmt: skip
# The models of April 2025; GLM-4-9B of 2024 is another architecture.
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    "GLM-4-0414",
    may_have_bias=True,
    output_bias=False,
    norms=AROUND,
    stored_fused=frozenset({"gate_up_proj"}),
    interleaved=True,
    rotary_share=0.5,
    may_rotate_a_part=True,
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
)
# vLLM's class decides some fields by itself, whatever config.json says: a config.json with other values is refused.
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    "gpt-oss 20B, 120B",
    may_have_bias=True,
    windows="pattern",
    sinks=True,
    activation="swigluoai",
    packs="mxfp4",
    rope_kinds=("yarn",),
    rope_lacks=frozenset({"attention_factor", "mscale", "mscale_all_dim"}),
    experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", width="intermediate_size", may_normalise=False, router="router",
        biased=True, adapted=False,
    ),
    defaults={
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts": 128,
        "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "attention_bias": True, "rope_theta": 150000.0, "sliding_window": 128, "sliding_window_pattern": 2,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    only={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, **_UNTIED},
    ignores=_BALANCE | {"experts_per_token", "initial_context_length"},
    why={"tie_word_embeddings": _OWN_HEAD},
    vllm_fields={"rope_parameters": "rope_table"},
)  # fmt: skip
# Behind the last layer, its folders have layers that predict further tokens (weight_files.py).
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    "GLM-4.5, 4.5-Air, 4.6",
    may_have_bias=True,
    output_bias=False,
    qk_norm=None,
    experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", width="moe_intermediate_size", may_normalise=True,
        counts=("n_routed_experts",), correction=f"gate.{CORRECTION}", shared="shared_experts",
    ),
    rotary_share=0.5,
    may_rotate_a_part=True,
    defaults={
        "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "use_qk_norm": False, "rms_norm_eps": 1e-5,
    },
    ignores=frozenset(PREDICTS) | _BALANCE,
    only=_UNTIED,
    why={"tie_word_embeddings": _OWN_HEAD},
)  # fmt: skip
# Its fields of windows, shared experts and further prediction describe what it does not have.
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    "MiniMax-M2",
    qk_norm=True,
    whole_qk_norm=True,
    engine_cuts_norms=True,
    packs="fp8",
    experts=Experts(
        "block_sparse_moe", "w1", "w3", "w2", width="intermediate_size", may_normalise=False, correction=CORRECTION,
    ),
    may_rotate_a_part=True,
    reads_rotary_dim=True,
    defaults={
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256,
        "num_experts_per_tok": 8, "intermediate_size": 1536, "vocab_size": 200064, "max_position_embeddings": 196608,
        "rope_theta": 5e6,
    },
    only={
        "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "sliding_window": None, "router_jitter_noise": 0.0, **_UNTIED,
    },
    ignores=_BALANCE | {"attn_type_list", "mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta", "use_mtp"}
    | {"mtp_transformer_layers", "num_mtp_modules"},
    why={**MIXTRAL.why, "tie_word_embeddings": _OWN_HEAD},
    vllm_fields={"rotary_dim": "rotary_dim"},
)  # fmt: skip
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    "Hy3",
    qk_norm=True,
    experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", width="moe_intermediate_size", may_normalise=False,
        router="router.gate", correction=EXPERT_BIAS, shared="shared_mlp", dense_kinds=True,
        config_names={
            "routed_scale": "router_scaling_factor", "shared_ffn": "num_shared_experts",
            "dense_layers": "first_k_dense_replace",
        },
        adapted=False,
    ),
    defaults={
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "num_shared_experts": 1,
        "router_scaling_factor": 2.826, "first_k_dense_replace": 1, "vocab_size": 120832,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0,
    },
    only={"qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True},
    # Ignored: types of some sums, the kernel of the experts, and the width of an expert a second time.
    ignores=_BALANCE | frozenset(PREDICTS) | {"expert_hidden_dim", "use_grouped_mm", "enable_moe_fp32_combine"}
    | {"enable_attention_fp32_softmax", "enable_lm_head_fp32"},
    vllm_fields={"first_k_dense_replace": "dense_layers", "expert_hidden_dim": "expert_ffn"},
)  # fmt: skip
# The text models: 1B, and those of larger ones, which are image checkpoints.
_TANH = "gelu_pytorch_tanh"
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma 3 270M, 1B; text of 4B, 12B, 27B",
    qk_norm=True,
    offset_norms=True,
    norms=SANDWICH,
    windows="some",
    two_ropes=True,
    activation=_TANH,
    scaled_embedding=True,
    query_scalar=True,
    rope_kinds=("default", "linear"),
    image_class="Gemma3ForConditionalGeneration",
    defaults={
        "num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072,
        "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "rope_theta": 1e6, "window_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    ignores=frozenset({"rope_local_base_freq", "cache_implementation", "_sliding_window_pattern"}),
    only={
        "hidden_act": _TANH, "hidden_activation": _TANH, "final_logit_softcapping": None,
        "attn_logit_softcapping": None, "use_bidirectional_attention": False,
    },
)  # fmt: skip
_NO_PLE = (
    "Gemma 4 E2B and E4B have embeddings for every layer and layers that share keys, which are not built; 31B and "
    "26B-A4B are"
)
GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    "text of Gemma 4 31B, 26B-A4B",
    qk_norm=True,
    value_norm=True,
    scaled_layers=True,
    norms=SANDWICH,
    windows="some",
    two_ropes=True,
    full_heads=True,
    activation=_TANH,
    scaled_embedding=True,
    query_scalar=1,
    softcap=True,
    rope_kinds=("proportional",),
    experts=Experts(
        "", "gate_proj", "up_proj", "down_proj", width="moe_intermediate_size", may_normalise=False,
        counts=("num_experts",), per_token="top_k_experts", switch="enable_moe_block", router="router.proj",
        shared="mlp", config_names={"shared_ffn": "intermediate_size"}, beside=True, adapted=False,
    ),
    image_class="Gemma4ForConditionalGeneration",
    defaults={
        "num_attention_heads": 8, "vocab_size": 262144, "max_position_embeddings": 131072, "head_dim": 256,
        "num_key_value_heads": 4, "tie_word_embeddings": True, "global_head_dim": 512, "sliding_window": 512,
        "sliding_window_pattern": 6, "window_theta": 1e4,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    ignores=frozenset({"vocab_size_per_layer_input"}),
    only={
        "hidden_act": _TANH, "hidden_activation": _TANH, "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "sliding_window_pattern": 6,
    },
    why={"hidden_size_per_layer_input": _NO_PLE, "num_kv_shared_layers": _NO_PLE},
    new_config_fields={"hidden_size_per_layer_input": 0},
)  # fmt: skip
# From the second generation on these models have gated delta nets; their folders hold layers of multi-token prediction
# beside the model's own (weight_files.py). `mamba_ssm_dtype` is the engine's type of a state.
_DELTA = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "head_dim": 256,
}  # fmt: skip
_PREDICTION = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"})
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "text of Qwen3.5, 3.6, 3.8",
    qk_norm=True,
    offset_norms=True,
    gated_attention=True,
    delta_net="apart",
    rope_kinds=("default", "yarn"),
    rope_ignores=frozenset({"mrope_section", "mrope_interleaved"}),
    rotary_share=0.25,
    may_rotate_a_part=True,
    image_class="Qwen3_5ForConditionalGeneration",
    defaults={**_DELTA, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320,
              "max_position_embeddings": 32768},
    ignores=_PREDICTION | {"mamba_ssm_dtype"},
    only={"attn_output_gate": True, "output_gate_type": "swish"},
)  # fmt: skip
# A shared expert beside the others, of a width of its own, and a gate on it.
_SHARED_EXPERT = Experts(
    "mlp", "gate_proj", "up_proj", "down_proj", width="moe_intermediate_size", may_normalise=False,
    counts=("num_experts",), shared="shared_expert", shared_gate="shared_expert_gate",
    config_names={"shared_ffn": "shared_expert_intermediate_size"},
)  # fmt: skip
_MOE_SIZES = {
    **_DELTA, "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    models="text of Qwen3.5, 3.6 with experts",
    experts=replace(_SHARED_EXPERT, adapted=False),
    image_class="Qwen3_5MoeForConditionalGeneration",
    defaults={**_MOE_SIZES, "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8},
    ignores=QWEN3_5.ignores - {"mlp_only_layers"} | _BALANCE,
    only={**QWEN3_5.only, "mlp_only_layers": []},
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next, Qwen3-Coder-Next",
    delta_net="by heads",
    rope_ignores=frozenset(),
    experts=replace(_SHARED_EXPERT, may_normalise=True),
    image_class=None,
    defaults={**_MOE_SIZES, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10,
              "norm_topk_prob": True},
    ignores=_NO_WINDOW | _BALANCE,
    only={**_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    why={"tie_word_embeddings": _OWN_HEAD},
)  # fmt: skip

# With latents (latent.py). vLLM's class reads how experts are scored and chosen, and in which type, where transformers'
# has one way. It supports interleaved rotary pairs alone.
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3, R1; Moonlight",
    latent=True,
    interleaved=True,
    packs="fp8",
    rope_kinds=("default", "yarn"),
    experts=GLM4_MOE.experts,
    defaults={
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_attention_heads": 128, "vocab_size": 129280, "max_position_embeddings": 4096,
    },
    only={
        "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "moe_router_dtype": "float32", "tie_word_embeddings": False,
    },
    ignores=frozenset(PREDICTS) | _BALANCE | {"aux_loss_alpha", "seq_aux", "ep_size"},
    why={"tie_word_embeddings": _OWN_HEAD, "rope_interleave": "vLLM turns neighbours"},
    vllm_fields={"first_k_dense_replace": "dense_layers"},
)  # fmt: skip
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    packs=None,
    experts=replace(GLM4_MOE.experts, dense_kinds=True),
    defaults={
        **DEEPSEEK_V3.defaults, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "num_attention_heads": 20, "vocab_size": 154880,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (
        LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL3, PHI3, OLMO2, OLMO3, GLM4, GEMMA3, GEMMA4, SMOLLM3, SEED_OSS,
        QWEN3_MOE, MIXTRAL, GLM4_MOE, GPT_OSS, MINIMAX_M2, HY_V3, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, DEEPSEEK_V3,
        GLM4_MOE_LITE,
    )
}  # fmt: skip


def is_tied(folder: Path) -> bool:
    """True if the head of a folder's model is its embedding, by config.json or its family's default."""
    config = read_config(folder)
    family = FAMILIES.get(str(config.get("model_type")))
    return bool(config.get("tie_word_embeddings", family is not None and family.defaults.get("tie_word_embeddings")))
