"""The comparison of two methods' runs: mean, standard deviation, paired bootstrap interval. Pure functions.

Runs are paired by seed: one seed has the same prompts in the same order for every method, so what a seed makes easy or
hard for both cancels in their difference. The interval is scipy's percentile bootstrap (Efron 1979) of the mean of the
differences: with few seeds it is too narrow rather than too wide, and below MIN_PAIRS none is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy.stats import bootstrap

MIN_PAIRS = 3
NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (divided by n - 1; None for one value) of n values."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """A method minus the reference, over the n seeds that both have.

    `interval` is None below MIN_PAIRS seeds; `num_positive` counts the seeds in which the method was better.
    """

    mean: float
    interval: tuple[float, float] | None
    num_positive: int
    n: int


def summarize(values: Sequence[float]) -> Summary:
    """At least one value."""
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired_difference(by_seed: Mapping[int, float], reference_by_seed: Mapping[int, float]) -> Difference | None:
    """The mean difference over the common seeds with its interval; None without a common seed."""
    seeds = sorted(by_seed.keys() & reference_by_seed.keys())
    if not seeds:
        return None
    differences = [by_seed[seed] - reference_by_seed[seed] for seed in seeds]
    interval = bootstrap_interval(differences) if len(seeds) >= MIN_PAIRS else None
    return Difference(fmean(differences), interval, sum(value > 0 for value in differences), len(seeds))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of a mean; the same values always give the same interval."""
    found = bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
