"""Attention over packed sequences: by the heads of queries, keys and values, and by latents that these are made of.

Shapes: T tokens of a packed micro-batch, t = T / cp of them on a rank, N query heads and K key/value heads of this
rank, D head size, H hidden size.

Elsewhere: its place in a layer (layers.py), rotary positions (rope.py), and segments that share a prompt
(shared_prompts.py).
"""

import inspect
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from hacpo_mega.megatron.model.context_parallel import FromHeads, whole_sequences
from hacpo_mega.megatron.model.installed import FLASH3
from hacpo_mega.megatron.model.rope import rotate
from hacpo_mega.megatron.model.router import random_weight
from hacpo_mega.megatron.model.shared_prompts import PackedSegments, Run, attended_tokens, gather_tokens
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.latent import EPSILON

# torch 2.11 has no such argument and accepts grouped heads; later versions need it.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# Largest heads of both flash kernels.
MAX_FLASH_HEAD = 256


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed micro-batch (THD), with grouped key/value heads.

    CUDA in half precision, heads of up to 256: one variable-length flash kernel, flash-attention 3's or torch's.
    Elsewhere: scaled_dot_product_attention over sequences of similar length, on CUDA by its memory-efficient kernel.
    Each takes the same path with and without gradients, so a score and the training forward agree to the last bit. With
    context parallelism they get all tokens for this rank's share of the heads (context_parallel.py).
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
            self.sinks = as_part(torch.nn.Parameter(own))

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
        """Attention output of this rank's tokens [t, N, D]; D is the values', which may be below the keys'."""
        assert attention_mask is None, "packed sequences carry their mask in cu_seqlens"
        half = query_tND.dtype in (torch.bfloat16, torch.float16)
        flash = query_tND.is_cuda and half and query_tND.shape[-1] <= MAX_FLASH_HEAD
        attend = _attend_flash if flash else _attend_in_groups
        query, key, value = whole_sequences(query_tND, key_tKD, value_tKD, self.cp)
        sinks_N = None if self.sinks is None else self.sinks.chunk(self.cp.size())[self.cp.rank()]
        size, missing = value.shape[2], key.shape[2] - value.shape[2]
        if missing:  # of latents: kernels take values that are as long as keys
            value = pad(value, (0, missing))
        output = attend(query, key, value, packed_seq_params, self.scale, self.window, sinks_N)
        return self.from_heads(output[..., :size])


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
    # The kernel aligns the ends of queries and keys: the last query of a segment sees all keys, each before one less.
    with attended_tokens(sources, packed.key_places) as attended:
        if sinks_N is not None:
            return WithSinks.apply(query_TND, *attended, sinks_N, _Varlen(packed, scale, window))
        if has_flash3():
            return FLASH3(
                query_TND,
                *attended,
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
            *attended,
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
            own = slice(first, first + sum(run.lengths))
            attended = key_TKD[own], value_TKD[own]
            parts.append(_attend_padded(run.lengths, query_GND, *attended, scale, window, sinks_N))
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
    with attended_tokens((key_TKD, value_TKD), run.key_BM) as attended:
        padded = (tensor.transpose(1, 2) for tensor in (query_BQND, *attended))
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

    A sink is one more key in front, which all see: each query has a further number, its sink, that
    meets 1 there and 0 in other keys.
    """
    whole, groups = needs_whole_heads(query), query.shape[1] // key.shape[1]
    if whole and groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if sinks_N is None:
        return scaled_dot_product_attention(
            query, key, value, sees, is_causal=sees is None, scale=scale, enable_gqa=True
        )
    num_queries, size = query.shape[-2:]
    scale = size**-0.5 if scale is None else scale
    if sees is None:
        sees = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).tril()
    further = 8 if whole else 1  # the sink, then zeros: the size stays a multiple of eight
    sinks = pad((sinks_N / scale)[:, None, None], (0, further - 1)).expand(*query.shape[:3], further)
    keys, values = pad(key, (0, further, 1, 0)), pad(value, (0, further, 1, 0))
    keys[..., 0, size] = 1.0
    found = scaled_dot_product_attention(
        torch.cat([query, sinks], dim=-1), keys, values, pad(sees, (1, 0), value=True), scale=scale, enable_gqa=True
    )
    return found[..., :size]


def needs_whole_heads(query: torch.Tensor) -> bool:
    """True on CUDA: torch's memory-efficient kernel takes what flash cannot there, with as many heads of keys and
    values as of queries and sizes of whole 16 bytes. For anything else torch keeps the scores of all pairs of tokens.
    """
    return query.is_cuda


class LatentAttention(torch.nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as Megatron builds and calls an attention.

    A token's latents, vectors far shorter than its heads together, are normalised and projected to heads: one to keys
    that do not turn and to values, one to queries (or these come from the token itself). Every head's key ends with the
    same few numbers. Only these and the last of every query turn with the position.

        [c, r] = W_down x        [k_h, v_h] = W_up,h norm(c)        key_h = [k_h, rotated r]

    Tensor ranks share the heads; every rank computes the latents of its own tokens. Heads are written out, so attention
    itself is PackedAttention. Megatron's own MLA (core 0.19.2) takes positions from where segments begin, which is
    wrong for answers that share a prompt and for cp, and gathers latents that it has cut over tensor ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        architecture: Architecture,
        norm: type[torch.nn.Module],
        layer_number: int,
        **_place: object,
    ) -> None:
        """`norm` is the class of RMSNorm of the layer (layers.py)."""
        super().__init__()
        latent, heads, hidden = architecture.latent, architecture.num_heads, architecture.hidden_size
        self.config, self.latent, self.tp_group = config, latent, pg_collection.tp
        self.heads = heads // pg_collection.tp.size()
        how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
        split = {"gather_output": False, "tp_group": pg_collection.tp, **how}
        self.q_down = self.q_norm = None
        if latent.query_rank:
            self.q_down = LatentProjection(config, latent.query_rank, pg_collection.tp)
            self.q_norm = norm(config, latent.query_rank, EPSILON)
        self.q_up = ColumnParallelLinear(latent.query_rank or hidden, heads * architecture.head_dim, **split)
        self.kv_down = LatentProjection(config, latent.cached, pg_collection.tp)
        self.kv_norm = norm(config, latent.rank, EPSILON)
        self.kv_up = ColumnParallelLinear(latent.rank, heads * (latent.nope_dim + latent.value_dim), **split)
        self.core_attention = PackedAttention(config, pg_collection, architecture.softmax_scale)
        self.linear_proj = RowParallelLinear(
            heads * latent.value_dim, hidden, input_is_parallel=True, tp_group=pg_collection.tp, **how
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSegments,
        **_how: object,
    ) -> tuple[torch.Tensor, None]:
        """[t/tp, 1, H] -> the same shape, and no bias; `rotary_pos_emb` [t, 1, 1, 4P] of its positions."""
        latent = self.latent
        of_query = hidden_states if self.q_down is None else self.q_norm(self.q_down(hidden_states))
        query_tND = self._heads_of(self.q_up(of_query)[0])
        compressed, turned = self.kv_down(hidden_states).split([latent.rank, latent.rope_dim], dim=-1)
        if self.tp_group.size() > 1:  # each rank's heads meet it, so its gradient is the sum of theirs
            turned = gather_from_sequence_parallel_region(turned, group=self.tp_group)
        written_tNE = self._heads_of(self.kv_up(self.kv_norm(compressed))[0])
        key_tNE, value_tND = written_tNE.split([latent.nope_dim, latent.value_dim], dim=-1)
        turned = rotate(turned.contiguous(), rotary_pos_emb, self.config).expand(-1, self.heads, -1)
        plain, last = query_tND.split([latent.nope_dim, latent.rope_dim], dim=-1)
        query_tND = torch.cat([plain, rotate(last.contiguous(), rotary_pos_emb, self.config)], dim=-1)
        key_tND = torch.cat([key_tNE, turned], dim=-1)
        output = self.core_attention(query_tND, key_tND, value_tND, None, packed_seq_params=packed_seq_params)
        return self.linear_proj(output.flatten(1)[:, None])[0], None

    def _heads_of(self, rows_t1R: torch.Tensor) -> torch.Tensor:
        return rows_t1R.squeeze(1).unflatten(1, (self.heads, -1))


class LatentProjection(torch.nn.Module):
    """Linear layer that every tensor rank has whole, for its own tokens."""

    def __init__(self, config: TransformerConfig, rows: int, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.weight = random_weight(config, rows, config.hidden_size)
        # Under sequence parallelism a rank has a part of the tokens: parts of the gradient are added up, as a norm's.
        self.weight.sequence_parallel = config.sequence_parallel
        self.adds_at_once = config.gradient_accumulation_fusion

    def forward(self, hidden_t1H: torch.Tensor) -> torch.Tensor:
        """[..., rows] of [..., H]."""
        none = {"allreduce_dgrad": False, "sequence_parallel": False, "tp_group": self.tp_group}
        is_trained = self.weight.requires_grad  # else it has no sum of gradients to add to
        product = linear_with_grad_accumulation_and_async_allreduce if is_trained else linear_with_frozen_weight
        return product(hidden_t1H, self.weight, None, self.adds_at_once, **none)


def as_part(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Marks a rank's part, which is no copy: Megatron's norm of the gradient counts it on every rank."""
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
