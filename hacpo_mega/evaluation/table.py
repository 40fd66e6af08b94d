"""The result of an evaluation: from answers to scores, `evaluation.json` for machines, a table for people.

Not here: the statistics themselves (scores.py) and the report page of a run (report/).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from hacpo_mega.evaluation.answers import Answer, read_answers
from hacpo_mega.evaluation.benchmarks import Benchmark
from hacpo_mega.evaluation.scores import (
    Answers,
    Estimate,
    are_graded,
    average,
    best,
    majority,
    mean_of_benchmarks,
    over_problems,
    pass_at,
)
from hacpo_mega.logbook.steps.held_out import score_name
from hacpo_mega.models.files.visible import one_line

RESULT = "evaluation.json"
LOG_WIDTH = 160  # of a table in a file
LINE_SCORES = 3  # of graded rewards, whose names are long: a line of more is cut between a name and its number


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
        answers = [list(group) for group in _by_problem(read_answers(out, benchmark.name).values())]
        problems = [judged(group) for group in answers if judged(group)]
        values = scores_of_problems(problems, benchmark.num_answers, is_defined=success is not None)
        named = (f"{what}@{benchmark.num_answers}" for what in (benchmark.headline, "avg"))
        headline = next(name for name in named if name in values)  # maj may be absent
        headlines.append(values[headline])
        scores = {name: over_problems(value_P, seed) for name, value_P in values.items()}
        result = _result(benchmark, headline, scores, answers, num_dropped[benchmark.name])
        results.append(replace(result, graded=are_graded(problems)))
    return Evaluation(settings, tuple(results), mean_of_benchmarks(headlines, seed))


def judged(answers: Sequence[Answer]) -> Answers | None:
    """The judged answers to one problem, by rollout; None without any."""
    kept = sorted((answer for answer in answers if answer.is_judged), key=lambda answer: answer.rollout)
    columns = ((a.reward for a in kept), (a.is_success for a in kept), (a.vote for a in kept))
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


def _by_problem(answers: Any) -> list[list[Answer]]:
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.id, []).append(answer)
    return list(groups.values())


def _result(
    benchmark: Benchmark, headline: str, scores: dict[str, Estimate], problems: list[list[Answer]], num_dropped: int
) -> BenchmarkResult:
    answers = [answer for group in problems for answer in group]
    return BenchmarkResult(
        name=benchmark.name,
        num_repeated=benchmark.num_repeated,
        headline=headline,
        scores=scores,
        num_problems=len(problems),
        num_dropped=num_dropped,
        num_unscored=sum(judged(group) is None for group in problems),
        num_answers=len(answers),
        num_unjudged=sum(not answer.is_judged for answer in answers),
        no_answer=_mean(answer.verdict == "no_answer" for answer in answers),
        cut=_mean(answer.stop == "length" for answer in answers),
        tokens_mean=_mean(answer.num_tokens for answer in answers),
    )


def _mean(values: Any) -> float:
    found = list(values)
    return fmean(found) if found else math.nan


def write_evaluation(evaluation: Evaluation, out: Path) -> None:
    """Writes `evaluation.json` atomically; NaN becomes null."""
    path = out / RESULT
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(_finite(asdict(evaluation)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)


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
                f"judge) and count nowhere; {result.num_unscored} problems are left out"
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
