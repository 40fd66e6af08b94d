"""Layers that Megatron's local spec lacks: packed attention, an output bias, and norms.

With them one layer spec serves the CPU and any GPU without TransformerEngine. Shapes: T tokens of a packed micro-batch,
t = T / cp of them on a rank, N query heads and K key/value heads of this rank, D head size, H
hidden size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from hacpo_mega.megatron.model.context_parallel import FromHeads, whole_sequences
from hacpo_mega.megatron.model.delta_net import GatedDeltaNet
from hacpo_mega.megatron.model.gated import GatedActivation
from hacpo_mega.megatron.model.installed import FLASH3
from hacpo_mega.megatron.model.moe import expert_layer
from hacpo_mega.megatron.model.rope import OwnHeads, QueriesAndKeys, ScaledQueries, TwoRopes, WithoutRope
from hacpo_mega.megatron.model.shared_prompts import PackedSegments, Run, gather_tokens, met_tokens
from hacpo_mega.models.families.architecture import Architecture

# torch 2.11 has no such argument and accepts grouped heads; later versions need it.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

# Largest heads of both flash kernels.
MOST_OF_FLASH = 256


# ---- norms: under sequence parallelism, over all heads, after a block, scaled by 1 + w


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
        self.weight = _as_part(torch.nn.Parameter(own))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N, D], normalised over both and over the ranks."""
        numbers = x.float()
        squares = numbers.square().sum(dim=(-2, -1), keepdim=True)
        size = self.weight.numel() * self.group.size()
        if self.group.size() > 1:
            squares = _SumOverRanks.apply(squares, self.group)
        scaled = numbers * torch.rsqrt(squares / size + self.eps) * self.weight.float().view(x.shape[-2:])
        return scaled.type_as(x)


def _as_part(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Marks a rank's part, which is no copy: Megatron's norm of the gradient counts it on every rank."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return parameter


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


# ---- attention and layer specs


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed micro-batch (THD), with grouped key/value heads.

    CUDA in half precision, heads of up to 256: one variable-length flash kernel, flash-attention 3's or torch's.
    Elsewhere: scaled_dot_product_attention over sequences of similar length. Both take the same path with and without
    so a score and the training forward agree to the last bit. With context parallelism they get all tokens for this
    rank's share of the heads (context_parallel.py).
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        **_place: object,
    ) -> None:
        """`window` is the number of tokens that each one attends to, itself included; None: all before it.

        `sinks`: each query head has one (WithSinks).
        """
        super().__init__()
        assert config.attention_dropout == 0.0, "dropout would make a score differ from the training forward"
        self.scale, self.window, self.cp = softmax_scale, window, pg_collection.cp
        self.from_heads = FromHeads(self.cp)
        self.sinks = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            own = torch.zeros(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
            self.sinks = _as_part(torch.nn.Parameter(own))

    def forward(
        self,
        query_tND: torch.Tensor,
        key_tKD: torch.Tensor,
        value_tKD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSegments,
        **_megatron_options: object,
    ) -> torch.Tensor:
        """Attention output of this rank's tokens [t, N, D]."""
        assert attention_mask is None, "packed sequences carry their mask in cu_seqlens"
        half = query_tND.dtype in (torch.bfloat16, torch.float16)
        flash = query_tND.is_cuda and half and query_tND.shape[-1] <= MOST_OF_FLASH
        attend = _attend_flash if flash else _attend_in_groups
        whole = whole_sequences(query_tND, key_tKD, value_tKD, self.cp)
        sinks_N = None if self.sinks is None else self.sinks.chunk(self.cp.size())[self.cp.rank()]
        return self.from_heads(attend(*whole, packed_seq_params, self.scale, self.window, sinks_N))


def _attend_flash(
    query_TND: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    packed: PackedSegments,
    scale: float | None,
    window: int | None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    # Megatron splits one fused projection: its value is a strided view, which the kernel refuses.
    sources = key_TKD, value_TKD.contiguous()
    with met_tokens(sources, packed.key_places) as met:  # the kernel lets the last query of a segment see all of them
        if sinks_N is not None:
            return WithSinks.apply(query_TND, *met, sinks_N, _Varlen(packed, scale, window))
        if has_flash3():
            return FLASH3(
                query_TND,
                *met,
                packed.cu_seqlens_q,
                packed.cu_seqlens_kv,
                packed.max_seqlen_q,
                packed.max_seqlen_kv,
                softmax_scale=scale,
                causal=True,
                window_size=(-1 if window is None else window - 1, 0),
                num_splits=1,  # else the shape decides, and an answer that is scored twice has two scores
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
        return varlen_attn(
            query_TND,
            *met,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **GROUPED_HEADS,
        )


def has_flash3() -> bool:
    """True if half precision takes flash-attention 3: it is installed, and this device is a Hopper GPU."""
    return FLASH3 is not None and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _attend_in_groups(
    query_TND: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    packed: PackedSegments,
    scale: float | None,
    window: int | None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends in padded batches of neighbouring segments of similar length: one call for each would cost more.

    The padding comes after a segment, where causality hides it from every token of the segment.
    """
    parts, first = [], 0
    for run in packed.runs:
        query_GND = query_TND[first : first + sum(run.lengths)]
        if run.key_BM is None:
            meets = slice(first, first + sum(run.lengths))
            met = key_TKD[meets], value_TKD[meets]
            parts.append(_attend_padded(run.lengths, query_GND, *met, scale, window, sinks_N))
        else:
            parts.append(_attend_prefixed(run, query_GND, key_TKD, value_TKD, scale, window, sinks_N))
        first += sum(run.lengths)
    return torch.cat(parts)


def _attend_padded(
    lengths: list[int],
    query_TND: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    longest = max(lengths)
    counting = torch.arange(longest, device=query_TND.device)
    is_token_BL = counting < torch.tensor(lengths, device=query_TND.device)[:, None]
    places_T = is_token_BL.flatten().nonzero()[:, 0]

    def spread(tensor_TND: torch.Tensor) -> torch.Tensor:
        """Pads to [B, N, longest, D], the form of scaled_dot_product_attention."""
        padded = tensor_TND.new_zeros(is_token_BL.numel(), *tensor_TND.shape[1:]).index_copy(0, places_T, tensor_TND)
        return padded.unflatten(0, is_token_BL.shape).transpose(1, 2)

    sees_all = window is None or window >= longest
    back_LL = None if sees_all else counting[:, None] - counting
    sees_LL = None if back_LL is None else (back_LL >= 0) & (back_LL < window)
    output = _attend_masked(*map(spread, (query_TND, key_TKD, value_TKD)), sees_LL, scale, sinks_N)
    return output.transpose(1, 2).flatten(0, 1)[places_T]


def _attend_prefixed(
    run: Run,
    query_GND: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of segments that meet the keys of a prompt before their own."""
    back_BQM = run.back_BQM
    sees_BQM = (back_BQM >= 0) if window is None else (back_BQM >= 0) & (back_BQM < window)
    query_BQND = gather_tokens(query_GND, run.query_BQ)
    with met_tokens((key_TKD, value_TKD), run.key_BM) as met:
        padded = (tensor.transpose(1, 2) for tensor in (query_BQND, *met))
        output = _attend_masked(*padded, sees_BQM[:, None], scale, sinks_N)
    return output.transpose(1, 2)[run.is_query_BQ]


class WithSinks(torch.autograd.Function):
    """Attention whose softmax has a further term for each query head, its sink, without a value (gpt-oss).

    With o and l, a kernel's output and log-sum-exp without sinks, and m = log(e^l + e^sink) that with them

        out = o e^(l - m) = o sigmoid(l - sink)        dsink = - sum over rows of e^(sink - m) <gradient, out>

    The gradients of queries, keys and values are those of the kernel's own backward, given out and m for o and l: it
    computes p = e^(score - m) again, and from each row's <gradient of o, p's value> it takes <gradient, out>.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_N: torch.Tensor,
        kernel: "_Varlen",
    ) -> torch.Tensor:
        output, lse = kernel.forward(query, key, value)
        sinks = sinks_N[:, None].to(lse.dtype)
        total = torch.logaddexp(lse, sinks)
        output = (output * kernel.as_output((lse - total).exp())).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, total)
        ctx.kernel, ctx.dtype = kernel, sinks_N.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, total = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad, query, key, value, output, total)
        inner = (grad.to(total.dtype) * output).sum(dim=-1, keepdim=True)
        terms = ctx.kernel.as_output((sinks - total).exp()) * inner
        others = [dim for dim in range(terms.dim()) if dim != 1]  # all but heads
        return *gradients, -terms.sum(dim=others).to(ctx.dtype), None


@dataclass(frozen=True)
class _Varlen:
    """torch's flash kernel over a pack: queries [T, N, D], log-sum-exp float32 [N, T]."""

    packed: PackedSegments
    scale: float | None
    window: int | None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp."""
        p = self.packed
        lengths = p.cu_seqlens_q, p.cu_seqlens_kv, p.max_seqlen_q, p.max_seqlen_kv
        output, lse, _ = torch.ops.torch_attn._varlen_attn(
            *tensors, *lengths, self.window is None, self.scale, self._sides, True
        )
        return output, lse

    def backward(self, grad: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of queries, keys and values."""
        p, state = self.packed, torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of no dropout
        lengths = p.cu_seqlens_q, p.cu_seqlens_kv, p.max_seqlen_q, p.max_seqlen_kv
        return torch.ops.torch_attn._varlen_attn_backward(
            grad.contiguous(), *kept, *lengths, self.window is None, state, self.scale, self._sides
        )

    @property
    def _sides(self) -> list[int]:
        return [-1 if self.window is None else self.window - 1, 0]

    @staticmethod
    def as_output(numbers_NT: torch.Tensor) -> torch.Tensor:
        """Numbers of heads and tokens in the layout of the output: [T, N, 1]."""
        return numbers_NT.T[..., None]


def _attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sees: torch.Tensor | None,
    scale: float | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """torch's attention of queries [B, N, Q, D] over what they see; None: all up to themselves.

    A sink is one more key in front, which all see: each query has a further number, its sink, that meets 1 there and 0
    in other keys.
    """
    if sinks_N is None:
        return scaled_dot_product_attention(
            query, key, value, sees, is_causal=sees is None, scale=scale, enable_gqa=True
        )
    num_queries, size = query.shape[-2:]
    scale = size**-0.5 if scale is None else scale
    if sees is None:
        sees = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).tril()
    sinks = (sinks_N / scale)[:, None, None].expand(*query.shape[:3], 1)
    keys, values = pad(key, (0, 1, 1, 0)), pad(value, (0, 1, 1, 0))
    keys[..., 0, size] = 1.0
    found = scaled_dot_product_attention(
        torch.cat([query, sinks], dim=-1), keys, values, pad(sees, (1, 0), value=True), scale=scale, enable_gqa=True
    )
    return found[..., :size]


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
        (a.window_of(layer), a.has_experts_in(layer), a.has_delta_net_in(layer), layer not in a.unturned)
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
    else:
        _set_attention(layer.submodules.self_attention, architecture, config, window, turns)
    if has_experts:
        layer.submodules.mlp = expert_layer(architecture)
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
