"""How Megatron's linear layers multiply: with the products of hacpo_kernels. All else of them stays Megatron's.

A matrix's gradient is added to the sum of its update where it is computed, not made first and added after that.
Megatron has this as gradient_accumulation_fusion, with a kernel of apex. Here it is `add_product`, on every device: a
gradient is not made whole, and one of half-precision numbers is not rounded to half precision before float32 adds it
up. The other two products of a layer are `product` on a CPU alone: elsewhere it is torch's own.
"""

from typing import Any

import torch
from hacpo_kernels import add_product, product
from torch.autograd.function import Function, FunctionCtx
from torch.overrides import TorchFunctionMode

# By whose layers a model has: do gradients add up at once? TransformerEngine's can, too, when they are told to.
ADDS_AT_ONCE = {"local": True, "te": False}
MATMULS = (torch.matmul, torch.Tensor.matmul)


class GradientKernel:
    """What Megatron's linear layers call by the names of apex's extension."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TK: torch.Tensor, gradient_TN: torch.Tensor, sum_NK: torch.Tensor) -> None:
        """sum += gradient^T @ input, in float32."""
        add_product(sum_NK, gradient_TN.t(), input_TK)


class _Products(TorchFunctionMode):
    """What is called matmul is `product`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in MATMULS and not kwargs:
            return product(*args)
        return func(*args, **(kwargs or {}))


def multiplying(megatrons: type[Function]) -> type[Function]:
    """A function of Megatron's, which is applied as it is on other devices."""

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
