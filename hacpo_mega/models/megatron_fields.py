"""The fields of Megatron's TransformerConfig that this project decides, each in one table.

The model builder fills a configuration from them (megatron/model.py) and `hacpo-mega check` refuses them in the
table `agents.megatron`: a second opinion there would split the truth. Imports no torch and no Megatron.
"""

from typing import Any

from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.layout import Layout

# Megatron's field -> ours
FROM_ARCHITECTURE = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "norm_eps",
    # By it Megatron adds up the gradients of norms that are copies on every tensor rank.
    "qk_layernorm": "copies_qk_norm",
    "add_qkv_bias": "qkv_bias",
    "rotary_interleaved": "interleaved",
    "softmax_scale": "softmax_scale",
}
FROM_LAYOUT = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp"}

# What every model of this project is: another value would compute something else than the folder says, or would ask for
# a part that is not built.
FIXED: dict[str, Any] = {
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "gated_linear_unit": True,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    # Whose activation a layer has is for its spec to say (megatron/gated.py), with both libraries' layers.
    "use_te_activation_func": True,
    "bias_activation_fusion": False,
    "activation_func_fp8_input_store": False,
    # Scores must not depend on a random stream.
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # PackedAttention is plain causal attention: it would ignore most of these, and the others change the model.
    "softmax_type": "vanilla",
    "window_size": None,
    "no_rope_freq": None,
    "apply_query_key_layer_scaling": False,
    "attention_output_gate": False,
    "qk_clip": False,
    "log_max_attention_logit": False,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    # These would read what this model does not hand them: angles per sequence, and norms that are not torch's.
    "apply_rope_fusion": False,
    "fused_single_qkv_rope": False,
    "persist_layer_norm": False,
    # What cuts a pack and what lets attention see all of it lies outside of the layers (megatron/context_parallel.py).
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_moe_experts": None,
    "heterogeneous_block_specs": False,
    # One chunk of dense layers per stage, as decoder_spec builds them; uneven stages are told by their layers.
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "mtp_num_layers": None,
    # Micro-batches are packed to different lengths; the dispatcher is what Megatron demands beside it.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    # An answer must have the same score twice (megatron/te_layers.py).
    "fp8": None,
    "fp4": None,
    # Weights are read into real tensors.
    "init_model_with_meta_device": False,
}

BY_MODULE = {
    "recompute_modules": ["mlp"],
    "recompute_method": None,
    "recompute_num_layers": None,
    "distribute_saved_activations": False,
}
# agents.recompute -> what Megatron computes a second time in backward instead of keeping it.
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"recompute_granularity": None, **BY_MODULE},
    "mlp": {"recompute_granularity": "selective", **BY_MODULE},
    # One by one, every layer is computed again from its input.
    "full": {"recompute_granularity": "full", **BY_MODULE, "recompute_method": "uniform", "recompute_num_layers": 1},
}
DECIDED_BY_RECOMPUTE = frozenset(RECOMPUTE["none"])

# What needs torch to say: the builder hands these over.
FROM_TORCH = frozenset(("params_dtype", "pipeline_dtype", "bf16", "fp16", "activation_func"))

# What is set on the finished configuration, by the law of gradients (megatron/schedule.py).
SET_LATER = frozenset(("calculate_per_token_loss", "finalize_model_grads_func", "no_sync_func"))

DECIDED = frozenset(
    (*FROM_ARCHITECTURE, *FROM_LAYOUT, "sequence_parallel", *FIXED, *DECIDED_BY_RECOMPUTE, *FROM_TORCH, *SET_LATER)
)


def decided_fields(
    architecture: Architecture, layout: Layout, recompute: str, from_torch: dict[str, Any]
) -> dict[str, Any]:
    """Every decided field with its value; `recompute` is a key of RECOMPUTE, `from_torch` has those of FROM_TORCH."""
    assert from_torch.keys() == FROM_TORCH, from_torch.keys() ^ FROM_TORCH
    return {
        **{field: getattr(architecture, name) for field, name in FROM_ARCHITECTURE.items()},
        **{field: getattr(layout, name) for field, name in FROM_LAYOUT.items()},
        "sequence_parallel": layout.tp > 1,
        **FIXED,
        **RECOMPUTE[recompute],
        **from_torch,
    }
