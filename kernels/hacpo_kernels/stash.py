"""The gradient of the logits from what the forward kept (linear_logprob's stash mode): no second matrix product.

Memory for arithmetic: T * V_local numbers live from forward to backward, and a quarter of the head's work goes away.
linear_logprob.py writes the stash and says how; rows without gradient are skipped here as they are there.
"""

import torch
import triton
import triton.language as tl

from hacpo_kernels.linear_logprob import FLOAT32, GRADIENT_BF16, INTERPRETED, aligned_empty, softmax_gradient
from hacpo_kernels.reference import RowGradients, Stash


@triton.jit
def _stash_kernel(
    exp_ptr,  # *bf16 or *fp32 [T, V]: exp(z - top)
    top_ptr,  # *fp32 [V / block_v, T]
    index_ptr,  # *i64 [C]: which tokens
    target_ptr, logsumexp_ptr, coefficient_ptr, entropy_coefficient_ptr, entropy_ptr,  # as _gradient_kernel [C]
    out_ptr,  # as exp [C, V]
    num_rows, num_tokens, num_columns, exp_stride, out_stride, inverse_temperature,
    block_t: tl.constexpr, block_v: tl.constexpr, with_entropy: tl.constexpr,
):  # fmt: skip
    """What _gradient_kernel makes, from what _stats_kernel kept; program = (row block, column block)."""
    num_blocks = tl.cdiv(num_columns, block_v)
    block = tl.program_id(0) % num_blocks
    rows = tl.program_id(0) // num_blocks * block_t + tl.arange(0, block_t)
    columns = block * block_v + tl.arange(0, block_v)
    inside = rows < num_rows
    index = tl.load(index_ptr + rows, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (columns < num_columns)[None, :]
    kept = tl.load(exp_ptr + index[:, None] * exp_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    top = tl.load(top_ptr + tl.cast(block, tl.int64) * num_tokens + index, mask=inside, other=0.0)
    logsumexp = tl.load(logsumexp_ptr + rows, mask=inside, other=float("inf"))
    gradient = softmax_gradient(
        tl.log2(kept) * 0.6931471805599453 + (top - logsumexp)[:, None], rows, columns, num_rows,
        target_ptr, coefficient_ptr, entropy_coefficient_ptr, entropy_ptr, with_entropy,
    )  # fmt: skip
    place = rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out_ptr + place, (gradient * inverse_temperature).to(out_ptr.dtype.element_ty), mask=mask)


def stash_gradient(stash: Stash, index_C: torch.Tensor, inverse_temperature: float, rows: RowGradients) -> torch.Tensor:
    """As reference.stash_gradient, in the dtype of the stash; no matrix product."""
    num_rows, num_columns = len(index_C), stash.exp_TV.shape[1]
    gradient_CV = aligned_empty(stash.exp_TV, num_rows, num_columns)
    block_t = 256 if INTERPRETED else 16
    block_v = FLOAT32.block_v if stash.exp_TV.dtype == torch.float32 else GRADIENT_BF16.block_v
    num_programs = triton.cdiv(num_rows, block_t) * triton.cdiv(num_columns, block_v)
    with_entropy = rows.entropy_coefficient_C is not None
    with torch.cuda.device_of(index_C):
        _stash_kernel[(num_programs,)](
            stash.exp_TV, stash.top_ST, index_C, rows.column_C, rows.logsumexp_C, rows.coefficient_C,
            rows.entropy_coefficient_C if with_entropy else rows.coefficient_C, rows.entropy_C, gradient_CV,
            num_rows, stash.top_ST.shape[1], num_columns, stash.exp_TV.stride(0), gradient_CV.stride(0),
            inverse_temperature, block_t, block_v, with_entropy, num_warps=4,
        )  # fmt: skip
    return gradient_CV
