"""The page's view of `hacpo-mega eval`: scores with their intervals, every answer, and evaluations side by side."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hacpo_mega.evaluation.answers import read_answers
from hacpo_mega.logbook.evaluation_file import (
    COLUMNS,
    RESULT,
    BenchmarkResult,
    number_text,
    read_evaluation,
    rows_of,
    score_texts,
    warnings_of,
)
from hacpo_mega.models.files.links import require_inside

SHOWN = ("model", "num_answers", "temperature", "max_answer_tokens", "reward", "suite", "seed")
PER_PAGE = 20


def evaluation(folder: Path) -> dict[str, Any]:
    """A row per benchmark, and their mean. ValueError, one line, for a file that is no evaluation."""
    result = read_evaluation(folder / RESULT)
    table = {"title": "Scores", "head": COLUMNS, "rows": rows_of(result), "notes": warnings_of(result)}
    return {
        "benchmarks": [benchmark.name for benchmark in result.benchmarks],
        "facts": {name: str(result.settings[name]) for name in SHOWN if result.settings.get(name) is not None},
        "tables": [table],
    }


def side_by_side(folders: Sequence[Path]) -> dict[str, Any]:
    """A row per evaluation, a column per benchmark. An evaluation that cannot be read becomes a note."""
    results, notes = {}, []
    for folder in folders:
        try:
            results[folder] = read_evaluation(folder / RESULT)
        except (OSError, ValueError) as error:
            notes.append(str(error))
    names = list(dict.fromkeys(benchmark.name for result in results.values() for benchmark in result.benchmarks))
    rows = []
    for folder, result in results.items():
        scores = {benchmark.name: _score(benchmark) for benchmark in result.benchmarks}
        mean = number_text(result.average.value) if len(scores) > 1 else ""
        label = "/".join(part for part in folder.parts[-3:] if part != "evaluations")
        model = str(result.settings.get("model", ""))
        rows.append([label, model, *(scores.get(name, "–") for name in names), mean])
    table = {
        "title": "Scores side by side",
        "head": ["evaluation", "model", *names, "mean"],
        "rows": rows,
        "notes": ["Brackets: 95 % interval. Compare scores of one name alone: avg@8 is another quantity than avg@1."],
    }
    return {"facts": {"evaluations": str(len(rows))}, "notes": notes, "tables": [table]}


def answers(folder: Path, benchmark: str, verdict: str, text: str, page: int) -> dict[str, Any]:
    """A page of a benchmark's answers, by problem, then by rollout: those with this verdict whose text contains `text`.

    An empty `verdict` or `text` selects all. ValueError for an unknown benchmark, and for a line that is no answer.
    """
    names = evaluation(folder)["benchmarks"]
    if benchmark not in names:
        raise ValueError(f"no benchmark {benchmark!r} in {folder}: give one of {', '.join(names)}")
    require_inside(folder, folder / "answers")
    by_place = read_answers(folder, benchmark)
    selected = [
        answer
        for _, answer in sorted(by_place.items())
        if verdict in ("", answer.verdict) and text.casefold() in answer.text.casefold()
    ]
    rows = [asdict(answer) for answer in selected[page * PER_PAGE :][:PER_PAGE]]
    verdicts = sorted({answer.verdict for answer in by_place.values()})
    return {"total": len(selected), "page": page, "per_page": PER_PAGE, "rows": rows, "verdicts": verdicts}


def _score(benchmark: BenchmarkResult) -> str:
    """A benchmark's headline score with its name and interval."""
    headline = benchmark.scores[benchmark.headline]
    return f"{score_texts(benchmark)[benchmark.headline]} [{number_text(headline.low)}, {number_text(headline.high)}]"
