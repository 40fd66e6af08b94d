"""The page's view of `hacpo-mega eval`: scores with their intervals, every answer, and evaluations side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hacpo_mega.evaluation.answers import read_answers
from hacpo_mega.logbook.files.json_lines import COUNT, NUMBER, TABLE, TEXT, list_of, table_of, wrong_field
from hacpo_mega.logbook.steps.held_out import score_name
from hacpo_mega.models.files.documents import json_file
from hacpo_mega.models.files.links import require_inside

SCORES = "evaluation.json"
ESTIMATE = dict.fromkeys(("value", "low", "high"), NUMBER.or_null)
FIELDS = {"settings": TABLE, "benchmarks": list_of(TABLE), "average": TABLE}
OF_BENCHMARK = {
    **{"name": TEXT, "headline": TEXT, "scores": table_of(TABLE)},
    **dict.fromkeys(("num_problems", "num_dropped", "num_unscored", "num_answers", "num_unjudged"), COUNT),
    **dict.fromkeys(("no_answer", "cut", "tokens_mean"), NUMBER.or_null),
}
SHOWN = ("model", "num_answers", "temperature", "max_answer_tokens", "reward", "suite", "seed")
PER_PAGE = 20
HEAD = ("benchmark", "problems", "score", "95 %", "others", "no answer", "cut", "tokens")


def evaluation(path: Path) -> dict[str, Any]:
    """A row per benchmark, and their mean. ValueError, one line, for another file."""
    content = _read(path)
    rows = [_row(found) for found in content["benchmarks"]]
    if len(rows) > 1:
        average = content["average"]
        rows.append(["mean", "", _number(average["value"]), _interval(average), "", "", "", ""])
    notes = [note for found in content["benchmarks"] for note in _notes(found)]
    settings = content["settings"]
    return {
        "benchmarks": [found["name"] for found in content["benchmarks"]],
        "facts": {name: str(settings[name]) for name in SHOWN if settings.get(name) is not None},
        "tables": [{"title": "Scores", "head": HEAD, "rows": rows, "notes": notes}],
    }


def side_by_side(folders: Sequence[Path]) -> dict[str, Any]:
    """A row per evaluation, a column per benchmark. One that cannot be read is a note."""
    found, notes = {}, []
    for folder in folders:
        try:
            found[folder] = _read(folder / SCORES)
        except (OSError, ValueError) as error:
            notes.append(str(error))
    names = list(dict.fromkeys(one["name"] for content in found.values() for one in content["benchmarks"]))
    rows = []
    for folder, content in found.items():
        scores = {one["name"]: _score(one) for one in content["benchmarks"]}
        mean = _number(content["average"]["value"]) if len(scores) > 1 else ""
        label = "/".join(part for part in folder.parts[-3:] if part != "evaluations")
        model = str(content["settings"].get("model", ""))
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
    names = evaluation(folder / SCORES)["benchmarks"]
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


def _read(path: Path) -> dict[str, Any]:
    content = json_file(path)
    if why := _wrong(content):
        raise ValueError(f"{path} is no evaluation: {why}")
    return content


def _wrong(content: Any) -> str | None:
    if not isinstance(content, dict):
        return "no table"
    if why := wrong_field(content, FIELDS) or wrong_field(content["average"], ESTIMATE, "average."):
        return why
    for found in content["benchmarks"]:
        if why := wrong_field(found, OF_BENCHMARK):
            return why
        if found["headline"] not in found["scores"]:
            return f"headline {found['headline']!r} is none of its scores"
        for name, score in found["scores"].items():
            if why := wrong_field(score, ESTIMATE, f"{name}."):
                return why
    return None


def _row(found: Mapping[str, Any]) -> list[str]:
    graded = found.get("graded") is True
    names = {name: score_name(name, graded=graded) for name in found["scores"]}
    headline = found["scores"][found["headline"]]
    others = (f"{names[n]} {_number(s['value'])}" for n, s in found["scores"].items() if n != found["headline"])
    shares = ("–" if found[key] is None else f"{found[key]:.1%}" for key in ("no_answer", "cut"))
    tokens = "–" if found["tokens_mean"] is None else f"{found['tokens_mean']:.0f}"
    score = f"{names[found['headline']]} {_number(headline['value'])}"
    return [
        *(found["name"], str(found["num_problems"]), score, _interval(headline), ", ".join(others)),
        *(*shares, tokens),
    ]


def _score(found: Mapping[str, Any]) -> str:
    """The headline of a benchmark with its name and interval."""
    headline, name = found["scores"][found["headline"]], found["headline"]
    spoken = score_name(name, graded=found.get("graded") is True)
    return f"{spoken} {_number(headline['value'])} [{_number(headline['low'])}, {_number(headline['high'])}]"


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    if found["num_dropped"]:
        yield f"{found['name']}: {found['num_dropped']} problems over the prompt limit were not asked."
    if found["num_unjudged"]:
        share = f"{found['num_unjudged']} of {found['num_answers']}"
        yield f"{found['name']}: {share} answers are unjudged, and count nowhere."


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _interval(estimate: Mapping[str, Any]) -> str:
    return f"{_number(estimate['low'])} to {_number(estimate['high'])}"
