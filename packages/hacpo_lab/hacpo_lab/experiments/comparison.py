"""The comparison of two methods' runs: mean, standard deviation, paired bootstrap interval. Pure functions.

Runs are paired by seed: one seed has the same prompts in the same order for every method, so the part that a seed makes
easy or hard for both cancels in their difference. The interval is the percentile bootstrap (Efron 1979) of the mean of
the differences, with the draws of scipy.stats.bootstrap, whose import would take a second. With few seeds it is too
narrow rather than too wide; below MIN_PAIRS none is given.

Where the answer of every run to every prompt is known, seeds and prompts are resampled independently of each other, so
that the interval covers other prompts, too (Owen, "The pigeonhole bootstrap", 2007: conservative, not exact).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

import numpy as np

MIN_PAIRS = 3
NUM_RESAMPLES = 10_000
NUM_CROSSED = 2_000  # resamples of seeds and prompts
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 0
SAME = 2e-6  # scores that differ by less may differ by rounding: a result keeps six digits of an agent's accuracy


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (divided by n - 1; None for one value) of n values."""

    mean: float
    sd: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.sd is None else f" ± {self.sd:.3f}")


@dataclass(frozen=True)
class Difference:
    """A method minus the reference, over the n seeds that both have.

    `interval` is None below MIN_PAIRS seeds; `num_positive` counts the seeds in which the method was better by more
    than rounding.
    """

    mean: float
    interval: tuple[float, float] | None
    num_positive: int
    n: int

    def __str__(self) -> str:
        interval = "" if self.interval is None else " [{:+.3f}, {:+.3f}]".format(*self.interval)
        return f"{self.mean:+.3f}{interval} {self.num_positive}/{self.n}"


def summarize(values: Sequence[float]) -> Summary:
    """The summary of at least one value."""
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Ends:
    """Accuracies at the end of a method's runs, by seed, and the answers that they are means of, where known.

    An answer is 0 or 1, a mean of several agents' lies between. Each skill has an array [prompts], the same prompts for
    all seeds and methods; an accuracy is the mean over skills of their means.
    """

    accuracy: Mapping[int, float]
    answers: Mapping[int, Sequence[np.ndarray]] | None = None

    @classmethod
    def of(cls, answers: Mapping[int, Sequence[np.ndarray]]) -> Self:
        """From answers alone."""
        means = {seed: fmean(float(skill.mean()) for skill in skills) for seed, skills in answers.items()}
        return cls(means, answers)


def paired_difference(ends: Ends, reference: Ends, confidence: float = CONFIDENCE) -> Difference | None:
    """The mean difference over the common seeds with its interval; None without a common seed."""
    seeds = sorted(ends.accuracy.keys() & reference.accuracy.keys())
    if not seeds:
        return None
    differences = [ends.accuracy[seed] - reference.accuracy[seed] for seed in seeds]
    interval = None
    if len(seeds) >= MIN_PAIRS and ends.answers is not None and reference.answers is not None:
        pairs = [zip(ends.answers[seed], reference.answers[seed], strict=True) for seed in seeds]
        interval = crossed_interval([[one - other for one, other in pair] for pair in pairs], confidence)
    elif len(seeds) >= MIN_PAIRS:
        interval = bootstrap_interval(differences)
    return Difference(fmean(differences), interval, sum(value > SAME for value in differences), len(seeds))


def crossed_interval(differences: Sequence[Sequence[np.ndarray]], confidence: float) -> tuple[float, float]:
    """Percentile interval of the mean over seeds, skills and prompts when seeds and each skill's prompts are resampled.

    differences[seed][skill] is an array [prompts]. The same values always give the same interval.
    """
    num_seeds, num_skills = len(differences), len(differences[0])
    seeds_RS, total_R = _resample(num_seeds, 0), np.zeros(NUM_CROSSED)
    for skill in range(num_skills):
        differences_SP = np.stack([of_seed[skill] for of_seed in differences])
        prompts_RP = _resample(differences_SP.shape[1], skill + 1)
        total_R += ((seeds_RS @ differences_SP) * prompts_RP).sum(axis=1) / num_skills
    low, high = np.quantile(total_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@functools.lru_cache(maxsize=16)
def _resample(size: int, stream: int) -> np.ndarray:
    """Weights of `size` items in NUM_CROSSED bootstrap resamples, float64 [NUM_CROSSED, size]; each row sums to 1."""
    rng = np.random.default_rng((BOOTSTRAP_SEED, stream))
    return rng.multinomial(size, np.full(size, 1 / size), size=NUM_CROSSED) / size


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of a mean; the same values always give the same interval."""
    draws = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[draws].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def right_answers(bits: str, size: int) -> np.ndarray:
    """Right answers, 0 or 1, float64 [size], from bits as hexadecimal text, the first answer's first."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8))[:size].astype(float)
