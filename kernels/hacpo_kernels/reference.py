"""All kernels in plain torch: the CPU path, and the formulas to check against the paper.

linear_logprob      log softmax(cap(hidden @ weight^T) / temperature)[target], split into the part of one vocabulary
                    shard (`logit_stats`, `logit_gradient`) and the part that needs all shards (`merge_stats`).
packed_objective    HACPO (arXiv 2603.02604): `objective_from_mean` is eq. 47 (own answers, GSPO clip) and eq. 50
                    (others' answers: stepwise band and exponential factor), or another method's objective of others'
                    answers (`Bounds.cross`). Both backends must match it.
gated_activation    a layer's gated activation and, as rms_norm and rotate_heads, its norm and its rotary embedding, in
                    torch's operations and with their bits
merge_adapter       LoRA's product, added to its matrix
experts             `combine_rows` with its gradients, and `add_grouped_product` (experts.py).

Elsewhere: argument checks, autograd and the choice of a backend (api.py, autograd.py, backends.py), Triton
(linear_logprob.py, sequence_objective.py, elementwise.py). Everything but a layer's operations computes in float32, or
in float64 for float64 inputs.

Shapes: T tokens, H hidden, V rows of this rank's vocabulary shard without padding, R ranks, B sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from hacpo_kernels.bounds import Bounds
from hacpo_kernels.products import add_product, product

# Most elements of logits that exist at once on this path (64 MiB of float32), whatever T and V are.
LOGIT_BUDGET = 1 << 24


def chunk_rows(num_columns: int) -> int:
    """Rows of one chunk of logits. A function of the vocabulary alone, so that chunks do not depend on the batch."""
    return max(1, LOGIT_BUDGET // max(1, num_columns))


class Curve(NamedTuple):
    """The function from a product z of hidden and weight to the logit that softmax takes: cap(z) / temperature.

    cap(z) is c tanh(z / c) with c = `softcap`, or z for None.
    """

    inverse_temperature: float
    softcap: float | None = None


class LogitStats(NamedTuple):
    """Softmax statistics of one vocabulary shard, z = cap(hidden @ weight^T) / temperature, per token [T].

    max_T      max over the shard, -inf if it has no column
    sum_T      sum of exp(z - max)
    target_T   z at the target, -inf if the target is in another shard
    """

    max_T: torch.Tensor
    sum_T: torch.Tensor
    target_T: torch.Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logit_stats(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, column_T: torch.Tensor, curve: Curve) -> LogitStats:
    """Statistics [T] of this shard. `column_T` is the target's row of `weight_VH`, or -1 if it is not here."""
    dtype = compute_dtype(hidden_TH.dtype)
    weight_HV = operand(weight_VH).t()
    stats = LogitStats(
        max_T=hidden_TH.new_full((len(hidden_TH),), -torch.inf, dtype=dtype),
        sum_T=hidden_TH.new_zeros((len(hidden_TH),), dtype=dtype),
        target_T=hidden_TH.new_full((len(hidden_TH),), -torch.inf, dtype=dtype),
    )
    for rows in _chunks(len(hidden_TH), len(weight_VH)) if len(weight_VH) else ():
        z_CV = _capped(product(hidden_TH[rows], weight_HV, dtype), curve).mul_(curve.inverse_temperature)
        for whole_T, part_C in zip(stats, _chunk_stats(z_CV, column_T[rows])):
            whole_T[rows] = part_C
    return stats


def _capped(product_CV: torch.Tensor, curve: Curve) -> torch.Tensor:
    """cap(z) of [C, V], in place."""
    if curve.softcap is None:
        return product_CV
    return product_CV.div_(curve.softcap).tanh_().mul_(curve.softcap)


def operand(weight_VH: torch.Tensor) -> torch.Tensor:
    """The weight [V, H] in the form that every chunk multiplies with: converted once, not once per chunk."""
    return weight_VH.to(compute_dtype(weight_VH.dtype))


def _chunks(num_rows: int, num_columns: int) -> list[slice]:
    step = chunk_rows(num_columns)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _chunk_stats(z_CV: torch.Tensor, column_C: torch.Tensor) -> LogitStats:
    """Statistics of one chunk of logits, which is overwritten."""
    target_C = z_CV.gather(1, column_C.clamp(min=0)[:, None])[:, 0].masked_fill(column_C < 0, -torch.inf)
    max_C = z_CV.amax(dim=1)
    # A fully masked row has max -inf: subtracting it would make NaN of every column.
    base_C = torch.where(max_C == -torch.inf, 0.0, max_C)
    return LogitStats(max_C, z_CV.sub_(base_C[:, None]).exp_().sum(dim=1), target_C)


def merge_stats(shards_R: list[LogitStats]) -> LogitStats:
    """Combines the shards' statistics [T] in rank order, so that every rank of the group has the same bits."""
    max_T = torch.stack([shard.max_T for shard in shards_R]).amax(dim=0)
    # Where no shard has a column, max is -inf and -inf - -inf would be NaN.
    base_T = torch.where(max_T == -torch.inf, 0.0, max_T)
    target_T = torch.stack([shard.target_T for shard in shards_R]).amax(dim=0)
    sum_T = torch.zeros_like(max_T)
    for shard in shards_R:
        sum_T += (shard.max_T - base_T).exp() * shard.sum_T
    return LogitStats(max_T, sum_T, target_T)


def finish_stats(stats: LogitStats) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of the target, log of the partition function), each [T], from the merged statistics."""
    log_sum_T = stats.sum_T.log()
    # Never above 0, whatever is rounded: the target is at most the maximum, whose own share of the sum is 1.
    return (stats.target_T - stats.max_T) - log_sum_T, stats.max_T + log_sum_T


class RowGradients(NamedTuple):
    """Inputs of backward for each row, [C] each. `column_C` is the target's row of the weight shard or -1."""

    column_C: torch.Tensor
    logsumexp_C: torch.Tensor
    coefficient_C: torch.Tensor  # d loss / d logprob


def logit_gradient(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, curve: Curve, rows: RowGradients) -> torch.Tensor:
    """d loss / d(hidden @ weight^T), one chunk [C, V]; the logits are computed again.

    d logprob / dz_v = 1{v = target} - p_v,  dz / dlogit = 1 / temperature times 1 - tanh^2(logit / c) with a cap.
    """
    hidden_CH = hidden_CH.to(compute_dtype(hidden_CH.dtype))
    z_CV = _capped(product(hidden_CH, operand(weight_VH).t()), curve)
    slope_CV = None if curve.softcap is None else (z_CV / curve.softcap).square_().neg_().add_(1.0)
    z_CV.mul_(curve.inverse_temperature)
    gradient_CV = z_CV.sub_(rows.logsumexp_C[:, None]).exp_().mul_(-rows.coefficient_C[:, None])
    here_C = (rows.column_C >= 0).to(rows.coefficient_C.dtype) * rows.coefficient_C
    gradient_CV.scatter_add_(1, rows.column_C.clamp(min=0)[:, None], here_C[:, None])
    gradient_CV.mul_(curve.inverse_temperature)
    return gradient_CV if slope_CV is None else gradient_CV.mul_(slope_CV)


# ---- sequence objective ----------------------------------------------------------------------------------------


def segment_sum(token_logprob_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sum of every segment, float64 [B]: the clip is 3e-4 wide, and a float32 running sum alone would blur it."""
    return torch.segment_reduce(token_logprob_T.double(), "sum", offsets=cu_seqlens.long())


def objective_from_mean(
    seq_logprob_B: torch.Tensor,
    source_logprob_B: torch.Tensor,
    advantage_B: torch.Tensor,
    is_self_B: torch.Tensor,
    low: float,
    bounds: Bounds,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of every sequence from its mean log-prob (nats per token), all tensors [B]. Eq. 47 and 50.

    Returns (loss_B, ratio_B, weight_B), float64: the ratio s, and w with d loss_B / d seq_logprob_B = -w A.
    `advantage_B` is A, with omega in it already; `low` is the lower end of the band.
    """
    difference_B = seq_logprob_B.double() - source_logprob_B.double()
    ratio_B = difference_B.clamp(-bounds.log_ratio_clamp, bounds.log_ratio_clamp).exp()
    advantage_B = advantage_B.double()

    loss_B, weight_B = _own_objective(ratio_B, advantage_B, bounds)
    if bounds.cross != "own":
        mean_B = seq_logprob_B.double()
        cross_loss_B, cross_weight_B = _cross_objective(mean_B, difference_B, ratio_B, advantage_B, low, bounds)
        loss_B = torch.where(is_self_B, loss_B, cross_loss_B)
        weight_B = torch.where(is_self_B, weight_B, cross_weight_B)
    has_ratio_B = is_self_B | (bounds.cross != "likelihood")  # else there is none to bound
    weight_B = torch.where(has_ratio_B & (difference_B.abs() > bounds.log_ratio_clamp), 0.0, weight_B)
    # A NaN log-prob gives a NaN weight: where() on a comparison with NaN would have made a silent 0 of it.
    return loss_B, ratio_B, torch.where(difference_B.isnan(), torch.nan, weight_B)


def _own_objective(
    ratio_B: torch.Tensor, advantage_B: torch.Tensor, bounds: Bounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """eq. 47: L = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), and its weight."""
    plain_B = ratio_B * advantage_B
    clipped_B = ratio_B.clamp(bounds.own_low, bounds.own_high) * advantage_B
    # At a tie both branches are s A, so the gradient is that of the unclipped one.
    return -torch.minimum(plain_B, clipped_B), torch.where(plain_B > clipped_B, 0.0, ratio_B)


def _cross_objective(
    mean_B: torch.Tensor,
    difference_B: torch.Tensor,
    ratio_B: torch.Tensor,
    advantage_B: torch.Tensor,
    low: float,
    bounds: Bounds,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and weight of others' answers, [B] each: `Bounds.cross` names the equation."""
    if bounds.cross == "likelihood":
        return -mean_B * advantage_B, torch.ones_like(ratio_B)
    if bounds.cross == "truncated":
        # -sg[min(s, C)] A log-prob has this gradient; its value is reported as the plain weighted advantage.
        is_dropped_B = (advantage_B < 0) & (difference_B < -bounds.divergence_limit)
        weight_B = torch.where(is_dropped_B, 0.0, ratio_B.clamp(max=bounds.ratio_cap))
        return -weight_B * advantage_B, weight_B
    if bounds.cross == "band":
        # eq. 50: L = -c sg[c]^alpha (omega A), c = clip(s, low(m), 1)
        band_B = ratio_B.clamp(min=low).clamp(max=bounds.high)
        factor_B = band_B.pow(bounds.alpha)
        is_inside_B = (ratio_B >= low) & (ratio_B <= bounds.high)
        return -band_B * factor_B * advantage_B, torch.where(is_inside_B, ratio_B * factor_B, 0.0)
    raise ValueError(f"cross is {bounds.cross!r}, an objective that the torch reference does not have")


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
    """objective_from_mean on packed tokens [T]: (loss_B, d loss_B / d token_logprob, ratio_B, weight_B), [B] each.

    A sequence without tokens, or of length 0, has loss, coefficient and weight 0 and ratio NaN.
    """
    count_B = cu_seqlens.diff().double()
    empty_B = count_B <= 0
    if length_B is None:
        length_B = count_B
    else:
        length_B = length_B.double()
        empty_B = empty_B | (length_B <= 0)
    length_B = length_B.masked_fill(empty_B, 1.0)
    # Rounded as the source's scalar was when it travelled: an unchanged policy has ratio 1 to the last bit.
    mean_B = (segment_sum(token_logprob_T, cu_seqlens) / length_B).to(source_logprob_B.dtype)
    loss_B, ratio_B, weight_B = objective_from_mean(mean_B, source_logprob_B, advantage_B, is_self_B, low, bounds)
    loss_B, weight_B = loss_B.masked_fill(empty_B, 0.0), weight_B.masked_fill(empty_B, 0.0)
    coefficient_B = -weight_B * advantage_B.double() / length_B
    dtype = token_logprob_T.dtype
    return loss_B.to(dtype), coefficient_B.to(dtype), ratio_B.masked_fill(empty_B, torch.nan), weight_B


# ---- layers

# Elementwise functions of the gate, called (gate, out=), and their gradients, (grad, gate, grad_input=), by the names
# of `hidden_act` in config.json.
# swigluoai is gpt-oss's, g sigmoid(1.702 g), whose factors are clamped: `clamped`.
SWIGLUOAI, SLOPE, LIMIT = "swigluoai", 1.702, 7.0


def _swish(gate: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(gate, SLOPE, out=out).sigmoid_().mul_(gate)


def _swish_gradient(grad: torch.Tensor, gate: torch.Tensor, *, grad_input: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(SLOPE * gate)
    return torch.mul(grad, sigmoid * (1 + SLOPE * gate * (1 - sigmoid)), out=grad_input)


ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "silu": (torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input),
    "gelu_pytorch_tanh": (
        partial(torch.ops.aten.gelu.out, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
    SWIGLUOAI: (_swish, _swish_gradient),
}
# Numbers in a block of rows, whose partial sums stay in a processor's cache.
MERGED_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 24}


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, [..., F], of gate and up [..., 2 F], both `clamped`."""
    gate, up = clamped(gate_up, activation)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return ACTIVATIONS[activation][0](gate, out=out).mul_(up)


def activation_gradient(gate_up: torch.Tensor, grad: torch.Tensor, activation: str) -> torch.Tensor:
    """Gradient [..., 2 F] of gate and up; the activated gate is computed again, in forward's order."""
    function, backward = ACTIVATIONS[activation]
    gate, up = clamped(gate_up, activation)
    grad_input = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_input.chunk(2, dim=-1)
    function(gate, out=grad_up).mul_(grad)
    torch.mul(grad, up, out=grad_gate)
    backward(grad_gate, gate, grad_input=grad_gate)
    if activation == SWIGLUOAI:  # beyond a limit the gradient is 0
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate.masked_fill_(gate > LIMIT, 0.0)
        grad_up.masked_fill_(up.abs() > LIMIT, 0.0)
    return grad_input


def clamped(gate_up: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up [..., F] as they enter the product: for gpt-oss min(gate, 7), and up within -7 and 7, plus 1."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1) if activation == SWIGLUOAI else (gate, up)


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y = r x (w + offset), [..., H], and r = (mean of x^2 + eps)^-1/2, float32 or float64 [..., 1]; rounded once."""
    if not offset:
        return torch.ops.aten._fused_rms_norm(x, weight_H.shape, weight_H, eps)
    dtype = compute_dtype(x.dtype)
    y, scale = torch.ops.aten._fused_rms_norm(x.to(dtype), weight_H.shape, offset + weight_H.to(dtype), eps)
    return y.type_as(x), scale


def rms_norm_gradient(
    x: torch.Tensor, weight_H: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor, offset: float, wants_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of `rms_norm`; with g the gradient of y

    dx = r g (w + offset) - x r^3 sum(g x (w + offset)) / H        dw = sum over rows of r g x
    """
    dtype = compute_dtype(x.dtype)
    numbers, weight, grad = x.to(dtype), weight_H.to(dtype), grad.to(dtype)
    if offset:
        weight = offset + weight
    products_TH = (grad * numbers).reshape(-1, len(weight))
    inner = (products_TH @ weight).div_(len(weight)).view(scale.shape)
    grad_x = (grad * weight).mul_(scale).addcmul_(numbers, inner.mul_(scale.pow(3)), value=-1.0)
    grad_weight = (scale.view(-1) @ products_TH).type_as(weight_H) if wants_weight else None
    return grad_x.type_as(x), grad_weight


def rotate_heads(tensor_TND: torch.Tensor, cos_sin_T4P: torch.Tensor, interleaved: bool, inverse: bool) -> torch.Tensor:
    """Heads with their first 2 P numbers rotated in pairs (a, b): (a cos - b sin, b cos + a sin); `inverse`: back."""
    cosines, sines = cos_sin_T4P.unsqueeze(1).chunk(2, dim=-1)
    size = cosines.shape[-1]
    part, rest = tensor_TND[..., :size], tensor_TND[..., size:]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    partners = torch.stack((-second, first), dim=-1).flatten(-2) if interleaved else torch.cat((-second, first), dim=-1)
    out = part * cosines
    out = out - partners * sines if inverse else out + partners * sines
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def merge_adapter(weight_ENM: torch.Tensor, up_ENR: torch.Tensor, down_ERM: torch.Tensor) -> torch.Tensor:
    """W + B A of each of E matrices in new memory: summed in float32, one rank of B A after the other, each rounded."""
    out_ENM = torch.empty_like(weight_ENM, memory_format=torch.contiguous_format)
    rows = max(1, MERGED_AT_ONCE[weight_ENM.device.type] // weight_ENM.shape[2])
    for weight_NM, up_NR, down_RM, out_NM in zip(weight_ENM, up_ENR, down_ERM, out_ENM, strict=True):
        blocks = (tensor.split(rows) for tensor in (weight_NM, up_NR, out_NM))
        for weight_nM, up_nR, out_nM in zip(*blocks, strict=True):
            sum_nM = torch.zeros_like(weight_nM, dtype=torch.float32)
            for column_n, row_M in zip(up_nR.unbind(1), down_RM, strict=True):
                sum_nM.add_(column_n[:, None] * row_M)  # not addcmul, which rounds once or twice by the processor
            out_nM.copy_(sum_nM.add_(weight_nM))
    return out_ENM


def combine_rows(rows_RH: torch.Tensor, index_nk: torch.Tensor, shares_nk: torch.Tensor | None) -> torch.Tensor:
    """Sum of the rows `index_nk` of each token, [n, H] in their dtype, weighted by its float32 shares if there are any.

    With shares, products and sum are float32.
    """
    if shares_nk is None:
        return rows_RH.index_select(0, index_nk.flatten()).unflatten(0, index_nk.shape).sum(dim=1)
    total_nH = rows_RH.new_zeros(len(index_nk), rows_RH.shape[1], dtype=shares_nk.dtype)
    for index_n, share_n in zip(index_nk.T, shares_nk.T, strict=True):
        total_nH += rows_RH.index_select(0, index_n) * share_n[:, None]
    return total_nH.type_as(rows_RH)


def combine_gradients(
    grad_nH: torch.Tensor, rows_RH: torch.Tensor, index_nk: torch.Tensor, shares_nk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `combine_rows`: of its rows, in their dtype, and of its shares. Each row belongs to one token."""
    grad_nH, grad_RH, grad_nk = grad_nH.type_as(shares_nk), torch.empty_like(rows_RH), torch.empty_like(shares_nk)
    for number, (index_n, share_n) in enumerate(zip(index_nk.T, shares_nk.T, strict=True)):
        grad_RH.index_copy_(0, index_n, (grad_nH * share_n[:, None]).type_as(rows_RH))
        grad_nk[:, number] = (grad_nH * rows_RH.index_select(0, index_n)).sum(dim=-1)
    return grad_RH, grad_nk


def add_grouped_product(
    total_eNK: torch.Tensor, left_RN: torch.Tensor, right_RK: torch.Tensor, ends_e: torch.Tensor
) -> None:
    """total[e] += left[rows of e]^T @ right[rows of e], in place; rows are sorted by expert and end at `ends_e`."""
    sizes = ends_e.diff(prepend=ends_e.new_zeros(1)).tolist()
    for total_NK, left, right in zip(total_eNK, left_RN.split(sizes), right_RK.split(sizes), strict=True):
        if len(left):
            add_product(total_NK, left.t(), right)
