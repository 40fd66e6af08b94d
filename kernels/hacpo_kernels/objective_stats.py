"""Statistics of the objective: ratios, clips, bands and weights as sums and counts.

Counting needs no bounds: a sequence's weight is 0 exactly where the objective gives it no gradient. It runs on
the device of the terms. The trainer counts on the host, after an update, from terms that were copied there with the
loss: without a launch or a synchronisation of the device. Shapes: B sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class SequenceTerms(NamedTuple):
    """Result of the objective for every sequence, all [B], without a graph; input of the statistics.

    loss_B       as the objective returns it
    ratio_B      s, float64; NaN for a sequence without tokens
    weight_B     w, float64, with d loss / d mean log-prob = -w A. Own answers: s, 0 where clipped. Others' answers:
                 s c^alpha inside the band, else 0. 0 where a ratio's log is beyond the clamp, NaN where the log-prob is
    advantage_B  A, with omega in it
    is_self_B    own answers
    """

    loss_B: torch.Tensor
    ratio_B: torch.Tensor
    weight_B: torch.Tensor
    advantage_B: torch.Tensor
    is_self_B: torch.Tensor

    def of(self, chosen_B: torch.Tensor) -> "SequenceTerms":
        """Terms of the chosen sequences (bool or index), such as those of one source."""
        return SequenceTerms(*(column_B[chosen_B] for column_B in self))


class ObjectiveStats(NamedTuple):
    """Statistics over sequences. Every pair is float64 [2], (sum, count).

    Pairs of micro-batches and ranks add up, and a mean is one division at the end. Sequences that have no tokens or are
    not finite are in no pair but `nonfinite`.

    ratio_*                        s of own (`self`) and others' (`cross`) answers
    ratio_*_min, ratio_*_max       float64 scalars; +inf and -inf if there is no such answer
    clipped_self                   own answers without a gradient: the clipped branch is the smaller one
    cross_below, _inside, _above   others' answers with s < low, low <= s <= 1, s > 1; only `inside` has a gradient
    weight_cross, weight_sq_cross  w and w^2: effective sample size = weight sum^2 / (count * weight_sq sum)
    weight_cross_max               float64 scalar, the highest w; -inf if there is no such answer
    gradient_sq_*                  (d loss / d mean log-prob)^2: gradient energy of others' answers beside own ones
    gradient_abs_*                 |w A|, the size of d loss / d mean log-prob; gradient_positive_* the part of it from
                                   A > 0, from answers that become more likely
    nonfinite                      counted over all sequences
    """

    ratio_self: torch.Tensor
    ratio_self_min: torch.Tensor
    ratio_self_max: torch.Tensor
    clipped_self: torch.Tensor
    gradient_sq_self: torch.Tensor
    gradient_abs_self: torch.Tensor
    gradient_positive_self: torch.Tensor
    ratio_cross: torch.Tensor
    ratio_cross_min: torch.Tensor
    ratio_cross_max: torch.Tensor
    cross_below: torch.Tensor
    cross_inside: torch.Tensor
    cross_above: torch.Tensor
    weight_cross: torch.Tensor
    weight_sq_cross: torch.Tensor
    weight_cross_max: torch.Tensor
    gradient_sq_cross: torch.Tensor
    gradient_abs_cross: torch.Tensor
    gradient_positive_cross: torch.Tensor
    nonfinite: torch.Tensor


def objective_stats(terms: SequenceTerms) -> ObjectiveStats:
    """Counts the sequences of `terms` [B], on their device, without a host synchronisation."""
    ratio_B, weight_B = terms.ratio_B, terms.weight_B
    gradient_B = weight_B * terms.advantage_B.double()
    finite_B = terms.loss_B.isfinite() & gradient_B.isfinite()
    counted_B = finite_B & ~ratio_B.isnan()  # no ratio: a sequence without tokens
    own_B, cross_B = counted_B & terms.is_self_B, counted_B & ~terms.is_self_B
    trained_B = weight_B != 0  # may be below 0 in an objective of the user's, against the advantage
    return ObjectiveStats(
        ratio_self=_pair(ratio_B, own_B),
        ratio_self_min=_extreme(ratio_B, own_B, torch.inf, torch.amin),
        ratio_self_max=_extreme(ratio_B, own_B, -torch.inf, torch.amax),
        clipped_self=_pair(~trained_B, own_B),
        gradient_sq_self=_pair(gradient_B.square(), own_B),
        gradient_abs_self=_pair(gradient_B.abs(), own_B),
        gradient_positive_self=_pair(gradient_B.clamp(min=0.0), own_B),
        ratio_cross=_pair(ratio_B, cross_B),
        ratio_cross_min=_extreme(ratio_B, cross_B, torch.inf, torch.amin),
        ratio_cross_max=_extreme(ratio_B, cross_B, -torch.inf, torch.amax),
        # The band ends at 1, so a ratio outside of it lies below where it is below 1.
        cross_below=_pair(~trained_B & (ratio_B < 1.0), cross_B),
        cross_inside=_pair(trained_B, cross_B),
        cross_above=_pair(~trained_B & (ratio_B > 1.0), cross_B),
        weight_cross=_pair(weight_B, cross_B),
        weight_sq_cross=_pair(weight_B.square(), cross_B),
        weight_cross_max=_extreme(weight_B, cross_B, -torch.inf, torch.amax),
        gradient_sq_cross=_pair(gradient_B.square(), cross_B),
        gradient_abs_cross=_pair(gradient_B.abs(), cross_B),
        gradient_positive_cross=_pair(gradient_B.clamp(min=0.0), cross_B),
        nonfinite=_pair(~finite_B, torch.ones_like(finite_B)),
    )


def _pair(value_B: torch.Tensor, mask_B: torch.Tensor) -> torch.Tensor:
    """(sum, count) over the sequences of the mask, float64 [2]."""
    return torch.stack([torch.where(mask_B, value_B.double(), 0.0).sum(), mask_B.double().sum()])


def _extreme(value_B: torch.Tensor, mask_B: torch.Tensor, neutral: float, reduce: Callable) -> torch.Tensor:
    padded_B = torch.cat([torch.where(mask_B, value_B, neutral), value_B.new_full((1,), neutral)])
    return reduce(padded_B, dim=0)
