"""The fields of Megatron's TransformerConfig: decided by this project, working, and all others.

The model builder fills a configuration from the first (megatron/model/model.py) and `hacpo-mega check` refuses them in
the table `agents.megatron`: a second opinion there would split the truth. It refuses the last, too, which nothing here
would read. A test holds the tables against Megatron's class, so that a field of a later version has its place. Imports
no torch and no Megatron.
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
    # One chunk of dense layers per stage, as decoder_spec builds them; uneven stages are told by their layers.
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
# Fields that work: WORKS with every model and layout, each WITH_ set only with the models or layouts of its name.
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

# Why nothing would come of the others.
_REASONS = {
    "experts are hacpo-mega's own, by the model folder; of Megatron's losses of a router "
    f"{AUX_LOSS} and {Z_LOSS} work": """
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
        moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_enable_routing_replay moe_router_topk_limited_devices
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk
        moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm
        moe_input_jitter_eps moe_token_dropping moe_enable_deepep
        moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor moe_pad_expert_input_to_capacity
        moe_token_drop_policy moe_layer_recompute moe_permute_fusion moe_router_fusion moe_apply_probs_on_input
        moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms overlap_moe_expert_parallel_comm
        ep_overlap_early_attn_memory_release delay_wgrad_compute use_fused_weighted_squared_relu
        moe_expert_rank_capacity_factor moe_flex_dispatcher_num_sms moe_grad_scale_func moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
        moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_permute_fusion_into_hybridep
        moe_router_force_biased moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
        moe_single_grouped_bias moe_single_grouped_weight overlap_dispatch_backward_with_experts_wgrad
        use_grouped_gemm_for_shared_expert high_priority_a2a_comm_stream""",
    "context parallelism is hacpo-mega's own; set agents.cp": """
        cp_comm_type hybrid_context_parallel max_seqlen_per_dp_cp_rank""",
    "attention is torch's or TransformerEngine's, over packed sequences": """
        attention_softmax_in_fp32 masked_softmax_fusion attention_backend window_attn_skip_freq qk_l2_norm
        qk_clip_alpha qk_clip_threshold flash_decode batch_invariant_mode use_kitchen use_kitchen_attention
        kitchen_attention_backend mrope_section test_mode dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim
        linear_value_head_dim linear_num_key_heads linear_num_value_heads dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
        experimental_attention_variant_loss_scale_func flash_attention_version""",
    "no layer is in fp8 or fp4": """
        fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
        fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe fp4_param fp4_quantizer_factory
        disable_parameter_transpose_cache quant_recipe fp8_output_proj""",
    "the head and its loss are a kernel outside of Megatron": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute wgrad_deferral_limit
        mtp_standalone mtp_loss_scaling_factor mtp_detach_heads mtp_grad_scale_func mtp_hybrid_override_pattern
        mtp_use_repeated_layer""",
    "the buffers of TransformerEngine that overlap tensor parallelism are not made": """
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        symmetric_ar_type""",
    "weights are loaded, whatever they began with": """
        init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std""",
    "micro-batches differ in length, so that no graph of one is another's": """
        enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_modules""",
    "what leaves the device is for agents.offload and agents.recompute to say": """
        cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules
        min_offloaded_tensor_size num_microbatches_with_partial_activation_checkpoints activation_offload_fraction
        cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        fine_grained_offloading_max_inflight_offloads""",
    "agents.transformer says whose layers these are, and no other is built": """
        transformer_impl use_inference_optimized_layers use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp
        fused_residual_rmsnorm mlp_chunks_for_training""",
    "tensor ranks keep their part of a weight whole": """
        gtp_weight_remat_size expert_gtp_weight_remat_size tensor_parallel_num_weight_shards
        expert_tensor_parallel_num_weight_shards""",
    "the model folder says what scales its numbers": """
        use_mup mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult
        mup_width_mult""",
    "layers compute in the type of the weights": "enable_autocast autocast_dtype fp32_residual_connection",
    "rounds of a pipeline are of pp micro-batches, over the groups that hacpo-mega makes": """
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p microbatch_group_size_per_vp_stage""",
    "no code of a run reads it": """
        timers grad_scale_func grad_sync_func param_sync_func barrier_with_L1_time config_logger_dir use_te_rng_tracker
        inference_rng_tracker inference_sampling_seed inference_fuse_tp_communication mlp_chunks_for_prefill
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        hetereogenous_dist_checkpoint memory_efficient_layer_norm inference_cuda_graph_scope
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type mamba_training_ssm_states_dtype nccl_all_reduce_for_prefill""",
}
WITHOUT_EFFECT = {field: reason for reason, fields in _REASONS.items() for field in fields.split()}
FREE = WORKS | WITH_PIPELINE | WITH_CHUNKS | WITH_TENSOR_RANKS | WITH_EXPERTS


def no_effect(field: str, value: Any) -> str | None:
    """The reason why a field that is not decided here has no effect, or not this one; None if it may work."""
    if field not in FREE:
        return f"has no effect here: {WITHOUT_EFFECT.get(field, 'nobody has seen it work')}; remove it"
    if field == BALANCING and value != "aux_loss":
        return f"{short(value)} is not built: a loss over each micro-batch is. Nearest: 'aux_loss'"
    if field == AUX_LOSS and isinstance(value, list):
        return f"needs one number, found {short(value)}"
    return None


def field_problems(
    given: Mapping[str, Any], architecture: Architecture, layout: Layout, *, has_adapters: bool = False
) -> Iterator[str]:
    """A line for every field that works, but not for this model in this layout."""
    where = (
        (WITH_PIPELINE, layout.pp > 1, "pp is 1"),
        (WITH_CHUNKS, layout.vpp > 1, f"there is no {VIRTUAL}"),
        (WITH_TENSOR_RANKS, layout.tp > 1, "tp is 1"),
        (WITH_EXPERTS, architecture.has_experts, f"this {architecture.family} model has no experts"),
    )
    for fields, works, why in where:
        if not works:
            yield from (
                f"megatron.{field} has no effect here: {why}; remove it" for field in sorted(fields & given.keys())
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
