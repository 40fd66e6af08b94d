"""Products of Megatron's linear layers, taken from hacpo_kernels. Everything else of the layers stays Megatron's.

A matrix's gradient is added to the update's sum where it is computed, instead of being made first and added later.
Megatron has this as gradient_accumulation_fusion, with a kernel of apex. Here it is `add_product`, on every device: no
gradient is ever whole, and one of half-precision numbers is not rounded to half precision before the float32 sum. The
other two products of a layer use `product` on a CPU alone; elsewhere they are torch's own.
"""

from typing import Any

import torch
from hacpo_kernels import add_product, product
from torch.autograd.function import Function, FunctionCtx
from torch.overrides import TorchFunctionMode

# Whether gradients are added at once, by layer implementation. TransformerEngine's layers have an option for it, which
# nobody has run here: off, they round the gradient of each micro-batch. Experts (moe.py) are always added at once.
ADDS_AT_ONCE = {"local": True, "te": False}
MATMULS = (torch.matmul, torch.Tensor.matmul)


class GradientKernel:
    """Stand-in for apex's extension, under the names that Megatron's linear layers call."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TK: torch.Tensor, gradient_TN: torch.Tensor, sum_NK: torch.Tensor) -> None:
        """sum [N, K] += gradient [T, N]^T @ input [T, K], in float32."""
        add_product(sum_NK, gradient_TN.t(), input_TK)


class _Products(TorchFunctionMode):
    """Replaces matmul by `product`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in MATMULS and not kwargs:
            return product(*args)
        return func(*args, **(kwargs or {}))


def multiplying(megatrons: type[Function]) -> type[Function]:
    """Wraps an autograd function of Megatron's, which is applied unchanged on other devices."""

    class Multiplying(megatrons):
        @classmethod
        def apply(cls, input_T1K: torch.Tensor, *given: Any) -> torch.Tensor:
            chosen = super() if input_T1K.device.type == "cpu" else megatrons
            return chosen.apply(input_T1K, *given)

        @staticmethod
        def forward(ctx: FunctionCtx, *given: Any) -> torch.Tensor:
            with _Products():
                return megatrons.forward(ctx, *given)

        @staticmethod
        def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            with _Products():
                return megatrons.backward(ctx, *grads)

    return Multiplying
