"""sequence_objective in Triton: HACPO's loss, gradient and metrics of a packed batch in two launches.

reference.objective_from_mean has the formula and says which equation is which; this file repeats it per sequence, in
float64, so that thousands of small sequences cost two launches and no host synchronisation instead of a hundred.
Launch 1: `_objective_kernel`, eight sequences per program: segment sum, ratio, branch, loss, coefficient, and one
column of per-sequence values. Launch 2: `_totals_kernel`, one program per value, sums in fixed order.

No atomics; a sequence's sum depends on its tokens alone, never on its place in the batch.
Shapes: T tokens, B sequences, K kinds of per-sequence values.
"""

import torch
import triton
import triton.language as tl

from hacpo_kernels.linear_logprob import INTERPRETED
from hacpo_kernels.objective_stats import ObjectiveStats

# Kinds of per-sequence values, rows of the scratch between the launches. `_objective_kernel` stores in this order.
RATIO, LOG_RATIO, LOSS, CLIPPED, GRADIENT_SQ = range(5)
BELOW, INSIDE, ABOVE, WEIGHT, WEIGHT_SQ = range(5, 10)
CLAMPED, EMPTY, NONFINITE = range(10, 13)
# Classes that totals are made over: own answers, others', both, and every sequence even if empty or not finite.
OWN, CROSS, COUNTED, EVERY = range(4)
# The interpreter pays per program, a GPU per program too long.
SEQUENCES_PER_PROGRAM, TOKENS_PER_STEP = (256 if INTERPRETED else 8), 512


@triton.jit
def _segment_sums(
    token_logprob_ptr, start, stop, block_b: tl.constexpr, block_t: tl.constexpr
):  # fmt: skip
    """Sum of tokens start[i]..stop[i], float64 [block_b]; partial sums lie by position in the segment."""
    sums = tl.zeros([block_b, block_t], tl.float64)
    for offset in range(0, tl.max(stop - start), block_t):
        place = start[:, None] + offset + tl.arange(0, block_t)[None, :]
        sums += tl.load(token_logprob_ptr + place, mask=place < stop[:, None], other=0.0).to(tl.float64)
    return tl.sum(sums, axis=1)


@triton.jit
def _segment_bounds(cu_seqlens_ptr, sequence, num_sequences, num_tokens):
    """Start and end of each sequence, int64, and whether they are nonsense. Nobody looked at them on the host: they are
    forced inside the tokens, so that nothing else is read, and the sequence becomes NaN."""
    inside = sequence < num_sequences
    start = tl.load(cu_seqlens_ptr + sequence, mask=inside, other=0).to(tl.int64)
    stop = tl.load(cu_seqlens_ptr + sequence + 1, mask=inside, other=0).to(tl.int64)
    broken = (start < 0) | (stop < start) | (stop > num_tokens)
    broken |= ((sequence == 0) & (start != 0)) | ((sequence == num_sequences - 1) & (stop != num_tokens))
    return tl.maximum(start, 0), tl.minimum(stop, num_tokens), broken


@triton.jit
def _segment_sum_kernel(
    token_logprob_ptr,  # *fp32 or *fp64 [T]
    cu_seqlens_ptr,  # *i32 or *i64 [B + 1]
    out_ptr,  # *fp64 [B]
    num_sequences, num_tokens, block_b: tl.constexpr, block_t: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    start, stop, broken = _segment_bounds(cu_seqlens_ptr, sequence, num_sequences, num_tokens)
    sums = _segment_sums(token_logprob_ptr, start, stop, block_b, block_t)
    tl.store(out_ptr + sequence, tl.where(broken, float("nan"), sums), mask=sequence < num_sequences)


@triton.jit
def _double(high, low):
    """A float64 scalar: Triton passes a Python float as float32, which would move the borders of the clip."""
    return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)


@triton.jit
def _objective_kernel(
    token_logprob_ptr,  # *fp32 or *fp64 [T]
    cu_seqlens_ptr,  # *i32 or *i64 [B + 1]
    source_logprob_ptr, advantage_ptr,  # *fp32 or *fp64 [B]
    is_self_ptr,  # *u1 [B]
    length_ptr, total_ptr,  # any number and *fp64 [B], read when has_length, has_total
    loss_ptr, coefficient_ptr,  # *fp32 or *fp64 [B]
    value_ptr,  # *fp64 [K, B]
    class_ptr,  # *i32 [B]: OWN, CROSS, or EVERY when it is in no mean
    num_sequences, num_tokens,
    own_low_high, own_low_low, own_high_high, own_high_low, low_high, low_low, alpha_high, alpha_low,
    clamp_high, clamp_low,
    has_length: tl.constexpr, has_total: tl.constexpr, block_b: tl.constexpr, block_t: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64) * block_b + tl.arange(0, block_b)
    inside = sequence < num_sequences
    own_low, own_high = _double(own_low_high, own_low_low), _double(own_high_high, own_high_low)
    low, alpha, bound = _double(low_high, low_low), _double(alpha_high, alpha_low), _double(clamp_high, clamp_low)
    start, stop, broken = _segment_bounds(cu_seqlens_ptr, sequence, num_sequences, num_tokens)
    source = tl.load(source_logprob_ptr + sequence, mask=inside, other=0.0)
    advantage = tl.load(advantage_ptr + sequence, mask=inside, other=0.0).to(tl.float64)
    is_self = tl.load(is_self_ptr + sequence, mask=inside, other=0) != 0

    length = (stop - start).to(tl.float64)
    empty = length <= 0
    if has_length:
        given = tl.load(length_ptr + sequence, mask=inside, other=0).to(tl.float64)
        empty = (given <= 0) if has_total else (empty | (given <= 0))
        broken |= given < 0
        length = given
    empty &= ~broken
    length = tl.where(empty, 1.0, length)
    if has_total:
        total = tl.load(total_ptr + sequence, mask=inside, other=0.0)
    else:
        total = _segment_sums(token_logprob_ptr, start, stop, block_b, block_t)
    mean = tl.where(broken, float("nan"), total / length).to(source.dtype).to(tl.float64)

    difference = mean - source.to(tl.float64)
    clamped = tl.abs(difference) > bound
    log_ratio = tl.where(difference > bound, bound, tl.where(difference < -bound, -bound, difference))
    ratio = tl.exp(log_ratio)

    plain = ratio * advantage
    clipped = tl.where(ratio < own_low, own_low, tl.where(ratio > own_high, own_high, ratio)) * advantage
    is_clipped = plain > clipped
    self_grad = tl.where(is_clipped, 0.0, -plain)

    below, above = ratio < low, ratio > 1.0
    band = tl.where(below, low, tl.where(above, 1.0, ratio))
    factor = tl.where(band == 0, tl.where(alpha == 0, 1.0, 0.0), tl.exp(alpha * tl.log(tl.where(band == 0, 1.0, band))))
    weight = tl.where(below | above, 0.0, ratio * factor)

    loss = tl.where(is_self, -tl.where(is_clipped, clipped, plain), -band * factor * advantage)
    grad = tl.where(clamped, 0.0, tl.where(is_self, self_grad, -weight * advantage))
    # A NaN log-prob must not end as a silent 0 because comparisons with it are false.
    grad = tl.where(difference != difference, difference, grad)
    loss, grad = tl.where(empty, 0.0, loss), tl.where(empty, 0.0, grad)
    tl.store(loss_ptr + sequence, loss.to(loss_ptr.dtype.element_ty), mask=inside)
    tl.store(coefficient_ptr + sequence, (grad / length).to(coefficient_ptr.dtype.element_ty), mask=inside)

    finite = (tl.abs(loss) < float("inf")) & (tl.abs(grad) < float("inf"))
    tl.store(class_ptr + sequence, tl.where(finite & ~empty, tl.where(is_self, 0, 1), 3), mask=inside)
    step = tl.cast(num_sequences, tl.int64)
    out = value_ptr + sequence
    tl.store(out, tl.where(empty, float("nan"), ratio), mask=inside)
    tl.store(out + step, log_ratio, mask=inside)
    tl.store(out + 2 * step, loss, mask=inside)
    tl.store(out + 3 * step, is_clipped.to(tl.float64), mask=inside)
    tl.store(out + 4 * step, grad * grad, mask=inside)
    tl.store(out + 5 * step, below.to(tl.float64), mask=inside)
    tl.store(out + 6 * step, ((ratio >= low) & (ratio <= 1.0)).to(tl.float64), mask=inside)
    tl.store(out + 7 * step, above.to(tl.float64), mask=inside)
    tl.store(out + 8 * step, weight, mask=inside)
    tl.store(out + 9 * step, weight * weight, mask=inside)
    tl.store(out + 10 * step, clamped.to(tl.float64), mask=inside)
    tl.store(out + 11 * step, empty.to(tl.float64), mask=inside)
    tl.store(out + 12 * step, (~finite).to(tl.float64), mask=inside)


@triton.jit
def _totals_kernel(
    value_ptr,  # *fp64 [K, B]
    class_ptr,  # *i32 [B]
    pair_ptr,  # *fp64 [K, 4, 2]: (sum, count) over own, cross, both, every sequence
    extreme_ptr,  # *fp64 [K, 2, 2]: (min, max) over own, cross
    num_sequences, block_b: tl.constexpr,
):  # fmt: skip
    """Program k adds up value k; partial sums lie by place, so the order is that of the batch."""
    kind = tl.program_id(0).to(tl.int64)
    own_sum, own_count = tl.zeros([block_b], tl.float64), tl.zeros([block_b], tl.float64)
    cross_sum, cross_count = tl.zeros([block_b], tl.float64), tl.zeros([block_b], tl.float64)
    rest_sum = tl.zeros([block_b], tl.float64)
    own_min, own_max = tl.full([block_b], float("inf"), tl.float64), tl.full([block_b], float("-inf"), tl.float64)
    cross_min, cross_max = own_min, own_max
    for first in range(0, num_sequences, block_b):
        sequence = first + tl.arange(0, block_b)
        inside = sequence < num_sequences
        kind_of = tl.load(class_ptr + sequence, mask=inside, other=-1)
        value = tl.load(value_ptr + kind * num_sequences + sequence, mask=inside, other=0.0)
        own, cross = kind_of == 0, kind_of == 1
        own_sum += tl.where(own, value, 0.0)
        own_count += own.to(tl.float64)
        cross_sum += tl.where(cross, value, 0.0)
        cross_count += cross.to(tl.float64)
        rest_sum += tl.where(kind_of == 3, value, 0.0)
        own_min, own_max = (
            tl.where(own & (value < own_min), value, own_min),
            tl.where(own & (value > own_max), value, own_max),
        )
        cross_min = tl.where(cross & (value < cross_min), value, cross_min)
        cross_max = tl.where(cross & (value > cross_max), value, cross_max)
    own_total, cross_total = tl.sum(own_sum), tl.sum(cross_sum)
    num_own, num_cross = tl.sum(own_count), tl.sum(cross_count)
    pair = pair_ptr + kind * 8
    tl.store(pair, own_total)
    tl.store(pair + 1, num_own)
    tl.store(pair + 2, cross_total)
    tl.store(pair + 3, num_cross)
    tl.store(pair + 4, own_total + cross_total)
    tl.store(pair + 5, num_own + num_cross)
    tl.store(pair + 6, own_total + cross_total + tl.sum(rest_sum))
    tl.store(pair + 7, tl.cast(num_sequences, tl.float64))
    extreme = extreme_ptr + kind * 4
    tl.store(extreme, tl.min(own_min))
    tl.store(extreme + 1, tl.max(own_max))
    tl.store(extreme + 2, tl.min(cross_min))
    tl.store(extreme + 3, tl.max(cross_max))


def segment_sum(token_logprob_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """As reference.segment_sum: float64 [B]."""
    num_sequences = len(cu_seqlens) - 1
    total_B = token_logprob_T.new_empty(num_sequences, dtype=torch.float64)
    if num_sequences:
        with torch.cuda.device_of(token_logprob_T):
            _segment_sum_kernel[(triton.cdiv(num_sequences, SEQUENCES_PER_PROGRAM),)](
                token_logprob_T.contiguous(), cu_seqlens, total_B, num_sequences, len(token_logprob_T),
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
    total_B: torch.Tensor | None,
    *,
    update_index: int,
    eps_low: float,
    eps_high: float,
    delta: float,
    delta_step: float,
    alpha: float,
    log_ratio_clamp: float,
) -> tuple[torch.Tensor, torch.Tensor, ObjectiveStats]:
    """As reference.packed_objective."""
    num_sequences = len(cu_seqlens) - 1
    loss_B, coefficient_B = token_logprob_T.new_empty((2, num_sequences))
    value_KB = token_logprob_T.new_empty((NONFINITE + 1, num_sequences), dtype=torch.float64)
    class_B = token_logprob_T.new_empty(num_sequences, dtype=torch.int32)
    pair_K42 = token_logprob_T.new_empty((NONFINITE + 1, 4, 2), dtype=torch.float64)
    extreme_K22 = token_logprob_T.new_empty((NONFINITE + 1, 2, 2), dtype=torch.float64)
    low = min(1.0, 1.0 - delta + update_index * delta_step)
    bounds = [_split(x) for x in (1.0 - eps_low, 1.0 + eps_high, low, alpha, log_ratio_clamp)]
    with torch.cuda.device_of(token_logprob_T):
        if num_sequences:
            _objective_kernel[(triton.cdiv(num_sequences, SEQUENCES_PER_PROGRAM),)](
                token_logprob_T.contiguous(), cu_seqlens.contiguous(), source_logprob_B.contiguous(),
                advantage_B.contiguous(), is_self_B.contiguous(),
                coefficient_B if length_B is None else length_B.contiguous(),
                coefficient_B if total_B is None else total_B.contiguous(),
                loss_B, coefficient_B, value_KB, class_B, num_sequences, len(token_logprob_T),
                *(half for pair in bounds for half in pair),
                length_B is not None, total_B is not None, SEQUENCES_PER_PROGRAM, TOKENS_PER_STEP, num_warps=8,
            )  # fmt: skip
        _totals_kernel[(len(value_KB),)](value_KB, class_B, pair_K42, extreme_K22, num_sequences, 1024, num_warps=4)
    return loss_B, coefficient_B, _stats(value_KB, pair_K42, extreme_K22)


def _split(value: float) -> tuple[float, float]:
    """(high, low): two float32 numbers that add up to `value` to 48 bits."""
    high = torch.tensor(value, dtype=torch.float32).item()
    return high, value - high


def _stats(value_KB: torch.Tensor, pair_K42: torch.Tensor, extreme_K22: torch.Tensor) -> ObjectiveStats:
    """Views of what the kernels stored: no launch."""
    return ObjectiveStats(
        ratio_self=pair_K42[RATIO, OWN],
        log_ratio_self=pair_K42[LOG_RATIO, OWN],
        loss_self=pair_K42[LOSS, OWN],
        clipped_self=pair_K42[CLIPPED, OWN],
        gradient_sq_self=pair_K42[GRADIENT_SQ, OWN],
        ratio_cross=pair_K42[RATIO, CROSS],
        log_ratio_cross=pair_K42[LOG_RATIO, CROSS],
        loss_cross=pair_K42[LOSS, CROSS],
        cross_below=pair_K42[BELOW, CROSS],
        cross_inside=pair_K42[INSIDE, CROSS],
        cross_above=pair_K42[ABOVE, CROSS],
        weight_cross=pair_K42[WEIGHT, CROSS],
        weight_sq_cross=pair_K42[WEIGHT_SQ, CROSS],
        gradient_sq_cross=pair_K42[GRADIENT_SQ, CROSS],
        clamped=pair_K42[CLAMPED, COUNTED],
        empty=pair_K42[EMPTY, EVERY],
        nonfinite=pair_K42[NONFINITE, EVERY],
        ratio_self_min=extreme_K22[RATIO, 0, 0],
        ratio_self_max=extreme_K22[RATIO, 0, 1],
        ratio_cross_min=extreme_K22[RATIO, 1, 0],
        ratio_cross_max=extreme_K22[RATIO, 1, 1],
        ratio_B=value_KB[RATIO],
    )
