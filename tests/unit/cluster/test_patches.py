"""Every name of a library that is replaced for good is there in the pinned version, as it was when it was replaced."""

import fractions
import inspect

from hacpo_mega.cluster.patches import TORCH, Patch, apply_patches
from hacpo_mega.megatron.patches import MEGATRON
from hacpo_mega.rollout.vllm.patches import VLLM

PATCHES = {f"{patch.owner.__name__}.{patch.name}": patch for patch in (*TORCH, *MEGATRON, *VLLM)}
GROUP = "vllm.distributed.parallel_state.GroupCoordinator"
BLOCKS = "vllm.v1.core.kv_cache_manager.KVCacheBlocks | None"
DEEPSEEK = "transformers.models.deepseek"
LINEAR = "megatron.core.tensor_parallel.layers"
BUFFER = "megatron.core.distributed.param_and_grad_buffer"
# The library's own, or the type of what has no signature.
SIGNATURES = {
    "torch.distributed.distributed_c10d._unpickler": (
        "(file, *, fix_imports=True, encoding='ASCII', errors='strict', buffers=())"
    ),
    "torch.distributed.distributed_c10d.ProcessGroupGloo": "pybind11_type",
    "megatron.core.transformer.attention.apply_rotary_pos_emb": (
        "(t: 'Tensor', freqs: 'Tensor', config: 'TransformerConfig', cu_seqlens: 'Optional[Tensor]' = None, "
        "mscale: 'float' = 1.0, cp_group: 'torch.distributed.ProcessGroup' = None, "
        "mla_rotary_interleaved: 'bool' = False)"
    ),
    f"{LINEAR}.fused_weight_gradient_mlp_cuda": "NoneType",  # apex's extension
    f"{LINEAR}._grad_accum_fusion_available": "bool",
    f"{LINEAR}.LinearWithGradAccumulationAndAsyncCommunication": (
        "(ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
        "grad_output_buffer, wgrad_deferral_limit, tp_group, gtp_remat_size)"
    ),
    f"{LINEAR}.LinearWithFrozenWeight": "(ctx, input, weight, bias, allreduce_dgrad, tp_group)",
    f"{BUFFER}.dist_reduce_scatter_func": "(output, input, op=<RedOpType.SUM: 0>, group=None, async_op=False)",
    f"{BUFFER}.dist_all_gather_func": "(output_tensor, input_tensor, group=None, async_op=False)",
    "vllm.distributed.parallel_state.destroy_distributed_environment": "()",
    "vllm.distributed.parallel_state.init_model_parallel_group": (
        "(group_ranks: list[list[int]], local_rank: int, backend: str, use_message_queue_broadcaster: bool = False, "
        f"group_name: str | None = None, use_device_communicator: bool = True, use_all2all: bool = False) -> {GROUP}"
    ),
    "vllm.distributed.aux_output_connector.worker.get_tp_group": f"() -> {GROUP}",
    "vllm.utils.jit_monitor.activate": "(*, mode: Literal['warn', 'error'] = 'warn', verbose: bool = False) -> None",
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention.cpu_gdn_attention_core": (
        "(mixed_qkv: 'torch.Tensor', b: 'torch.Tensor', a: 'torch.Tensor', core_attn_out: 'torch.Tensor', "
        "layer_name: 'LayerNameType') -> 'None'"
    ),
    "_LazyRegisteredModel.inspect_model_cls": "(self) -> vllm.model_executor.models.registry._ModelInfo",
    "CPURouter.__init__": (
        "(self, top_k: int, global_num_experts: int, use_grouped_topk: bool = False, "
        "num_expert_group: int | None = None, topk_group: int | None = None, renormalize: bool = True, "
        "scoring_func: str = 'softmax', routed_scaling_factor: float = 1.0, "
        "e_score_correction_bias: torch.Tensor | None = None, "
        "custom_routing_function: collections.abc.Callable | None = None, "
        "hash_indices_table: torch.Tensor | None = None, "
        "eplb_state: vllm.distributed.eplb.eplb_state.EplbLayerState | None = None)"
    ),
    "DeepseekV2MLAAttention.__init__": (
        "(self, vllm_config: vllm.config.vllm.VllmConfig, "
        f"config: {DEEPSEEK}_v2.configuration_deepseek_v2.DeepseekV2Config | "
        f"{DEEPSEEK}_v3.configuration_deepseek_v3.DeepseekV3Config, hidden_size: int, num_heads: int, "
        "qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, q_lora_rank: int | None, kv_lora_rank: int, "
        "max_position_embeddings: int = 8192, cache_config: vllm.config.cache.CacheConfig | None = None, "
        "quant_config: vllm.model_executor.layers.quantization.base_config.QuantizationConfig | None = None, "
        "prefix: str = '', topk_indices_buffer: torch.Tensor | None = None, "
        "index_group_builder: vllm.v1.attention.backends.mla.index_group.SparseMLAIndexGroupBuilder | None = None, "
        "input_size: int | None = None, reduce_results: bool = True, "
        "non_causal_multi_token_decode: bool = False) -> None"
    ),
    "RotaryEmbedding.forward_cpu": (
        "(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> "
        "tuple[torch.Tensor, torch.Tensor | None]"
    ),
    "vllm.model_executor.model_loader.reload.layerwise._get_weight_loader": "(tensor: torch.Tensor)",
    "LogprobsProcessor._update_sample_logprobs": "(self, logprobs_lists: vllm.v1.outputs.LogprobsLists) -> None",
    "KVCacheManager.allocate_slots": (
        "(self, request: vllm.v1.request.Request, num_new_tokens: int, num_new_computed_tokens: int = 0, "
        f"new_computed_blocks: {BLOCKS} = None, num_lookahead_tokens: int = 0, num_external_computed_tokens: int = 0, "
        "delay_cache_blocks: bool = False, num_encoder_tokens: int = 0, full_sequence_must_fit: bool = False, "
        "reserved_blocks: int = 0, has_scheduled_reqs: bool = True, skip_zeroing_group_ids: tuple[int, ...] = ()) "
        f"-> {BLOCKS}"
    ),
}


def signature(value: object) -> str:
    """The signature of what is called: a function, an autograd function's forward, an unpickler."""
    called = value.forward if hasattr(value, "forward") else value
    try:
        return str(inspect.signature(called))
    except (TypeError, ValueError):
        return type(value).__name__


def test_libraries_have_what_is_replaced():
    """A version with another signature, or without the name, needs another look at the replacement."""
    assert {name: signature(patch.original()) for name, patch in PATCHES.items()} == SIGNATURES


def test_a_patch_is_applied_once(monkeypatch):
    """A wrapper around its own wrapper would do its work twice."""
    monkeypatch.setattr(fractions, "louder", lambda value: value, raising=False)
    patch = Patch(fractions, "louder", lambda function: lambda value: 10 * function(value), "to see it", wraps=True)
    apply_patches([patch])
    apply_patches([patch])
    assert (fractions.louder(2), patch.original()(2)) == (20, 2)
