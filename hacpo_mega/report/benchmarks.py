"""Benchmarks of a run's agents: every `evaluations/<name>/evaluation.json` of the run folder as one table.

`hacpo-mega eval RUN/agents/NAME ... --out RUN/evaluations/NAME` writes them (evaluation/table.py); here they are read.
"""

from pathlib import Path
from typing import Any

from hacpo_mega.logbook.steps.held_out import score_name
from hacpo_mega.models.files.documents import json_file
from hacpo_mega.report.html import Html, join, table, tag

HEAD = ["evaluation", "benchmark", "problems", "score", "95 % interval", "others"]


def render_benchmarks(run_dir: Path) -> Html | None:
    """A table with a row per benchmark, or None without evaluations. ValueError names a file that is none."""
    files = sorted((run_dir / "evaluations").glob("*/evaluation.json"))
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        return None
    note = "Intervals are bootstraps over problems: they say how much a score depends on which problems there are."
    return join(tag("h2", "Benchmarks"), tag("p", note, class_="note"), table(HEAD, rows, class_="numbers"))


def _rows(file: Path) -> list[list[str]]:
    try:
        found = json_file(file)
        return [_row(file.parent.name, benchmark) for benchmark in found["benchmarks"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{file} is not the result of hacpo-mega eval: {error!r}; move it out of the run") from error


def _row(name: str, benchmark: dict[str, Any]) -> list[str]:
    headline, scores = benchmark["headline"], benchmark["scores"]
    low, high = scores[headline]["low"], scores[headline]["high"]
    num_scored = benchmark["num_problems"] - benchmark.get("num_unscored", 0)
    is_flat = low is not None and low == high
    interval = f"all {num_scored} equal" if is_flat else f"{_number(low)} to {_number(high)}"
    graded = bool(benchmark.get("graded"))
    shown = {key: f"{score_name(key, graded=graded)} {_number(score['value'])}" for key, score in scores.items()}
    others = ", ".join(score for key, score in shown.items() if key != headline)
    return [name, str(benchmark["name"]), str(benchmark["num_problems"]), shown[headline], interval, others]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
