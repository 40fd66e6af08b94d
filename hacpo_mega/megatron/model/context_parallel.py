"""Context parallelism: the cp ranks of a cell share the tokens of a micro-batch, and in attention its heads.

Rank r of cp has the neighbouring tokens [r T / cp, (r + 1) T / cp) of a pack of T, wherever its sequences begin. Every
layer but attention works on a token by itself. Before attention an all-to-all turns [T / cp, N, D] into [T, N / cp, D],
the kernel runs over whole sequences as it does without cp, and an all-to-all turns its output back (DeepSpeed-Ulysses,
arXiv 2309.14509). So sequences need no padding and no zigzag, the work of attention is even whatever their lengths are,
and a layer keeps 1 / cp of its activations, unless there are fewer key/value heads than ranks. Backward turns the
output back once more instead of keeping it twice (`FromHeads`).

The law of gradients. With l_r the log-probs of the rows of rank r, every rank computes the loss L(l_1, ..., l_cp) from
all of them (`sum_rows`), so every rank holds L itself, not a share of it. For a weight w

    dL/dw  =  sum over r, of  dL/dl_r  dl_r/dw

and backward on rank r begins with dL/dl_r alone: identity, not a sum, which would count L cp times. An all-to-all
permutes numbers over ranks, and its transpose is the all-to-all back. So a hidden state gets its whole gradient on the
rank that has its token, from rows on any rank. Rank r then adds to the gradient of w the uses of w for its own
tokens, and the plain sum over dp x cp that train/schedule.py asks of Megatron is dL/dw.

Elsewhere: which layouts a model can have (models/sharding/layout.py). Megatron's own context parallelism, which cuts
every sequence into 2 cp parts, is not used: its layers are built with cp 1.

Shapes: T tokens of a micro-batch and t = T / cp of them on a rank, N query and K key/value heads of a tensor rank, D
head size, R trained rows.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

# Resizes the storage of a tensor, in bytes. A registered operation, so that memory traces see it.
resize = torch.ops.inductor.resize_storage_bytes_


def own_tokens(num_tokens: int) -> slice:
    """Slice of a micro-batch's tokens that this rank has; cp must divide their number."""
    group = parallel_state.get_context_parallel_group()
    share, left = divmod(num_tokens, group.size())
    assert left == 0, (num_tokens, group.size())
    return slice(group.rank() * share, (group.rank() + 1) * share)


def own_rows(rows_R: torch.Tensor, tokens: slice) -> slice:
    """Slice of the trained rows, at rising positions [R], that read one of `tokens`. On the CPU."""
    first, last = torch.searchsorted(rows_R, torch.tensor([tokens.start, tokens.stop])).tolist()
    return slice(first, last)


def sum_rows(logprob_N: torch.Tensor, own: slice, num_rows: int) -> torch.Tensor:
    """Log-probs of all rows [R] on every rank of cp, from this rank's [N] in the slice `own`.

    Each is a number plus cp - 1 zeros, so every rank has the same bits. Backward passes on the gradient of the own rows
    unchanged: see the law above.
    """
    group = parallel_state.get_context_parallel_group()
    return logprob_N if group.size() == 1 else _SumRows.apply(logprob_N, own, num_rows, group)


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprob_N, own, num_rows, group):
        ctx.own = own
        logprob_R = logprob_N.new_zeros(num_rows)
        logprob_R[own] = logprob_N
        dist.all_reduce(logprob_R, group=group)
        return logprob_R

    @staticmethod
    def backward(ctx, gradient_R):
        return gradient_R[ctx.own], None, None, None


def all_to_all_heads(tensor: torch.Tensor, group: dist.ProcessGroup, *, gathers_tokens: bool) -> torch.Tensor:
    """From [t, heads, D] to [T, heads / cp, D], or back. Contiguous; differentiable. The group is that of cp."""
    return tensor if group.size() == 1 else _AllToAllHeads.apply(tensor, group, gathers_tokens)


class _AllToAllHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, gathers_tokens):
        ctx.group, ctx.gathers_tokens = group, gathers_tokens
        return (_gather_tokens if gathers_tokens else _gather_heads)(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return (_gather_heads if ctx.gathers_tokens else _gather_tokens)(gradient, ctx.group), None, None


class FromHeads:
    """Converts attention output from head shards to token shards without keeping the result: backward redoes it.

    Attention keeps its output by heads for backward. The projection after it would keep the same numbers again, by
    tokens. So that storage is freed once the projection has read it, and refilled when the gradient of its result
    arrives: a permutation has the same bits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, heads_TND: torch.Tensor) -> torch.Tensor:
        """From [T, N / cp, D] to [t, N, D]; differentiable."""
        tokens_tND = all_to_all_heads(heads_TND, self._group, gathers_tokens=False)
        is_kept = self._group.size() > 1 and tokens_tND.grad_fn is not None
        # Through `data`, which has no version counter: autograd would take the refilled numbers for changed ones.
        self._last = (heads_TND.detach(), tokens_tND.data) if is_kept else None
        return tokens_tND

    def free_output(self, projected: torch.Tensor, is_kept: bool) -> None:
        """Frees the last output, which the projection has read, and has kept for backward if `is_kept`.

        `projected` is the projection's result, whose gradient comes before the output is needed again.
        """
        last, self._last = self._last, None
        if last is None or not is_kept:
            return
        pending, tokens_tND = [last], last[1]
        size = tokens_tND.nbytes
        resize(tokens_tND, 0)

        def redo(_gradient: torch.Tensor) -> None:
            if pending:  # once: afterwards this keeps neither tensor alive
                heads_TND, tokens_tND = pending.pop()
                resize(tokens_tND, size)
                _gather_heads(heads_TND, self._group, out=tokens_tND)

        projected.register_hook(redo)


def recompute_output(attention: torch.nn.Module) -> None:
    """Makes a Megatron attention free its output by tokens, and redo it in backward; a frozen projection keeps none."""

    def free(attention: torch.nn.Module, _inputs: tuple, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        is_kept = any(parameter.requires_grad for parameter in attention.linear_proj.parameters())
        attention.core_attention.from_heads.free_output(output[0], is_kept)

    attention.register_forward_hook(free)


def _gather_tokens(tensor_tND: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    by_rank = tensor_tND.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return _exchanged(by_rank, group).flatten(0, 1)


def _gather_heads(tensor_TND: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None) -> torch.Tensor:
    by_rank = tensor_TND.contiguous().unflatten(0, (group.size(), -1))
    gathered = _exchanged(by_rank, group).transpose(0, 1).flatten(1, 2)
    return gathered.contiguous() if out is None else out.copy_(gathered)


def _exchanged(by_rank: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all: `by_rank` [cp, ...] has what this rank sends to each; returns what it receives from each."""
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received


def whole_sequences(
    query_tND: torch.Tensor, key_tKD: torch.Tensor, value_tKD: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, N / cp, D], and their keys and values [T, max(K, cp) / cp, D].

    With fewer key/value heads than ranks, each goes to several ranks, which have the queries that share it.
    """
    copies = max(1, group.size() // key_tKD.shape[1])
    if copies > 1:
        key_tKD, value_tKD = (tensor.repeat_interleave(copies, dim=1) for tensor in (key_tKD, value_tKD))
    query_TND, key_TKD, value_TKD = (
        all_to_all_heads(tensor, group, gathers_tokens=True) for tensor in (query_tND, key_tKD, value_tKD)
    )
    return query_TND, key_TKD, value_TKD
