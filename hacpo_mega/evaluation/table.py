"""The result of an evaluation: from answers to scores, `evaluation.json` for machines, a table for people.

    avg@k    mean reward: with rewards of 0 and 1 the expected accuracy of one answer, else shown as mean reward@k
    best@k   mean of the highest reward among the k answers to a problem, else shown as best reward@k
    pass@k   share of problems with a success among k of n answers, without bias:
             1 - C(n - c, k) / C(n, k)   (Chen et al. 2021, eq. 1)
    maj@k    share of problems whose most frequent final answer is a success

An unjudged answer (a fault of the judge) is in no statistic, since it says nothing about the model; a problem without
any judged answer is left out. Elsewhere: which answers are a success (hacpo_grading/judge.py), and the report page of a
run (report/).
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from hacpo_mega.logbook.steps.held_out import is_graded, score_name
from hacpo_mega.models.files.replacing import replace_file
from hacpo_mega.models.files.visible import one_line

RESULT = "evaluation.json"
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


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark: its scores by name, such as "avg@30", and the counts behind them.

    graded            a reward lay between 0 and 1: avg@k is shown as mean reward@k, best@k as best reward@k
    num_repeated      rows of its file that repeat a problem and count nowhere
    num_problems      that were asked                num_dropped       over the prompt limit, not asked
    num_unscored      without any judged answer      num_unjudged      answers without a reward
    no_answer, cut    shares of answers without a final answer, and ended by the length limit
    """

    name: str
    headline: str
    scores: dict[str, Estimate]
    num_problems: int
    num_dropped: int
    num_unscored: int
    num_answers: int
    num_unjudged: int
    no_answer: float
    cut: float
    tokens_mean: float
    num_repeated: int = 0
    graded: bool = False


@dataclass(frozen=True)
class Evaluation:
    """All benchmarks of one evaluation; `average` is the unweighted mean of their headline scores."""

    settings: dict[str, Any]
    benchmarks: tuple[BenchmarkResult, ...]
    average: Estimate


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
        problems = [found for group in groups.values() if (found := judged(group))]
        values = scores_of_problems(problems, benchmark.num_answers, is_defined=success is not None)
        named = (f"{what}@{benchmark.num_answers}" for what in (benchmark.headline, "avg"))
        headline = next(name for name in named if name in values)  # maj may be absent
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


def judged(answers: Sequence[Answer]) -> Answers | None:
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
    found = list(values)
    return fmean(found) if found else math.nan


def write_evaluation(evaluation: Evaluation, out: Path) -> None:
    """Writes `evaluation.json` atomically; NaN becomes null."""
    replace_file(out / RESULT, json.dumps(_finite(asdict(evaluation)), indent=2, ensure_ascii=False) + "\n")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_table(evaluation: Evaluation) -> None:
    """One line per benchmark, and their mean; caveats stand below."""
    table = Table(title=one_line(str(evaluation.settings["model"])), title_justify="left")
    for column in ("benchmark", "problems", "score", "95 %", "others", "no answer", "cut", "tokens"):
        table.add_column(column, justify="left" if column in ("benchmark", "others") else "right")
    for result in evaluation.benchmarks:
        table.add_row(*_row(result))
    if len(evaluation.benchmarks) > 1:
        table.add_section()
        average = evaluation.average
        interval = "each all equal" if average.low == average.high else _interval(average)
        table.add_row("mean", "", f"{average.value:.4f}", interval, "", "", "", "")
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(table)
    for line in warnings_of(evaluation):
        console.print(one_line(line), highlight=False)


def warnings_of(evaluation: Evaluation) -> list[str]:
    """Caveats for a reader of the scores: repeated and dropped problems, unjudged answers, the meaning of a success."""
    lines = []
    for result in evaluation.benchmarks:
        if result.num_repeated:
            lines.append(
                f"{result.name}: {result.num_repeated} rows repeat a problem of the file (same text, same gold); each "
                "problem counts once"
            )
        if result.graded:
            lines.append(f"{result.name}: {_success_note(result, evaluation.settings.get('reward_success'))}")
        if result.num_dropped:
            lines.append(f"{result.name}: {result.num_dropped} problems dropped, longer than the prompt limit")
        if result.num_unjudged:
            lines.append(
                f"{result.name}: {result.num_unjudged} of {result.num_answers} answers are unjudged (a fault of the "
                f"judge) and count nowhere; {result.num_unscored} problems are left out; the same command judges again"
            )
    return lines


def _row(result: BenchmarkResult) -> tuple[str, ...]:
    headline = result.scores[result.headline]
    shown = {name: f"{score_name(name, graded=result.graded)} {s.value:.4f}" for name, s in result.scores.items()}
    others = [one_line(score) for name, score in shown.items() if name != result.headline]
    lines = ["  ".join(others[i : i + LINE_SCORES]) for i in range(0, len(others), LINE_SCORES)]
    return (
        one_line(result.name),
        str(result.num_problems),
        one_line(shown[result.headline]),
        _interval_of(headline, result.num_problems - result.num_unscored),
        "\n".join(lines if result.graded else ["  ".join(others)]),
        f"{result.no_answer:.1%}",
        f"{result.cut:.1%}",
        f"{result.tokens_mean:.0f}",
    )


def _interval_of(estimate: Estimate, num_problems: int) -> str:
    """The interval as text; without a width it tells only how many values are equal."""
    if num_problems and estimate.low == estimate.high:
        return f"all {num_problems} equal" if num_problems > 1 else "1 problem"
    return _interval(estimate)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.4f} to {estimate.high:.4f}"


def _success_note(result: BenchmarkResult, success: str | float | None) -> str:
    """A sentence on the successes that pass@k and maj@k count for graded rewards."""
    if not any(name.startswith("pass@") for name in result.scores):
        return (
            "no answer has the full reward of 1, and nothing else says which are a success: pass@k and maj@k are left "
            "out; reward.success says it"
        )
    if isinstance(success, str):
        return f"pass@k and maj@k count successes, answers with the full reward of the part {success!r}"
    return (
        f"pass@k and maj@k count successes, answers with a reward of at least {1.0 if success is None else success:g}"
    )
