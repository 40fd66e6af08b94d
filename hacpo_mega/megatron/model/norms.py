"""Norms that Megatron's local spec lacks: under sequence parallelism, over all heads, after a block, scaled by 1 + w.

Shapes: T tokens of this rank, N heads of this rank, D head size, H hidden size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor.

    Under sequence parallelism each rank has a slice of the tokens, so its weight gradient is a part of the sum; the
    attribute `sequence_parallel` makes Megatron's finalize_model_grads add the parts.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H], normalised over the last dimension."""
        return _normed(x, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm scaled by 1 + weight (Gemma), multiplied in float32 and rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H], normalised over the last dimension."""
        return _normed(x.float(), 1.0 + self.weight.float(), self.eps).type_as(x)


def _normed(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's RMSNorm of [..., H], to the last bit; its gradient in float32 on the CPU by a formula (_Normed)."""
    if x.device.type == "cpu" and x.dtype is torch.float32:
        return _Normed.apply(x, weight_H, eps)
    return rms_norm(x, weight_H.shape, weight_H, eps)


class _Normed(torch.autograd.Function):
    """y = r x w with r = (mean of x^2 + eps)^-1/2, and with g the gradient of y

        dx = r g w - x r^3 sum(g x w) / H        dw = sum over rows of r g x

    CUDA has a kernel for that. On the CPU torch derives it from a dozen operations, at two to three times the cost.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, weight_H.shape, weight_H, eps)
        ctx.save_for_backward(x, weight_H, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight_H, scale = ctx.saved_tensors
        products_TH = (g * x).reshape(-1, len(weight_H))
        inner = (products_TH @ weight_H).div_(len(weight_H)).view(scale.shape)
        grad_x = (g * weight_H).mul_(scale).addcmul_(x, inner.mul_(scale.pow(3)), value=-1.0)
        return grad_x, scale.view(-1) @ products_TH if ctx.needs_input_grad[1] else None, None


class WholeRMSNorm(torch.nn.Module):
    """RMSNorm over all heads together, of which a tensor-parallel rank has some (OLMo 2).

    The weight [N * D] is this rank's part. Every rank has all tokens here, and the squares are summed over ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        """`hidden_size` is D, as Megatron builds norms of queries and keys; `num_heads` is N."""
        super().__init__()
        self.eps, self.group = eps, parallel_state.get_tensor_model_parallel_group()
        own = torch.ones(num_heads * hidden_size, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(own)
        # A part, not a copy: Megatron's norm of the gradient counts it on every rank.
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N, D], normalised over both and over the ranks."""
        numbers = x.float()
        squares = numbers.square().sum(dim=(-2, -1), keepdim=True)
        size = self.weight.numel() * self.group.size()
        if self.group.size() > 1:
            squares = _SumOverRanks.apply(squares, self.group)
        scaled = numbers * torch.rsqrt(squares / size + self.eps) * self.weight.float().view(x.shape[-2:])
        return scaled.type_as(x)


class _SumOverRanks(torch.autograd.Function):
    """Sum that every rank reads, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class AddNormed(torch.nn.Module):
    """Residual addition where a block's output is normalised first; Megatron's is a plain one."""

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Function that Megatron calls with (output, bias), the residual [T, 1, H] and a dropout of 0."""
        return self._add

    def _add(
        self, output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        output, bias = output_with_bias
        assert dropout == 0.0, dropout
        # Megatron enables gradients here even if nothing is trained: the norm's weight would then keep its input.
        with torch.set_grad_enabled(output.requires_grad or residual.requires_grad):
            return residual + self.norm(output if bias is None else output + bias)
