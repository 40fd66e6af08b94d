"""Grading a file of anybody's answers: JSON Lines or Parquet with `gold` and `pred` -> one verdict per line.

The verdict of a line stands at the same line of the output, a bad row's too, so that the two files can be read side by
side. Not here: reading the command line, and the graders themselves (judge.py).
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.commands.inspect_data import Findings
from hacpo_mega.data.files import (
    GOLD_TYPES,
    DataProblem,
    describe,
    field_names,
    gold_text,
    quoted,
    read_records,
    refuse_overwriting,
    replacing,
    value_problem,
)
from hacpo_mega.grading.judge import Judge
from hacpo_mega.records import Judgement, Stop, Verdict

ROWS_AT_A_TIME = 2048
STOPS = {"eos": Stop.EOS, "length": Stop.LENGTH, "abort": Stop.ABORT}


@dataclass(frozen=True)
class GradedFile:
    """How many rows got which verdict, what was wrong with the others, and how fast it went."""

    num_by_verdict: dict[Verdict, int]
    problems: tuple[DataProblem, ...]
    answers_per_s: float


@dataclass(frozen=True)
class _Row:
    line: int
    prompt: str
    gold: str
    pred: str
    stop: Stop


def grade_file(file: Path, out: Path, judge: Judge, gold_field: str = "gold", pred_field: str = "pred") -> GradedFile:
    """Judges every row of `file` and writes {"line", "verdict", "reward"} to `out`; a bad row has "problem" instead.

    Optional fields: `prompt`, for a grader that wants it, and `stop` ("eos", "length", "abort"; eos when absent). The
    reward of an unjudged answer is null. What cannot be read is in `problems`, with its line; nothing is raised for it.
    ValueError when `out` is the file itself.
    """
    verdicts: Counter[Verdict] = Counter()
    problems: list[DataProblem] = []
    refuse_overwriting(out, [file])
    with replacing(out) as lines:
        for rows in _batches(file, gold_field, pred_field):
            good = [row for row in rows if isinstance(row, _Row)]
            judgements = iter(_judged(good, judge))
            for row in rows:
                judgement = next(judgements) if isinstance(row, _Row) else None
                lines.write(json.dumps(_reply(row, judgement)) + "\n")
                verdicts.update([] if judgement is None else [judgement.verdict])
            problems += [row for row in rows if isinstance(row, DataProblem)]
    if not verdicts and not problems:
        problems.append(DataProblem(file, None, None, "has no rows"))
    seconds = judge.counts.wall_s
    return GradedFile(dict(verdicts), tuple(problems), judge.counts.num_answers / seconds if seconds else 0.0)


def _judged(rows: list[_Row], judge: Judge) -> list[Judgement]:
    return judge.judge(
        [row.prompt for row in rows], [row.gold for row in rows], [row.pred for row in rows], [row.stop for row in rows]
    )


def _reply(row: _Row | DataProblem, judgement: Judgement | None) -> dict[str, Any]:
    if judgement is None:
        return {"line": row.line, "problem": row.what if row.field is None else f"field {row.field!r} {row.what}"}
    reward = None if math.isnan(judgement.reward) else judgement.reward
    return {"line": row.line, "verdict": judgement.verdict.name.lower(), "reward": reward}


def _batches(file: Path, gold_field: str, pred_field: str) -> Iterator[list[_Row | DataProblem]]:
    batch: list[_Row | DataProblem] = []
    for line, record in read_records(file):
        is_read = isinstance(record, dict)
        batch.append(_row(file, line, record, gold_field, pred_field) if is_read else record)
        if len(batch) == ROWS_AT_A_TIME:
            yield batch
            batch = []
    if batch:
        yield batch


def _row(file: Path, line: int, record: dict[str, Any], gold_field: str, pred_field: str) -> _Row | DataProblem:
    gold, pred, stop = record.get(gold_field), record.get(pred_field), record.get("stop") or "eos"
    for field, value in ((gold_field, gold), (pred_field, pred)):
        if value is None or isinstance(value, bool) or not isinstance(value, str | int | float):
            what = (
                f"is missing (the row has: {field_names(record)})"
                if value is None
                else f"is a {type(value).__name__}, needs text"
            )
            return DataProblem(file, line, field, what)
    if what := value_problem(gold, GOLD_TYPES):
        return DataProblem(file, line, gold_field, what)
    if not isinstance(stop, str) or stop not in STOPS:
        return DataProblem(file, line, "stop", f"is {quoted(stop)}, needs one of {', '.join(STOPS)}")
    return _Row(line, str(record.get("prompt") or ""), gold_text(gold), gold_text(pred), STOPS[stop])


def grade(file: Path, out: Path, judge: Judge) -> Findings:
    """Grades a file of answers; how many got which verdict, how fast, and which rows could not be read.

    ValueError when there is no such file, or `out` is the same.
    """
    if not file.is_file():
        raise ValueError(f"{file}: {'is a folder' if file.is_dir() else 'does not exist'}")
    graded = grade_file(file, out, judge)
    counts = [f"{verdict.name.lower()}: {graded.num_by_verdict[verdict]}" for verdict in sorted(graded.num_by_verdict)]
    lines = [*counts, f"{graded.answers_per_s:.0f} answers per second; one verdict per line in {out}"]
    lines += [describe(graded.problems)] if graded.problems else []
    return Findings(tuple(lines), is_sound=not graded.problems)
