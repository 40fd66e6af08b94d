"""Statistics of k judged answers per problem, and their errors over problems. Pure functions, no files.

    avg@k    mean reward: with rewards of 0 and 1 the expected accuracy of one answer, else shown as mean reward@k
    best@k   mean of the highest reward among the k answers to a problem, else shown as best reward@k
    pass@k   share of problems with a success among k of n answers, without bias:
             1 - C(n - c, k) / C(n, k)   (Chen et al. 2021, eq. 1)
    maj@k    share of problems whose most frequent final answer is a success

An unjudged answer (a fault of the judge) is in no statistic, since it says nothing about the model; a problem without
any judged answer is left out. Not here: which answers are a success, verdict "correct" (hacpo_grading/judge.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, nan
from statistics import fmean

import numpy as np
from scipy.stats import bootstrap

from hacpo_mega.logbook.steps.held_out import is_graded

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
RESAMPLES_AT_ONCE = 100


@dataclass(frozen=True)
class Answers:
    """The judged answers to one problem, in the order they were drawn.

    rewards  from 0 to 1
    correct  which are a success
    votes    the final answer of each as text, None where there is none. Equal texts are one candidate of maj@k, and so
            are all correct ones however they are written
    """

    rewards: tuple[float, ...]
    correct: tuple[bool, ...]
    votes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.correct) == len(self.votes) > 0, (self.rewards, self.correct, self.votes)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its bootstrap interval."""

    value: float
    low: float
    high: float


def average(answers: Answers) -> float:
    """The mean reward."""
    return fmean(answers.rewards)


def best(answers: Answers) -> float:
    """The highest reward."""
    return float(max(answers.rewards))


def pass_at(k: int, answers: Answers) -> float:
    """The chance that k answers, drawn from these without replacement, hold a correct one.

    ValueError with fewer than k answers: there is no unbiased estimate of pass@k from them.
    """
    drawn, num_correct = len(answers.correct), sum(answers.correct)
    if not 1 <= k <= drawn:
        raise ValueError(f"pass@{k} needs at least {k} judged answers to a problem, found {drawn}")
    return 1.0 - comb(drawn - num_correct, k) / comb(drawn, k)


def majority(answers: Answers) -> float:
    """1 when the most frequent final answer is correct; of t candidates in a tie each wins with chance 1/t.

    Texts without a final answer do not vote. Without any vote the problem is not solved.
    """
    candidates = Counter(
        True if correct else vote
        for correct, vote in zip(answers.correct, answers.votes)
        if correct or vote is not None
    )
    if not candidates:
        return 0.0
    most = max(candidates.values())
    winners = [candidate for candidate, count in candidates.items() if count == most]
    return float(True in winners) / len(winners)


def over_problems(value_P: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over P problems and its percentile bootstrap interval (95 %, problems drawn with replacement).

    The interval is about which problems a benchmark happens to hold. With few problems it is too narrow, and with equal
    values it has no width. All three numbers are NaN without a problem.
    """
    return mean_of_benchmarks([value_P], seed)


def mean_of_benchmarks(values: Sequence[Sequence[float]], seed: int = 0) -> Estimate:
    """The unweighted mean of the means of several benchmarks; each is resampled within itself."""
    if not values or any(len(value_P) == 0 for value_P in values):
        return Estimate(nan, nan, nan)
    # scipy wants two values of each; one value twice is resampled as the one.
    samples = [np.repeat(np.asarray(value_P, np.float64), 2 if len(value_P) == 1 else 1) for value_P in values]
    found = bootstrap(
        samples,
        _mean_of_means,
        n_resamples=NUM_RESAMPLES,
        batch=RESAMPLES_AT_ONCE,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(fmean(fmean(value_P) for value_P in values), float(found.low), float(found.high))


def _mean_of_means(*benchmarks: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([value_P.mean(axis=axis) for value_P in benchmarks], axis=0)


def are_graded(problems: Sequence[Answers]) -> bool:
    """True if a reward lies between 0 and 1, so that the mean is no accuracy."""
    rewards = [reward for problem in problems for reward in problem.rewards]
    return bool(rewards) and is_graded(fmean(rewards), fmean(reward**2 for reward in rewards))
