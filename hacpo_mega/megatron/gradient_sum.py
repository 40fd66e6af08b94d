"""A matrix's gradient is added to the sum of its update where it is computed, not made first and added after that.

Megatron has this as gradient_accumulation_fusion, with a kernel of apex. Here it is torch's own product that adds, on
every device: a gradient is neither allocated, nor written, nor read again, and one of half-precision numbers is not
rounded to half precision before float32 adds it up.
"""

import torch
from hacpo_kernels import add_product
from megatron.core.tensor_parallel import layers


class _Kernel:
    """What Megatron's linear layers call by the names of apex's extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TK: torch.Tensor, gradient_TN: torch.Tensor, sum_NK: torch.Tensor) -> None:
        """sum += gradient^T @ input, in float32."""
        add_product(sum_NK, gradient_TN.t(), input_TK)


layers.fused_weight_gradient_mlp_cuda = _Kernel
layers._grad_accum_fusion_available = True

# By whose layers a model has. TransformerEngine's can, too, when they are told to.
ADDS_AT_ONCE = {"local": True, "te": False}
