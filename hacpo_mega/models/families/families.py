"""The families of models that can be trained: one record each, and nothing about a family anywhere else.

A record lists the fields that a config.json of the family may have, and what the family decides by itself. An unknown
field is refused, since it may ask for another computation (Mistral's `sliding_window`). Sources: the configuration
classes of transformers, whose defaults tests/unit/models/test_families.py compares, and vllm/model_executor/models. Not
here: public sizes (public.py), names of tensors (segments.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hacpo_mega.models.families.experts import Experts
from hacpo_mega.models.files.folder import PREDICTS, read_config
from hacpo_mega.models.files.weight_files import CORRECTION, EXPERT_BIAS

# What Architecture.from_folder, folder.py and the tokenizer's readers read.
READ = frozenset(
    {"architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps"}
    | {"tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "dtype", "torch_dtype"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
# What describes a folder, its making or its sampling, and changes no log-prob.
DESCRIBES = frozenset(
    {"_name_or_path", "_attn_implementation_autoset", "auto_map", "initializer_range", "transformers_version"}
    | {"use_cache", "pretraining_tp", "id2label", "label2id", "problem_type", "task_specific_params", "tokenizer_class"}
    | {"finetuning_task", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states"}
    | {"output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss", "prefix", "sep_token_id", "max_length"}
    | {"min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"}
    | {"top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"}
    | {"encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "chunk_size_feed_forward"}
    | {"forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"}
    | {"suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id", "unsloth_fixed", "unsloth_version"}
)
# Fields that every family may have with this value alone: with another the model computes something else.
ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}

# Norms of a layer, Megatron's names -> those of a folder: before attention and feed-forward; after both; all four.
# A norm behind a block is part of the sum with the residual (megatron/model/layers.py, AddNormed).
BEFORE = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
AFTER = {"self_attn_bda.norm": "post_attention_layernorm", "mlp_bda.norm": "post_feedforward_layernorm"}
AROUND = {
    **BEFORE,
    "self_attn_bda.norm": "post_self_attn_layernorm",
    "mlp_bda.norm": "post_mlp_layernorm",
}
SANDWICH = {
    **AFTER,
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
}
# The fields about gated delta nets -> their sizes (delta_net.py); how far apart layers with attention are.
DELTA_FIELDS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "width",
}
DELTA_INTERVAL = "full_attention_interval"
# Which layers may see a window alone -> the fields that say so.
WINDOWS = {"none": frozenset(), "all": frozenset({"sliding_window"}), "pattern": frozenset({"sliding_window"}),
           "some": frozenset({"sliding_window", "sliding_window_pattern"})}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of decoders with rotary positions, RMSNorm and a gated feed-forward, or experts that are such.

    models          what is published of it, for people
    model_type      as config.json and Megatron's model builder know it
    architecture    the class that transformers and vLLM run
    qkv_bias        whether queries, keys and values have a bias, whatever config.json says
    may_have_bias   whether `attention_bias` may be true
    output_bias     whether it then stands for a bias on the output projection, too
    qk_norm         whether queries and keys are normalised; None: `use_qk_norm` says it
    whole_qk_norm   whether that is over all heads together, before they are split
    interleaved     whether neighbours turn together, not the halves of what turns
    windows         which layers may see a window alone: none, all, some, or those of the family's pattern (windows.py)
    two_ropes       whether layers with a window have angles of their own
    offset_norms    whether its folders hold what a norm's scale is beyond 1
    sinks           whether each query head has a number that joins its scores and has no value
    activation      of the feed-forward's gate, by transformers' name or vLLM's
    scaled_embedding    whether the embedding is multiplied with the root of the hidden size
    query_scalar    whether `query_pre_attn_scalar` is in the place of the head size where scores are scaled
    experts         what it has in the place of its feed-forwards; None: feed-forwards
    norms           the norms of a layer: Megatron's name -> that of its folders
    stored_fused    matrices that its folders hold as one, of qkv_proj and gate_up_proj
    rope_ignores    fields of its rope table that say where images lie, and change nothing in text
    rope_kinds      the kinds of rotary scaling that it may have (rope.py)
    rotary_share    how much of a head turns with the position, where config.json does not say it
    may_turn_a_part whether config.json may say another share
    counts_turning  whether it may do so by `rotary_dim`, a number of a head's dimensions
    image_class     the class of its image checkpoints, whose `text_config` is a model of this family
    packs           how its folders may hold matrices that are read as bfloat16: experts in MXFP4, all of a layer in fp8
    skips_rope      whether `no_rope_layers` may name layers whose queries and keys do not turn
    gated_attention whether queries come with a gate on attention's output
    delta_net       how it stores the projections of gated delta nets (delta_net.py): queries, keys and values, gates
                    and the rest apart, or by heads of keys; None: it has no delta nets
    scales_queries  whether queries grow with their position, by `llama_4_scaling_beta` of its rope table (rope.py)
    defaults        values of fields that a config.json leaves out; head_dim is otherwise the hidden size over heads,
                    num_key_value_heads as many as heads
    ignores         fields of the family that change nothing, given what `only` fixes
    only            fields of the family, with the one value that is supported
    why             of an `only` field, what is wrong with another value; no entry: it computes something else
    made_with       what a new config.json has to say, where transformers' default is another model
    asked           fields that vLLM's class asks for and folders may leave out -> the Architecture's; it gets those of
                    `only`, too
    engine_cuts_norms   whether vLLM cuts norms over all heads by ranks
    """

    model_type: str
    architecture: str
    models: str
    qkv_bias: bool = False
    may_have_bias: bool = False
    output_bias: bool = True
    qk_norm: bool | None = False
    whole_qk_norm: bool = False
    interleaved: bool = False
    windows: Literal["none", "all", "some", "pattern"] = "none"
    two_ropes: bool = False
    offset_norms: bool = False
    sinks: bool = False
    activation: str = "silu"
    scaled_embedding: bool = False
    query_scalar: bool = False
    experts: Experts | None = None
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    stored_fused: frozenset[str] = frozenset()
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_ignores: frozenset[str] = frozenset()
    rotary_share: float = 1.0
    may_turn_a_part: bool = False
    counts_turning: bool = False
    image_class: str | None = None
    packs: Literal["mxfp4", "fp8"] | None = None
    skips_rope: bool = False
    gated_attention: bool = False
    delta_net: Literal["apart", "by heads"] | None = None
    scales_queries: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    only: Mapping[str, Any] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    engine_cuts_norms: bool = False

    @property
    def values(self) -> Mapping[str, Any]:
        """Fields that a config.json may have with one value alone."""
        free = {"attention_bias": self.may_have_bias, "partial_rotary_factor": self.may_turn_a_part}
        free |= {**dict.fromkeys(self.ignores, True), "quantization_config": self.packs is not None}
        free["attention_bias"] = self.may_have_bias and "attention_bias" not in self.only
        return {name: value for name, value in {**ONLY, **self.only}.items() if not free.get(name)}

    @property
    def fits_te(self) -> bool:
        """True if it has TransformerEngine's layout: a plain norm before each block, fused with the next layer."""
        lacks = self.whole_qk_norm or self.offset_norms or self.two_ropes or self.gated_attention
        lacks = lacks or self.skips_rope or self.sinks
        return self.norms == BEFORE and not lacks

    def knows(self, name: str) -> bool:
        """True if a config.json of the family may have this field."""
        scalar = {"query_pre_attn_scalar"} if self.query_scalar else set()
        scalar |= {"use_qk_norm"} if self.qk_norm is None else set()
        scalar |= {"rotary_dim"} if self.counts_turning else set()
        scalar |= {"no_rope_layers", "no_rope_layer_interval"} if self.skips_rope else set()
        scalar |= {*DELTA_FIELDS, DELTA_INTERVAL} if self.delta_net is not None else set()
        experts = self.experts.fields if self.experts is not None else frozenset()
        own = READ | DESCRIBES | self.ignores | WINDOWS[self.windows] | scalar | experts
        return name in own or name in ONLY or name in self.only


_WINDOW = {"use_sliding_window": False, "use_mrope": False}
_NO_WINDOW = frozenset({"sliding_window", "max_window_layers"})  # of a window that is not used

LLAMA = Family("llama", "LlamaForCausalLM", "Llama 2 and 3", may_have_bias=True)
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
# Its dropouts are of pre-training: an answer that is scored twice has one score.
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
    only={**_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ignores=_NO_WINDOW | _BALANCE,
)  # fmt: skip
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "Mixtral 8x7B, 8x22B",
    experts=Experts("block_sparse_moe", "w1", "w3", "w2", width="intermediate_size", may_normalise=False),
    defaults={"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    only={"sliding_window": None, "router_jitter_noise": 0.0},
    ignores=_BALANCE,
    why={"router_jitter_noise": "an answer that is scored twice would have two scores; only 0.0"},
)
# v0.1 has a window; v0.3, Nemo and Small say null, which is not the same as nothing.
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "Mistral 7B, Nemo, Small; text of Small 3.x",
    windows="all",
    image_class="Mistral3ForConditionalGeneration",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    made_with={"sliding_window": None},
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
    ignores=frozenset({"llama_4_scaling"}),  # the same for vLLM, which reads no other (Architecture.served_as)
)  # fmt: skip
# Others have longrope. transformers reads yarn as longrope.
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "Phi-3 at 4k, Phi-4",
    stored_fused=frozenset({"qkv_proj", "gate_up_proj"}),
    windows="all",
    rope_kinds=("default",),
    may_turn_a_part=True,
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
    may_turn_a_part=True,
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
)
# What vLLM's class decides by itself whatever config.json says is refused where it says something else.
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
    experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", width="intermediate_size", may_normalise=False, router="router",
        biased=True,
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
    only={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    ignores=_BALANCE | {"experts_per_token", "initial_context_length"},
    asked={"rope_parameters": "rope_table"},
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
    may_turn_a_part=True,
    defaults={
        "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "use_qk_norm": False, "rms_norm_eps": 1e-5,
    },
    ignores=frozenset(PREDICTS) | _BALANCE,
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
    may_turn_a_part=True,
    counts_turning=True,
    defaults={
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256,
        "num_experts_per_tok": 8, "intermediate_size": 1536, "vocab_size": 200064, "max_position_embeddings": 196608,
        "rope_theta": 5e6,
    },
    only={
        "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "sliding_window": None, "router_jitter_noise": 0.0,
    },
    ignores=_BALANCE | {"attn_type_list", "mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta", "use_mtp"}
    | {"mtp_transformer_layers", "num_mtp_modules"},
    why={"router_jitter_noise": MIXTRAL.why["router_jitter_noise"]},
    asked={"rotary_dim": "rotary_dim"},
)  # fmt: skip
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    "Hy3",
    qk_norm=True,
    experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", width="moe_intermediate_size", may_normalise=False,
        router="router.gate", correction=EXPERT_BIAS, shared="shared_mlp", dense_kinds=True,
        says={
            "routed_scale": "router_scaling_factor", "shared_ffn": "num_shared_experts",
            "dense_layers": "first_k_dense_replace",
        },
    ),
    defaults={
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "num_shared_experts": 1,
        "router_scaling_factor": 2.826, "first_k_dense_replace": 1, "vocab_size": 120832,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0,
    },
    only={"qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True},
    # In which type parts of it are added, by which kernel its experts are multiplied; the width of an expert again.
    ignores=_BALANCE | frozenset(PREDICTS) | {"expert_hidden_dim", "use_grouped_mm", "enable_moe_fp32_combine"}
    | {"enable_attention_fp32_softmax", "enable_lm_head_fp32"},
    asked={"first_k_dense_replace": "dense_layers", "expert_hidden_dim": "expert_ffn"},
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
    may_turn_a_part=True,
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
    says={"shared_ffn": "shared_expert_intermediate_size"},
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
    experts=_SHARED_EXPERT,
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
    why={"tie_word_embeddings": "vLLM gives it a head of its own, so it would sample from another model than the one "
         "that is trained"},
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (
        LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL3, PHI3, OLMO2, OLMO3, GLM4, GEMMA3, SMOLLM3, SEED_OSS, QWEN3_MOE,
        MIXTRAL, GLM4_MOE, GPT_OSS, MINIMAX_M2, HY_V3, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT,
    )
}  # fmt: skip


def is_tied(folder: Path) -> bool:
    """True if the head of a folder's model is its embedding, by config.json or its family's default."""
    config = read_config(folder)
    family = FAMILIES.get(str(config.get("model_type")))
    return bool(config.get("tie_word_embeddings", family is not None and family.defaults.get("tie_word_embeddings")))
