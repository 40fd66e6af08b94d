"""`evaluation.json`, the result of `eval` for machines, and the cells that tables for people show of it.

Elsewhere: how answers become scores, and the table in the terminal (evaluation/table.py).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from hacpo_mega.logbook.steps.held_out import score_name
from hacpo_mega.models.files.documents import json_file, one_line
from hacpo_mega.models.files.replacing import replace_file

RESULT = "evaluation.json"
COLUMNS = ("benchmark", "problems", "score", "95 %", "others", "no answer", "cut", "tokens")
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its bootstrap interval."""

    value: Number
    low: Number
    high: Number


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
    no_answer: Number
    cut: Number
    tokens_mean: Number
    num_repeated: int = 0
    graded: bool = False

    def __post_init__(self) -> None:
        if self.headline not in self.scores:
            raise ValueError(f"headline {self.headline!r} is none of its scores")


@dataclass(frozen=True)
class Evaluation:
    """All benchmarks of one evaluation; `average` is the unweighted mean of their headline scores."""

    settings: dict[str, Any]
    benchmarks: tuple[BenchmarkResult, ...]
    average: Estimate


FILE = TypeAdapter(Evaluation)


def write_evaluation(evaluation: Evaluation, out: Path) -> None:
    """Writes `evaluation.json` atomically; NaN becomes null."""
    replace_file(out / RESULT, FILE.dump_json(evaluation, indent=2) + b"\n")


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in a file; null is NaN. ValueError, one line, for another file."""
    try:
        return FILE.validate_python(json_file(path))
    except ValidationError as error:
        first = error.errors()[0]
        field = one_line(".".join(map(str, first["loc"])) or "all")
        reason = f"{path} is no evaluation: {field}: {one_line(first['msg'])}; move it away to go on"
        raise ValueError(reason) from error


def rows_of(evaluation: Evaluation) -> list[list[str]]:
    """Cells under COLUMNS, a row per benchmark, and their mean below several."""
    rows = []
    for result in evaluation.benchmarks:
        headline, *others = score_texts(result).values()
        shares = ("–" if math.isnan(share) else f"{share:.1%}" for share in (result.no_answer, result.cut))
        tokens = number_text(result.tokens_mean, 0)
        rows.append(
            [result.name, str(result.num_problems), headline, _interval(result), ", ".join(others), *shares, tokens]
        )
    if len(rows) > 1:
        average = evaluation.average
        interval = "each all equal" if average.low == average.high else _range(average)
        rows.append(["mean", "", number_text(average.value), interval, *[""] * 4])
    return rows


def score_texts(result: BenchmarkResult) -> dict[str, str]:
    """All scores for people by their name, the headline first."""
    scores = {result.headline: result.scores[result.headline]} | result.scores
    return {name: f"{score_name(name, graded=result.graded)} {number_text(one.value)}" for name, one in scores.items()}


def number_text(value: float, decimals: int = 4) -> str:
    """A number for people, a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.{decimals}f}"


def _interval(result: BenchmarkResult) -> str:
    """The headline's interval; without a width it tells only how many values are equal."""
    estimate, num_problems = result.scores[result.headline], result.num_problems - result.num_unscored
    if num_problems and estimate.low == estimate.high:
        return f"all {num_problems} equal" if num_problems > 1 else "1 problem"
    return _range(estimate)


def _range(estimate: Estimate) -> str:
    return f"{number_text(estimate.low)} to {number_text(estimate.high)}"


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
