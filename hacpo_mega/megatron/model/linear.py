"""Parts of Megatron's layers that hacpo_kernels computes: products of linear ones, the embedding's gradient, and the
activation of a feed-forward. Everything else of the layers stays Megatron's.

A matrix's gradient is added to the update's sum where it is computed, instead of being made first and added later.
Megatron has this as gradient_accumulation_fusion, with a kernel of apex. Here it is `add_product`, on every device: no
gradient is ever whole, and one of half-precision numbers is not rounded to half precision before the float32 sum. The
other two products of a layer use `product` on a CPU alone; elsewhere they are torch's own.

An embedding of half-precision numbers adds its gradient's rows to the same sum. torch's own backward adds them in half
precision: 6,600 times 0.01 makes 4 instead of 66.
"""

from typing import Any

import torch
from hacpo_kernels import add_product, gated_activation, main_grad_placeholder, product
from torch.autograd.function import Function, FunctionCtx
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode

# Layer implementations that add gradients at once. TransformerEngine's layers have an option for it, which nobody has
# run here: off, they round the gradient of each micro-batch. Experts (moe.py) are always added at once.
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


class _Rows(Function):
    """Rows [..., H] of a weight [V, H] by their ids, whose gradient is added to its main_grad in float32."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight_VH: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight_VH, ids)
        return embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight_VH, ids = ctx.saved_tensors
        ids_T, rows_TH = ids.flatten(), gradient.flatten(end_dim=-2).float()
        # Megatron reads tokens of other shards as id 0, and gives them no gradient. CUDA adds an id's rows one by
        # one: those without gradient go to all ids in turn.
        in_turn_T = torch.arange(len(ids_T), device=ids_T.device) % len(weight_VH)
        ids_T = ids_T.where(rows_TH.ne(0).any(dim=1), in_turn_T.to(ids_T.dtype))
        if rows_TH.is_cuda:  # on its own device, each of the two adds an id's rows in order
            weight_VH.main_grad.index_put_((ids_T,), rows_TH, accumulate=True)
        else:
            weight_VH.main_grad.index_add_(0, ids_T, rows_TH)
        return main_grad_placeholder(weight_VH), None


class EmbeddingInFloat32(TorchFunctionMode):
    """Replaces the embedding of a half-precision weight that Megatron's buffers train; for Megatron's own layer."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (embedding, torch.Tensor.__getitem__):  # the second with megatron.deterministic_mode
            ids, weight_VH = args[:2] if func is embedding else args[1::-1]
            takes_rows = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)
            if takes_rows and weight_VH.dtype != torch.float32 and hasattr(weight_VH, "main_grad"):
                return _Rows.apply(weight_VH, ids)
        return func(*args, **(kwargs or {}))


def with_own_products(megatron_function: type[Function]) -> type[Function]:
    """Subclass of an autograd function of Megatron's with `product` as its matmul on a CPU; unchanged elsewhere."""

    class WithOwnProducts(megatron_function):
        @classmethod
        def apply(cls, input_T1K: torch.Tensor, *given: Any) -> torch.Tensor:
            chosen = super() if input_T1K.device.type == "cpu" else megatron_function
            return chosen.apply(input_T1K, *given)

        @staticmethod
        def forward(ctx: FunctionCtx, *given: Any) -> torch.Tensor:
            with _Products():
                return megatron_function.forward(ctx, *given)

        @staticmethod
        def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            with _Products():
                return megatron_function.backward(ctx, *grads)

    return WithOwnProducts


class GatedActivation(torch.nn.Module):
    """act(gate) * up of [..., 2 f], gate before up, as Megatron builds and calls an activation.

    It keeps its input alone for backward: 2 f numbers of a token, against 4 f in torch's operations.
    """

    def __init__(self, name: str, **_config: object) -> None:
        """`name` is that of `hidden_act` in config.json."""
        super().__init__()
        self.name = name

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The product, [..., f], of gate and up [..., 2 f]."""
        return gated_activation(gate_up, self.name)
