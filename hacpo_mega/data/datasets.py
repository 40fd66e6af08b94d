"""Public mathematics data in the layouts it is published in -> one schema, `Problem`.

    container   JSON Lines (.jsonl, .txt, .json), one JSON object or list per file (.json), both also gzipped, Parquet,
                a .tar.gz or a folder tree of such files (the classic MATH/<split>/<subject>/<n>.json)
    layout      recognised by the fields of a row, see LAYOUTS: MATH, MATH-500, GSM8K, AIME, AMC, Minerva,
                OlympiadBench, verl's RLHFDataset, plain prompt/answer
A row that fits no layout, has no gold answer, or is of another layout than the rest of its file is a DataProblem with
its line; the good rows still come. Not here: repeated and overlapping problems (dataset_checks.py).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hacpo_grading.texts.answer_text import gold_answer, last_boxed
from hacpo_grading.texts.chat_messages import messages_of
from hacpo_mega.data.reading.containers import Record, Row, rows_of
from hacpo_mega.data.reading.files import (
    MAX_BAD_ROWS,
    TOO_MANY,
    DataProblem,
    PromptRow,
    absence,
    content_id,
    field_names,
    fields_text,
    replacing,
)
from hacpo_mega.data.reading.row_values import (
    HALF_A_PAIR,
    gold_problem,
    gold_text,
    prompt_problem,
    prompt_text,
    quoted,
    row_tools_problem,
)


@dataclass(frozen=True)
class Problem:
    """A problem in the common schema; empty fields are missing in the source.

    id         the first 16 hex digits of sha256 of `prompt`: the same problem has it in every file
    prompt     the text a model is given        gold      the gold answer alone, as LaTeX or plain text
    solution   the reference solution           level, subject   as the source writes them
    source     file name, and the row's own id where it has one      line   in its file, from 1
    fields     every field of its row as JSON text, for graders; a written data set does not have it
    """

    id: str
    prompt: str
    gold: str
    solution: str = ""
    level: str = ""
    subject: str = ""
    source: str = ""
    line: int = 0
    fields: str = ""

    @property
    def row(self) -> PromptRow:
        return PromptRow(self.id, self.prompt, self.gold, row=self.fields)


@dataclass(frozen=True)
class Dataset:
    """Content of a file or folder: its problems, in order, unreadable rows, and the layout of its rows."""

    path: Path
    layout: str
    problems: tuple[Problem, ...]
    defects: tuple[DataProblem, ...]


@dataclass(frozen=True)
class Layout:
    """A kind of row: how it is recognised, and its fields of problem, gold answer and solution.

    `prompt_field` and `gold_field` say where a person finds them. The extractors raise KeyError, TypeError or
    ValueError on a row that is not what it looks like; what they return is checked: a list is no gold answer.
    """

    matches: Callable[[Record], bool]
    prompt_field: str
    gold_field: str
    prompt: Callable[[Record], object]
    gold: Callable[[Record], object]
    solution: Callable[[Record], object] = lambda row: row.get("solution")
    tools_field: str | None = None


def _plain(prompt_field: str, gold_field: str, tools_field: str | None = None) -> Layout:
    """The layout of rows that hold the problem in one field and the gold answer in another."""
    return Layout(
        lambda row: row.get(prompt_field) is not None and row.get(gold_field) is not None,
        prompt_field,
        gold_field,
        lambda row: row[prompt_field],
        lambda row: row[gold_field],
        tools_field=tools_field,
    )


def _boxed_solution(row: Record) -> str:
    answer = last_boxed(row["solution"])
    if answer is None:
        raise ValueError("has no complete \\boxed{} to take the answer from")
    if not answer.strip():
        raise ValueError("boxes nothing: the last \\boxed{} is empty")
    return answer


def _competition_answer(row: Record) -> object:
    """AMC writes 27.0 and AIME 025 for whole numbers; every other answer stays as it is."""
    answer = row["answer"]
    is_digits = isinstance(answer, str) and answer.isascii() and answer.isdigit()
    return answer.lstrip("0") or "0" if is_digits else answer


def _last_message(row: Record) -> object:
    roles = [message["role"] for message in row["prompt"]]
    if roles != ["user"]:
        raise ValueError(f"has messages of {quoted(', '.join(map(str, roles)))}; needs a single one of user")
    return row["prompt"][0]["content"]


def _verl_target(row: Record) -> object:
    truth = row["reward_model"]["ground_truth"]
    return truth["target"] if isinstance(truth, dict) else truth


def _verl_solution(row: Record) -> object:
    truth = row["reward_model"]["ground_truth"]
    return truth.get("solution") if isinstance(truth, dict) else None


def _with_context(row: Record) -> object:
    return row["context"] + "\n\n" + row["question"] if row.get("context") else row["question"]


def _single_answer(row: Record) -> object:
    answers = row["final_answer"]
    if not isinstance(answers, list) or len(answers) == 1:
        return answers[0] if isinstance(answers, list) else answers
    raise ValueError(f"has {len(answers)} final answers; needs one string with all of them")


def _olympiad_solution(row: Record) -> object:
    found = row.get("solution")
    return "\n\n".join(map(str, found)) if isinstance(found, list) else found


LAYOUTS: Mapping[str, Layout] = {
    "verl": Layout(
        lambda row: isinstance(row.get("prompt"), list) and "reward_model" in row,
        "prompt",
        "reward_model.ground_truth",
        _last_message,
        _verl_target,
        _verl_solution,
    ),
    "olympiadbench": Layout(
        _plain("question", "final_answer").matches,
        "question",
        "final_answer",
        _with_context,
        _single_answer,
        _olympiad_solution,
    ),
    "nemo": replace(_plain("problem", "expected_answer"), solution=lambda row: row.get("reference_solution")),
    "gsm8k": Layout(
        lambda row: isinstance(row.get("answer"), str) and "####" in row["answer"] and "question" in row,
        "question",
        "answer",
        lambda row: row["question"],
        lambda row: gold_answer(row["answer"]).replace(",", ""),
        lambda row: row["answer"],
    ),
    "answered": replace(_plain("problem", "answer"), gold=_competition_answer),
    "math": replace(_plain("problem", "solution"), gold=_boxed_solution),
    "plain": Layout(
        lambda row: isinstance(row.get("prompt"), str | list) and row.get("answer") is not None,
        "prompt",
        "answer",
        lambda row: row["prompt"],
        lambda row: row["answer"],
    ),
    "question": _plain("question", "answer"),
}


def layouts_of(
    prompt_field: str, gold_field: str, *, only: bool, tools_field: str | None = None
) -> Mapping[str, Layout]:
    """Rows with these two fields, before the known layouts or, with `only`, in place of them. ValueError for one field
    as both."""
    if prompt_field == gold_field:
        raise ValueError(f"the field {prompt_field!r} is read as the prompt and as the gold answer: give two fields")
    return {"own": _plain(prompt_field, gold_field, tools_field)} | ({} if only else LAYOUTS)


def read_dataset(path: Path, layouts: Mapping[str, Layout] = LAYOUTS) -> Dataset:
    """The problems of a file, archive or folder in any of the layouts; faults are returned as defects."""
    path = Path(path)
    problems, defects = [], []
    layout_of_file = ""
    for row in rows_of(path):
        if len(defects) > MAX_BAD_ROWS:
            defects.append(DataProblem(row.file, row.line, None, TOO_MANY))
            break
        if isinstance(row.record, DataProblem):
            defects.append(row.record)
            continue
        layout = next((name for name, layout in layouts.items() if layout.matches(row.record)), None)
        layout_of_file = layout_of_file or layout or ""
        if layout is None:
            defects.append(_without_layout(row, row.record, layouts))
        elif layout != layout_of_file:
            what = f"is a row of layout {layout!r} in a file of {layout_of_file!r}"
            defects.append(DataProblem(row.file, row.line, None, what))
        else:
            found = _problem(row, row.record, layouts[layout])
            (problems if isinstance(found, Problem) else defects).append(found)
    if not problems and not defects:
        defects.append(DataProblem(path, None, None, "has no rows"))
    return Dataset(path, layout_of_file, tuple(problems), tuple(defects))


def _without_layout(row: Row, record: Record, layouts: Mapping[str, Layout]) -> DataProblem:
    if (own := layouts.get("own")) is None or len(layouts) > 1:
        asked = f"has not {own.prompt_field!r} and {own.gold_field!r}, and " if own else ""
        empty = field_names({name: None for name, value in record.items() if value is None})
        null = "" if empty == field_names({}) else f"; null: {empty}"
        what = f"{asked}fits no known layout (the row has: {field_names(record)}{null})"
        return DataProblem(row.file, row.line, None, what)
    field = own.prompt_field if record.get(own.prompt_field) is None else own.gold_field
    return DataProblem(row.file, row.line, field, absence(record, field))


def _problem(row: Row, record: Record, layout: Layout) -> Problem | DataProblem:
    try:
        prompt, gold, solution = layout.prompt(record), layout.gold(record), layout.solution(record)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = str(error) if isinstance(error, ValueError) else f"is malformed ({type(error).__name__}: {error})"
        return DataProblem(row.file, row.line, None, what)
    checked = (layout.prompt_field, prompt_problem(prompt)), (layout.gold_field, gold_problem(gold))
    for field, what in (*checked, (layout.tools_field, row_tools_problem(record, layout.tools_field))):
        if what:
            return DataProblem(row.file, row.line, field, what)
    text = prompt_text(prompt, record, layout.tools_field)
    own_id = record.get("unique_id", record.get("id", record.get("idx")))
    subject = record.get("type") or record.get("subject") or record.get("subfield")
    others = {"solution": solution, "id": own_id, "level": record.get("level"), "subject": subject}
    for field, value in others.items():
        if HALF_A_PAIR.search(str(value or "")):
            return DataProblem(row.file, row.line, field, "holds half a surrogate pair, which UTF-8 cannot hold")
    return Problem(
        id=content_id(text),
        prompt=text,
        gold=gold_text(gold).strip(),
        solution=solution if isinstance(solution, str) else "",
        level=str(record.get("level") or ""),
        subject=str(subject or ""),
        source=f"{row.name}#{own_id}" if isinstance(own_id, str | int) else row.name,
        line=row.line,
        fields=fields_text(record),
    )


def write_dataset(problems: Iterable[Problem], file: Path, own: Sequence[str] = ()) -> None:
    """Writes JSON Lines in the schema of `Problem`, the gold as `answer`: data.files of a run reads it as it is.

    Where the prompt and gold fields of a user's own rows are named (`own`), the other fields of a row stay, too. An old
    file stays as it is until the new one is whole. ValueError when there is no such folder.
    """
    with replacing(file) as out:
        out.writelines(json.dumps(_written(p, own), ensure_ascii=False) + "\n" for p in problems)


def _written(problem: Problem, own: Sequence[str]) -> Record:
    written = [field.name for field in fields(Problem) if field.name != "fields"]
    row = {"answer" if name == "gold" else name: getattr(problem, name) for name in written}
    row["prompt"] = messages_of(problem.prompt) or problem.prompt  # data.files reads chats as lists
    if own:  # its own fields win, and a field without a value is left out
        others = {name: value for name, value in json.loads(problem.fields).items() if name not in own}
        asked = {name: row[name] for name in ("prompt", "answer")}
        row = {name: value for name, value in row.items() if value} | others | asked
    return row
