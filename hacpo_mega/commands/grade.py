"""Grades a file of answers from any source: JSON Lines or Parquet with `gold` and `pred` -> one verdict per line.

Line N of the output belongs to row N of the input, also if that row is bad. Elsewhere: the command line (cli/data.py),
and the graders (hacpo_grading).
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hacpo_grading.judge import Judge, JudgeReport
from hacpo_grading.judgement import Asked, gold_text
from hacpo_mega.commands.inspect_data import Findings
from hacpo_mega.data.reading.files import (
    DataProblem,
    absence,
    describe,
    fields_text,
    read_records,
    refuse_overwriting,
    replacing,
)
from hacpo_mega.data.reading.row_values import GOLD_TYPES, prompt_problem, prompt_text, quoted, value_problem
from hacpo_mega.models.files.links import require_inside_its_run
from hacpo_mega.records import Judgement, Stop, Verdict

ROWS_AT_A_TIME = 2048
STOPS = {"eos": Stop.EOS, "length": Stop.LENGTH, "abort": Stop.ABORT, "cut": Stop.CUT}


def grade(
    file: Path,
    out: Path,
    judge: Judge,
    is_explained: bool = False,
    pred_field: str | None = None,
    gold_field: str = "gold",
) -> Findings:
    """Judges every row of `file` and writes {"line", "verdict", "reward"} to `out`; a bad row has "problem" instead.

    `pred_field` is by default "pred" or, in the answers of an evaluation, "text". With `is_explained` a line also has
    an "explanation": the extracted answer, both sides as parsed, the rule that decided. Optional fields of a row:
    `prompt`, a text or chat messages for a grader that reads it, and `stop` ("eos", "length", "abort", "cut"; default:
    eos). Answers to an equal prompt (in eval's files `prompt_seen`) with an equal gold are a group; without prompts,
    those of equal rows. The reward of an unjudged answer is null.
    The findings are the number of each verdict, the speed, and the rows that could not be read. ValueError if `file`
    does not exist or is `out`, or if both fields are the same.
    """
    if pred_field == gold_field:
        raise ValueError(f"the field {gold_field!r} is read as the gold answer and as the one that is judged: give two")
    require_inside_its_run(file)
    if not file.is_file():
        raise ValueError(f"{file}: {'is a folder' if file.is_dir() else 'does not exist'}")
    refuse_overwriting(out, [file])
    verdicts: Counter[Verdict] = Counter()
    problems: list[DataProblem] = []
    with replacing(out) as lines:
        for rows in _batches(file, gold_field, pred_field, math.inf if judge.compares_groups else ROWS_AT_A_TIME):
            good = [row for _, row in rows if isinstance(row, Asked)]
            judged = iter(judge.judge_and_explain(good) if is_explained else [(one, {}) for one in judge.judge(good)])
            for line, row in rows:
                if isinstance(row, DataProblem):
                    reason = row.reason if row.field is None else f"field {row.field!r} {row.reason}"
                    lines.write(json.dumps({"line": row.line, "problem": reason}) + "\n")
                    problems.append(row)
                    continue
                judgement, explanation = next(judged)
                explained = {"explanation": explanation} if is_explained else {}
                lines.write(json.dumps({"line": line} | _result(judgement) | explained, default=str) + "\n")
                verdicts[judgement.verdict] += 1
    if not verdicts and not problems:
        problems.append(DataProblem(file, None, None, "has no rows"))
    return _findings(out, verdicts, problems, judge.take_report())


def _result(judgement: Judgement) -> dict[str, Any]:
    reward = None if math.isnan(judgement.reward) else judgement.reward
    return {"verdict": judgement.verdict.name.lower(), "reward": reward}


def _findings(out: Path, verdicts: Counter[Verdict], problems: Sequence[DataProblem], report: JudgeReport) -> Findings:
    """The findings for people; the speed is wall time of the judge and CPU time of the graders."""
    lines = [f"{verdict.name.lower()}: {verdicts[verdict]}" for verdict in sorted(verdicts)]
    speed, number = "no answer judged", report.num_answers
    if number and report.wall_s:
        cpu_s = 1000 * report.cpu_s / number
        speed = f"{number / report.wall_s:.0f} answers per second, {cpu_s:.2f} CPU seconds per 1,000 answers"
    lines.append(f"{speed}; one verdict per line in {out}")
    if report.num_unjudged:
        unjudged = f"{report.num_unjudged} unjudged, the fault of the judge"
        lines.append(f"{unjudged}; the first error: {report.first_error}")
    lines += [describe(problems)] if problems else []
    lines += ["--gold-field and --pred-field name other columns"] if any(p.field for p in problems) else []
    return Findings(tuple(lines), is_sound=not problems and not report.num_unjudged)


def _batches(
    file: Path, gold: str, pred: str | None, most: float
) -> Iterator[list[tuple[int | None, Asked | DataProblem]]]:
    """The rows in batches of at most `most`: line number, and the question to the judge or the row's problem."""
    batch = []
    for line, record in read_records(file):
        batch.append((line, _row(file, line, record, gold, pred) if isinstance(record, dict) else record))
        if len(batch) >= most:
            yield batch
            batch = []
    if batch:
        yield batch


def _row(file: Path, line: int, record: dict[str, Any], gold_field: str, given: str | None) -> Asked | DataProblem:
    is_of_evaluation = "pred" not in record and {"text", "verdict"} <= record.keys()
    pred_field = given or ("text" if is_of_evaluation else "pred")
    gold, pred, stop = record.get(gold_field), record.get(pred_field), record.get("stop") or "eos"
    for field, value in ((gold_field, gold), (pred_field, pred)):
        if value is None or isinstance(value, bool) or not isinstance(value, str | int | float):
            what = absence(record, field) if value is None else f"is a {type(value).__name__}, needs text"
            return DataProblem(file, line, field, what)
    if what := value_problem(gold, GOLD_TYPES):
        return DataProblem(file, line, gold_field, what)
    if not isinstance(stop, str) or stop not in STOPS:
        return DataProblem(file, line, "stop", f"is {quoted(stop)}, needs one of {', '.join(STOPS)}")
    row = fields_text({name: value for name, value in record.items() if name not in ("prompt", pred_field)})
    question = record.get("prompt") or record.get("prompt_seen")
    place = hash((str(question), gold_text(gold))) if question else None  # equal for the answers of a group
    asked = record.get("prompt") or ""
    prompt = prompt_text(asked, {}, None) if prompt_problem(asked) is None else str(asked)
    return Asked(prompt, gold_text(pred), gold_text(gold), STOPS[stop], row, place=place)
