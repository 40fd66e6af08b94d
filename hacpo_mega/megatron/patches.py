"""Permanent patches of Megatron-core, with the reason of each (cluster/patches.py).

actor.py applies them when a process creates Megatron's groups. Elsewhere: replacements on the CPU while Megatron code
runs (model/platform.py).
"""

from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import attention

from hacpo_mega.cluster.patches import Patch
from hacpo_mega.megatron.model.linear import GradientKernel, with_own_products
from hacpo_mega.megatron.model.rope import rotate
from hacpo_mega.megatron.train.shard_exchange import gather_shards, sum_into_shard

_FUSION = "gradient_accumulation_fusion without apex"
_PRODUCTS = "a weight's gradient is added in float32 where it is computed; on the CPU, products of hacpo_kernels"
_SHARDS = "a rank that is alone sends nothing, and one on the CPU only what the receiver keeps"

MEGATRON = (
    Patch(attention, "apply_rotary_pos_emb", rotate, "cosines and sines once a micro-batch, not twice in every layer"),
    Patch(layers, "fused_weight_gradient_mlp_cuda", GradientKernel, _FUSION),
    Patch(layers, "_grad_accum_fusion_available", True, _FUSION),
    Patch(layers, "LinearWithGradAccumulationAndAsyncCommunication", with_own_products, _PRODUCTS, wraps=True),
    Patch(layers, "LinearWithFrozenWeight", with_own_products, _PRODUCTS, wraps=True),
    Patch(param_and_grad_buffer, "dist_reduce_scatter_func", sum_into_shard, _SHARDS),
    Patch(param_and_grad_buffer, "dist_all_gather_func", gather_shards, _SHARDS),
)
