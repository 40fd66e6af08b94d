"""linear_logprob in Triton: two passes over the vocabulary that never materialise the logits.

`logit_stats`      hidden @ weight^T tile by tile; a tile of logits exists only as float32 accumulators, of which max,
                   sum of exponentials and target logit per row and vocabulary split are stored. A second kernel joins
                   the splits in fixed order.
`logit_gradient`   the same tiles again, turned into the gradient of the logits: one bounded chunk in the inputs' dtype,
                   which two cuBLAS products (autograd.py) fold into the gradients of hidden and weight.

A split is a constant number of columns, never a function of the number of tokens, there are no atomics, and rows never
interact: a token's log-prob has the same bits whatever it is batched with. Logits are never rounded to bf16: that
alone would move a sequence's mean log-prob by the width of the clip.

Shapes: T tokens, H hidden, V rows of the vocabulary shard without padding, S splits.
"""

import contextvars
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hacpo_kernels.reference import Curve, LogitStats, RowGradients

INTERPRETED = triton.knobs.runtime.interpret
DTYPES = (torch.bfloat16, torch.float32)
# exp(x) = 2^(x log2 e): the hardware has exp2 only.
LOG2_E = tl.constexpr(1.4426950408889634)
# Elements and rows of one chunk of logit gradients: 2.5 GB of bf16 at most. Fewer rows starve the two cuBLAS products.
GRADIENT_BUDGET, GRADIENT_ROWS = 1_250_000_000, 8192


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a kernel. `tiles_per_split` column tiles share one set of partial statistics."""

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    tiles_per_split: int = 4
    group_t: int = 16


# 48 KiB of shared memory per stage: four stages fill a Hopper SM. The gradient needs room for its output tile as well.
STATS_BF16 = Tiling(128, 256, 64, num_warps=8, num_stages=4)
GRADIENT_BF16 = Tiling(128, 256, 64, num_warps=8, num_stages=3)
WIDE_BYTES = 213_016
# For devices with less: compute capabilities 8.6, 8.9 and 12.0 have 101,376 bytes, 98,320 are used. A split is as wide.
NARROW_BF16 = Tiling(128, 128, 64, num_warps=8, num_stages=3, tiles_per_split=8)
# float32 operands take ordinary multiply-adds (no tf32: it has fewer bits than bf16 noise would allow us to lose).
FLOAT32 = Tiling(64, 128, 16, num_warps=8, num_stages=3, tiles_per_split=8)


def tiling_for(dtype: torch.dtype, wide: Tiling, shared_bytes: float) -> Tiling:
    """Tiling of a kernel where a program may have `shared_bytes` of shared memory; `wide` is the kernel's on Hopper."""
    if dtype == torch.float32:
        return FLOAT32
    return wide if shared_bytes >= WIDE_BYTES else NARROW_BF16


def _tiling(tensor: torch.Tensor, wide: Tiling) -> Tiling:
    device = torch.cuda.get_device_properties(tensor.device) if tensor.is_cuda else None
    return tiling_for(tensor.dtype, wide, math.inf if device is None else device.shared_memory_per_block_optin)


def chunk_rows(num_columns: int) -> int:
    """Rows of logits whose gradient is held at once; a function of the vocabulary shard alone."""
    return max(128, min(GRADIENT_ROWS, GRADIENT_BUDGET // max(1, num_columns) // 128 * 128))


@triton.jit
def _tile_position(tile, num_rows, num_splits, block_t: tl.constexpr, group_t: tl.constexpr):
    """(first row, split) of a work item; items go through the splits with group_t row blocks at a time.

    So tiles that run together share weights and hidden states in L2. With all row blocks at a time, all of hidden would
    be read again for every split.
    """
    num_blocks = tl.cdiv(num_rows, block_t)
    per_group = group_t * num_splits
    first_block = (tile // per_group) * group_t
    blocks_here = tl.minimum(num_blocks - first_block, group_t)
    inside = tile % per_group
    return (first_block + inside % blocks_here) * block_t, inside // blocks_here


@triton.jit
def _logit_tile(
    hidden,  # tensor descriptor [T, H]
    weight,  # tensor descriptor [V, H]
    row,
    column,
    hidden_size,
    block_t: tl.constexpr,
    block_v: tl.constexpr,
    block_h: tl.constexpr,
    upcast: tl.constexpr,
):
    """hidden[row:, :] @ weight[column:, :]^T, float32 [block_t, block_v]; rows past either end come as 0."""
    logits = tl.zeros([block_t, block_v], tl.float32)
    for start in range(0, hidden_size, block_h):
        left, right = hidden.load([row, start]), weight.load([column, start])
        if upcast:  # the interpreter multiplies bf16 payloads as integers
            left, right = left.to(tl.float32), right.to(tl.float32)
        logits = tl.dot(left, right.T, logits, input_precision="ieee")
    return logits


@triton.jit
def _tanh(x):
    """tanh by exp2, which cannot overflow: (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x."""
    e = tl.exp2(-2.0 * tl.abs(x) * LOG2_E)
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _stats_kernel(
    hidden_ptr,  # *bf16 or *fp32 [T, H], rows 16-byte aligned
    weight_ptr,  # as hidden [V, H]
    target_ptr,  # *i64 [T], row of weight or -1
    top_ptr,  # *fp32 [S, T]: largest logit of the split, before temperature
    total_ptr,  # *fp32 [S, T]: sum of exp((logit - top) / temperature)
    picked_ptr,  # *fp32 [S, T]: logit at the target, before temperature; -inf where it is in another split
    num_rows,
    hidden_size,
    num_columns,
    hidden_stride,
    weight_stride,
    inverse_temperature,
    block_t: tl.constexpr,
    block_v: tl.constexpr,
    block_h: tl.constexpr,
    tiles_per_split: tl.constexpr,
    group_t: tl.constexpr,
    upcast: tl.constexpr,
    softcap: tl.constexpr,
):
    """Persistent kernel: program p takes items p, p + programs, ...; an item is a row block and a vocabulary split."""
    hidden = tl.make_tensor_descriptor(hidden_ptr, [num_rows, hidden_size], [hidden_stride, 1], [block_t, block_h])
    weight = tl.make_tensor_descriptor(weight_ptr, [num_columns, hidden_size], [weight_stride, 1], [block_v, block_h])
    split_columns: tl.constexpr = block_v * tiles_per_split
    num_splits = tl.cdiv(num_columns, split_columns)
    num_items = tl.cdiv(num_rows, block_t) * num_splits
    to_log2 = inverse_temperature * LOG2_E
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        row, split = _tile_position(item, num_rows, num_splits, block_t, group_t)
        rows = row + tl.arange(0, block_t)
        target = tl.load(target_ptr + rows, mask=rows < num_rows, other=-1)
        # -inf, not 0: the logits of a row may all be far below 0.
        top = tl.full([block_t], float("-inf"), tl.float32)
        total = tl.zeros([block_t], tl.float32)
        picked = tl.full([block_t], float("-inf"), tl.float32)
        last = tl.minimum((split + 1) * split_columns, num_columns)
        for column in range(split * split_columns, last, block_v):
            logits = _logit_tile(hidden, weight, row, column, hidden_size, block_t, block_v, block_h, upcast)
            if softcap is not None:
                logits = softcap * _tanh(logits * (1.0 / softcap))
            columns = column + tl.arange(0, block_v)
            # TMA fills columns past the end with 0, which would be a logit like any other.
            logits = tl.where((columns < num_columns)[None, :], logits, float("-inf"))
            here = columns[None, :] == target[:, None]
            picked = tl.maximum(picked, tl.max(tl.where(here, logits, float("-inf")), axis=1))
            new_top = tl.maximum(top, tl.max(logits, axis=1))
            # -inf - -inf would be NaN where every column so far is masked.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            # Subtract first, scale after: exact however far all logits are from 0.
            shrink = tl.exp2(tl.where(top == float("-inf"), 0.0, top - base) * to_log2)
            total = total * shrink + tl.sum(tl.exp2((logits - base[:, None]) * to_log2), axis=1)
            top = new_top
        # int64: splits times rows exceeds 2^31.
        element = split.to(tl.int64) * num_rows + rows
        tl.store(top_ptr + element, top, mask=rows < num_rows)
        tl.store(total_ptr + element, total, mask=rows < num_rows)
        tl.store(picked_ptr + element, picked, mask=rows < num_rows)


@triton.jit
def _join_kernel(
    top_ptr,  # *fp32 [S, T], as _stats_kernel left them
    total_ptr,  # *fp32 [S, T]
    picked_ptr,  # *fp32 [S, T]
    max_ptr,  # *fp32 [T], after temperature
    sum_ptr,  # *fp32 [T]
    target_ptr,  # *fp32 [T], logit at the target after temperature
    num_rows,
    num_splits,
    inverse_temperature,
    block_t: tl.constexpr,
):
    """Joins the statistics of a row's splits, in the order of the vocabulary."""
    rows = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    inside = rows < num_rows
    to_log2 = inverse_temperature * LOG2_E
    top = tl.full([block_t], float("-inf"), tl.float32)
    total = tl.zeros([block_t], tl.float32)
    picked = tl.full([block_t], float("-inf"), tl.float32)
    for split in range(num_splits):
        element = tl.cast(split, tl.int64) * num_rows + rows
        other_top = tl.load(top_ptr + element, mask=inside, other=float("-inf"))
        other_total = tl.load(total_ptr + element, mask=inside, other=0.0)
        picked = tl.maximum(picked, tl.load(picked_ptr + element, mask=inside, other=float("-inf")))
        new_top = tl.maximum(top, other_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(tl.where(top == float("-inf"), 0.0, top - base) * to_log2)
        other_shrink = tl.exp2(tl.where(other_top == float("-inf"), 0.0, other_top - base) * to_log2)
        total = shrink * total + other_shrink * other_total
        top = new_top
    tl.store(max_ptr + rows, top * inverse_temperature, mask=inside)
    tl.store(sum_ptr + rows, total, mask=inside)
    tl.store(target_ptr + rows, picked * inverse_temperature, mask=inside)


@triton.jit
def _gradient_kernel(
    hidden_ptr,  # *bf16 or *fp32 [C, H], rows 16-byte aligned
    weight_ptr,  # as hidden [V, H]
    target_ptr,  # *i64 [C], row of weight or -1
    logsumexp_ptr,  # *fp32 [C]
    coefficient_ptr,  # *fp32 [C]
    out_ptr,  # as hidden [C, V], rows 16-byte aligned
    num_rows,
    hidden_size,
    num_columns,
    hidden_stride,
    weight_stride,
    out_stride,
    inverse_temperature,
    block_t: tl.constexpr,
    block_v: tl.constexpr,
    block_h: tl.constexpr,
    group_t: tl.constexpr,
    upcast: tl.constexpr,
    softcap: tl.constexpr,
):
    """Gradient of sum(coefficient * log-prob) by the logits before temperature and cap."""
    hidden = tl.make_tensor_descriptor(hidden_ptr, [num_rows, hidden_size], [hidden_stride, 1], [block_t, block_h])
    weight = tl.make_tensor_descriptor(weight_ptr, [num_columns, hidden_size], [weight_stride, 1], [block_v, block_h])
    out = tl.make_tensor_descriptor(out_ptr, [num_rows, num_columns], [out_stride, 1], [block_t, block_v])
    num_splits = tl.cdiv(num_columns, block_v)
    num_items = tl.cdiv(num_rows, block_t) * num_splits
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        row, split = _tile_position(item, num_rows, num_splits, block_t, group_t)
        column = split * block_v
        logits = _logit_tile(hidden, weight, row, column, hidden_size, block_t, block_v, block_h, upcast)
        slope = inverse_temperature
        if softcap is not None:
            tanh = _tanh(logits * (1.0 / softcap))
            logits = softcap * tanh
            slope = inverse_temperature * (1.0 - tanh * tanh)
        rows = row + tl.arange(0, block_t)
        columns = column + tl.arange(0, block_v)
        inside = rows < num_rows
        target = tl.load(target_ptr + rows, mask=inside, other=-1)
        coefficient = tl.load(coefficient_ptr + rows, mask=inside, other=0.0)
        # A row past the end gets probability 0.
        logsumexp = tl.load(logsumexp_ptr + rows, mask=inside, other=float("inf"))
        prob = tl.exp2((logits * inverse_temperature - logsumexp[:, None]) * LOG2_E)
        hit = tl.where(columns[None, :] == target[:, None], coefficient[:, None], 0.0)
        gradient = hit - coefficient[:, None] * prob
        out.store([row, column], (gradient * slope).to(out_ptr.dtype.element_ty))


def logit_stats(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, column_T: torch.Tensor, curve: Curve) -> LogitStats:
    """`reference.logit_stats` in Triton, float32 [T] each."""
    num_rows, num_columns = len(hidden_TH), len(weight_VH)
    tiling = _tiling(hidden_TH, STATS_BF16)
    num_splits = triton.cdiv(num_columns, tiling.block_v * tiling.tiles_per_split)
    # One allocation each: the partial statistics of the splits, and the joined ones.
    parts_3ST = hidden_TH.new_empty((3, num_splits, num_rows), dtype=torch.float32)
    stats_3T = hidden_TH.new_empty((3, num_rows), dtype=torch.float32)
    if num_rows and num_splits:
        hidden_TH, weight_VH = aligned(hidden_TH), aligned(weight_VH)
        _launch(
            _stats_kernel, triton.cdiv(num_rows, tiling.block_t) * num_splits, tiling,
            hidden_TH, weight_VH, column_T, *parts_3ST, num_rows, hidden_TH.shape[1], num_columns,
            hidden_TH.stride(0), weight_VH.stride(0), curve.inverse_temperature,
            tiles_per_split=tiling.tiles_per_split, softcap=curve.softcap,
        )  # fmt: skip
    if num_rows:
        # Larger for the interpreter, whose cost is per program.
        block_t = 1024 if INTERPRETED else 64
        with torch.cuda.device_of(hidden_TH):
            _join_kernel[(triton.cdiv(num_rows, block_t),)](
                *parts_3ST, *stats_3T, num_rows, num_splits, curve.inverse_temperature, block_t, num_warps=2
            )
    return LogitStats(*stats_3T)


def operand(weight_VH: torch.Tensor) -> torch.Tensor:
    """The weight [V, H] for every chunk's product: unchanged, or copied once into a layout that TMA can read."""
    return aligned(weight_VH)


def logit_gradient(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, curve: Curve, rows: RowGradients) -> torch.Tensor:
    """`reference.logit_gradient` in Triton, but [C, V] in the dtype of hidden, for the tensor cores."""
    num_rows, num_columns = len(hidden_CH), len(weight_VH)
    tiling = _tiling(hidden_CH, GRADIENT_BF16)
    gradient_CV = aligned_empty(hidden_CH, num_rows, num_columns)
    hidden_CH, weight_VH = aligned(hidden_CH), aligned(weight_VH)
    _launch(
        _gradient_kernel, triton.cdiv(num_rows, tiling.block_t) * triton.cdiv(num_columns, tiling.block_v), tiling,
        hidden_CH, weight_VH, rows.column_C, rows.logsumexp_C, rows.coefficient_C, gradient_CV,
        num_rows, hidden_CH.shape[1], num_columns, hidden_CH.stride(0), weight_VH.stride(0), gradient_CV.stride(0),
        curve.inverse_temperature, softcap=curve.softcap,
    )  # fmt: skip
    return gradient_CV


def _launch(kernel, num_items: int, tiling: Tiling, *arguments: object, **constants: object) -> None:
    """Runs a persistent kernel, at most one program per SM, with scratch memory for tensor descriptors."""
    device = arguments[0].device
    programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    with_scratch(
        lambda: kernel[(min(programs, num_items),)](
            *arguments,
            block_t=tiling.block_t,
            block_v=tiling.block_v,
            block_h=tiling.block_h,
            group_t=tiling.group_t,
            upcast=INTERPRETED,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **constants,
        ),
        device,
    )


def with_scratch(launch: Callable[[], object], device: torch.device) -> None:
    """Launches on `device` with Triton's scratch allocator set, for this launch alone.

    The allocator belongs to a thread's context, autograd runs backward in a thread of its own, and a caller may have
    set another.
    """

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        with torch.cuda.device(device if device.type == "cuda" else -1):
            launch()

    contextvars.copy_context().run(run)


def aligned(tensor_NH: torch.Tensor) -> torch.Tensor:
    """The same rows [N, H] in a layout that TMA can read: contiguous, 16-byte aligned. Else copied."""
    step = 16 // tensor_NH.element_size()
    if tensor_NH.stride(1) == 1 and tensor_NH.stride(0) % step == 0 and tensor_NH.data_ptr() % 16 == 0:
        return tensor_NH
    rows, width = tensor_NH.shape
    padded_NH = tensor_NH.new_empty((rows, triton.cdiv(width, step) * step))
    padded_NH[:, :width] = tensor_NH
    return padded_NH[:, :width]


def aligned_empty(like: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Tensor [num_rows, num_columns] that TMA can write: rows start on 32 bytes or better."""
    return like.new_empty((num_rows, triton.cdiv(num_columns, 16) * 16))[:, :num_columns]
