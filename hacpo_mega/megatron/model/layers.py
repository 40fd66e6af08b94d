"""Layers that Megatron's local spec lacks, and that spec with them: norms, an output bias, packed attention
(attention.py).

With them one layer spec serves the CPU and any GPU without TransformerEngine. Shapes: T tokens of a packed micro-batch,
N query heads of this rank, D head size, H hidden size.
"""

from collections.abc import Callable

import torch
from hacpo_kernels import rms_norm
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.distributed.nn.functional import all_reduce

from hacpo_mega.megatron.model.attention import LatentAttention, PackedAttention, as_part
from hacpo_mega.megatron.model.delta_net import GatedDeltaNet
from hacpo_mega.megatron.model.linear import GatedActivation
from hacpo_mega.megatron.model.moe import expert_layer
from hacpo_mega.megatron.model.rope import OwnHeads, QueriesAndKeys, ScaledQueries, TwoRopes, WithoutRope
from hacpo_mega.models.families.architecture import Architecture

# ---- norms: under sequence parallelism, over all heads, after a block, scaled by 1 + w


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron's constructor, scaled by `offset` + weight.

    Under sequence parallelism each rank has a slice of the tokens, so its weight gradient is a part of the sum; the
    attribute `sequence_parallel` makes Megatron's finalize_model_grads add the parts.
    """

    offset = 0.0

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H], normalised over the last dimension."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm scaled by 1 + weight (Gemma), multiplied in float32 and rounded once."""

    offset = 1.0


class WholeRMSNorm(torch.nn.Module):
    """RMSNorm over all heads together, of which a tensor-parallel rank has some (OLMo 2).

    The weight [N * D] is this rank's part. Every rank has all tokens here, and the squares are summed over ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        """`hidden_size` is D, as Megatron builds norms of queries and keys; `num_heads` is N."""
        super().__init__()
        self.eps, self.group = eps, parallel_state.get_tensor_model_parallel_group()
        own = torch.ones(num_heads * hidden_size, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = as_part(torch.nn.Parameter(own))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N, D], normalised over both and over the ranks."""
        numbers = x.float()
        squares = numbers.square().sum(dim=(-2, -1), keepdim=True)
        size = self.weight.numel() * self.group.size()
        if self.group.size() > 1:
            squares = all_reduce(squares, group=self.group)  # every rank reads the sum, so its gradient is theirs' sum
        scaled = numbers * torch.rsqrt(squares / size + self.eps) * self.weight.float().view(x.shape[-2:])
        return scaled.type_as(x)


class AddNormed(torch.nn.Module):
    """Residual addition where a block's output is normalised first; Megatron's is a plain one.

    With `scales` the sum is multiplied with a number that stays as it was loaded.
    """

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm], scales: bool) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.scale: torch.nn.Parameter | None = None
        if scales:
            one = torch.ones(1, device=torch.cuda.current_device(), dtype=config.params_dtype)
            self.scale = torch.nn.Parameter(one, requires_grad=False)

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
            added = residual + self.norm(output if bias is None else output + bias)
            return added if self.scale is None else added * self.scale


# ---- layer specs


class WithBias:
    """Row-parallel linear with a bias, for an attention output that has one while the MLP has none."""

    def __new__(cls, *sizes: int, linear: type, bias: bool, **options: object) -> torch.nn.Module:
        """Returns the linear itself; `bias` is the one of Megatron's configuration."""
        return linear(*sizes, bias=True, **options)


def decoder_spec(architecture: Architecture, config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with the layers of this file, for the layers of one pipeline stage."""
    # Layers of the same kind share a spec.
    a = architecture
    kinds = [
        (a.window_of(layer), a.has_experts_in(layer), a.has_delta_net_in(layer), layer not in a.nope_layers)
        for layer in layers
    ]
    specs = {kind: _layer_spec(architecture, config, *kind) for kind in kinds}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=_norm(architecture))


def _norm(architecture: Architecture) -> type[RMSNorm]:
    return OffsetRMSNorm if architecture.traits.offset_norms else RMSNorm


def _layer_spec(
    architecture: Architecture,
    config: TransformerConfig,
    window: int | None,
    has_experts: bool,
    has_delta_net: bool,
    turns: bool,
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    traits, norm = architecture.traits, _norm(architecture)
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        setattr(layer.submodules, name, norm if name in traits.norms else IdentityOp)
    for name in ("self_attn_bda", "mlp_bda"):
        if f"{name}.norm" in traits.norms:
            scales = traits.scaled_layers and name == "mlp_bda"
            added = ModuleSpec(module=AddNormed, params={"config": config, "norm": norm, "scales": scales})
            setattr(layer.submodules, name, added)
    if has_delta_net:
        delta = {"delta": architecture.delta_net}
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params=delta)
    elif architecture.latent is not None:
        params = {"architecture": architecture, "norm": norm}
        layer.submodules.self_attention = ModuleSpec(module=LatentAttention, params=params)
    else:
        _set_attention(layer.submodules.self_attention, architecture, config, window, turns)
    if has_experts:
        layer.submodules.mlp = expert_layer(architecture, norm)
        if traits.experts.beside:
            layer.submodules.pre_mlp_layernorm = IdentityOp
    else:
        activation = ModuleSpec(module=GatedActivation, params={"name": traits.activation})
        layer.submodules.mlp.keywords["submodules"].activation_func = activation
    return layer


def _set_attention(
    attention: ModuleSpec, architecture: Architecture, config: TransformerConfig, window: int | None, turns: bool
) -> None:
    traits = architecture.traits
    if traits.two_ropes:
        attention.module = TwoRopes
        places = (0, 2 * architecture.full_rotary_dim, 2 * architecture.angle_size)
        attention.params = {**attention.params, "angles": places[:2] if window is None else places[1:]}
    if (full := architecture.full_heads) is not None:
        heads = full if window is None else architecture.kinds_of_heads[0]
        attention.module = OwnHeads
        attention.params = {**attention.params, "heads": heads}
        if not heads.has_values:
            attention.submodules.linear_qkv = ModuleSpec(
                module=QueriesAndKeys, params={"linear": attention.submodules.linear_qkv}
            )
    if architecture.query_beta:
        attention.module = ScaledQueries
    if not turns:
        attention.module = WithoutRope
    core = {"window": window, "sinks": traits.sinks}
    attention.submodules.core_attention = ModuleSpec(module=PackedAttention, params=core)
    if architecture.qk_norm:
        norms = _qk_norms(architecture, config.tensor_model_parallel_size)
        attention.submodules.q_layernorm, attention.submodules.k_layernorm = norms
    if architecture.output_bias:
        attention.submodules.linear_proj = ModuleSpec(
            module=WithBias, params={"linear": attention.submodules.linear_proj}
        )


def _qk_norms(architecture: Architecture, tp: int) -> tuple[ModuleSpec, ModuleSpec]:
    if not architecture.traits.whole_qk_norm:
        return ModuleSpec(module=_norm(architecture)), ModuleSpec(module=_norm(architecture))
    query, key = (
        ModuleSpec(module=WholeRMSNorm, params={"num_heads": heads // tp})
        for heads in (architecture.num_heads, architecture.num_kv_heads)
    )
    return query, key
