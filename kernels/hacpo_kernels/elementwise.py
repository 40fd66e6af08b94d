"""Gated activation, RMSNorm, rotary embedding and LoRA merge in Triton, each of one launch that reads and writes a
number once.

They compute in float32 and round once to the dtype of the result. An element's bits depend on its inputs alone, never
on its element in the tensor, but for the gradient of a norm's weight. reference.py has the formulas.

Shapes: R rows of F columns, normalised rows of H; T tokens with N heads of size D, of which P pairs are rotated; E
stacked matrices [N, M].
"""

import torch
import triton
import triton.language as tl

from hacpo_kernels.linear_logprob import INTERPRETED
from hacpo_kernels.reference import LIMIT, SLOPE

# Larger for the interpreter, whose cost is per program.
COLUMNS_PER_PROGRAM, PAIRS_PER_PROGRAM = (1 << 12, 1 << 14) if INTERPRETED else (1024, 1024)
NUMBERS_PER_PROGRAM = 1 << 14 if INTERPRETED else 2048
# Programs that sum a norm's weight gradient, each over rows of its own: a few for every multiprocessor.
SUMMING_PROGRAMS = 512
MERGED_ROWS, MERGED_COLUMNS = 32, 128
# 2 sqrt(2 / pi) and the cubic factor of GELU's tanh form, g (1 + tanh u) / 2 = g sigmoid(2 u).
GELU_SLOPE, GELU_CUBE = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
# Constants of gpt-oss's activation; reference.py has the formula.
SWISH_SLOPE, SWISH_LIMIT = tl.constexpr(SLOPE), tl.constexpr(LIMIT)


@triton.jit
def _sigmoid(gate, activation: tl.constexpr):
    """sigmoid(k) with act(gate) = gate sigmoid(k), and the derivative of k; float32 [block]."""
    if activation == "silu":
        inner, slope = gate, tl.full(gate.shape, 1.0, tl.float32)
    elif activation == "swigluoai":
        inner, slope = gate * SWISH_SLOPE, tl.full(gate.shape, SWISH_SLOPE, tl.float32)
    else:
        tl.static_assert(activation == "gelu_pytorch_tanh", "an activation that the kernel does not have")
        square = gate * gate
        inner = GELU_SLOPE * gate * (1.0 + GELU_CUBE * square)
        slope = GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * square)
    return 1.0 / (1.0 + tl.exp(-inner)), slope


@triton.jit
def _gate_and_up(
    gate_up_ptr,  # *bf16 or *fp32 [R, 2 F]
    width,
    activation: tl.constexpr,
    block: tl.constexpr,
):
    """Gate and up of a program's columns, float32 [block], and for each the factor of its gradient, 0 or 1; the gate's
    index in [R, 2 F], the column, and the mask."""
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    element = tl.program_id(0).to(tl.int64) * 2 * width + column
    gate = tl.load(gate_up_ptr + element, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + element + width, mask=inside, other=0.0).to(tl.float32)
    gate_factor, up_factor = tl.full(gate.shape, 1.0, tl.float32), tl.full(gate.shape, 1.0, tl.float32)
    if activation == "swigluoai":
        gate_factor, up_factor = (gate <= SWISH_LIMIT).to(tl.float32), (tl.abs(up) <= SWISH_LIMIT).to(tl.float32)
        # Not by minimum and maximum, which lose NaN: an update with a NaN must be skipped.
        gate = tl.where(gate > SWISH_LIMIT, SWISH_LIMIT, gate)
        up = tl.where(up > SWISH_LIMIT, SWISH_LIMIT, tl.where(up < -SWISH_LIMIT, -SWISH_LIMIT, up)) + 1.0
    return gate, up, gate_factor, up_factor, element, column, inside


@triton.jit
def _gated_kernel(
    gate_up_ptr,  # *bf16 or *fp32 [R, 2 F]
    out_ptr,  # as gate_up [R, F]
    width,
    activation: tl.constexpr,
    block: tl.constexpr,
):
    gate, up, _, _, _, column, inside = _gate_and_up(gate_up_ptr, width, activation, block)
    sigmoid, _ = _sigmoid(gate, activation)
    element = tl.program_id(0).to(tl.int64) * width + column
    tl.store(out_ptr + element, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_gradient_kernel(
    gate_up_ptr,  # *bf16 or *fp32 [R, 2 F]
    grad_ptr,  # as gate_up [R, F]
    out_ptr,  # as gate_up [R, 2 F]
    width,
    activation: tl.constexpr,
    block: tl.constexpr,
):
    gate, up, gate_factor, up_factor, element, column, inside = _gate_and_up(gate_up_ptr, width, activation, block)
    grad_element = tl.program_id(0).to(tl.int64) * width + column
    grad = tl.load(grad_ptr + grad_element, mask=inside, other=0.0).to(tl.float32)
    sigmoid, slope = _sigmoid(gate, activation)
    activated = gate * sigmoid
    grad_gate = grad * up * (sigmoid + activated * (1.0 - sigmoid) * slope) * gate_factor
    tl.store(out_ptr + element, grad_gate.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + element + width, (grad * activated * up_factor).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _heads(ptr, row, token_stride, head_stride, num_heads: tl.constexpr, block_h: tl.constexpr):
    """Pointers [block_r, block_h] to rows of a tensor [T, N, H], rows counted through all its heads."""
    element = (row // num_heads).to(tl.int64) * token_stride + (row % num_heads).to(tl.int64) * head_stride
    return ptr + element[:, None] + tl.arange(0, block_h)[None, :]


@triton.jit
def _norm_kernel(
    in_ptr,  # *bf16 or *fp32 [T, N, H], a row's numbers side by side
    weight_ptr,  # as in [H]
    out_ptr,  # as in [T, N, H], contiguous
    scale_ptr,  # *fp32 [T N]
    num_rows,  # T N
    token_stride,
    head_stride,
    eps,
    offset,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    block_r: tl.constexpr,
    block_h: tl.constexpr,
):
    row, column = tl.program_id(0) * block_r + tl.arange(0, block_r), tl.arange(0, block_h)
    is_row = row < num_rows
    inside = is_row[:, None] & (column < size)[None, :]
    source = _heads(in_ptr, row, token_stride, head_stride, num_heads, block_h)
    numbers = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / size + eps)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32) + offset
    element = row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(out_ptr + element, (numbers * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale, mask=is_row)


@triton.jit
def _norm_gradient_kernel(
    in_ptr,  # *bf16 or *fp32 [T, N, H], a row's numbers side by side
    grad_ptr,  # as in [T, N, H], likewise
    weight_ptr,  # as in [H]
    scale_ptr,  # *fp32 [T N]
    out_ptr,  # as in [T, N, H], contiguous
    sums_ptr,  # *fp32 [programs, H]: the weight's gradient from the rows of each
    num_rows,  # T N
    token_stride,
    head_stride,
    grad_token_stride,
    grad_head_stride,
    offset,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    wants_weight: tl.constexpr,
    block_r: tl.constexpr,
    block_h: tl.constexpr,
):
    column = tl.arange(0, block_h)
    is_column = column < size
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32) + offset
    total = tl.zeros([block_h], tl.float32)
    for start in range(tl.program_id(0) * block_r, num_rows, tl.num_programs(0) * block_r):
        row = start + tl.arange(0, block_r)
        inside = (row < num_rows)[:, None] & is_column[None, :]
        source = _heads(in_ptr, row, token_stride, head_stride, num_heads, block_h)
        grad_source = _heads(grad_ptr, row, grad_token_stride, grad_head_stride, num_heads, block_h)
        scale = tl.load(scale_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        y = tl.load(source, mask=inside, other=0.0).to(tl.float32) * scale
        grad = tl.load(grad_source, mask=inside, other=0.0).to(tl.float32)
        weighted = grad * weight[None, :]
        inner = tl.sum(weighted * y, axis=1)[:, None] / size
        element = row.to(tl.int64)[:, None] * size + column[None, :]
        tl.store(out_ptr + element, ((weighted - y * inner) * scale).to(out_ptr.dtype.element_ty), mask=inside)
        if wants_weight:
            total += tl.sum(grad * y, axis=0)
    if wants_weight:
        tl.store(sums_ptr + tl.program_id(0) * size + column, total, mask=is_column)


@triton.jit
def _rotary_kernel(
    in_ptr,  # *bf16 or *fp32 [T, N, D], a head's numbers side by side
    cos_sin_ptr,  # as in [T, 4 P]: cosines, then sines, twice each
    out_ptr,  # as in [T, N, D], contiguous
    num_rows,  # T N
    token_stride,
    head_stride,
    cos_sin_stride,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    num_pairs: tl.constexpr,
    interleaved: tl.constexpr,
    inverse: tl.constexpr,
    block_r: tl.constexpr,
    block_p: tl.constexpr,
):
    """Rotates a block of heads; those of a token lie side by side, so that its angles are read from memory once."""
    row = tl.program_id(0) * block_r + tl.arange(0, block_r)
    token = (row // num_heads).to(tl.int64)
    source = in_ptr + (token * token_stride + (row % num_heads).to(tl.int64) * head_stride)[:, None]
    target = out_ptr + (row.to(tl.int64) * size)[:, None]
    is_row, pair = (row < num_rows)[:, None], tl.arange(0, block_p)[None, :]
    inside = is_row & (pair < num_pairs)
    cos_sin = cos_sin_ptr + (token * cos_sin_stride)[:, None] + (pair * 2 if interleaved else pair)
    cosine = tl.load(cos_sin, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(cos_sin + 2 * num_pairs, mask=inside, other=0.0).to(tl.float32)
    if inverse:
        sine = -sine
    if interleaved:
        both = tl.arange(0, 2 * block_p)[None, :]
        inside = is_row & (both < 2 * num_pairs)
        numbers = tl.load(source + both, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(numbers, [block_r, block_p, 2]))
        out = tl.join(first * cosine - second * sine, second * cosine + first * sine)
        out = tl.reshape(out, [block_r, 2 * block_p])
        tl.store(target + both, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + num_pairs + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair, (first * cosine - second * sine).to(out_ptr.dtype.element_ty), mask=inside)
        out = second * cosine + first * sine
        tl.store(target + num_pairs + pair, out.to(out_ptr.dtype.element_ty), mask=inside)
    for start in tl.static_range(2 * num_pairs, size, block_p):  # dimensions that are not rotated
        rest = start + pair
        inside = is_row & (rest < size)
        tl.store(target + rest, tl.load(source + rest, mask=inside, other=0.0), mask=inside)


@triton.jit
def _merge_kernel(
    weight_ptr,  # *bf16 or *fp32 [E, N, M], columns side by side
    up_ptr,  # *fp32 [E, rank, N]
    down_ptr,  # *fp32 [E, rank, M]
    out_ptr,  # as weight [E, N, M], contiguous
    num_rows,
    width,
    matrix_stride,
    row_stride,
    rank: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
):
    """Adds rank by rank, each product rounded by itself: launched without fused multiply-adds."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * block_n + tl.arange(0, block_n)
    column = tl.program_id(0) * block_m + tl.arange(0, block_m)
    is_row, is_column = row < num_rows, column < width
    up, down = up_ptr + matrix * rank * num_rows + row, down_ptr + matrix * rank * width + column
    total = tl.zeros([block_n, block_m], tl.float32)
    for _ in range(rank):
        total += tl.load(up, mask=is_row, other=0.0)[:, None] * tl.load(down, mask=is_column, other=0.0)[None, :]
        up += num_rows
        down += width
    inside, row = is_row[:, None] & is_column[None, :], row.to(tl.int64)[:, None]
    weight = tl.load(weight_ptr + matrix * matrix_stride + row * row_stride + column[None, :], mask=inside, other=0.0)
    element = (matrix * num_rows + row) * width + column[None, :]
    tl.store(out_ptr + element, (total + weight.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`reference.gated_activation` in Triton."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _launch_gated(_gated_kernel, out, width, activation, gate_up.contiguous(), out)
    return out


def activation_gradient(gate_up: torch.Tensor, grad: torch.Tensor, activation: str) -> torch.Tensor:
    """`reference.activation_gradient` in Triton."""
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    _launch_gated(
        _gated_gradient_kernel, grad, grad.shape[-1], activation, gate_up.contiguous(), grad.contiguous(), out
    )
    return out


def _launch_gated(kernel, like: torch.Tensor, width: int, activation: str, *pointers: torch.Tensor) -> None:
    if like.numel():
        block = min(COLUMNS_PER_PROGRAM, triton.next_power_of_2(width))
        grid = (like.numel() // width, triton.cdiv(width, block))
        with torch.cuda.device_of(like):
            kernel[grid](*pointers, width, activation, block)


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rms_norm` in Triton."""
    x_TNH = _as_heads(x)
    rows, sizes, options = _rows_of(x_TNH)
    out, scale = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if rows:
        with torch.cuda.device_of(x):
            _norm_kernel[(triton.cdiv(rows, sizes[2]),)](
                x_TNH, weight_H, out, scale, rows, *x_TNH.stride()[:2], eps, offset, *sizes, **options
            )
    return out, scale


def rms_norm_gradient(
    x: torch.Tensor, weight_H: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor, offset: float, wants_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`reference.rms_norm_gradient` in Triton."""
    x_TNH, grad_TNH = _as_heads(x), _as_heads(grad)
    rows, (num_heads, size, block_r, block_h), options = _rows_of(x_TNH)
    programs = min(SUMMING_PROGRAMS if wants_weight else rows, triton.cdiv(rows, block_r))
    out, sums = x.new_empty(x.shape), scale  # without a weight gradient some pointer: it is not written
    if wants_weight:
        sums = scale.new_zeros((programs, size))
    if rows:
        with torch.cuda.device_of(x):
            _norm_gradient_kernel[(programs,)](
                x_TNH, grad_TNH, weight_H, scale, out, sums, rows, *x_TNH.stride()[:2], *grad_TNH.stride()[:2], offset,
                num_heads, size, wants_weight, block_r, block_h, **options,
            )  # fmt: skip
    return out, sums.sum(dim=0).to(weight_H.dtype) if wants_weight else None


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[..., N, H] as [T, N, H], a row's numbers side by side: heads within a fused projection stay where they are."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 1:
        return x.view(1, 1, -1)
    # [R, H] as R tokens of one head: the number of heads is compiled in, that of tokens is not.
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(0, -3)


def _rows_of(x_TNH: torch.Tensor) -> tuple[int, tuple[int, int, int, int], dict[str, int]]:
    """Number of rows; heads, their size and the block of rows and of columns; launch options of a kernel of them."""
    tokens, num_heads, size = x_TNH.shape
    block_h = triton.next_power_of_2(size)
    block_r = max(1, NUMBERS_PER_PROGRAM // block_h)
    return tokens * num_heads, (num_heads, size, block_r, block_h), {"num_warps": min(16, max(4, block_h // 512))}


def rotate_heads(tensor_TND: torch.Tensor, cos_sin_T4P: torch.Tensor, interleaved: bool, inverse: bool) -> torch.Tensor:
    """`reference.rotate_heads` in Triton."""
    if tensor_TND.stride(2) != 1:
        tensor_TND = tensor_TND.contiguous()
    num_tokens, num_heads, size = tensor_TND.shape
    out_TND = tensor_TND.new_empty(tensor_TND.shape)
    if out_TND.numel():
        num_pairs = cos_sin_T4P.shape[1] // 4
        block_p = triton.next_power_of_2(num_pairs)
        block_r = max(1, PAIRS_PER_PROGRAM // block_p)
        with torch.cuda.device_of(tensor_TND):
            _rotary_kernel[(triton.cdiv(num_tokens * num_heads, block_r),)](
                tensor_TND, cos_sin_T4P, out_TND, num_tokens * num_heads, *tensor_TND.stride()[:2],
                cos_sin_T4P.stride(0), num_heads, size, num_pairs, interleaved, inverse, block_r, block_p,
            )  # fmt: skip
    return out_TND


def merge_adapter(weight_ENM: torch.Tensor, up_ENR: torch.Tensor, down_ERM: torch.Tensor) -> torch.Tensor:
    """`reference.merge_adapter` in Triton, with its bits."""
    if weight_ENM.stride(2) != 1:
        weight_ENM = weight_ENM.contiguous()
    num_matrices, num_rows, width = weight_ENM.shape
    out_ENM = weight_ENM.new_empty(weight_ENM.shape)
    if out_ENM.numel():
        grid = (triton.cdiv(width, MERGED_COLUMNS), triton.cdiv(num_rows, MERGED_ROWS), num_matrices)
        with torch.cuda.device_of(weight_ENM):
            _merge_kernel[grid](
                weight_ENM, up_ENR.mT.contiguous(), down_ERM.contiguous(), out_ENM, num_rows, width,
                *weight_ENM.stride()[:2], up_ENR.shape[2], MERGED_ROWS, MERGED_COLUMNS, enable_fp_fusion=False,
            )  # fmt: skip
    return out_ENM
