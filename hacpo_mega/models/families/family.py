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
# The fields about gated delta nets -> their sizes (delta_net.py); how far apart layers with attention are.
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
# Layers that may see a window alone -> the fields that say so.
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
    full_heads      whether layers without a window may have key/value heads of their own (heads.py)
    value_norm      whether values are normalised, without a scale
    scaled_layers   whether a layer's output is multiplied with a number of its own, which is not trained
    softcap         whether `final_logit_softcapping` may be given: logits z are then c tanh(z / c)
    activation      of the feed-forward's gate, by transformers' name or vLLM's
    scaled_embedding    whether the embedding is multiplied with the root of the hidden size
    query_scalar    whether `query_pre_attn_scalar` is in the place of the head size where scores are scaled; a number:
                    this one is, whatever config.json says
    experts         what it has in the place of its feed-forwards; None: feed-forwards
    norms           the norms of a layer: Megatron's name -> that of its folders
    stored_fused    matrices that its folders hold as one, of qkv_proj and gate_up_proj
    rope_ignores    fields of its rope table that say where images lie, and change nothing in text
    rope_lacks      fields of its rope table that vLLM's class passes over
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
    latent          whether queries, keys and values come out of latents (latent.py)
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
    may_turn_a_part: bool = False
    counts_turning: bool = False
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
        lacks = lacks or self.skips_rope or self.sinks or self.latent or self.full_heads
        return self.norms == BEFORE and not lacks

    def knows(self, name: str) -> bool:
        """True if a config.json of the family may have this field."""
        scalar = {"query_pre_attn_scalar"} if self.query_scalar is True else set()
        scalar |= FULL_HEADS if self.full_heads else set()
        scalar |= {"final_logit_softcapping"} if self.softcap else set()
        scalar |= {"use_qk_norm"} if self.qk_norm is None else set()
        scalar |= {"rotary_dim"} if self.counts_turning else set()
        scalar |= {"no_rope_layers", "no_rope_layer_interval"} if self.skips_rope else set()
        scalar |= {*DELTA_FIELDS, DELTA_INTERVAL} if self.delta_net is not None else set()
        scalar |= {*LATENT_FIELDS} if self.latent else set()
        experts = self.experts.fields if self.experts is not None else frozenset()
        own = READ | DESCRIBES | self.ignores | WINDOWS[self.windows] | scalar | experts
        return name in own or name in ONLY or name in self.only
