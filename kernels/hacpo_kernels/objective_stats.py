"""What the sequence objective reports beside its loss: ratios, clips, bands and weights as sums and counts.

Shapes: B sequences. Not here: the objective (reference.py) and Triton's own counting (sequence_objective.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class ObjectiveStats(NamedTuple):
    """What a step reports of its objective. Every pair is float64 [2], (sum, count) over sequences: pairs of
    micro-batches and ranks add up, and a mean is one division at the end. Empty sequences and sequences whose loss is
    not finite are in no pair but `empty` and `nonfinite`.

    ratio_*, log_ratio_*, loss_*   s, log s and the loss of own (`self`) and others' (`cross`) answers
    clipped_self                   own answers whose clipped branch is the smaller one: no gradient
    cross_below, _inside, _above   others' answers with s < low, low <= s <= 1, s > 1; only `inside` has a gradient
    weight_cross, weight_sq_cross  w = s c^alpha inside the band, else 0 (the factor of omega A in the gradient); w^2:
                                   effective sample size = weight sum^2 / (count * weight_sq sum)
    gradient_sq_*                  (d loss / d mean log-prob)^2: cross share of the gradient norm
    clamped                        |log s| beyond log_ratio_clamp: no gradient
    empty, nonfinite               counted over all sequences
    ratio_*_min, ratio_*_max       float64 scalars; +inf and -inf when there is no such answer
    ratio_B                        float64 [B], for breakdowns by source; NaN where empty
    """

    ratio_self: torch.Tensor
    log_ratio_self: torch.Tensor
    loss_self: torch.Tensor
    clipped_self: torch.Tensor
    gradient_sq_self: torch.Tensor
    ratio_cross: torch.Tensor
    log_ratio_cross: torch.Tensor
    loss_cross: torch.Tensor
    cross_below: torch.Tensor
    cross_inside: torch.Tensor
    cross_above: torch.Tensor
    weight_cross: torch.Tensor
    weight_sq_cross: torch.Tensor
    gradient_sq_cross: torch.Tensor
    clamped: torch.Tensor
    empty: torch.Tensor
    nonfinite: torch.Tensor
    ratio_self_min: torch.Tensor
    ratio_self_max: torch.Tensor
    ratio_cross_min: torch.Tensor
    ratio_cross_max: torch.Tensor
    ratio_B: torch.Tensor


def objective_stats(
    ratio_B: torch.Tensor,
    log_ratio_B: torch.Tensor,
    loss_B: torch.Tensor,
    grad_B: torch.Tensor,
    weight_B: torch.Tensor,
    is_self_B: torch.Tensor,
    empty_B: torch.Tensor,
    is_clipped_B: torch.Tensor,
    is_clamped_B: torch.Tensor,
    low: float,
) -> ObjectiveStats:
    """What ObjectiveStats describes, from the quantities of objective_from_mean by their names there."""
    finite_B = loss_B.isfinite() & grad_B.isfinite()
    counted_B = finite_B & ~empty_B
    own_B, cross_B = counted_B & is_self_B, counted_B & ~is_self_B
    everything_B = torch.ones_like(own_B)
    return ObjectiveStats(
        ratio_self=_pair(ratio_B, own_B),
        log_ratio_self=_pair(log_ratio_B, own_B),
        loss_self=_pair(loss_B, own_B),
        clipped_self=_pair(is_clipped_B, own_B),
        gradient_sq_self=_pair(grad_B.square(), own_B),
        ratio_cross=_pair(ratio_B, cross_B),
        log_ratio_cross=_pair(log_ratio_B, cross_B),
        loss_cross=_pair(loss_B, cross_B),
        cross_below=_pair(ratio_B < low, cross_B),
        cross_inside=_pair((ratio_B >= low) & (ratio_B <= 1.0), cross_B),
        cross_above=_pair(ratio_B > 1.0, cross_B),
        weight_cross=_pair(weight_B, cross_B),
        weight_sq_cross=_pair(weight_B.square(), cross_B),
        gradient_sq_cross=_pair(grad_B.square(), cross_B),
        clamped=_pair(is_clamped_B, counted_B),
        empty=_pair(empty_B, everything_B),
        nonfinite=_pair(~finite_B, everything_B),
        ratio_self_min=_extreme(ratio_B, own_B, torch.inf, torch.amin),
        ratio_self_max=_extreme(ratio_B, own_B, -torch.inf, torch.amax),
        ratio_cross_min=_extreme(ratio_B, cross_B, torch.inf, torch.amin),
        ratio_cross_max=_extreme(ratio_B, cross_B, -torch.inf, torch.amax),
        ratio_B=ratio_B,
    )


def _pair(value_B: torch.Tensor, mask_B: torch.Tensor) -> torch.Tensor:
    """(sum, count) over the sequences of the mask, float64 [2]."""
    return torch.stack([torch.where(mask_B, value_B.double(), 0.0).sum(), mask_B.double().sum()])


def _extreme(value_B: torch.Tensor, mask_B: torch.Tensor, neutral: float, reduce: Callable) -> torch.Tensor:
    padded_B = torch.cat([torch.where(mask_B, value_B, neutral), value_B.new_full((1,), neutral)])
    return reduce(padded_B, dim=0)
