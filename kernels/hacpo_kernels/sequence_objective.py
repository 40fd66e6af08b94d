"""Packed objective in Triton: HACPO's loss, coefficient, ratio and weight of every sequence in one launch.

reference.objective_from_mean has the formula with its equation numbers. This file repeats it per sequence, in float64,
so that thousands of small sequences cost one launch and no host synchronisation instead of a hundred. Counting is in
objective_stats.py, from the results of the launch. No atomics; a sequence's sum depends on its tokens alone, never on
its place in the batch.

Shapes: T tokens, B sequences.
"""

import torch
import triton
import triton.language as tl

from hacpo_kernels.bounds import Bounds
from hacpo_kernels.linear_logprob import INTERPRETED

# Larger for the interpreter, whose cost is per program.
SEQUENCES_PER_PROGRAM, TOKENS_PER_STEP = (256 if INTERPRETED else 8), 512


@triton.jit
def _segment_sums(
    token_logprob_ptr,  # *fp32 or *fp64 [T]
    start,
    stop,
    block_b: tl.constexpr,
    block_t: tl.constexpr,
):
    """Sums over the tokens from start to stop, float64 [block_b]; partial sums are by position in the segment."""
    sums = tl.zeros([block_b, block_t], tl.float64)
    for offset in range(0, tl.max(stop - start), block_t):
        token = start[:, None] + offset + tl.arange(0, block_t)[None, :]
        sums += tl.load(token_logprob_ptr + token, mask=token < stop[:, None], other=0.0).to(tl.float64)
    return tl.sum(sums, axis=1)


@triton.jit
def _segment_bounds(
    cu_seqlens_ptr,  # *i32 or *i64 [B + 1]
    sequence,
    num_sequences,
    num_tokens,
):
    """Start and end of each sequence, int64, and whether they are invalid.

    The host has not checked them: they are clamped to the tokens, so that no read is out of bounds, and an invalid
    sequence becomes NaN.
    """
    inside = sequence < num_sequences
    start = tl.load(cu_seqlens_ptr + sequence, mask=inside, other=0).to(tl.int64)
    stop = tl.load(cu_seqlens_ptr + sequence + 1, mask=inside, other=0).to(tl.int64)
    broken = (start < 0) | (stop < start) | (stop > num_tokens)
    broken |= ((sequence == 0) & (start != 0)) | ((sequence == num_sequences - 1) & (stop != num_tokens))
    return tl.maximum(start, 0), tl.minimum(stop, num_tokens), broken


@triton.jit
def _lengths(length_ptr, sequence, inside, start, stop, broken, has_length: tl.constexpr):
    """Divisor of each sum, float64 [block_b], 1 for an empty sequence; whether it is empty; whether it is invalid."""
    length = (stop - start).to(tl.float64)
    empty = length <= 0
    if has_length:
        length = tl.load(length_ptr + sequence, mask=inside, other=0).to(tl.float64)
        empty |= length <= 0
        broken |= length < 0
    empty &= ~broken
    return tl.where(empty, 1.0, length), empty, broken


@triton.jit
def _segment_sum_kernel(
    token_logprob_ptr,  # *fp32 or *fp64 [T]
    cu_seqlens_ptr,  # *i32 or *i64 [B + 1]
    out_ptr,  # *fp64 [B]
    num_sequences,
    num_tokens,
    block_b: tl.constexpr,
    block_t: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    start, stop, broken = _segment_bounds(cu_seqlens_ptr, sequence, num_sequences, num_tokens)
    sums = _segment_sums(token_logprob_ptr, start, stop, block_b, block_t)
    tl.store(out_ptr + sequence, tl.where(broken, float("nan"), sums), mask=sequence < num_sequences)


@triton.jit
def _own_objective(ratio, advantage, own_low, own_high):
    """Loss and weight of own answers (eq. 47), float64 [block_b]; the borders of the clip are scalars."""
    plain = ratio * advantage
    clipped = tl.where(ratio < own_low, own_low, tl.where(ratio > own_high, own_high, ratio)) * advantage
    is_clipped = plain > clipped
    return -tl.where(is_clipped, clipped, plain), tl.where(is_clipped, 0.0, ratio)


@triton.jit
def _band_objective(ratio, advantage, low, high, alpha):
    """HACPO's loss and weight of others' answers (eq. 50), float64 [block_b]; low, high and alpha are scalars."""
    below, above = ratio < low, ratio > high
    band = tl.where(below, low, tl.where(above, high, ratio))
    # band^alpha by logarithm; log 0 is kept out, and 0^0 is 1 as everywhere else.
    is_zero = band == 0
    power = tl.exp(alpha * tl.log(tl.where(is_zero, 1.0, band)))
    factor = tl.where(is_zero, tl.where(alpha == 0, 1.0, 0.0), power)
    return -band * factor * advantage, tl.where(below | above, 0.0, ratio * factor)


@triton.jit
def _cross_objective(
    mean, difference, ratio, advantage, low, high, alpha, ratio_cap, divergence_limit, cross: tl.constexpr
):
    """Loss and weight of others' answers, float64 [block_b], by the equation that `cross` names."""
    if cross == "likelihood":
        loss, weight = -mean * advantage, tl.full(mean.shape, 1.0, tl.float64)
    elif cross == "truncated":
        is_dropped = (advantage < 0) & (difference < -divergence_limit)
        weight = tl.where(is_dropped, 0.0, tl.where(ratio > ratio_cap, ratio_cap, ratio))
        loss = -weight * advantage
    else:
        tl.static_assert(cross == "band", "an objective that the kernel does not have")
        loss, weight = _band_objective(ratio, advantage, low, high, alpha)
    return loss, weight


@triton.jit
def _objective_kernel(
    token_logprob_ptr,  # *fp32 or *fp64 [T]
    cu_seqlens_ptr,  # *i32 or *i64 [B + 1]
    source_logprob_ptr,  # *fp32 or *fp64 [B]
    advantage_ptr,  # *fp32 or *fp64 [B]
    is_self_ptr,  # *u1 [B]
    length_ptr,  # any number [B], read when has_length
    loss_ptr,  # *fp32 or *fp64 [B]
    coefficient_ptr,  # *fp32 or *fp64 [B]
    ratio_ptr,  # *fp64 [B]
    weight_ptr,  # *fp64 [B]
    num_sequences,
    num_tokens,
    # Without the annotation Triton passes a Python float as float32, which would move the borders of the clip by 3e-8.
    own_low: tl.float64,
    own_high: tl.float64,
    low: tl.float64,
    high: tl.float64,
    alpha: tl.float64,
    ratio_cap: tl.float64,
    divergence_limit: tl.float64,
    log_ratio_clamp: tl.float64,
    cross: tl.constexpr,
    has_length: tl.constexpr,
    block_b: tl.constexpr,
    block_t: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    inside = sequence < num_sequences
    start, stop, broken = _segment_bounds(cu_seqlens_ptr, sequence, num_sequences, num_tokens)
    source = tl.load(source_logprob_ptr + sequence, mask=inside, other=0.0)
    advantage = tl.load(advantage_ptr + sequence, mask=inside, other=0.0).to(tl.float64)
    is_self = tl.load(is_self_ptr + sequence, mask=inside, other=0) != 0
    length, empty, broken = _lengths(length_ptr, sequence, inside, start, stop, broken, has_length)
    total = _segment_sums(token_logprob_ptr, start, stop, block_b, block_t)
    # Rounded as the source's scalar was when it travelled: an unchanged policy has ratio 1 to the last bit.
    mean = tl.where(broken, float("nan"), total / length).to(source.dtype).to(tl.float64)

    difference = mean - source.to(tl.float64)
    too_high, too_low = difference > log_ratio_clamp, difference < -log_ratio_clamp
    ratio = tl.exp(tl.where(too_high, log_ratio_clamp, tl.where(too_low, -log_ratio_clamp, difference)))

    own_loss, own_weight = _own_objective(ratio, advantage, own_low, own_high)
    if cross == "own":
        cross_loss, cross_weight = own_loss, own_weight
    else:
        cross_loss, cross_weight = _cross_objective(
            mean, difference, ratio, advantage, low, high, alpha, ratio_cap, divergence_limit, cross
        )

    loss = tl.where(empty, 0.0, tl.where(is_self, own_loss, cross_loss))
    beyond = too_high | too_low
    if cross == "likelihood":
        beyond = beyond & is_self  # the loss of others' answers has no ratio to bound
    weight = tl.where(beyond, 0.0, tl.where(is_self, own_weight, cross_weight))
    # A NaN log-prob must not become a silent 0 because comparisons with it are false.
    weight = tl.where(difference != difference, difference, weight)
    weight = tl.where(empty, 0.0, weight)
    coefficient = -weight * advantage / length
    tl.store(loss_ptr + sequence, loss.to(loss_ptr.dtype.element_ty), mask=inside)
    tl.store(coefficient_ptr + sequence, coefficient.to(coefficient_ptr.dtype.element_ty), mask=inside)
    tl.store(ratio_ptr + sequence, tl.where(empty, float("nan"), ratio), mask=inside)
    tl.store(weight_ptr + sequence, weight, mask=inside)


def segment_sum(token_logprob_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`reference.segment_sum` in Triton: float64 [B]."""
    num_sequences = len(cu_seqlens) - 1
    total_B = token_logprob_T.new_empty(num_sequences, dtype=torch.float64)
    if num_sequences:
        with torch.cuda.device_of(token_logprob_T):
            _segment_sum_kernel[(triton.cdiv(num_sequences, SEQUENCES_PER_PROGRAM),)](
                token_logprob_T.contiguous(), cu_seqlens.contiguous(), total_B, num_sequences, len(token_logprob_T),
                SEQUENCES_PER_PROGRAM, TOKENS_PER_STEP, num_warps=8,
            )  # fmt: skip
    return total_B


def packed_objective(
    token_logprob_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    source_logprob_B: torch.Tensor,
    advantage_B: torch.Tensor,
    is_self_B: torch.Tensor,
    length_B: torch.Tensor | None,
    low: float,
    bounds: Bounds,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.packed_objective` in Triton, [B] each."""
    num_sequences = len(cu_seqlens) - 1
    loss_B, coefficient_B = token_logprob_T.new_empty((2, num_sequences))
    ratio_B, weight_B = token_logprob_T.new_empty((2, num_sequences), dtype=torch.float64)
    if num_sequences:
        with torch.cuda.device_of(token_logprob_T):
            _objective_kernel[(triton.cdiv(num_sequences, SEQUENCES_PER_PROGRAM),)](
                token_logprob_T.contiguous(), cu_seqlens.contiguous(), source_logprob_B.contiguous(),
                advantage_B.contiguous(), is_self_B.contiguous(),
                coefficient_B if length_B is None else length_B.contiguous(),  # a pointer that is not read
                loss_B, coefficient_B, ratio_B, weight_B, num_sequences, len(token_logprob_T),
                bounds.own_low, bounds.own_high, low, bounds.high, bounds.alpha,
                bounds.ratio_cap, bounds.divergence_limit, bounds.log_ratio_clamp, bounds.cross,
                length_B is not None, SEQUENCES_PER_PROGRAM, TOKENS_PER_STEP, num_warps=8,
            )  # fmt: skip
    return loss_B, coefficient_B, ratio_B, weight_B
