"""The result of an evaluation: from answers to scores, and as a table in the terminal.

    avg@k    mean reward: with rewards of 0 and 1 the expected accuracy of one answer, else shown as mean reward@k
    best@k   mean of the highest reward among the k answers to a problem, else shown as best reward@k
    pass@k   share of problems with a success among k of n answers, without bias:
             1 - C(n - c, k) / C(n, k)   (Chen et al. 2021, eq. 1)
    maj@k    share of problems whose most frequent final answer is a success

An unjudged answer (a fault of the judge) is in no statistic, since it says nothing about the model; a problem without
any judged answer is left out. Elsewhere: which answers are a success (hacpo_grading/judge.py), `evaluation.json` and
the cells of tables (logbook/evaluation_file.py).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import comb, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap

from hacpo_mega.evaluation.answers import NO_ANSWER, Answer, read_answers
from hacpo_mega.evaluation.benchmarks import Benchmark
from hacpo_mega.logbook.evaluation_file import (
    COLUMNS,
    BenchmarkResult,
    Estimate,
    Evaluation,
    rows_of,
    score_texts,
    warnings_of,
)
from hacpo_mega.logbook.steps.held_out import is_graded
from hacpo_mega.models.files.visible import one_line

LOG_WIDTH = 160  # of a table in a file
LINE_SCORES = 3  # of graded rewards, whose names are long: a line of more is cut between a name and its number
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
    interval = bootstrap(
        samples,
        _mean_of_means,
        n_resamples=NUM_RESAMPLES,
        batch=RESAMPLES_AT_ONCE,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(fmean(fmean(value_P) for value_P in values), float(interval.low), float(interval.high))


def _mean_of_means(*benchmarks: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([value_P.mean(axis=axis) for value_P in benchmarks], axis=0)


def are_graded(problems: Sequence[Answers]) -> bool:
    """True if a reward lies between 0 and 1, so that the mean is no accuracy."""
    rewards = [reward for problem in problems for reward in problem.rewards]
    return bool(rewards) and is_graded(fmean(rewards), fmean(reward**2 for reward in rewards))


def summarize(
    settings: dict[str, Any], benchmarks: Sequence[Benchmark], num_dropped: Mapping[str, int], out: Path, seed: int
) -> Evaluation:
    """Scores everything that was answered into `out`."""
    results, headlines = [], []
    success = settings.get("reward_success")
    for benchmark in benchmarks:
        groups: dict[str, list[Answer]] = defaultdict(list)
        for answer in read_answers(out, benchmark.name).values():
            groups[answer.id].append(answer)
        problems = [answers for group in groups.values() if (answers := judged_answers(group))]
        values = scores_of_problems(problems, benchmark.num_answers, is_defined=success is not None)
        candidates = (f"{score}@{benchmark.num_answers}" for score in (benchmark.headline, "avg"))
        headline = next(name for name in candidates if name in values)  # maj may be absent
        headlines.append(values[headline])
        scores = {name: over_problems(value_P, seed) for name, value_P in values.items()}
        answers = [answer for group in groups.values() for answer in group]
        results.append(
            BenchmarkResult(
                name=benchmark.name,
                headline=headline,
                scores=scores,
                num_problems=len(groups),
                num_dropped=num_dropped[benchmark.name],
                num_unscored=len(groups) - len(problems),
                num_answers=len(answers),
                num_unjudged=sum(not answer.is_judged for answer in answers),
                no_answer=_mean(answer.verdict == NO_ANSWER for answer in answers),
                cut=_mean(answer.stop == "length" for answer in answers),
                tokens_mean=_mean(answer.num_tokens for answer in answers),
                num_repeated=benchmark.num_repeated,
                graded=are_graded(problems),
            )
        )
    return Evaluation(settings, tuple(results), mean_of_benchmarks(headlines, seed))


def judged_answers(answers: Sequence[Answer]) -> Answers | None:
    """The judged answers to one problem, by rollout; None without any."""
    kept = sorted((answer for answer in answers if answer.is_judged), key=lambda answer: answer.rollout)
    # One that had to end by itself and was cut has no answer, whatever stands in its text.
    votes = (None if a.verdict == NO_ANSWER else a.vote for a in kept)
    columns = ((a.reward for a in kept), (a.is_success for a in kept), votes)
    return Answers(*map(tuple, columns)) if kept else None


def scores_of_problems(
    problems: Sequence[Answers], num_answers: int, *, is_defined: bool = False
) -> dict[str, list[float]]:
    """Every score of every problem, by name. pass@k leaves problems out that have fewer than k judged answers.

    Graded rewards have pass@1 and pass@n, too. Where none of their answers is a success and
    reward.success does not define one (`is_defined`), none could be, and pass@k and maj@k are absent.
    """
    graded = are_graded(problems)
    values = {f"avg@{num_answers}": [average(problem) for problem in problems]}
    if num_answers > 1:
        values[f"best@{num_answers}"] = [best(problem) for problem in problems]
    if graded and not is_defined and not any(any(problem.correct) for problem in problems):
        return values
    if num_answers > 1:
        values[f"maj@{num_answers}"] = [majority(problem) for problem in problems]
    powers = [k for power in range(num_answers.bit_length()) if (k := 2**power) < num_answers]
    # with rewards of 0 and 1 pass@1 is avg@n, and pass@n is best@n
    for k in [*powers, num_answers] if graded else powers[1:]:
        values[f"pass@{k}"] = [*map(partial(pass_at, k), (p for p in problems if len(p.correct) >= k))]
    return values


def _mean(values: Any) -> float:
    values = list(values)
    return fmean(values) if values else math.nan


def print_table(evaluation: Evaluation) -> None:
    """One line per benchmark, and their mean; caveats stand below."""
    table = Table(title=one_line(str(evaluation.settings["model"])), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("benchmark", "others") else "right")
    for result, row in zip_longest(evaluation.benchmarks, rows_of(evaluation)):
        others = [row[4]]
        if result is None:
            table.add_section()
        elif result.graded:
            scores = list(score_texts(result).values())[1:]
            others = [", ".join(scores[i : i + LINE_SCORES]) for i in range(0, len(scores), LINE_SCORES)]
        table.add_row(*map(one_line, row[:4]), "\n".join(map(one_line, others)), *row[5:])
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(table)
    for line in warnings_of(evaluation):
        console.print(one_line(line), highlight=False)
