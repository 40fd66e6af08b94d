"""The two kernels in plain torch: the path that runs on CPU, and the formulas a reader checks against the paper.

linear_logprob      log softmax(hidden @ weight^T / temperature)[target], split into the part one vocabulary shard can
                    do (`logit_stats`, `logit_gradient`) and the part that needs all shards (`merge_stats`).
sequence_objective  HACPO (arXiv 2603.02604): `objective_from_mean` is eq. 47 (own answers, GSPO clip) and eq. 50
                    (others' answers: stepwise band and exponential factor), once and for both backends to be held to.

Not here: argument checks, autograd and the choice of a backend (dispatch.py, head.py, backends.py), Triton
(linear_logprob.py, sequence_objective.py). Everything computes in float32 or, when the inputs are float64, in float64.
Shapes: T tokens, H hidden, V rows of this rank's vocabulary shard without padding, R ranks, B sequences.
"""

from typing import NamedTuple

import torch

from hacpo_kernels.objective_stats import ObjectiveStats, objective_stats

# The only logits that ever live on this path: so many elements at once (64 MiB of float32), whatever T and V are.
LOGIT_BUDGET = 1 << 24


def chunk_rows(num_columns: int) -> int:
    """Rows of one chunk of logits. A function of the vocabulary alone, so chunks do not move when the batch grows."""
    return max(1, LOGIT_BUDGET // max(1, num_columns))


class LogitStats(NamedTuple):
    """What one vocabulary shard knows of softmax(z), z = hidden @ weight^T / temperature, per token [T].

    max_T      max over the shard, -inf when it has no column
    sum_T      sum of exp(z - max)
    target_T   z at the target, -inf when the target is in another shard
    tilt_T     sum of exp(z - max) * (z - max): the entropy without the cancellation of large common offsets
    """

    max_T: torch.Tensor
    sum_T: torch.Tensor
    target_T: torch.Tensor
    tilt_T: torch.Tensor


class Stash(NamedTuple):
    """What forward keeps when it trades memory for the second matrix product: exp(z - top), not z, because rounding an
    exponential to bf16 costs 2^-9 of a probability and rounding a logit of 20 costs 6 % of it.

    exp_TV    exp(z - top), in the dtype of hidden on the Triton path
    top_ST    the maximum that was subtracted, per token and block of columns (one block in plain torch)
    """

    exp_TV: torch.Tensor
    top_ST: torch.Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logit_stats(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    column_T: torch.Tensor,
    inverse_temperature: float,
    with_entropy: bool,
    with_stash: bool,
) -> tuple[LogitStats, Stash | None]:
    """The statistics of this shard. `column_T` is the target's row of `weight_VH`, or -1 when it is not here."""
    dtype = compute_dtype(hidden_TH.dtype)
    weight_HV = operand(weight_VH).t()
    stats_4T = hidden_TH.new_zeros((4, len(hidden_TH)), dtype=dtype)
    stats_4T[0].fill_(-torch.inf)
    stats_4T[2].fill_(-torch.inf)
    exp_TV = hidden_TH.new_empty((len(hidden_TH), len(weight_VH)), dtype=dtype) if with_stash else None
    for rows in _chunks(len(hidden_TH), len(weight_VH)) if len(weight_VH) else ():
        z_CV = (hidden_TH[rows].to(dtype) @ weight_HV).mul_(inverse_temperature)
        stats_4T[:, rows], exp_CV = _chunk_stats(z_CV, column_T[rows], with_entropy)
        if with_stash:
            exp_TV[rows] = exp_CV
    return LogitStats(*stats_4T), Stash(exp_TV, stats_4T[:1]) if with_stash else None


def operand(weight_VH: torch.Tensor) -> torch.Tensor:
    """The weight as every chunk multiplies with it: converted once, not once per chunk."""
    return weight_VH.to(compute_dtype(weight_VH.dtype))


def _chunks(num_rows: int, num_columns: int) -> list[slice]:
    step = chunk_rows(num_columns)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _chunk_stats(z_CV: torch.Tensor, column_C: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(statistics [4, C], exp(z - max) [C, V]) of one chunk of logits, which is overwritten."""
    target_C = z_CV.gather(1, column_C.clamp(min=0)[:, None])[:, 0].masked_fill(column_C < 0, -torch.inf)
    max_C = z_CV.amax(dim=1)
    # A fully masked row has max -inf: subtracting it would make NaN of every column.
    shifted_CV = z_CV.sub_(torch.where(max_C == -torch.inf, 0.0, max_C)[:, None])
    if not with_entropy:
        exp_CV = shifted_CV.exp_()
        return torch.stack([max_C, exp_CV.sum(dim=1), target_C, torch.zeros_like(max_C)]), exp_CV
    exp_CV = shifted_CV.exp()
    # exp(-inf) * -inf is 0 here: a column without probability has no entropy.
    tilt_C = shifted_CV.masked_fill_(shifted_CV == -torch.inf, 0.0).mul_(exp_CV).sum(dim=1)
    return torch.stack([max_C, exp_CV.sum(dim=1), target_C, tilt_C]), exp_CV


def merge_stats(shards_R: list[LogitStats]) -> LogitStats:
    """Combine the shards in rank order, so that every rank of the group holds the same bits."""
    max_T = torch.stack([shard.max_T for shard in shards_R]).amax(dim=0)
    base_T = torch.where(max_T == -torch.inf, 0.0, max_T)
    target_T = torch.stack([shard.target_T for shard in shards_R]).amax(dim=0)
    sum_T, tilt_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
    for shard in shards_R:
        shift_T = torch.where(shard.max_T == -torch.inf, 0.0, shard.max_T - base_T)
        scale_T = shift_T.exp()
        sum_T += scale_T * shard.sum_T
        tilt_T += scale_T * (shard.tilt_T + shift_T * shard.sum_T)
    return LogitStats(max_T, sum_T, target_T, tilt_T)


def finish_stats(stats: LogitStats) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-prob of the target, log of the partition function, entropy), each [T], from the merged statistics."""
    log_sum_T = stats.sum_T.log()
    # Never above 0, whatever is rounded: the target is at most the maximum, whose own share of the sum is 1.
    logprob_T = (stats.target_T - stats.max_T) - log_sum_T
    return logprob_T, stats.max_T + log_sum_T, log_sum_T - stats.tilt_T / stats.sum_T


class RowGradients(NamedTuple):
    """What backward knows of the rows it treats, each [C]. `column_C` is the target's row of the weight shard or -1."""

    column_C: torch.Tensor
    logsumexp_C: torch.Tensor
    coefficient_C: torch.Tensor  # d loss / d logprob
    entropy_C: torch.Tensor
    entropy_coefficient_C: torch.Tensor | None  # d loss / d entropy, None when nobody asked


def logit_gradient(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, inverse_temperature: float, rows: RowGradients
) -> torch.Tensor:
    """d loss / d(hidden @ weight^T), one chunk [C, V]; the logits are computed again."""
    hidden_CH = hidden_CH.to(compute_dtype(hidden_CH.dtype))
    z_CV = (hidden_CH @ operand(weight_VH).t()).mul_(inverse_temperature)
    return _softmax_gradient(z_CV.sub_(rows.logsumexp_C[:, None]), inverse_temperature, rows)


def stash_gradient(stash: Stash, index_C: torch.Tensor, inverse_temperature: float, rows: RowGradients) -> torch.Tensor:
    """As logit_gradient, for the tokens `index_C` of the stash."""
    logprob_CV = stash.exp_TV[index_C].log_().add_((stash.top_ST[0, index_C] - rows.logsumexp_C)[:, None])
    return _softmax_gradient(logprob_CV, inverse_temperature, rows)


def _softmax_gradient(logprob_CV: torch.Tensor, inverse_temperature: float, rows: RowGradients) -> torch.Tensor:
    """d logprob / dz_v = 1{v = target} - p_v,  d entropy / dz_v = -p_v (log p_v + entropy),  dz / dlogit = 1 / T."""
    coefficient_C = rows.coefficient_C
    if rows.entropy_coefficient_C is None:
        gradient_CV = logprob_CV.exp_().mul_(-coefficient_C[:, None])
    else:
        slope_CV = logprob_CV + rows.entropy_C[:, None]
        slope_CV.mul_(rows.entropy_coefficient_C[:, None]).add_(coefficient_C[:, None])
        prob_CV = logprob_CV.exp_()
        gradient_CV = slope_CV.masked_fill_(prob_CV == 0, 0.0).mul_(prob_CV).neg_()
    here_C = (rows.column_C >= 0).to(coefficient_C.dtype) * coefficient_C
    gradient_CV.scatter_add_(1, rows.column_C.clamp(min=0)[:, None], here_C[:, None])
    return gradient_CV.mul_(inverse_temperature)


# ---- sequence objective ----------------------------------------------------------------------------------------


def segment_sum(token_logprob_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sum of every segment, float64 [B]: the clip is 3e-4 wide, a float32 running sum alone would blur it."""
    return torch.segment_reduce(token_logprob_T.double(), "sum", offsets=cu_seqlens.long())


def objective_from_mean(
    seq_logprob_B: torch.Tensor,
    source_logprob_B: torch.Tensor,
    advantage_B: torch.Tensor,
    is_self_B: torch.Tensor,
    *,
    update_index: int,
    eps_low: float,
    eps_high: float,
    delta: float,
    delta_step: float,
    alpha: float,
    log_ratio_clamp: float,
    empty_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, ObjectiveStats]:
    """HACPO's loss of every sequence from its mean log-prob (nats per token), all tensors [B].

    Returns (loss_B, grad_B, stats): grad_B = d loss_B / d seq_logprob_B, both in the dtype of `seq_logprob_B`, computed
    in float64. `advantage_B` has omega in it already. A sequence marked in `empty_B` has loss and gradient 0.
    """
    difference_B = seq_logprob_B.double() - source_logprob_B.double()
    advantage_B, is_self_B = advantage_B.double(), is_self_B.bool()
    log_ratio_B = difference_B.clamp(-log_ratio_clamp, log_ratio_clamp)
    ratio_B = log_ratio_B.exp()

    # eq. 47, own answers: L = -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)
    plain_B = ratio_B * advantage_B
    clipped_B = ratio_B.clamp(1.0 - eps_low, 1.0 + eps_high) * advantage_B
    self_loss_B = -torch.minimum(plain_B, clipped_B)
    is_clipped_B = plain_B > clipped_B
    self_grad_B = torch.where(is_clipped_B, 0.0, -plain_B)

    # eq. 50, others' answers: L = -c sg[c]^alpha (omega A), c = clip(s, low, 1), low = 1 - delta + m delta_step
    low = min(1.0, 1.0 - delta + update_index * delta_step)
    inside_B = (ratio_B >= low) & (ratio_B <= 1.0)
    band_B = ratio_B.clamp(low, 1.0)
    factor_B = band_B.pow(alpha)
    cross_loss_B = -band_B * factor_B * advantage_B
    weight_B = torch.where(inside_B, ratio_B * factor_B, 0.0)
    cross_grad_B = -weight_B * advantage_B

    is_clamped_B = difference_B.abs() > log_ratio_clamp
    loss_B = torch.where(is_self_B, self_loss_B, cross_loss_B)
    grad_B = torch.where(is_clamped_B, 0.0, torch.where(is_self_B, self_grad_B, cross_grad_B))
    # A NaN in comes out as NaN: where() on a comparison with NaN would have made a silent 0 of it.
    grad_B = torch.where(difference_B.isnan(), torch.nan, grad_B)
    if empty_B is None:
        empty_B = torch.zeros_like(is_self_B)
    loss_B, grad_B = loss_B.masked_fill(empty_B, 0.0), grad_B.masked_fill(empty_B, 0.0)
    ratio_B = ratio_B.masked_fill(empty_B, torch.nan)

    stats = objective_stats(
        ratio_B, log_ratio_B, loss_B, grad_B, weight_B, is_self_B, empty_B, is_clipped_B, is_clamped_B, low
    )
    return loss_B.to(seq_logprob_B.dtype), grad_B.to(seq_logprob_B.dtype), stats


def packed_objective(
    token_logprob_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    source_logprob_B: torch.Tensor,
    advantage_B: torch.Tensor,
    is_self_B: torch.Tensor,
    length_B: torch.Tensor | None,
    total_B: torch.Tensor | None,
    **options: float,
) -> tuple[torch.Tensor, torch.Tensor, ObjectiveStats]:
    """objective_from_mean on packed tokens: (loss_B, d loss_B / d token_logprob, stats)."""
    count_B = cu_seqlens.diff().double()
    empty_B = length_B <= 0 if total_B is not None else count_B <= 0
    if length_B is None:
        length_B = count_B
    else:
        length_B = length_B.double()
        empty_B = empty_B | (length_B <= 0)
    if total_B is None:
        total_B = segment_sum(token_logprob_T, cu_seqlens)
    length_B = length_B.masked_fill(empty_B, 1.0)
    # Rounded as the source's scalar was when it travelled: an unchanged policy has ratio 1 to the last bit.
    mean_B = (total_B / length_B).to(source_logprob_B.dtype).double()
    loss_B, grad_B, stats = objective_from_mean(
        mean_B, source_logprob_B, advantage_B, is_self_B, empty_B=empty_B, **options
    )
    return loss_B.to(token_logprob_T.dtype), (grad_B / length_B).to(token_logprob_T.dtype), stats
