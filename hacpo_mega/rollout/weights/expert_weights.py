"""Experts of a live vLLM: two tensors a layer, [experts, gate and up, hidden] and [experts, hidden, feed-forward].

On CUDA Triton's kernels read them as they were loaded; other kernels have forms of their own, which this file does not
read. On the CPU vLLM packs them, one expert after the other, and pads the feed-forward. vLLM 0.32 packs at the first
load alone (`is_weight_update` of UnquantizedFusedMoEMethod), and would read later loads as if they were packed.
Here every load packs. The packed order comes from vLLM's own operation, applied to positions instead of numbers: so
packed weights can be read back, to the bit.
"""

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn

GATE_UP, DOWN = "w13_weight", "w2_weight"
# vLLM's names of kernels that read experts as they are loaded, but for the CPU's packing.
PLAIN_KERNELS = ("TRITON", "BATCHED_TRITON", "CPU")
# Whole numbers below it are exact in every type that weights have.
DIGIT = 256


def holds_experts(module: nn.Module) -> bool:
    """True for vLLM's layer of mixture experts."""
    return hasattr(module, GATE_UP) and hasattr(module, "ckpt_gate_proj_name")


def packs_experts(module: nn.Module) -> bool:
    """True for an expert layer whose kernel reads a packed form."""
    return holds_experts(module) and hasattr(_kernel(module), "isa")


def experts_problem(method: object) -> str | None:
    """Reason why a layer with this method converts the experts that it loads; None if it does not, or has none."""
    kernel = getattr(method, "unquantized_backend", None)
    if kernel is None or kernel.name in PLAIN_KERNELS:
        return None
    return f"its layer holds experts as {kernel.value} wants them (vllm.moe_backend = 'triton' takes them as they are)"


def converts_experts(model: nn.Module) -> bool:
    """True if some layer holds experts in a form that cannot be read here."""
    return any(experts_problem(getattr(module, "quant_method", None)) for module in model.modules())


def pack_at_every_load(model: nn.Module) -> None:
    """Makes every later load pack experts, as the first one does."""
    for module in filter(packs_experts, model.modules()):
        method = module.quant_method
        method.process_weights_after_loading = partial(_pack_again, method, method.process_weights_after_loading)


def _pack_again(method, process, layer: nn.Module) -> None:
    method.moe_kernel = None  # vLLM's sign of a first load
    process(layer)


def take_experts(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Installs the layer's two expert tensors, shapes as above."""
    for name, tensor in tensors.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    module.quant_method.process_weights_after_loading(module)


def expert_halves(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Experts as they were loaded: gate and up [experts, ffn, hidden] each, down [experts, hidden, ffn].

    ffn is this rank's part of the feed-forward.
    """
    gate_up, down, ffn = getattr(module, GATE_UP), getattr(module, DOWN), module.intermediate_size_per_partition
    if packs_experts(module):
        gate_up, down = (_unpacked(packed.detach(), _kernel(module).isa) for packed in (gate_up, down))
    if interleaves_gate_up(module):
        return gate_up[:, 0 : 2 * ffn : 2], gate_up[:, 1 : 2 * ffn : 2], down[..., :ffn]
    half = gate_up.shape[1] // 2
    return gate_up[:, :ffn], gate_up[:, half : half + ffn], down[..., :ffn]


def interleaves_gate_up(module: nn.Module) -> bool:
    """True if rows of gate and up are interleaved (gpt-oss), False if all of gate comes before up."""
    return module.moe_config.activation.value == "swigluoai"


def _kernel(module: nn.Module) -> object:
    return getattr(getattr(module.quant_method, "moe_kernel", None), "fused_experts", None)


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    order = _packed_order(tuple(packed.shape[1:]), packed.dtype, isa)
    plain = torch.empty_like(packed)
    plain.view(len(packed), -1)[:, order] = packed.view(len(packed), -1)
    return plain


@cache
def _packed_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """Flat index in the packed form of one expert -> flat index in the matrix [rows, columns].

    Packs the indices themselves, one digit after the other: vLLM's operation takes numbers of the weights' type alone.
    """
    indices = torch.arange(shape[0] * shape[1])
    order, scale = torch.zeros_like(indices), 1
    while scale <= indices[-1]:
        digits = (indices // scale % DIGIT).to(dtype).view(1, *shape)
        packed = torch.empty_like(digits)
        torch.ops._C.prepack_moe_weight(digits, packed, isa)
        order += packed.view(-1).to(torch.int64) * scale
        scale *= DIGIT
    return order
