"""Public mathematics data in the layouts it is published in -> one schema, `Problem`.

    container   JSON Lines (.jsonl, .txt, .json), one JSON object or list per file (.json), both also gzipped, Parquet,
                a .tar.gz or a folder tree of such files (the classic MATH/<split>/<subject>/<n>.json)
    layout      recognised by the fields of a row, see LAYOUTS: MATH, MATH-500, GSM8K, AIME, AMC, Minerva,
                OlympiadBench, verl's RLHFDataset, plain prompt/answer
A row that fits no layout, has no gold answer, or is of another layout than the rest of its file is a DataProblem with
its line; the good rows still come. Not here: repeated and overlapping problems (dataset_checks.py).
"""

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from hacpo_mega.data.answer_text import gold_answer, last_boxed
from hacpo_mega.data.files import (
    GOLD_TYPES,
    HALF_A_PAIR,
    MAX_LINE_BYTES,
    MAX_TIMES_UNPACKED,
    UNREADABLE,
    DataProblem,
    PromptRow,
    content_id,
    field_names,
    gold_text,
    most_unpacked,
    open_bytes,
    quoted,
    read_lines,
    read_records,
    replacing,
    value_problem,
)
from hacpo_mega.models.documents import MAX_JSON_BYTES, parse_json

Record = dict[str, Any]

LINES = (".jsonl", ".jsonl.gz")
DOCUMENTS = (".json", ".json.gz")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
# Entries of an archive that say something of the next one: a long name, a size, times.
ABOUT_OTHERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, b"X", tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


@dataclass(frozen=True)
class Problem:
    """A problem in the one schema; empty where the source says nothing.

    id         the first 16 hex digits of sha256 of `prompt`: the same problem has it in every file
    prompt     the text a model is given        gold      the gold answer alone, as LaTeX or plain text
    solution   the reference solution           level, subject   as the source writes them
    source     file name, and the row's own id where it has one      line   in its file, from 1
    """

    id: str
    prompt: str
    gold: str
    solution: str = ""
    level: str = ""
    subject: str = ""
    source: str = ""
    line: int = 0

    @property
    def row(self) -> PromptRow:
        return PromptRow(self.id, self.prompt, self.gold)


@dataclass(frozen=True)
class Dataset:
    """What a file or folder holds: its problems, in order, what could not be read, and the layout of its rows."""

    path: Path
    layout: str
    problems: tuple[Problem, ...]
    defects: tuple[DataProblem, ...]


@dataclass(frozen=True)
class Layout:
    """How one kind of row is recognised and where its problem, gold answer and solution are.

    `prompt_field` and `gold_field` say where a person finds them. The extractors raise KeyError, TypeError or
    ValueError on a row that is not what it looks like; what they return is checked: a list is no gold answer.
    """

    matches: Callable[[Record], bool]
    prompt_field: str
    gold_field: str
    prompt: Callable[[Record], object]
    gold: Callable[[Record], object]
    solution: Callable[[Record], object] = lambda row: row.get("solution")


class Row(NamedTuple):
    """A row as it was found: `line` counts in `file`, in an archive a member; `name` is for `Problem.source`."""

    file: Path
    line: int
    name: str
    record: Record | DataProblem


def _plain(prompt_field: str, gold_field: str) -> Layout:
    """The layout of rows that hold the problem in one field and the gold answer in another."""
    return Layout(
        lambda row: row.get(prompt_field) is not None and row.get(gold_field) is not None,
        prompt_field,
        gold_field,
        lambda row: row[prompt_field],
        lambda row: row[gold_field],
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
        lambda row: isinstance(row.get("prompt"), str) and row.get("answer") is not None,
        "prompt",
        "answer",
        lambda row: row["prompt"],
        lambda row: row["answer"],
    ),
    "question": _plain("question", "answer"),
}


def read_dataset(path: Path) -> Dataset:
    """The problems of a file, archive or folder in any layout; whatever is wrong with it comes as defects."""
    path = Path(path)
    problems, defects = [], []
    layout_of_file = ""
    for row in _rows(path):
        if isinstance(row.record, DataProblem):
            defects.append(row.record)
            continue
        layout = next((name for name, layout in LAYOUTS.items() if layout.matches(row.record)), None)
        layout_of_file = layout_of_file or layout or ""
        if layout is None:
            what = f"fits no known layout (the row has: {field_names(row.record)})"
            defects.append(DataProblem(row.file, row.line, None, what))
        elif layout != layout_of_file:
            what = f"is a row of layout {layout!r} in a file of {layout_of_file!r}"
            defects.append(DataProblem(row.file, row.line, None, what))
        else:
            found = _problem(row, row.record, LAYOUTS[layout])
            (problems if isinstance(found, Problem) else defects).append(found)
    if not problems and not defects:
        defects.append(DataProblem(path, None, None, "has no rows"))
    return Dataset(path, layout_of_file, tuple(problems), tuple(defects))


def _problem(row: Row, record: Record, layout: Layout) -> Problem | DataProblem:
    try:
        prompt, gold, solution = layout.prompt(record), layout.gold(record), layout.solution(record)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        what = str(error) if isinstance(error, ValueError) else f"is malformed ({type(error).__name__}: {error})"
        return DataProblem(row.file, row.line, None, what)
    for field, value, types in ((layout.prompt_field, prompt, (str,)), (layout.gold_field, gold, GOLD_TYPES)):
        if what := value_problem(value, types):
            return DataProblem(row.file, row.line, field, what)
    own_id = record.get("unique_id", record.get("id", record.get("idx")))
    subject = record.get("type") or record.get("subject") or record.get("subfield")
    others = {"solution": solution, "id": own_id, "level": record.get("level"), "subject": subject}
    for field, value in others.items():
        if HALF_A_PAIR.search(str(value or "")):
            return DataProblem(row.file, row.line, field, "holds half a surrogate pair, which UTF-8 cannot hold")
    return Problem(
        id=content_id(prompt),
        prompt=prompt,
        gold=gold_text(gold).strip(),
        solution=solution if isinstance(solution, str) else "",
        level=str(record.get("level") or ""),
        subject=str(subject or ""),
        source=f"{row.name}#{own_id}" if isinstance(own_id, str | int) else row.name,
        line=row.line,
    )


def write_dataset(problems: Iterable[Problem], file: Path) -> None:
    """Writes JSON Lines in the schema of `Problem`, the gold as `answer`: data.files of a run reads it as it is.

    An old file stays as it is until the new one is whole. ValueError when there is no such folder.
    """
    rows = ({"answer" if key == "gold" else key: value for key, value in asdict(p).items()} for p in problems)
    with replacing(file) as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rows(path: Path) -> Iterator[Row]:
    """Every row of a file, an archive or a folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name.endswith((*LINES, *DOCUMENTS, ".parquet")):
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
    """Of a .json file: rows of JSON Lines when its first line is an object and there is another, else one document."""
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
    """A file of an archive; TarError for one whose header fills the memory: tarfile reads it whole."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Entry":
        entry = super().frombuf(buf, encoding, errors)
        if entry.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.TarError("holds a sparse file; make the archive without --sparse")
        if entry.type in ABOUT_OTHERS and entry.size > MAX_LINE_BYTES:
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
                    what = "is packed inside the archive and is not read; unpack the archive and give the folder"
                    yield Row(member, 1, entry.name, DataProblem(member, None, None, what))
    except (tarfile.TarError, *UNREADABLE) as error:
        yield Row(member, 1, path.name, DataProblem(member, None, None, f"unreadable archive: {error}"))


def _rows_of_document(file: Path, name: str, stream: IO[bytes]) -> Iterator[Row]:
    raw = stream.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        what = f"has more than {MAX_JSON_BYTES:,} bytes; write it as JSON Lines"
        yield Row(file, 1, name, DataProblem(file, None, None, what))
        return
    try:
        content = parse_json(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Row(file, 1, name, DataProblem(file, None, None, f"invalid UTF-8 at byte {error.start}"))
        return
    except ValueError as error:
        yield Row(file, 1, name, DataProblem(file, None, None, f"invalid JSON: {error}"))
        return
    for line, record in enumerate(content if isinstance(content, list) else [content], start=1):
        what = f"is a JSON {type(record).__name__}, needs an object with fields"
        yield Row(file, line, name, record if isinstance(record, dict) else DataProblem(file, line, None, what))
