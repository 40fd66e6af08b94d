"""Autograd functions, shared by both backends: linear_logprob's, around two passes over the vocabulary, and a layer's.

linear_logprob: forward merges the vocabulary shards of a tensor-parallel group. Backward drops the rows without
gradient and folds the gradient of the logits into those of hidden and weight, chunk by chunk, in float32.

Shapes: T tokens, N of them with a gradient, C a chunk of those, H hidden, V rows of the vocabulary shard.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hacpo_kernels import reference
from hacpo_kernels.backends import Backend
from hacpo_kernels.products import add_product, product
from hacpo_kernels.reference import Curve, LogitStats, RowGradients


@dataclass(frozen=True)
class LmHead:
    """Non-tensor arguments of linear_logprob, which its backward needs again."""

    backend: Backend
    curve: Curve
    num_columns: int  # rows of the weight shard without padding
    group: dist.ProcessGroup | None
    reduce_hidden_grad: bool
    fuse_main_grad: bool


class LinearLogprob(torch.autograd.Function):
    """Forward keeps one number per token; backward recomputes the logits, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, column_T, ignored_T, head):
        vocabulary_VH = weight_VH[: head.num_columns]
        stats = head.backend.logit_stats(hidden_TH, vocabulary_VH, column_T, head.curve)
        if head.group is not None:
            stats = _merge_over_group(stats, head.group)
        logprob_T, logsumexp_T = reference.finish_stats(stats)
        ctx.save_for_backward(hidden_TH, weight_VH, column_T, ignored_T, logsumexp_T)
        ctx.head = head
        return logprob_T.masked_fill_(ignored_T, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_T):
        hidden_TH, weight_VH, column_T, ignored_T, logsumexp_T = ctx.saved_tensors
        # Tokens of clipped sequences, often most of a batch, have coefficient 0. This is the only host synchronisation.
        rows_N = ((grad_T != 0) & ~ignored_T).nonzero()[:, 0]
        rows = RowGradients(column_T[rows_N], logsumexp_T[rows_N], grad_T[rows_N])
        grad_hidden_NH, grad_weight_VH = _fold_chunks(ctx, hidden_TH, weight_VH, rows_N, rows)
        if grad_hidden_NH is not None and len(rows_N) < len(hidden_TH):
            grad_hidden_NH = torch.zeros_like(hidden_TH).index_copy_(0, rows_N, grad_hidden_NH)
        return grad_hidden_NH, grad_weight_VH, None, None, None


def _merge_over_group(stats: LogitStats, group: dist.ProcessGroup) -> LogitStats:
    mine_3T = torch.stack(stats)
    all_R3T = mine_3T.new_empty((group.size(), *mine_3T.shape))
    dist.all_gather(list(all_R3T), mine_3T, group=group)
    return reference.merge_stats([LogitStats(*shard_3T) for shard_3T in all_R3T])


def _fold_chunks(
    ctx, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows_N: torch.Tensor, rows: RowGradients
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Folds the gradient of the logits, one bounded chunk at a time, into (grad_hidden [N, H], grad_weight [V, H])."""
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
        chunk_rows = RowGradients(*(column_N[chunk] for column_N in rows))
        gradient_CV = backend.logit_gradient(hidden_CH, vocabulary_VH, head.curve, chunk_rows)
        if wants_hidden:
            grad_hidden_NH[chunk] = product(gradient_CV, vocabulary_VH, dtype)
        if wants_weight:
            add_product(grad_weight_VH[: head.num_columns], gradient_CV.t(), hidden_CH)
        del gradient_CV  # else two of them, each up to 2.5 GB, are alive while the next one is made
    if wants_hidden and reduces:
        dist.all_reduce(grad_hidden_NH, group=head.group)
        grad_hidden_NH = grad_hidden_NH.to(hidden_TH.dtype)
    if wants_weight:
        fuses = head.fuse_main_grad  # then autograd gets a placeholder, which Megatron's hook ignores
        grad_weight_VH = main_grad_placeholder(weight_VH) if fuses else grad_weight_VH.to(weight_VH.dtype)
    return grad_hidden_NH, grad_weight_VH


def main_grad_placeholder(weight_VH: torch.Tensor) -> torch.Tensor:
    """Gradient [V, H] to return to autograd where the real one is added to `weight_VH.main_grad` already."""
    weight_VH.grad_added_to_main_grad = True
    # The embedding of a tied weight adds its own gradient to the placeholder; Megatron marks such weights and then
    # adds the sum to main_grad, so the placeholder must be 0.
    tied = getattr(weight_VH, "zero_out_wgrad", False)
    return torch.zeros_like(weight_VH) if tied else torch.empty_like(weight_VH)


class GatedActivationFunction(torch.autograd.Function):
    """Gated activation that keeps its input alone: torch's operations would keep twice as much."""

    @staticmethod
    def forward(ctx, gate_up, activation, backend):
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.backend = activation, backend
        return backend.gated_activation(gate_up, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.backend.activation_gradient(*ctx.saved_tensors, grad, ctx.activation), None, None


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm that keeps its input and one number for each row; torch's own takes a dozen operations on a CPU."""

    @staticmethod
    def forward(ctx, x, weight_H, eps, offset, backend):
        y, scale = backend.rms_norm(x, weight_H, eps, offset)
        ctx.save_for_backward(x, weight_H, scale)
        ctx.offset, ctx.backend = offset, backend
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grads = ctx.backend.rms_norm_gradient(*ctx.saved_tensors, grad, ctx.offset, ctx.needs_input_grad[1])
        return *grads, None, None, None


class RotaryFunction(torch.autograd.Function):
    """Rotary embedding, whose gradient is the rotation back."""

    @staticmethod
    def forward(ctx, tensor_TND, cos_sin_T4P, interleaved, backend):
        ctx.save_for_backward(cos_sin_T4P)
        ctx.interleaved, ctx.backend = interleaved, backend
        return backend.rotate_heads(tensor_TND, cos_sin_T4P, interleaved, inverse=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TND):
        grad_TND = ctx.backend.rotate_heads(grad_TND, *ctx.saved_tensors, ctx.interleaved, inverse=True)
        return grad_TND, None, None, None
