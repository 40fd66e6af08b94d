"""Kernels of a mixture of experts in Triton: rows back to their tokens, and the gradient of the experts' matrices.

combine_rows          a token's rows, weighted by its shares, summed; rows are read once, float32 stays in registers
combine_gradients     its gradients, from one pass over the same rows
add_grouped_product   every expert's product of gradients and inputs, added to its float32 sum: the product is never
                      rounded to half precision, never in memory, and an expert without rows is not touched

reference.py has the formulas. No atomics: a number is written by one program, so bits repeat.

Shapes: n tokens, k rows of a token, H hidden size, R rows sorted by expert, e experts with a matrix [N, K] each.
"""

import torch
import triton
import triton.language as tl

from hacpo_kernels.linear_logprob import INTERPRETED

COLUMNS_PER_STEP = 512
# Tile of a matrix, and rows of a step: nothing spills, and two programs fit the shared memory of an SM.
BLOCK_N, BLOCK_K, BLOCK_R, NUM_WARPS, NUM_STAGES = (64, 64, 64, 4, 1) if INTERPRETED else (128, 128, 64, 8, 3)


@triton.jit
def _combine_kernel(
    rows_ptr,  # *bf16 or *fp32 [n k, H]
    index_ptr,  # *i64 [n, k], the row of each of a token's experts
    shares_ptr,  # *fp32 [n, k], read when has_shares
    out_ptr,  # as rows [n, H]
    per_token,
    hidden_size,
    has_shares: tl.constexpr,
    block_k: tl.constexpr,
    block_h: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot, column = tl.arange(0, block_k), tl.program_id(1) * block_h + tl.arange(0, block_h)
    is_slot, is_inside = slot < per_token, column < hidden_size
    index = tl.load(index_ptr + token * per_token + slot, mask=is_slot, other=0)
    rows_ptr += index[:, None] * hidden_size + column[None, :]
    rows = tl.load(rows_ptr, mask=is_slot[:, None] & is_inside[None, :], other=0.0).to(tl.float32)
    if has_shares:
        rows *= tl.load(shares_ptr + token * per_token + slot, mask=is_slot, other=0.0)[:, None]
    out = tl.sum(rows, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden_size + column, out, mask=is_inside)


@triton.jit
def _combine_gradient_kernel(
    grad_ptr,  # *bf16 or *fp32 [n, H]
    rows_ptr,  # as grad [n k, H]
    index_ptr,  # *i64 [n, k]
    shares_ptr,  # *fp32 [n, k]
    grad_rows_ptr,  # as grad [n k, H]
    grad_shares_ptr,  # *fp32 [n, k]
    per_token,
    hidden_size,
    block_k: tl.constexpr,
    block_h: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, block_k)
    is_slot = slot < per_token
    index = tl.load(index_ptr + token * per_token + slot, mask=is_slot, other=0)
    shares = tl.load(shares_ptr + token * per_token + slot, mask=is_slot, other=0.0)
    products = tl.zeros([block_k, block_h], tl.float32)
    for start in range(0, hidden_size, block_h):
        column = start + tl.arange(0, block_h)
        is_inside = column < hidden_size
        grad = tl.load(grad_ptr + token * hidden_size + column, mask=is_inside, other=0.0).to(tl.float32)[None, :]
        element, mask = index[:, None] * hidden_size + column[None, :], is_slot[:, None] & is_inside[None, :]
        products += grad * tl.load(rows_ptr + element, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_rows_ptr + element, (grad * shares[:, None]).to(grad_rows_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_shares_ptr + token * per_token + slot, tl.sum(products, axis=1), mask=is_slot)


@triton.jit
def _add_grouped_kernel(
    total_ptr,  # *fp32 [e, N, K]
    left_ptr,  # *bf16 or *fp32 [R, N]
    right_ptr,  # as left [R, K]
    ends_ptr,  # *i32 [e], where the rows of each expert end
    matrix_rows,  # N
    matrix_columns,  # K
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    block_r: tl.constexpr,
    upcast: tl.constexpr,
):
    expert, tiles_across = tl.program_id(1), tl.cdiv(matrix_columns, block_k)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends_ptr + expert)
    if last > first:
        row = (tl.program_id(0) // tiles_across) * block_n + tl.arange(0, block_n)
        column = (tl.program_id(0) % tiles_across) * block_k + tl.arange(0, block_k)
        total = tl.zeros([block_n, block_k], tl.float32)
        for start in range(first, last, block_r):
            index = start + tl.arange(0, block_r)
            is_own, index = (index < last)[:, None], index.to(tl.int64)[:, None]
            left_mask, right_mask = is_own & (row < matrix_rows)[None, :], is_own & (column < matrix_columns)[None, :]
            left = tl.load(left_ptr + index * matrix_rows + row[None, :], mask=left_mask, other=0.0)
            right = tl.load(right_ptr + index * matrix_columns + column[None, :], mask=right_mask, other=0.0)
            if upcast:  # the interpreter multiplies bf16 payloads as integers
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
        into = total_ptr + expert.to(tl.int64) * matrix_rows * matrix_columns
        into += row.to(tl.int64)[:, None] * matrix_columns + column[None, :]
        mask = (row < matrix_rows)[:, None] & (column < matrix_columns)[None, :]
        tl.store(into, tl.load(into, mask=mask) + total, mask=mask)


def combine_rows(rows_RH: torch.Tensor, index_nk: torch.Tensor, shares_nk: torch.Tensor | None) -> torch.Tensor:
    """`reference.combine_rows` in Triton."""
    (num_tokens, per_token), hidden_size = index_nk.shape, rows_RH.shape[1]
    out_nH = rows_RH.new_empty(num_tokens, hidden_size)
    if num_tokens:
        with torch.cuda.device_of(rows_RH):
            _combine_kernel[(num_tokens, triton.cdiv(hidden_size, COLUMNS_PER_STEP))](
                rows_RH.contiguous(), index_nk, index_nk if shares_nk is None else shares_nk.contiguous(), out_nH,
                per_token, hidden_size, shares_nk is not None, triton.next_power_of_2(per_token), COLUMNS_PER_STEP,
            )  # fmt: skip
    return out_nH


def combine_gradients(
    grad_nH: torch.Tensor, rows_RH: torch.Tensor, index_nk: torch.Tensor, shares_nk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.combine_gradients` in Triton."""
    (num_tokens, per_token), hidden_size = index_nk.shape, rows_RH.shape[1]
    grad_RH, grad_nk = rows_RH.new_empty(rows_RH.shape), shares_nk.new_empty(shares_nk.shape)
    if num_tokens:
        with torch.cuda.device_of(rows_RH):
            _combine_gradient_kernel[(num_tokens,)](
                grad_nH.contiguous(), rows_RH.contiguous(), index_nk, shares_nk.contiguous(), grad_RH, grad_nk,
                per_token, hidden_size, triton.next_power_of_2(per_token), COLUMNS_PER_STEP,
            )  # fmt: skip
    return grad_RH, grad_nk


def add_grouped_product(
    total_eNK: torch.Tensor, left_RN: torch.Tensor, right_RK: torch.Tensor, ends_e: torch.Tensor
) -> None:
    """`reference.add_grouped_product` in Triton."""
    num_experts, num_rows, num_columns = total_eNK.shape
    if len(left_RN):
        tiles = triton.cdiv(num_rows, BLOCK_N) * triton.cdiv(num_columns, BLOCK_K)
        with torch.cuda.device_of(left_RN):
            _add_grouped_kernel[(tiles, num_experts)](
                total_eNK, left_RN.contiguous(), right_RK.contiguous(), ends_e, num_rows, num_columns,
                BLOCK_N, BLOCK_K, BLOCK_R, INTERPRETED, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
            )  # fmt: skip
