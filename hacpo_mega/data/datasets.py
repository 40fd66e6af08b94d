"""Public mathematics data in the layouts it is published in -> one schema, `Problem`.

    container   JSON Lines (.jsonl, .txt, .json), one JSON object or list per file (.json), both also gzipped, Parquet,
                .tar.gz, .tgz or .tar of .jsonl and .json, and folder trees of all of these (the classic
                MATH/<split>/<subject>/<n>.json)
    layout      recognised by the fields of a row, see LAYOUTS: MATH, MATH-500, GSM8K, AIME, AMC, Minerva,
                OlympiadBench, verl's RLHFDataset, plain prompt/answer
A row that fits no layout, has no gold answer, or is of another layout than the rest of its file is a DataProblem with
its line; the good rows still come. Elsewhere: repeated and overlapping problems (dataset_checks.py).
"""

import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from hacpo_grading.judgement import gold_text
from hacpo_grading.texts.answer_text import gold_answer, last_boxed
from hacpo_grading.texts.chat_messages import messages_of
from hacpo_mega.data.reading.files import (
    MAX_BAD_ROWS,
    MAX_LINE_BYTES,
    TOO_MANY,
    UNREADABLE,
    DataProblem,
    PromptRow,
    absence,
    as_record,
    content_id,
    field_names,
    fields_text,
    json_value,
    open_bytes,
    read_lines,
    read_records,
    replacing,
)
from hacpo_mega.data.reading.row_values import (
    HALF_A_PAIR,
    gold_problem,
    has_no_answer,
    media_problems,
    prompt_problem,
    prompt_text,
    quoted,
    row_tools_problem,
    unread_problems,
)
from hacpo_mega.data.reading.tables import MAX_TIMES_UNPACKED, is_saved, most_unpacked
from hacpo_mega.models.files.documents import MAX_JSON_BYTES, parse_json
from hacpo_mega.models.files.links import require_inside_its_run

Record = dict[str, Any]

LINES = (".jsonl", ".jsonl.gz")
DOCUMENTS = (".json", ".json.gz")
NO_LAYOUT = "fits no known layout"
# A file of a split by its name or folder: train.jsonl, data/test-00000-of-00001.parquet, MATH/test/algebra/1.json.
SPLIT = re.compile(r"/(train|test|validation|valid|val|dev)(?:[./]|-\d+-of-)")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
# Files of a folder that are reported as not read; texts only where there is no data: beside data they are licences.
UNREAD = (*ARCHIVES, ".csv", ".tsv", ".arrow", ".gz", ".zip", ".zst", ".bz2", ".xz")
UNREAD_WITHOUT_DATA = (*UNREAD, ".txt")
# Entries of an archive that describe the next one: a long name, a size, times.
METADATA_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, b"X", tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # commas of 1,234,567, not of 3,4

# The fields of a row that verl's reward functions are called with.
VERL_FIELDS = ("data_source", "reward_model", "extra_info")


@dataclass(frozen=True)
class Problem:
    """A problem in the common schema; empty fields are missing in the source.

    id         the first 16 hex digits of sha256 of `prompt`: the same problem has it in every file
    prompt     the text a model is given        gold      the gold answer alone, as LaTeX or plain text
    solution   the reference solution           level, subject   as the source writes them
    source     file name, and the row's own id where it has one      line   in its file, from 1
    fields     every field of its row as JSON text, for graders; of these a written data set has VERL_FIELDS
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


def _plain(prompt_field: str, gold_field: str, **others: Any) -> Layout:
    """The layout of rows that hold the problem in one field and the gold answer in another; `others` override."""
    fields_read = {
        "matches": lambda row: row.get(prompt_field) is not None and row.get(gold_field) is not None,
        "prompt": lambda row: row[prompt_field],
        "gold": lambda row: row[gold_field],
    }
    return Layout(**{"prompt_field": prompt_field, "gold_field": gold_field, **fields_read, **others})


def _boxed_answer(row: Record) -> str:
    answer = last_boxed(row["solution"])
    if answer is None:
        raise ValueError("has no complete \\boxed{} to take the answer from")
    if not answer.strip():
        raise ValueError("boxes nothing: the last \\boxed{} is empty")
    return answer


def _text_or_messages(row: Record) -> object:
    """The text of a lone message of the user, so that its id is that of the same problem in a plain file; else all."""
    messages = row["prompt"]
    is_text = [message["role"] for message in messages] == ["user"] and isinstance(messages[0]["content"], str)
    return messages[0]["content"] if is_text else messages


def _verl_gold(row: Record) -> object:
    truth = row["reward_model"]["ground_truth"]
    truth = truth["target"] if isinstance(truth, dict) else truth
    if isinstance(truth, str) and truth.startswith('["'):  # Skywork-OR1 writes each list of golds as JSON text
        with suppress(ValueError):
            truth = parse_json(truth)
    return _single(truth)


def _verl_solution(row: Record) -> object:
    truth = row["reward_model"]["ground_truth"]
    return truth.get("solution") if isinstance(truth, dict) else None


def _question_in_context(row: Record) -> object:
    return row["context"] + "\n\n" + row["question"] if row.get("context") else row["question"]


def _single(answers: object) -> object:
    """The gold of a list of one. ValueError for more: readers differ in whether all are asked for or any will do."""
    if not isinstance(answers, list):
        return answers
    if len(answers) != 1:
        raise ValueError(f"has {len(answers)} final answers; needs a single text")
    return answers[0]


def _olympiad_solution(row: Record) -> object:
    solution = row.get("solution")
    return "\n\n".join(map(str, solution)) if isinstance(solution, list) else solution


LAYOUTS: Mapping[str, Layout] = {
    "verl": Layout(
        lambda row: isinstance(row.get("prompt"), list) and "reward_model" in row,
        "prompt",
        "reward_model.ground_truth",
        _text_or_messages,
        _verl_gold,
        _verl_solution,
    ),
    "olympiadbench": _plain(
        "question",
        "final_answer",
        prompt=_question_in_context,
        gold=lambda row: _single(row["final_answer"]),
        solution=_olympiad_solution,
    ),
    "nemo": _plain("problem", "expected_answer", solution=lambda row: row.get("reference_solution")),
    "gsm8k": _plain(
        "question",
        "answer",
        matches=lambda row: isinstance(row.get("answer"), str) and "####" in row["answer"] and "question" in row,
        gold=lambda row: THOUSANDS.sub("", gold_answer(row["answer"])),
        solution=lambda row: row["answer"],
    ),
    "answered": _plain("problem", "answer"),
    "math": _plain("problem", "solution", gold=_boxed_answer),
    "plain": _plain(
        "prompt",
        "answer",
        matches=lambda row: isinstance(row.get("prompt"), str | list) and row.get("answer") is not None,
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
    return {"own": _plain(prompt_field, gold_field, tools_field=tools_field)} | ({} if only else LAYOUTS)


def read_dataset(path: Path, layouts: Mapping[str, Layout] = LAYOUTS) -> Dataset:
    """The problems of a file, archive or folder in any of the layouts; faults are returned as defects."""
    path = Path(path)
    problems, defects, without_answer = [], [], []
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
            reason = f"is a row of layout {layout!r} in a file of {layout_of_file!r}"
            defects.append(DataProblem(row.file, row.line, None, reason))
        else:
            problem = _problem(row, row.record, layouts[layout])
            if isinstance(problem, Problem) and has_no_answer(layouts[layout].prompt_field, problem.gold):
                reason = f"is {quoted(problem.gold)}, which is no answer"
                without_answer.append(DataProblem(row.file, row.line, layouts[layout].gold_field, reason))
                continue
            (problems if isinstance(problem, Problem) else defects).append(problem)
    if without_answer:  # one line for all of them: they are a seventh of NuminaMath
        first = without_answer[0]
        defects.append(replace(first, reason=f"{first.reason} (the first of {len(without_answer):,} such rows)"))
    if not problems and not defects:
        defects.append(DataProblem(path, None, None, "has no rows"))
    return Dataset(path, layout_of_file, tuple(problems), tuple(defects))


class Row(NamedTuple):
    """A row as it was found: `line` counts in `file`, in an archive a member; `name` is for `Problem.source`."""

    file: Path
    line: int
    name: str
    record: Record | DataProblem


def rows_of(path: Path) -> Iterator[Row]:
    """Every row of a file, an archive or a folder. ValueError for a link that leads out of a run."""
    require_inside_its_run(path)
    if path.is_dir() and not is_saved(path):
        inside = sorted(filter(Path.is_file, path.rglob("*")))
        files = [file for file in inside if file.name.endswith((*LINES, *DOCUMENTS, ".parquet"))]
        splits = sorted({found[1] for file in files if (found := SPLIT.search(f"/{file.relative_to(path)}"))})
        if len(splits) > 1:
            reason = f"holds the splits {', '.join(splits)}; give the files or the folder of one"
            yield Row(path, 0, path.name, DataProblem(path, None, None, reason))
            return
        others = sorted(set(inside) - set(files))
        if unread := [file for file in others if file.name.endswith(UNREAD if files else UNREAD_WITHOUT_DATA)]:
            more = f", nor are {len(unread) - 1} others" if len(unread) > 1 else ""
            reason = f"is not read in a folder{more}: give the files to be read"
            yield Row(unread[0], 0, path.name, DataProblem(unread[0], None, None, reason))
        for file in files:
            yield from _rows_of_file(file, str(file.relative_to(path)))
    elif path.name.endswith(ARCHIVES) and path.is_file():
        yield from _rows_of_archive(path)
    else:
        yield from _rows_of_file(path, path.name)


def _rows_of_file(file: Path, name: str) -> Iterator[Row]:
    if file.name.endswith(DOCUMENTS) and file.is_file():
        yield from _rows_of_json(file, name)
    else:
        yield from (Row(file, line, name, record) for line, record in read_records(file))


def _rows_of_json(file: Path, name: str) -> Iterator[Row]:
    """Rows of a .json file: JSON Lines if its first line is an object and there is another, else one document."""
    try:
        with open_bytes(file) as lines:
            is_lines = _is_object(lines.readline(MAX_LINE_BYTES)) and bool(lines.readline(MAX_LINE_BYTES).strip())
            if is_lines:
                yield from (Row(file, line, name, record) for line, record in read_records(file))
            else:
                lines.seek(0)
                yield from _rows_of_document(file, name, lines)
    except UNREADABLE as error:
        yield Row(file, 1, name, DataProblem(file, None, None, f"unreadable: {error}"))


def _is_object(raw: bytes) -> bool:
    try:
        return isinstance(parse_json(raw), dict)
    except ValueError:
        return False


class _Entry(tarfile.TarInfo):
    """A file of an archive; TarError if its header fills the memory: tarfile reads it whole."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Entry":
        entry = super().frombuf(buf, encoding, errors)
        if entry.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.TarError("holds a sparse file; make the archive without --sparse")
        if entry.type in METADATA_TYPES and entry.size > MAX_LINE_BYTES:
            raise tarfile.TarError(f"holds a header of {entry.size:,} bytes, more than {MAX_LINE_BYTES:,}")
        return entry


def _rows_of_archive(path: Path) -> Iterator[Row]:
    member = path
    try:
        left = most_unpacked(path.stat().st_size)
        with tarfile.open(path, tarinfo=_Entry) as archive:
            for entry in archive:
                member, left = path / entry.name, left - entry.size - tarfile.BLOCKSIZE
                if left < 0:
                    raise tarfile.TarError(f"unpacks to more than {MAX_TIMES_UNPACKED} times its size")
                if entry.isfile() and entry.name.endswith(".jsonl"):
                    lines = archive.extractfile(entry)
                    yield from (Row(member, line, entry.name, record) for line, record in read_lines(member, lines))
                elif entry.isfile() and entry.name.endswith(".json"):
                    yield from _rows_of_document(member, entry.name, archive.extractfile(entry))
                elif entry.isfile() and entry.name.endswith((*LINES, *DOCUMENTS, ".parquet")):
                    reason = "is packed inside the archive and is not read; unpack the archive and give the folder"
                    yield Row(member, 1, entry.name, DataProblem(member, None, None, reason))
    except (tarfile.TarError, *UNREADABLE) as error:
        yield Row(member, 1, path.name, DataProblem(member, None, None, f"unreadable archive: {error}"))


def _rows_of_document(file: Path, name: str, stream: IO[bytes]) -> Iterator[Row]:
    raw = stream.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        content = DataProblem(file, None, None, f"has more than {MAX_JSON_BYTES:,} bytes; write it as JSON Lines")
    else:
        content = json_value(file, None, raw)
    for line, record in enumerate(content if isinstance(content, list) else [content], start=1):
        yield Row(file, line, name, as_record(file, line, record))


def _without_layout(row: Row, record: Record, layouts: Mapping[str, Layout]) -> DataProblem:
    if (own := layouts.get("own")) is None or len(layouts) > 1:
        asked = f"has not {own.prompt_field!r} and {own.gold_field!r}, and " if own else ""
        empty = field_names({name: None for name, value in record.items() if value is None})
        null = "" if empty == field_names({}) else f"; null: {empty}"
        reason = f"{asked}{NO_LAYOUT} (the row has: {field_names(record)}{null})"
        return DataProblem(row.file, row.line, None, reason)
    field = own.prompt_field if record.get(own.prompt_field) is None else own.gold_field
    return DataProblem(row.file, row.line, field, absence(record, field))


def _problem(row: Row, record: Record, layout: Layout) -> Problem | DataProblem:
    try:
        prompt, gold, solution = layout.prompt(record), layout.gold(record), layout.solution(record)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"is malformed ({type(error).__name__}: {error})"
        return DataProblem(row.file, row.line, None, reason)
    checked = (layout.prompt_field, prompt_problem(prompt)), (layout.gold_field, gold_problem(gold))
    unread = media_problems(record) + (unread_problems(record, prompt) if layout in LAYOUTS.values() else [])
    for field, reason in (*checked, (layout.tools_field, row_tools_problem(record, layout.tools_field)), *unread):
        if reason:
            return DataProblem(row.file, row.line, field, reason)
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


def write_dataset(problems: Iterable[Problem], file: Path, fields_read: Sequence[str] = ()) -> None:
    """Writes JSON Lines in the schema of `Problem`, the gold as `answer`: data.files of a run reads it as it is.

    VERL_FIELDS of a row stay; `fields_read`, the prompt and gold fields that the user has named, have all others stay.
    An old file stays as it is until the new one is whole. ValueError when there is no such folder.
    """
    with replacing(file) as out:
        out.writelines(json.dumps(_written_row(p, fields_read), ensure_ascii=False) + "\n" for p in problems)


def _written_row(problem: Problem, fields_read: Sequence[str]) -> Record:
    names = [field.name for field in fields(Problem) if field.name != "fields"]
    row = {"answer" if name == "gold" else name: getattr(problem, name) for name in names}
    row["prompt"] = messages_of(problem.prompt) or problem.prompt  # data.files reads chats as lists
    source = json.loads(problem.fields) if problem.fields else {}
    row |= {name: source[name] for name in VERL_FIELDS if name in source}
    if fields_read:  # fields of the source row win, and a field without a value is left out
        others = {name: value for name, value in source.items() if name not in fields_read}
        asked = {name: row[name] for name in ("prompt", "answer")}
        row = {name: value for name, value in row.items() if value} | others | asked
    return row
