"""Public functions: check the arguments (checks.py), choose the backend (backends.py), compute, connect autograd."""

import torch
import torch.distributed as dist

from hacpo_kernels import checks, reference
from hacpo_kernels.autograd import GatedActivationFunction, LinearLogprob, LmHead, RMSNormFunction, RotaryFunction
from hacpo_kernels.backends import choose_backend
from hacpo_kernels.bounds import Bounds
from hacpo_kernels.linear_logprob import DTYPES
from hacpo_kernels.objective_stats import SequenceTerms
from hacpo_kernels.reference import Curve


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    reduce_hidden_grad: bool = True,
    fuse_main_grad: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Log-probs [T] of `target` under softmax(hidden @ weight^T / temperature), without materialising the logits.

    hidden        [T, H] float; with sequence parallelism, gathered
    weight        [V_local, H], the dtype of hidden: this rank's vocabulary shard, its first row id `vocab_start`
    target        [T] int, global token ids, or `ignore_index`: log-prob 0, no gradient
    vocab_size    the vocabulary without padding over all shards: rows at or past it are never part of the softmax.
                  Default: all rows of all shards
    softcap       logits z of hidden @ weight^T are replaced by c tanh(z / c) with this c, before temperature
    group         the tensor-parallel group over which the vocabulary is sharded, None when it is not. One all-gather
                  of 3 numbers per token, merged in rank order: all ranks return the same bits
    reduce_hidden_grad   sum the gradient of hidden over `group` here (hidden is replicated). False when a
                  reduce-scatter of sequence parallelism follows
    fuse_main_grad   add the weight gradient to `weight.main_grad` in float32, as Megatron's
                  gradient_accumulation_fusion does, and hand autograd a placeholder: otherwise the gradient of a bf16
                  weight is rounded to bf16 on its way

    Returns nats [T], float32 (float64 for float64 inputs), differentiable in hidden and weight.
    Raises ValueError on arguments that do not fit (checks.py).
    """
    num_shards = 1 if group is None else group.size()
    if vocab_size is None:
        vocab_size = vocab_start + len(weight) if num_shards == 1 else len(weight) * num_shards
    checks.check_linear_logprob(hidden, weight, target, vocab_start, vocab_size, temperature, ignore_index)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a number above 0, or None")
    if num_shards > 1 and group.rank() > 0 and vocab_start == 0:
        raise ValueError(f"vocab_start is 0 on rank {group.rank()} of the group; expected the first id of its shard")
    if fuse_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("fuse_main_grad is on but weight has no main_grad; expected Megatron's gradient buffer there")
    head = LmHead(
        backend=choose_backend(backend, hidden, DTYPES),
        curve=Curve(1.0 / temperature, softcap),
        num_columns=max(0, min(len(weight), vocab_size - vocab_start)),
        group=group if num_shards > 1 else None,
        reduce_hidden_grad=reduce_hidden_grad,
        fuse_main_grad=fuse_main_grad,
    )
    if hidden.is_cuda and not target.is_cuda:
        target = target.pin_memory()  # else the copy may wait for the device's queue
    target = target.to(hidden.device, torch.int64, non_blocking=True)
    column_T = target - vocab_start
    column_T = column_T.masked_fill((column_T < 0) | (column_T >= head.num_columns), -1)
    return LinearLogprob.apply(hidden, weight, column_T, target == ignore_index, head)


def segment_sum(token_logprob: torch.Tensor, cu_seqlens: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Sum of token_logprob [T] over every segment of cu_seqlens [B + 1], float64 [B]."""
    checks.check_segments(token_logprob, cu_seqlens)
    cu_seqlens = cu_seqlens.to(token_logprob.device, non_blocking=True)
    return choose_backend(backend, token_logprob, checks.LOGPROBS).segment_sum(token_logprob, cu_seqlens)


def packed_objective(
    token_logprob: torch.Tensor,
    cu_seqlens: torch.Tensor,
    source_logprob: torch.Tensor,
    advantage: torch.Tensor,
    is_self: torch.Tensor,
    *,
    update_index: int,
    bounds: Bounds,
    length: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, SequenceTerms]:
    """HACPO's loss of packed sequences (formula: reference.objective_from_mean), without a host sync on CUDA.

    token_logprob   [T] nats under the learner now; cu_seqlens [B + 1] starts of the sequences, the last entry T
    source_logprob  [B] mean log-prob under the source; advantage [B] with omega in it; is_self [B] bool
    update_index    m, the updates already made in this step
    length          [B] what the sum of each sequence is divided by; default: its number of tokens

    Returns (loss_B, coefficient_B, terms): coefficient_B = d loss_b / d token_logprob_t for every token t of b.
    `loss_B` is differentiable in token_logprob through exactly that. Mean and source_logprob are compared in the
    dtype of `source_logprob`, so that an unchanged policy has ratio 1 to the last bit. A sequence without tokens (or
    of length 0) has loss and coefficient 0. Raises ValueError on arguments that do not fit (checks.py).
    """
    checks.check_segments(token_logprob, cu_seqlens)
    num_sequences = len(cu_seqlens) - 1
    checks.check_objective(num_sequences, token_logprob, source_logprob, advantage, is_self, update_index, length)
    cu_seqlens = cu_seqlens.to(token_logprob.device, non_blocking=True)
    length = length if length is None else length.to(token_logprob.device, non_blocking=True)
    chosen = choose_backend(backend, token_logprob, checks.LOGPROBS)
    loss_B, coefficient_B, ratio_B, weight_B = chosen.packed_objective(
        token_logprob.detach(), cu_seqlens, source_logprob, advantage, is_self, length, bounds.low(update_index), bounds
    )
    terms = SequenceTerms(loss_B, ratio_B, weight_B, advantage, is_self)
    return _PackedLoss.apply(token_logprob, loss_B, coefficient_B, cu_seqlens), coefficient_B, terms


def objective_from_mean(
    seq_logprob: torch.Tensor,
    source_logprob: torch.Tensor,
    advantage: torch.Tensor,
    is_self: torch.Tensor,
    *,
    update_index: int,
    bounds: Bounds,
) -> tuple[torch.Tensor, torch.Tensor, SequenceTerms]:
    """Sequence-level part of packed_objective, from mean log-probs [B] in nats per token, on any device.

    Returns (loss_B, grad_B, terms), grad_B = d loss_B / d seq_logprob, both in the dtype of `seq_logprob`; not part of
    an autograd graph. Raises ValueError on arguments that do not fit.
    """
    checks.check_tensor("seq_logprob", seq_logprob, (None,), checks.LOGPROBS)
    checks.check_objective(len(seq_logprob), seq_logprob, source_logprob, advantage, is_self, update_index)
    loss_B, ratio_B, weight_B = reference.objective_from_mean(
        seq_logprob.detach(), source_logprob, advantage, is_self, bounds.low(update_index), bounds
    )
    loss_B, grad_B = loss_B.to(seq_logprob.dtype), (-weight_B * advantage.double()).to(seq_logprob.dtype)
    return loss_B, grad_B, SequenceTerms(loss_B, ratio_B, weight_B, advantage, is_self)


def gated_activation(gate_up: torch.Tensor, activation: str, *, backend: str = "auto") -> torch.Tensor:
    """act(gate) * up, [..., F], of `gate_up` [..., 2 F], gate before up; differentiable, and keeps `gate_up` alone.

    `activation` is "silu", "gelu_pytorch_tanh" or "swigluoai". On CUDA computed in float32 and rounded once, elsewhere
    with the bits of torch's operations. Raises ValueError on another name or an odd number of columns.
    """
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(reference.ACTIVATIONS)}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns; expected gate and up side by side")
    return GatedActivationFunction.apply(gate_up, activation, choose_backend(backend, gate_up, DTYPES))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, backend: str = "auto"
) -> torch.Tensor:
    """x (weight + offset) / sqrt(mean of x^2 + eps) over the last dimension of `x` [..., H]; differentiable in both.

    On CUDA heads within a fused projection are read without a copy. Computed in float32 and rounded once. Raises
    ValueError on a weight of another shape, dtype or device.
    """
    checks.check_tensor("weight", weight, (x.shape[-1],), (x.dtype,), x)
    return RMSNormFunction.apply(x, weight, eps, offset, choose_backend(backend, x, DTYPES))


def rotate_heads(
    heads: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool, backend: str = "auto"
) -> torch.Tensor:
    """Queries or keys [T, N, D], rotated by their tokens' own angles; differentiable in `heads`.

    cos_sin       [T, 4 P], 2 P <= D, the dtype of heads: cosines, then sines, twice each, in the order of the pairs
    interleaved   a pair is two neighbours, cosines c1 c1 c2 c2 ...; else one of each half, c1 c2 ... c1 c2 ...

    Dimensions from 2 P on stay as they are. On CUDA computed in float32 and rounded once, elsewhere with the bits of
    Megatron's own function. Raises ValueError on shapes or dtypes that do not fit.
    """
    checks.check_tensor("heads", heads, (None, None, None), checks.FLOATS)
    checks.check_tensor("cos_sin", cos_sin, (len(heads), None), (heads.dtype,), heads)
    if cos_sin.shape[1] % 4 or cos_sin.shape[1] > 2 * heads.shape[2]:
        raise ValueError(
            f"cos_sin has {cos_sin.shape[1]} columns; expected 4 for each pair, at most {2 * heads.shape[2]} for heads "
            f"of {heads.shape[2]}"
        )
    return RotaryFunction.apply(heads, cos_sin, interleaved, choose_backend(backend, heads, DTYPES))


@torch.no_grad()
def merge_adapter(
    weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float, *, backend: str = "auto"
) -> torch.Tensor:
    """W + scale * B A of W [..., N, M], B [..., N, R] and A [..., R, M], in new memory and W's dtype; W stays.

    A matrix product may sum in another order for another shape. Here an element is summed one rank after the other,
    each product rounded by itself, float32: equal bits for any part of W, by either backend. Not differentiable.
    Raises ValueError on shapes that do not fit.
    """
    rank, stack = up.shape[-1], weight.shape[:-2]
    wanted = ((*stack, weight.shape[-2], rank), (*stack, rank, weight.shape[-1]))
    if weight.ndim not in (2, 3) or (up.shape, down.shape) != wanted:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (weight, up, down))
        raise ValueError(f"weight, up and down are {shapes}; expected [N, M], [N, R], [R, M], or a stack of these")
    is_single = weight.ndim == 2
    parts = (weight, up.float() * scale, down.float())
    parts = (part[None] for part in parts) if is_single else parts
    merged = choose_backend(backend, weight, DTYPES).merge_adapter(*parts)
    return merged[0] if is_single else merged


def combine_rows(
    rows: torch.Tensor, index: torch.Tensor, shares: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Sum [n, H] of each token's rows, weighted by its float32 shares [n, k]; not part of an autograd graph.

    rows    [n k, H]; index int64 [n, k], contiguous: the rows of each token
    """
    return choose_backend(backend, rows, DTYPES).combine_rows(rows, index, shares)


def combine_gradients(
    grad: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `combine_rows` in rows [n k, H] and shares [n, k], from that of its result [n, H]."""
    return choose_backend(backend, rows, DTYPES).combine_gradients(grad, rows, index, shares)


def add_grouped_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, *, backend: str = "auto"
) -> None:
    """total [e, N, K] += left^T @ right over each expert's rows, in place, in float32 over all of them.

    left [R, N], right [R, K]   sorted by expert; the rows of an expert end at ends int32 [e]
    """
    choose_backend(backend, left, DTYPES).add_grouped_product(total, left, right, ends)


class _PackedLoss(torch.autograd.Function):
    """Connects loss_B [B] to autograd: every token of sequence b gets coefficient_b."""

    @staticmethod
    def forward(ctx, token_logprob_T, loss_B, coefficient_B, cu_seqlens):
        ctx.save_for_backward(coefficient_B, cu_seqlens)
        ctx.num_tokens = len(token_logprob_T)
        return loss_B.view_as(loss_B)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_B):
        coefficient_B, cu_seqlens = ctx.saved_tensors
        tokens_T = torch.arange(ctx.num_tokens, device=grad_B.device, dtype=cu_seqlens.dtype)
        # The sequence of a token, without asking the device for the lengths (repeat_interleave would).
        sequence_T = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens_T, right=True)
        return (grad_B * coefficient_B)[sequence_T], None, None, None
