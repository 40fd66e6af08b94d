"""The fields of Megatron's TransformerConfig: decided by this project, free for the user, and without effect.

The model builder fills a configuration from the decided ones (megatron/model/model.py), and `hacpo-mega check` refuses
them in the table `agents.megatron`, where they would contradict the builder. It also refuses those that nothing here
reads. A test compares the tables with Megatron's class, so that no field of a later version is missed. Imports no torch
and no Megatron.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.sharding.layout import FIRST_STAGE, LAST_STAGE, VIRTUAL, Layout

# Megatron's field -> ours
FROM_ARCHITECTURE = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "norm_eps",
    "qk_layernorm": "qk_norm",  # until the model is built (megatron/model/model.py)
    "add_qkv_bias": "qkv_bias",
    "rotary_interleaved": "interleaved",
    "softmax_scale": "softmax_scale",
    "attention_output_gate": "gated",
}
FROM_LAYOUT = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp"}

# Fields with the same value in every model of this project: another value would compute something else than the folder
# says, or would ask for a part that is not built.
FIXED: dict[str, Any] = {
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "gated_linear_unit": True,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    # A layer's spec chooses its activation (megatron/model/linear.py), with both libraries' layers.
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
    "qk_clip": False,
    "log_max_attention_logit": False,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    # These would read what this model does not hand them: angles per sequence, and norms that are not torch's.
    "apply_rope_fusion": False,
    "fused_single_qkv_rope": False,
    "persist_layer_norm": False,
    # Code outside of the layers cuts a pack and lets attention see all of it
    # (megatron/model/context_parallel.py).
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_moe_experts": None,
    "heterogeneous_block_specs": False,
    # decoder_spec builds the stages; uneven ones are given by the layers of the first and the last.
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "mtp_num_layers": None,
    # An exchange of true lengths waits for the whole device, the engine's work included (megatron/train/schedule.py).
    "variable_seq_lengths": False,
    "moe_token_dispatcher_type": "alltoall",
    # An answer must have the same score twice (megatron/model/te_layers.py).
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

# Fields whose values need torch: the builder hands them over.
FROM_TORCH = frozenset(("params_dtype", "pipeline_dtype", "bf16", "fp16", "activation_func"))

# Fields that are set on the finished configuration, by the law of gradients (megatron/train/schedule.py).
SET_LATER = frozenset(("calculate_per_token_loss", "finalize_model_grads_func", "no_sync_func"))

DECIDED = frozenset(
    (*FROM_ARCHITECTURE, *FROM_LAYOUT, "sequence_parallel", *FIXED, *DECIDED_BY_RECOMPUTE, *FROM_TORCH, *SET_LATER)
)


AUX_LOSS, Z_LOSS, BALANCING = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"
# Free fields: WORKS with every model and layout, each WITH_ set only with the models or layouts of its name.
WORKS = frozenset(
    (
        *("bias_dropout_fusion", "deterministic_mode", "disable_bf16_reduced_precision_matmul"),
        *("gradient_accumulation_fusion", "perform_initialization", "use_cpu_initialization"),
        *(FIRST_STAGE, LAST_STAGE, VIRTUAL),  # the layout has rules of its own for these
    )
)
WITH_PIPELINE = frozenset(("batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs"))
WITH_CHUNKS = frozenset(("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"))
WITH_TENSOR_RANKS = frozenset(("clone_scatter_output_in_embedding",))
WITH_EXPERTS = frozenset((AUX_LOSS, Z_LOSS, BALANCING))

FREE = WORKS | WITH_PIPELINE | WITH_CHUNKS | WITH_TENSOR_RANKS | WITH_EXPERTS


def no_effect(field: str, value: Any) -> str | None:
    """The reason why a free field has no effect with this value; None if it may work."""
    if field == BALANCING and value != "aux_loss":
        return f"{short(value)} is not built: a loss over each micro-batch is. Nearest: 'aux_loss'"
    if field == AUX_LOSS and isinstance(value, list):
        return f"needs one number, found {short(value)}"
    return None


def field_problems(
    given: Mapping[str, Any], architecture: Architecture, layout: Layout, *, has_adapters: bool = False
) -> Iterator[str]:
    """A line for every free field that has no effect on this model in this layout."""
    conditions = (
        (WITH_PIPELINE, layout.pp > 1, "pp is 1"),
        (WITH_CHUNKS, layout.vpp > 1, f"there is no {VIRTUAL}"),
        (WITH_TENSOR_RANKS, layout.tp > 1, "tp is 1"),
        (WITH_EXPERTS, architecture.has_experts, f"this {architecture.family} model has no experts"),
    )
    for fields, has_effect, reason in conditions:
        if not has_effect:
            yield from (
                f"megatron.{field} has no effect here: {reason}; remove it" for field in sorted(fields & given.keys())
            )
    if architecture.has_experts and has_adapters:
        for field in sorted({AUX_LOSS, Z_LOSS} & given.keys()):
            yield f"megatron.{field} has no effect here: adapters leave the router as it is; remove it"
    elif architecture.has_experts and BALANCING in given and not given.get(AUX_LOSS):
        yield f"megatron.{BALANCING} has no effect here: {AUX_LOSS} is not given; remove it"
    if layout.vpp > 1 and given.get("overlap_p2p_comm") and given.get("batch_p2p_comm", True):
        yield "megatron.overlap_p2p_comm = true needs batch_p2p_comm = false, which is true; set it, too"
    if given.get("overlap_p2p_comm_warmup_flush") and not given.get("overlap_p2p_comm") and layout.vpp > 1:
        yield "megatron.overlap_p2p_comm_warmup_flush has no effect here: overlap_p2p_comm is not given; remove it"


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
