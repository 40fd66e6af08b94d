"""Gated delta nets in vLLM's CPU runner: the rule token by token in float32, and the models without torchvision.

vLLM's own operator takes bfloat16 alone, and equal sizes of keys and values; this one takes its place for other types.
It is the recurrent form of the rule that megatron/model/delta_net.py has in chunks.

Shapes: B sequences in a step, T tokens of all, N heads of values, D key and E value numbers of a head, W tokens that
the convolution reads, C its channels.
"""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

EPSILON = 1e-6  # of the lengths of queries and keys, as vLLM's kernels have it


def in_any_type(of_vllm: Callable[..., None]) -> Callable[..., None]:
    """vLLM's operator `cpu_gdn_attention_core`, which computes in other types than bfloat16, too."""

    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        if mixed_qkv.dtype is torch.bfloat16:
            of_vllm(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is not None and context.attn_metadata[layer.prefix].num_actual_tokens:
            _write_outputs(layer, context.attn_metadata[layer.prefix], (mixed_qkv, b, a), core_attn_out)

    return cpu_gdn_attention_core


def _write_outputs(
    layer: nn.Module, step: GDNAttentionMetadata, projected: tuple[Tensor, Tensor, Tensor], output_TNE: Tensor
) -> None:
    """Writes the outputs of all tokens of a step, all sequences in lockstep, and their states to the engine's cache."""
    mixed_TC, share_TN, decay_TN = projected
    starts = step.non_spec_query_start_loc[: step.num_decodes + step.num_prefills + 1].long()
    slots_B = step.non_spec_state_indices_tensor[: len(starts) - 1].long()
    is_new_B = torch.zeros(len(slots_B), dtype=torch.bool)
    if step.num_prefills:
        is_new_B[step.num_decodes :] = ~step.has_initial_state[step.num_decodes : len(slots_B)]
    read, states = layer.kv_cache
    read = read if is_conv_state_dim_first() else read.transpose(-1, -2)
    read_BCW = read[slots_B].masked_fill(is_new_B[:, None, None], 0.0)
    states_BNED = states[slots_B].float().masked_fill(is_new_B[:, None, None, None], 0.0)
    log_decay_TN = -layer.A_log.float().exp() * softplus(decay_TN.float() + layer.dt_bias.float())
    lengths_B = starts.diff()
    for index in range(int(lengths_B.max())):
        active = (lengths_B > index).nonzero()[:, 0]
        rows = starts[active] + index
        window = torch.cat([read_BCW[active], mixed_TC[rows][:, :, None].to(read.dtype)], dim=-1)
        read_BCW[active] = window[:, :, 1:]
        summed_BC = (window * layer.conv1d.weight.view(1, *window.shape[1:])).sum(-1)
        sizes = [layer.key_dim // layer.tp_size] * 2 + [layer.value_dim // layer.tp_size]
        query, key, value = (part.float() for part in (summed_BC * sigmoid(summed_BC)).split(sizes, dim=1))
        repeated = (
            part.unflatten(1, (-1, layer.head_k_dim)).repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=1)
            for part in (query, key)
        )
        states_BNED[active], output = delta_step(
            states_BNED[active],
            *repeated,
            value.unflatten(1, (-1, layer.head_v_dim)),
            log_decay_TN[rows],
            sigmoid(share_TN[rows].float()),
        )
        output_TNE[rows] = output.to(output_TNE.dtype)
    read[slots_B], states[slots_B] = read_BCW, states_BNED.to(states.dtype)


# torch's softplus and sigmoid round the last few numbers of a tensor differently from those before them, so that a
# token's numbers would depend on its place among those of a step. exp and log1p do not.
def softplus(numbers: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return numbers.clamp(min=0.0) + (-numbers.abs()).exp().log1p()


def sigmoid(numbers: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + (-numbers).exp())


def delta_step(
    states_BNED: Tensor, query_BND: Tensor, key_BND: Tensor, value_BNE: Tensor, log_decay_BN: Tensor, share_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule for one token of every sequence: states after it, and its outputs [B, N, E]."""
    query_BND, key_BND = (
        rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON) for rows in (query_BND, key_BND)
    )
    states_BNED = states_BNED * log_decay_BN.exp()[..., None, None]
    new_BNE = share_BN[..., None] * (value_BNE - (states_BNED @ key_BND[..., None])[..., 0])
    states_BNED = states_BNED + new_BNE[..., :, None] * key_BND[..., None, :]
    return states_BNED, (states_BNED @ query_BND[..., None])[..., 0] * query_BND.shape[-1] ** -0.5


# ---- the model's classes


class _Absent(ModuleType):
    """A module that is not installed, and whatever is asked of it."""

    def __getattr__(self, name: str) -> ModuleType | list[str]:
        if name == "__path__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def register_text_model(architecture: str) -> None:
    """Registers vLLM's class of a text model whose module also has the images' one, which imports torchvision.

    The CPU's lock has no torchvision. During the import its names are placeholders; the text model calls none.
    """
    registered = ModelRegistry.models.get(architecture)
    if importlib.util.find_spec("torchvision") is not None or not hasattr(registered, "module_name"):
        return
    sys.modules.update({name: _Absent(name) for name in IMAGES})
    try:
        model = registered.load_model_cls()
    finally:
        for name in IMAGES:
            del sys.modules[name]
    ModelRegistry.register_model(architecture, model)
