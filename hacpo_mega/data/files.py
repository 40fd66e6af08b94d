"""Prompt files: JSON Lines or Parquet rows -> checked `PromptRow`s, or every problem of every file at once.

A problem names file, line and field. Nothing here samples (prompts.py), judges (judge.py) or imports torch, so that
`hacpo-mega check` can read data files and still answer at once.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

NUM_PROBLEMS_SHOWN = 20


@dataclass(frozen=True)
class PromptRow:
    """A prompt with its gold answer, before it has a place in a step. `id` is a hash of the prompt's text."""

    id: str
    text: str
    gold: str
    skill: str = ""


@dataclass(frozen=True)
class DataProblem:
    """What is wrong with a data file. `line` counts from 1 (a Parquet row likewise); None: the whole file."""

    file: Path
    line: int | None
    field: str | None
    what: str

    def __str__(self) -> str:
        place = f"{self.file}" if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.what}" if self.field is None else f"{place}: field {self.field!r} {self.what}"


def content_id(text: str) -> str:
    """The first 16 hex digits of sha256 of the text: the same in every process, on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_data(files: Sequence[Path], prompt_field: str = "prompt", gold_field: str = "answer") -> list[DataProblem]:
    """Every problem of the files, in file and line order; empty when all rows can be trained on."""
    return read_prompts(files, prompt_field, gold_field)[1]


def load_prompts(
    files: Sequence[Path], prompt_field: str = "prompt", gold_field: str = "answer"
) -> tuple[PromptRow, ...]:
    """The rows of the files, in order. One ValueError names all bad rows (the first 20, and how many there are)."""
    rows, problems = read_prompts(files, prompt_field, gold_field)
    if problems:
        raise ValueError(describe(problems))
    return tuple(rows)


def describe(problems: Sequence[DataProblem]) -> str:
    """The problems as one message: the first of them one per line, and how many are not shown."""
    lines = [str(problem) for problem in problems[:NUM_PROBLEMS_SHOWN]]
    hidden = len(problems) - NUM_PROBLEMS_SHOWN
    return "\n".join([*lines, f"... and {hidden} more problems in the data files"] if hidden > 0 else lines)


def read_prompts(
    files: Sequence[Path], prompt_field: str, gold_field: str, first_seen: dict[str, str] | None = None
) -> tuple[list[PromptRow], list[DataProblem]]:
    """The good rows of the files and every problem of the others, both in file and line order.

    `first_seen` says where each prompt was met; handed from one call to the next, it finds repetitions across them.
    """
    rows: list[PromptRow] = []
    problems: list[DataProblem] = []
    first_seen = {} if first_seen is None else first_seen
    for file in map(Path, files):
        num_records = 0
        for line, record in read_records(file):
            num_records += 1
            found = [record] if isinstance(record, DataProblem) else []
            found += [] if found else _field_problems(file, line, record, (prompt_field, gold_field))
            if not found:
                row = _row(record, prompt_field, gold_field)
                found = _duplicate(file, line, prompt_field, row, first_seen)
                rows.append(row)
            problems += found
        if num_records == 0:
            problems.append(DataProblem(file, None, None, "has no rows"))
    return rows, problems


def _row(record: dict[str, Any], prompt_field: str, gold_field: str) -> PromptRow:
    text = record[prompt_field]
    skill = record.get("skill")
    return PromptRow(content_id(text), text, gold_text(record[gold_field]), skill if isinstance(skill, str) else "")


def gold_text(answer: str | int | float) -> str:
    """A gold answer as text. A whole float is written as an integer: Parquet makes floats of a column with a gap."""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def _field_problems(file: Path, line: int, record: dict[str, Any], fields: tuple[str, str]) -> list[DataProblem]:
    allowed = ((str,), (str, int, float))
    problems = []
    for field, types in zip(fields, allowed):
        value = record.get(field)
        if value is None:
            has = ", ".join(sorted(record)) or "no field at all"
            problems.append(DataProblem(file, line, field, f"is missing (the row has: {has})"))
        elif isinstance(value, bool) or not isinstance(value, types):
            what = f"is a {type(value).__name__}, needs {' or '.join(t.__name__ for t in types)}"
            problems.append(DataProblem(file, line, field, what))
        elif isinstance(value, str) and not value.strip():
            problems.append(DataProblem(file, line, field, "is empty"))
        elif isinstance(value, str) and any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            problems.append(
                DataProblem(file, line, field, "holds half a surrogate pair, which no tokenizer can encode")
            )
    return problems


def _duplicate(file: Path, line: int, field: str, row: PromptRow, first_seen: dict[str, str]) -> list[DataProblem]:
    here = f"{file}:{line}"
    earlier = first_seen.setdefault(row.id, here)
    return [] if earlier == here else [DataProblem(file, line, field, f"is the prompt of {earlier} again")]


def read_records(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    """(line from 1, record) of a JSON Lines or Parquet file; a DataProblem in place of what cannot be read."""
    if not file.is_file():
        yield 0, DataProblem(file, None, None, "is a folder" if file.is_dir() else "does not exist")
    elif file.suffix == ".parquet":
        yield from _read_parquet(file)
    else:
        yield from _read_json_lines(file)


def _read_json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    with file.open("rb") as lines:
        for line, raw in enumerate(lines, start=1):
            if raw.strip():
                yield line, _parse_line(file, line, raw)


def _parse_line(file: Path, line: int, raw: bytes) -> dict[str, Any] | DataProblem:
    try:
        record = json.loads(raw.rstrip().decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return DataProblem(file, line, None, f"invalid UTF-8 at byte {error.start} of the line")
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        return DataProblem(file, line, None, f"invalid JSON: {error}")
    if not isinstance(record, dict):
        return DataProblem(file, line, None, f"is a JSON {type(record).__name__}, needs an object with fields")
    return record


def _read_parquet(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    line = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    line += 1
                    yield line, record
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        yield line + 1, DataProblem(file, line + 1, None, f"unreadable Parquet: {str(error).splitlines()[0]}")
