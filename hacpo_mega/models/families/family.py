"""A family of models: the fields that a config.json may have, and what the family decides by itself.

An unknown field is refused, since it may ask for another computation (Mistral's `sliding_window`). Elsewhere: the
families (families.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hacpo_mega.models.families.experts import Experts

# Fields that Architecture.from_folder, folder.py and the tokenizer's readers read.
READ = frozenset(
    {"architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps"}
    | {"tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "dtype", "torch_dtype"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
# Fields that describe a folder, its making or its sampling, and change no log-prob.
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
    | {"is_llama_config", "transformers.js_config"}
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
# The fields about gated delta nets -> their sizes (delta_net.py), and that of the distance of layers with attention.
DELTA_FIELDS = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "width",
}
DELTA_INTERVAL = "full_attention_interval"
# The fields about latents of attention (latent.py).
LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
# The fields about key/value heads of layers without a window (heads.py).
FULL_HEADS = frozenset({"attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "per_layer_config"})
# Layers that may have a sliding window -> the fields of config.json about it.
WINDOWS = {"none": frozenset(), "all": frozenset({"sliding_window"}), "pattern": frozenset({"sliding_window"}),
           "some": frozenset({"sliding_window", "sliding_window_pattern"})}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of decoders with rotary positions, RMSNorm and a gated feed-forward, or experts that are such.

    models          published models of the family, for users
    model_type      its name in config.json and in Megatron's model builder
    architecture    the class that transformers and vLLM run
    qkv_bias        whether queries, keys and values have a bias, whatever config.json says
    may_have_bias   whether `attention_bias` may be true
    output_bias     whether `attention_bias` means a bias on the output projection, too
    qk_norm         whether queries and keys are normalised; None: `use_qk_norm` decides
    whole_qk_norm   whether that norm is over all heads together, before they are split
    interleaved     whether rotary pairs are interleaved (GPT-J style), not half-split (NeoX style)
    windows         layers that may have a sliding window: none, all, some, or those of a pattern (windows.py)
    two_ropes       whether layers with a window have rotary angles of their own
    offset_norms    whether its folders hold norms' scales minus 1
    sinks           whether query heads have attention sinks: a number each that joins the scores and has no value
    full_heads      whether layers without a window may have key/value heads of their own (heads.py)
    value_norm      whether values are normalised, without a scale
    scaled_layers   whether each layer's output has a factor, which is not trained
    softcap         whether `final_logit_softcapping` may be given: logits z are then c tanh(z / c)
    activation      of the feed-forward's gate, by transformers' name or vLLM's
    scaled_embedding    whether the embedding is multiplied with the root of the hidden size
    query_scalar    whether `query_pre_attn_scalar` replaces the head size in the scale of scores; a number: this one
                    does, whatever config.json says
    experts         experts in place of its feed-forwards; None: feed-forwards
    norms           the norms of a layer: Megatron's name -> that of its folders
    stored_fused    matrices that its folders hold as one, of qkv_proj and gate_up_proj
    rope_ignores    fields of its rope table that say where images lie, and change nothing in text
    rope_lacks      fields of its rope table that vLLM's class ignores
    rope_kinds      the kinds of rotary scaling that it may have (rope.py)
    rotary_share    share of a head's dimensions with rotary positions, where config.json has none
    may_rotate_a_part   whether config.json may have another share
    reads_rotary_dim    whether it may have it as `rotary_dim`, a number of dimensions
    image_class     the class of its image checkpoints, whose `text_config` is a model of this family
    packs           quantization of its folders' matrices, read as bfloat16: experts in MXFP4, all of a layer in fp8
    skips_rope      whether `no_rope_layers` may name layers without rotary positions
    gated_attention whether queries come with a gate on attention's output
    delta_net       how it stores the projections of gated delta nets (delta_net.py): in matrices apart, or fused by key
                    heads; None: it has no delta nets
    latent          whether it has latent attention (latent.py)
    scales_queries  whether queries grow with their position, by `llama_4_scaling_beta` of its rope table (rope.py)
    defaults        values of fields that a config.json leaves out; head_dim is otherwise the hidden size over heads,
                    num_key_value_heads as many as heads
    ignores         fields of the family that change nothing, given what `only` fixes
    only            fields of the family, with the one value that is supported
    why             reasons why an `only` field cannot have another value; no entry: the model would compute something
                    else
    new_config_fields   fields that a new config.json needs, since transformers' defaults mean another model
    vllm_fields     fields that vLLM's class needs and folders may leave out -> attributes of Architecture; vLLM gets
                    those of `only`, too
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
    full_heads: bool = False
    value_norm: bool = False
    scaled_layers: bool = False
    softcap: bool = False
    activation: str = "silu"
    scaled_embedding: bool = False
    query_scalar: bool | int = False
    experts: Experts | None = None
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    stored_fused: frozenset[str] = frozenset()
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_ignores: frozenset[str] = frozenset()
    rope_lacks: frozenset[str] = frozenset()
    rotary_share: float = 1.0
    may_rotate_a_part: bool = False
    reads_rotary_dim: bool = False
    image_class: str | None = None
    packs: Literal["mxfp4", "fp8"] | None = None
    skips_rope: bool = False
    gated_attention: bool = False
    delta_net: Literal["apart", "by heads"] | None = None
    latent: bool = False
    scales_queries: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    only: Mapping[str, Any] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    new_config_fields: Mapping[str, Any] = field(default_factory=dict)
    vllm_fields: Mapping[str, str] = field(default_factory=dict)
    engine_cuts_norms: bool = False

    @property
    def values(self) -> Mapping[str, Any]:
        """Fields that a config.json may have with one value alone."""
        free = {"partial_rotary_factor": self.may_rotate_a_part, **dict.fromkeys(self.ignores, True)}
        free["quantization_config"] = self.packs is not None
        free["attention_bias"] = self.may_have_bias and "attention_bias" not in self.only
        return {name: value for name, value in {**ONLY, **self.only}.items() if not free.get(name)}

    @property
    def fits_te(self) -> bool:
        """True if it has TransformerEngine's layout: a plain norm before each block, fused with the next layer."""
        differs = self.whole_qk_norm or self.offset_norms or self.two_ropes or self.gated_attention
        differs = differs or self.skips_rope or self.sinks or self.latent or self.full_heads
        return self.norms == BEFORE and not differs

    def knows(self, name: str) -> bool:
        """True if a config.json of the family may have this field."""
        optional = {"query_pre_attn_scalar"} if self.query_scalar is True else set()
        optional |= FULL_HEADS if self.full_heads else set()
        optional |= {"final_logit_softcapping"} if self.softcap else set()
        optional |= {"use_qk_norm"} if self.qk_norm is None else set()
        optional |= {"rotary_dim"} if self.reads_rotary_dim else set()
        optional |= {"no_rope_layers", "no_rope_layer_interval"} if self.skips_rope else set()
        optional |= {*DELTA_FIELDS, DELTA_INTERVAL} if self.delta_net is not None else set()
        optional |= {*LATENT_FIELDS} if self.latent else set()
        experts = self.experts.fields if self.experts is not None else frozenset()
        known = READ | DESCRIBES | self.ignores | WINDOWS[self.windows] | optional | experts
        return name in known or name in ONLY or name in self.only
