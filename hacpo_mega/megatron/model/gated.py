"""Gated activation of a feed-forward, act(gate) * up, which keeps only its input for backward.

In torch's operations it would also keep the activated gate and the product's factors: 4 f numbers of a token for f
columns, against 2 f here. Backward computes the activated gate again, by the same operations in the same order: forward
and gradient have torch's own bits. Not here: the product itself, which the second matrix keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True)
class Activation:
    """Elementwise function of the gate, called (gate, out=), and its gradient, (grad, gate, grad_input=)."""

    function: Callable[..., torch.Tensor]
    backward: Callable[..., torch.Tensor]


# By the names of `hidden_act` in config.json.
ACTIVATIONS = {
    "silu": Activation(torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input),
    "gelu_pytorch_tanh": Activation(
        partial(torch.ops.aten.gelu.out, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}


class GatedActivation:
    """act(gate) * up of [..., 2 f], gate before up, as Megatron builds and calls an activation.

    Not a Module: Megatron would ask it for its part of a checkpoint.
    """

    def __init__(self, name: str, **_config: object) -> None:
        """`name` is one of ACTIVATIONS; any other is a KeyError."""
        self.activation = ACTIVATIONS[name]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The product, [..., f], of gate and up [..., 2 f]."""
        return _Gated.apply(gate_up, self.activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.function(gate, out=torch.empty_like(gate, memory_format=torch.contiguous_format)).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_input = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_input.chunk(2, dim=-1)
        ctx.activation.function(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        ctx.activation.backward(grad_gate, gate, grad_input=grad_gate)
        return grad_input, None
