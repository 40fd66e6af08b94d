"""The public functions: check the arguments, choose the backend, join the vocabulary shards, hook into autograd.

The one place that chooses: `auto` is Triton for CUDA tensors and plain torch (reference.py) elsewhere. A backend does
what `Backend` lists; everything around that is here and shared.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hacpo_kernels import checks, reference
from hacpo_kernels import linear_logprob as triton_logprob
from hacpo_kernels import sequence_objective as triton_objective
from hacpo_kernels import stash as triton_stash
from hacpo_kernels.reference import LogitStats, ObjectiveStats, RowGradients, Stash


@dataclass(frozen=True)
class Backend:
    """What a backend must do; reference.py says what each of these means."""

    logit_stats: Callable[..., tuple[LogitStats, Stash | None]]
    logit_gradient: Callable[[torch.Tensor, torch.Tensor, float, RowGradients], torch.Tensor]
    stash_gradient: Callable[[Stash, torch.Tensor, float, RowGradients], torch.Tensor]
    operand: Callable[[torch.Tensor], torch.Tensor]
    chunk_rows: Callable[[int], int]
    segment_sum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    packed_objective: Callable[..., tuple[torch.Tensor, torch.Tensor, ObjectiveStats]]


REFERENCE = Backend(
    reference.logit_stats,
    reference.logit_gradient,
    reference.stash_gradient,
    reference.operand,
    reference.chunk_rows,
    reference.segment_sum,
    reference.packed_objective,
)
TRITON = Backend(
    triton_logprob.logit_stats,
    triton_logprob.logit_gradient,
    triton_stash.stash_gradient,
    triton_logprob.operand,
    triton_logprob.chunk_rows,
    triton_objective.segment_sum,
    triton_objective.packed_objective,
)


def choose_backend(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> Backend:
    """Triton for CUDA tensors of one of `dtypes`, plain torch for everything else, unless `name` insists."""
    if name not in ("auto", "triton", "reference"):
        raise ValueError(f"backend is {name!r}; expected auto, triton or reference")
    if name == "auto":
        name = "triton" if tensor.is_cuda and tensor.dtype in dtypes else "reference"
    if name == "reference":
        return REFERENCE
    if tensor.dtype not in dtypes:
        raise ValueError(f"backend is triton, tensors are {tensor.dtype}; expected one of {dtypes}, or backend auto")
    if not tensor.is_cuda and not triton_logprob.INTERPRETED:
        raise ValueError(
            f"backend is triton, tensors are on {tensor.device}; expected CUDA tensors, backend auto, or "
            "TRITON_INTERPRET=1 in the environment before Python starts"
        )
    return TRITON


@dataclass(frozen=True)
class _Head:
    """What linear_logprob's backward must know of its forward beside tensors."""

    backend: Backend
    inverse_temperature: float
    num_columns: int  # rows of the weight shard that are vocabulary; the rest is padding
    group: dist.ProcessGroup | None
    reduce_hidden_grad: bool
    fuse_main_grad: bool
    return_entropy: bool
    stash: bool


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    return_entropy: bool = False,
    reduce_hidden_grad: bool = True,
    fuse_main_grad: bool = False,
    stash: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `target` under softmax(hidden @ weight^T / temperature), without ever holding the logits.

    hidden        [T, H] float; with sequence parallelism, gathered
    weight        [V_local, H], the dtype of hidden: this rank's vocabulary shard, its first row id `vocab_start`
    target        [T] int, global token ids, or `ignore_index`: log-prob 0, no gradient
    vocab_size    the vocabulary without padding over all shards: rows at or past it are never part of the softmax.
                  Default: all rows of all shards
    group         the tensor-parallel group over which the vocabulary is sharded, None when it is not. One all-gather
                  of 4 numbers per token, merged in rank order: all ranks return the same bits
    reduce_hidden_grad   sum the gradient of hidden over `group` here (hidden is replicated). False when a
                  reduce-scatter of sequence parallelism follows
    fuse_main_grad   add the weight gradient to `weight.main_grad` in float32, as Megatron's
                  gradient_accumulation_fusion does, and hand autograd a placeholder

    stash         keep exp(logit - max) of the forward, T * V_local numbers in the dtype of hidden (float32 on the
                  reference path), and save backward the recomputation: a quarter of the arithmetic of the head

    Returns nats [T], float32 (float64 for float64 inputs), differentiable in hidden and weight; with `return_entropy`
    also the entropy of the softmax [T]. Raises ValueError on arguments that do not fit (checks.py).
    """
    num_shards = 1 if group is None else group.size()
    if vocab_size is None:
        vocab_size = vocab_start + len(weight) if num_shards == 1 else len(weight) * num_shards
    checks.check_linear_logprob(hidden, weight, target, vocab_start, vocab_size, temperature, ignore_index)
    if num_shards > 1 and group.rank() > 0 and vocab_start == 0:
        raise ValueError(f"vocab_start is 0 on rank {group.rank()} of the group; expected the first id of its shard")
    if fuse_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("fuse_main_grad is on but weight has no main_grad; expected Megatron's gradient buffer there")
    head = _Head(
        backend=choose_backend(backend, hidden, triton_logprob.DTYPES),
        inverse_temperature=1.0 / temperature,
        num_columns=max(0, min(len(weight), vocab_size - vocab_start)),
        group=group if num_shards > 1 else None,
        reduce_hidden_grad=reduce_hidden_grad,
        fuse_main_grad=fuse_main_grad,
        return_entropy=return_entropy,
        stash=stash and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
    )
    target = target.to(hidden.device, torch.int64, non_blocking=True)
    column_T = target - vocab_start
    column_T = column_T.masked_fill((column_T < 0) | (column_T >= head.num_columns), -1)
    logprob_T, entropy_T = _LinearLogprob.apply(hidden, weight, column_T, target == ignore_index, head)
    return (logprob_T, entropy_T) if return_entropy else logprob_T


class _LinearLogprob(torch.autograd.Function):
    """Forward keeps one number per token (unless it stashes); backward makes the logits again, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, column_T, ignored_T, head):
        stats, stash = head.backend.logit_stats(
            hidden_TH,
            weight_VH[: head.num_columns],
            column_T,
            head.inverse_temperature,
            head.return_entropy,
            head.stash,
        )
        if head.group is not None:
            stats = _merge_over_group(stats, head.group)
        logprob_T, logsumexp_T, entropy_T = reference.finish_stats(stats)
        logprob_T = logprob_T.masked_fill_(ignored_T, 0.0)
        entropy_T = entropy_T.masked_fill_(ignored_T, 0.0)
        ctx.save_for_backward(hidden_TH, weight_VH, column_T, ignored_T, logsumexp_T, entropy_T, *(stash or ()))
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprob_T, grad_entropy_T):
        hidden_TH, weight_VH, column_T, ignored_T, logsumexp_T, entropy_T, *stash = ctx.saved_tensors
        if not ctx.head.return_entropy:
            grad_entropy_T = None
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(logsumexp_T)
        rows_N = _rows_with_gradient(grad_logprob_T, grad_entropy_T, ignored_T)
        columns = (column_T, logsumexp_T, grad_logprob_T, entropy_T, grad_entropy_T)
        rows = RowGradients(*(x if x is None else x[rows_N] for x in columns))
        stash = Stash(*stash) if stash else None
        grad_hidden_NH, grad_weight_VH = _fold_chunks(ctx, hidden_TH, weight_VH, rows_N, rows, stash)
        if grad_hidden_NH is not None and len(rows_N) < len(hidden_TH):
            grad_hidden_NH = torch.zeros_like(hidden_TH).index_copy_(0, rows_N, grad_hidden_NH)
        return grad_hidden_NH, grad_weight_VH, None, None, None


def _merge_over_group(stats: LogitStats, group: dist.ProcessGroup) -> LogitStats:
    mine_4T = torch.stack(stats)
    all_R4T = mine_4T.new_empty((group.size(), *mine_4T.shape))
    dist.all_gather(list(all_R4T), mine_4T, group=group)
    return reference.merge_stats([LogitStats(*shard_4T) for shard_4T in all_R4T])


def _rows_with_gradient(grad_logprob_T, grad_entropy_T, ignored_T) -> torch.Tensor:
    """Rows that backward must touch. All tokens of a clipped sequence have coefficient 0: often most of a batch."""
    needed_T = grad_logprob_T != 0
    if grad_entropy_T is not None:
        needed_T = needed_T | (grad_entropy_T != 0)
    return (needed_T & ~ignored_T).nonzero()[:, 0]


def _fold_chunks(
    ctx, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows_N: torch.Tensor, rows: RowGradients, stash: Stash | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradient of the logits, one bounded chunk at a time, folded into (grad_hidden [N, H], grad_weight [V, H])."""
    head, backend, dtype = ctx.head, ctx.head.backend, reference.compute_dtype(weight_VH.dtype)
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    reduces = head.group is not None and head.reduce_hidden_grad
    vocabulary_VH = backend.operand(weight_VH[: head.num_columns])
    grad_hidden_NH = grad_weight_VH = None
    if wants_hidden:
        shape = (len(rows_N), hidden_TH.shape[1])
        grad_hidden_NH = hidden_TH.new_zeros(shape, dtype=dtype if reduces else hidden_TH.dtype)
    if wants_weight:
        grad_weight_VH = weight_VH.main_grad if head.fuse_main_grad else torch.zeros_like(weight_VH, dtype=dtype)
    step = backend.chunk_rows(head.num_columns)
    for start in range(0, len(rows_N) if head.num_columns else 0, step):
        chunk = slice(start, start + step)
        hidden_CH = hidden_TH[rows_N[chunk]]
        chunk_rows = RowGradients(*(x if x is None else x[chunk] for x in rows))
        if stash is None:
            gradient_CV = backend.logit_gradient(hidden_CH, vocabulary_VH, head.inverse_temperature, chunk_rows)
        else:
            gradient_CV = backend.stash_gradient(stash, rows_N[chunk], head.inverse_temperature, chunk_rows)
        if wants_hidden:
            grad_hidden_NH[chunk] = _product(gradient_CV, vocabulary_VH, dtype)
        if wants_weight:
            _add_product(grad_weight_VH[: head.num_columns], gradient_CV.t(), hidden_CH)
    if wants_hidden and reduces:
        dist.all_reduce(grad_hidden_NH, group=head.group)
        grad_hidden_NH = grad_hidden_NH.to(hidden_TH.dtype)
    return grad_hidden_NH, _weight_gradient(head, weight_VH, grad_weight_VH) if wants_weight else None


def _weight_gradient(head: _Head, weight_VH: torch.Tensor, grad_weight_VH: torch.Tensor) -> torch.Tensor:
    """What autograd gets: the gradient, or with `fuse_main_grad` a placeholder that Megatron's hook ignores."""
    if not head.fuse_main_grad:
        return grad_weight_VH.to(weight_VH.dtype)
    weight_VH.grad_added_to_main_grad = True
    # The embedding of a tied weight adds its own gradient to the placeholder; Megatron marks such weights and then
    # adds the sum to main_grad, so the placeholder must be 0.
    tied = getattr(weight_VH, "zero_out_wgrad", False)
    return torch.zeros_like(weight_VH) if tied else torch.empty_like(weight_VH)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left @ right in `dtype`: float32 sums of bf16 operands, never rounded between partial sums."""
    if left.is_cuda and left.dtype == right.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right in the dtype of `total`: float32 over all chunks, however many there are."""
    if left.is_cuda and left.dtype == right.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def segment_sum(token_logprob: torch.Tensor, cu_seqlens: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Sum of token_logprob [T] over every segment of cu_seqlens [B + 1], float64 [B]: a context-parallel share."""
    checks.check_segments(token_logprob, cu_seqlens)
    cu_seqlens = cu_seqlens.to(token_logprob.device, non_blocking=True)
    return choose_backend(backend, token_logprob, checks.LOGPROBS).segment_sum(token_logprob, cu_seqlens)


def sequence_objective(
    token_logprob: torch.Tensor,
    cu_seqlens: torch.Tensor,
    source_logprob: torch.Tensor,
    advantage: torch.Tensor,
    is_self: torch.Tensor,
    *,
    update_index: int,
    length: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    delta: float = 0.2,
    delta_step: float = 0.025,
    alpha: float = 1.0,
    log_ratio_clamp: float = 20.0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, ObjectiveStats]:
    """HACPO's loss of packed sequences (reference.objective_from_mean has the formula), without a host sync on CUDA.

    token_logprob   [T] nats under the learner now; cu_seqlens [B + 1] starts of the sequences, the last entry T
    source_logprob  [B] mean log-prob under the source; advantage [B] with omega in it; is_self [B] bool
    length          [B] what the sum of each sequence is divided by; default: its number of tokens
    total           [B] float64 sums over all context-parallel ranks (segment_sum, then all-reduce), with `length` the
                    whole lengths; token_logprob is then only what the gradient flows to

    Returns (loss_B, coefficient_B, stats): coefficient_B = d loss_b / d token_logprob_t for every token t of b.
    `loss_B` is differentiable in token_logprob through exactly that. Mean and source_logprob are compared in the
    dtype of `source_logprob`, so that an unchanged policy has ratio 1 to the last bit. A sequence without tokens (or
    of length 0) has loss and coefficient 0. Raises ValueError on arguments that do not fit (checks.py).
    """
    checks.check_segments(token_logprob, cu_seqlens)
    num_sequences = len(cu_seqlens) - 1
    bounds = {
        "eps_low": eps_low,
        "eps_high": eps_high,
        "delta": delta,
        "delta_step": delta_step,
        "alpha": alpha,
        "log_ratio_clamp": log_ratio_clamp,
    }
    checks.check_objective(
        num_sequences, token_logprob, source_logprob, advantage, is_self, update_index, length, bounds
    )
    if total is not None:
        checks.check_tensor("total", total, (num_sequences,), (torch.float64,), token_logprob)
        if length is None:
            raise ValueError("total is given without length; expected the token counts over all ranks with it")
    cu_seqlens = cu_seqlens.to(token_logprob.device, non_blocking=True)
    length = length if length is None else length.to(token_logprob.device, non_blocking=True)
    loss_B, coefficient_B, stats = choose_backend(backend, token_logprob, checks.LOGPROBS).packed_objective(
        token_logprob.detach(),
        cu_seqlens,
        source_logprob,
        advantage,
        is_self,
        length,
        total,
        update_index=update_index,
        **bounds,
    )
    return _PackedLoss.apply(token_logprob, loss_B, coefficient_B, cu_seqlens), coefficient_B, stats


class _PackedLoss(torch.autograd.Function):
    """Gives loss_B its gradient: every token of sequence b gets coefficient_b."""

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
        owner_T = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens_T, right=True)
        return (grad_B * coefficient_B)[owner_T], None, None, None
