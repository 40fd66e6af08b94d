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
    """A row per benchmark, and their mean. ValueError, one line, for another file."""
    found = read_evaluation(folder / RESULT)
    table = {"title": "Scores", "head": COLUMNS, "rows": rows_of(found), "notes": warnings_of(found)}
    return {
        "benchmarks": [result.name for result in found.benchmarks],
        "facts": {name: str(found.settings[name]) for name in SHOWN if found.settings.get(name) is not None},
        "tables": [table],
    }


def side_by_side(folders: Sequence[Path]) -> dict[str, Any]:
    """A row per evaluation, a column per benchmark. One that cannot be read is a note."""
    found, notes = {}, []
    for folder in folders:
        try:
            found[folder] = read_evaluation(folder / RESULT)
        except (OSError, ValueError) as error:
            notes.append(str(error))
    names = list(dict.fromkeys(one.name for content in found.values() for one in content.benchmarks))
    rows = []
    for folder, content in found.items():
        scores = {one.name: _score(one) for one in content.benchmarks}
        mean = number_text(content.average.value) if len(scores) > 1 else ""
        label = "/".join(part for part in folder.parts[-3:] if part != "evaluations")
        model = str(content.settings.get("model", ""))
        rows.append([label, model, *(scores.get(name, "–") for name in names), mean])
    table = {
        "title": "Scores side by side",
        "head": ["evaluation", "model", *names, "mean"],
        "rows": rows,
        "notes": ["Brackets: 95 % interval. Compare scores of one name alone: avg@8 is another quantity than avg@1."],
    }
    return {"facts": {"evaluations": str(len(rows))}, "notes": notes, "tables": [table]}


def answers(folder: Path, benchmark: str, verdict: str, text: str, page: int) -> dict[str, Any]:
    """A page of a benchmark's answers, by problem, then by rollout: those of a verdict, whose text has a text.

    Empty texts select all. ValueError for a benchmark that it has not, and for a line that is no answer.
    """
    names = evaluation(folder)["benchmarks"]
    if benchmark not in names:
        raise ValueError(f"no benchmark {benchmark!r} in {folder}: give one of {', '.join(names)}")
    require_inside(folder, folder / "answers")
    found = read_answers(folder, benchmark)
    chosen = [
        answer
        for _, answer in sorted(found.items())
        if verdict in ("", answer.verdict) and text.casefold() in answer.text.casefold()
    ]
    rows = [asdict(answer) for answer in chosen[page * PER_PAGE :][:PER_PAGE]]
    verdicts = sorted({answer.verdict for answer in found.values()})
    return {"total": len(chosen), "page": page, "per_page": PER_PAGE, "rows": rows, "verdicts": verdicts}


def _score(found: BenchmarkResult) -> str:
    """The headline of a benchmark with its name and interval."""
    headline = found.scores[found.headline]
    return f"{score_texts(found)[found.headline]} [{number_text(headline.low)}, {number_text(headline.high)}]"
