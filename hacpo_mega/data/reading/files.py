"""Prompt files: JSON Lines (also gzipped), Parquet, saved folders -> checked `PromptRow`s, or every problem of them.

A problem names file, line and field. Rows that repeat an earlier row's prompt are counted and refused in one line per
file, or left out (`data.repeated`). Two rows of one prompt with different golds are refused in any case, and so is a
prompt that is both trained on and evaluated on; copies whose text differs are not seen here (dataset_checks.py).
A digest of a file is of its content, not its name: the first 16 hexadecimal digits of a SHA-256. Nothing here samples
(prompts.py), judges (grading/) or imports torch, so that `hacpo-mega check` reads data files and still starts
quickly.
"""

import functools
import gzip
import hashlib
import io
import json
import math
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np
import pyarrow

from hacpo_grading.judgement import gold_text
from hacpo_mega.data.reading.row_values import (
    NUM_CHARACTERS_SHOWN,
    gold_problem,
    media_problems,
    prompt_problem,
    prompt_text,
    quoted,
    row_tools_problem,
)
from hacpo_mega.data.reading.tables import (
    HUB,
    TOO_LARGE,
    HubSplit,
    data_files,
    is_saved,
    most_unpacked,
    num_bytes,
    stored_batches,
)
from hacpo_mega.models.files.documents import parse_json
from hacpo_mega.models.files.replacing import replacing as replacing_bytes

NUM_PROBLEMS_SHOWN = 20
NUM_NAMES_SHOWN = 20
GZIP_MAGIC = b"\x1f\x8b"
NARROW_FLOATS = {pyarrow.float16(): np.float16, pyarrow.float32(): np.float32}
# Size of a row, packed or not: a program's test cases take a few MiB.
MAX_LINE_BYTES = 16 * 2**20
MAX_BAD_ROWS = 100_000  # of a file; after so many it is another kind of file
TOO_MANY = f"more than {MAX_BAD_ROWS:,} bad rows; nothing is read from here on"
UNREADABLE = (OSError, EOFError, zlib.error)  # raised by a cut or damaged stream


@dataclass(frozen=True)
class PromptRow:
    """A prompt with its gold answer, before it has a place in a step. `id` is a hash of the prompt's text.

    `row` is JSON text of every field of its row but the prompt, for graders and logs.
    """

    id: str
    text: str
    gold: str
    skill: str = ""
    row: str = ""


@dataclass(frozen=True)
class DataProblem:
    """A problem of a data file. `line` counts from 1 (a Parquet row likewise); None: the whole file."""

    file: Path
    line: int | None
    field: str | None
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}" if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.reason}" if self.field is None else f"{place}: field {self.field!r} {self.reason}"


def content_id(text: str) -> str:
    """The first 16 hex digits of sha256 of the text: the same in every process, on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class FirstRow(NamedTuple):
    """First place of a prompt: FILE:LINE, its gold, and the number of its set of files (training, evaluation)."""

    place: str
    gold: str
    set_number: int


class SeenPrompts:
    """The first row of every prompt, over all files; each set of files (training, evaluation) is begun once."""

    def __init__(self) -> None:
        self._first: dict[str, FirstRow] = {}
        self._set_number = 0

    def begin_set(self) -> None:
        """Starts another set for the rows that come now."""
        self._set_number += 1

    def first_row(self, prompt_id: str, place: str, gold: str) -> FirstRow | None:
        """The row in which this prompt was seen before; None for its first one, which is remembered."""
        mine = FirstRow(place, gold, self._set_number)
        first = self._first.setdefault(prompt_id, mine)
        return None if first is mine else first

    def is_of_this_set(self, row: FirstRow) -> bool:
        """True if it is in the set that was begun last."""
        return row.set_number == self._set_number


class PromptFiles(NamedTuple):
    """The good rows of files and every problem of the others, both in file and line order, and the number of rows left
    out as repeated."""

    rows: list[PromptRow]
    problems: list[DataProblem]
    num_repeated: int


def load_prompts(
    files: Sequence[Path],
    prompt_field: str = "prompt",
    gold_field: str = "answer",
    tools_field: str | None = None,
    *,
    keep_first: bool = False,
) -> tuple[PromptRow, ...]:
    """The rows of the files, in order. One ValueError names all bad rows (the first 20, and how many there are)."""
    prompts = read_prompts(files, prompt_field, gold_field, tools_field=tools_field, keep_first=keep_first)
    if prompts.problems:
        raise ValueError(describe(prompts.problems))
    return tuple(prompts.rows)


def describe(problems: Sequence[DataProblem]) -> str:
    """The problems as one message: the first of them one per line, and how many are not shown."""
    lines = [str(problem) for problem in problems[:NUM_PROBLEMS_SHOWN]]
    hidden = len(problems) - NUM_PROBLEMS_SHOWN
    return "\n".join([*lines, f"... and {hidden} more problems in the data files"] if hidden > 0 else lines)


def read_prompts(
    files: Sequence[Path],
    prompt_field: str,
    gold_field: str,
    seen: SeenPrompts | None = None,
    tools_field: str | None = None,
    *,
    keep_first: bool = False,
) -> PromptFiles:
    """Reads one set of files. A repeated prompt is a problem; `keep_first` leaves the row out if both are of this set
    and have the same gold.

    `seen` knows the first row of each prompt; handed from one call to the next, it finds repetitions across sets.
    """
    rows, problems, num_repeated = [], [], 0
    seen = SeenPrompts() if seen is None else seen
    seen.begin_set()
    for file in map(Path, files):
        reader = _FileReader(file, (prompt_field, gold_field), tools_field, seen, keep_first=keep_first)
        good, bad = reader.read(MAX_BAD_ROWS - len(problems))
        rows += good
        problems += bad
        num_repeated += reader.num_left_out
        if len(problems) > MAX_BAD_ROWS:
            break
    return PromptFiles(rows, problems, num_repeated)


class _FileReader:
    """One file of prompts, row by row; repeated rows of a kind share one problem, which counts them."""

    def __init__(
        self, file: Path, fields: tuple[str, str], tools_field: str | None, seen: SeenPrompts, *, keep_first: bool
    ) -> None:
        self._file, self._fields, self._tools_field = file, fields, tools_field
        self._seen, self._keeps_first = seen, keep_first
        self.num_left_out = 0
        self._rows: list[PromptRow] = []
        self._problems: list[DataProblem] = []
        self._first_of: dict[str, int] = {}  # kind of repetition: the index of its problem
        self._num_of: Counter[str] = Counter()

    def read(self, most_problems: int) -> tuple[list[PromptRow], list[DataProblem]]:
        """The good rows and every problem; after more problems than `most_problems` nothing is read."""
        num_records = 0
        for line, record in read_records(self._file):
            num_records += 1
            found = [record] if isinstance(record, DataProblem) else self._field_problems(line, record)
            if found:
                self._problems += found
            else:
                self._take(line, _row(record, *self._fields, self._tools_field))
            if len(self._problems) > most_problems:
                self._problems.append(DataProblem(self._file, line, None, TOO_MANY))
                break
        if num_records == 0:
            self._problems.append(DataProblem(self._file, None, None, "has no rows"))
        for kind, index in self._first_of.items():
            first = self._problems[index]
            self._problems[index] = replace(first, reason=f"{first.reason} ({self._complaint_of(kind, first)})")
        return self._rows, self._problems

    def _take(self, line: int, row: PromptRow) -> None:
        earlier = self._seen.first_row(row.id, f"{self._file}:{line}", row.gold)
        if earlier is None:
            self._rows.append(row)
            return
        again = DataProblem(self._file, line, self._fields[0], f"is the prompt of {earlier.place} again")
        if not self._seen.is_of_this_set(earlier):
            self._count("in the other set", again)
        elif earlier.gold != row.gold:
            golds = f"with another gold: {quoted(row.gold)}, there {quoted(earlier.gold)}"
            reason = f"{again.reason} ({golds}; `hacpo-mega data convert` leaves both out)"
            self._problems.append(replace(again, reason=reason))
        elif self._keeps_first:
            self.num_left_out += 1
        else:
            self._count("repeated", again)

    def _count(self, kind: str, again: DataProblem) -> None:
        self._num_of[kind] += 1
        if kind not in self._first_of:
            self._first_of[kind] = len(self._problems)
            self._problems.append(again)

    def _complaint_of(self, kind: str, first: DataProblem) -> str:
        number = self._num_of[kind]
        rows = "the only such row" if number == 1 else f"the first of {number:,} such rows"
        if kind == "in the other set":
            other = first.reason.removeprefix("is the prompt of ").rpartition(":")[0]
            command = f"`{self._convert(other)} --without {shlex.quote(str(self._file))}`"
            return f"{rows}, which would be trained on and measured on; {command} leaves them out of training"
        command = f"`{self._convert(self._file)}` writes each prompt once"
        return f'{rows}; data.repeated = "keep_first" takes the first of each, {command}'

    def _convert(self, file: Path | str) -> str:
        """The command that reads a file with these fields."""
        options = zip(("--prompt-field", "--gold-field"), self._fields)
        words = [] if self._fields == ("prompt", "answer") else [word for option in options for word in option]
        return f"{shlex.join(['hacpo-mega', 'data', 'convert', str(file), *words])} --out NEW.jsonl"

    def _field_problems(self, line: int, record: dict[str, Any]) -> list[DataProblem]:
        problems = []
        for field, problem_of in zip(self._fields, (prompt_problem, gold_problem)):
            value = record.get(field)
            reason = absence(record, field) if value is None else problem_of(value)
            if field not in record and not self._problems and not problems:  # reported once
                command = f"hacpo-mega data convert {shlex.quote(str(self._file))} --out NEW.jsonl"
                reason += f"; `{command}` reads public layouts"
            if reason:
                problems.append(DataProblem(self._file, line, field, reason))
        problems += [DataProblem(self._file, line, field, reason) for field, reason in media_problems(record)]
        if reason := row_tools_problem(record, self._tools_field):
            problems.append(DataProblem(self._file, line, self._tools_field, reason))
        return problems


def _row(record: dict[str, Any], prompt_field: str, gold_field: str, tools_field: str | None) -> PromptRow:
    text = prompt_text(record[prompt_field], record, tools_field)
    skill = record["skill"] if isinstance(record.get("skill"), str) else ""
    row = fields_text({name: value for name, value in record.items() if name != prompt_field})
    return PromptRow(content_id(text), text, gold_text(record[gold_field]), skill, row)


def fields_text(record: dict[str, Any]) -> str:
    """The fields of a row as JSON text; dates and decimals, which Parquet has and JSON has not, as their text.

    A number that is not finite is null: a table writes NaN where a row has no value.
    """
    try:
        return json.dumps(record, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(record, default=str), parse_constant=lambda _: None))


def field_names(record: dict[str, Any]) -> str:
    """The fields that a row has, for a message: the first 20 in alphabetical order."""
    names = sorted(map(str, record))
    shown = [name if len(name) <= NUM_CHARACTERS_SHOWN else quoted(name) for name in names[:NUM_NAMES_SHOWN]]
    more = [f"... and {len(names) - NUM_NAMES_SHOWN} more"] if len(names) > NUM_NAMES_SHOWN else []
    return ", ".join(shown + more) or "no field at all"


def absence(record: dict[str, Any], field: str) -> str:
    """The reason why a field has no value: it is missing, or null."""
    return "is null" if field in record else f"is missing (the row has: {field_names(record)})"


def read_records(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    """(line from 1, record) of a prompt file or a saved folder; a DataProblem in place of an unreadable one."""
    if is_saved(file) or str(file).startswith(HUB):
        yield from _read_batches(file)
    elif not file.is_file():
        yield 0, DataProblem(file, None, None, "is a folder" if file.is_dir() else "does not exist")
    elif file.suffix == ".parquet":
        yield from _read_batches(file)
    elif file.suffix in (".csv", ".tsv"):
        reason = f"is {file.suffix[1:]}; JSON Lines and Parquet are read: pyarrow.csv.read_csv, pyarrow.parquet"
        yield 0, DataProblem(file, None, None, reason)
    else:
        with open_bytes(file) as lines:
            is_packed = isinstance(lines, gzip.GzipFile)
            yield from read_lines(file, lines, most_unpacked(file.stat().st_size) if is_packed else math.inf)


def open_bytes(file: Path) -> BinaryIO:
    """The bytes of a file, unpacked when they are gzip's, whatever the file is called."""
    with file.open("rb") as start:
        is_gzip = start.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip.open(file) if is_gzip else file.open("rb")


def read_lines(
    file: Path, lines: BinaryIO, most_bytes: float = math.inf
) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    """(line from 1, record) of a stream of JSON Lines; problems name `file`."""
    line = 0
    try:
        while raw := lines.readline(MAX_LINE_BYTES + 1):
            line, most_bytes = line + 1, most_bytes - len(raw)
            if most_bytes < 0:
                yield line, DataProblem(file, line, None, TOO_LARGE)
                return
            if len(raw) > MAX_LINE_BYTES:  # what follows may be gigabytes, also of a small packed file
                reason = f"has more than {MAX_LINE_BYTES:,} bytes; nothing is read from here on"
                yield line, DataProblem(file, line, None, reason)
                return
            if raw.strip():
                yield line, as_record(file, line, json_value(file, line, raw.rstrip()))
    except UNREADABLE as error:
        yield line + 1, DataProblem(file, line + 1, None, f"unreadable from here: {error}")


def json_value(file: Path, line: int | None, raw: bytes) -> Any:
    """The value of a line, or of a whole document without a `line`; a DataProblem for one that is not valid."""
    try:
        return parse_json(raw.decode("utf-8-sig" if line in (None, 1) else "utf-8"))
    except UnicodeDecodeError as error:
        of_line = "" if line is None else " of the line"
        return DataProblem(file, line, None, f"invalid UTF-8 at byte {error.start}{of_line}")
    except ValueError as error:
        return DataProblem(file, line, None, f"invalid JSON: {error}")


def as_record(file: Path, line: int, value: Any) -> dict[str, Any] | DataProblem:
    """The value of a row, which must be an object."""
    if isinstance(value, dict | DataProblem):
        return value
    return DataProblem(file, line, None, f"is a JSON {type(value).__name__}, needs an object with fields")


def _read_batches(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    """The rows of a Parquet file, of a saved folder, or of a data set of the Hub."""
    line, kind = 0, "Parquet" if file.is_file() else "Arrow"
    try:
        for batch in stored_batches(file):
            yield from _rows_of(batch, file, line)
            line += len(batch)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:  # the first of which are ValueErrors, too
        first = (str(error).splitlines() or [type(error).__name__])[0]
        yield line + 1, DataProblem(file, line + 1, None, f"unreadable {kind}: {first}")
    except (ValueError, OverflowError) as error:  # OverflowError for a date beyond Python's
        place = line + 1 if kind == "Parquet" else line
        yield place, DataProblem(file, place or None, None, str(error))


def _rows_of(batch: pyarrow.RecordBatch, file: Path, line: int) -> Iterator[tuple[int, dict[str, Any] | DataProblem]]:
    """The rows of a batch, numbered from `line` + 1. ValueError for two columns of one name."""
    names = batch.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"has two columns {quoted(twice)}, and a row is read by names: rename one of them")
    batch = _with_shortest_decimals(batch)
    is_small = num_bytes(batch) <= MAX_LINE_BYTES
    # a row is repeated in a Parquet file at no cost, so a batch that is large is unpacked row by row
    for rows in [batch] if is_small else (batch.slice(i, 1) for i in range(len(batch))):
        if num_bytes(rows) > MAX_LINE_BYTES:
            line += 1
            yield line, DataProblem(file, line, None, f"has more than {MAX_LINE_BYTES:,} bytes")
            continue
        for record in rows.to_pylist():
            line += 1
            yield line, record


def _with_shortest_decimals(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """The batch with its 16 and 32 bit floats at their shortest text: 0.1 would else be 0.10000000149011612."""
    for number, column in enumerate(batch.columns):
        if (narrow := NARROW_FLOATS.get(column.type)) is not None:
            values = [value if value is None else float(str(narrow(value))) for value in column.to_pylist()]
            batch = batch.set_column(number, batch.schema.names[number], pyarrow.array(values, pyarrow.float64()))
    return batch


def refuse_overwriting(out: Path, inputs: Sequence[Path]) -> None:
    """ValueError if writing `out` would destroy, or add to, an input: the same file, or one inside an input folder."""
    for given in inputs:
        is_same = out.exists() and given.exists() and out.samefile(given)
        if is_same or out.resolve().is_relative_to(given.resolve()):
            raise ValueError(f"{out}: is what is read ({given}); give another file to write to")


@contextmanager
def replacing(file: Path) -> Iterator[TextIO]:
    """A text stream that replaces `file` when the block ends, and leaves it alone if the block raises.

    ValueError when the folder does not exist, or `file` is there and no file: /dev/null would be one afterwards.
    """
    target = file.resolve()  # a symbolic link stays one, and its target is replaced
    if target.exists() and not target.is_file():
        raise ValueError(f"{file}: {'is a folder' if target.is_dir() else 'is a pipe or a device, not a file'}")
    if not target.parent.is_dir():
        raise ValueError(f"{file}: cannot be written: the folder {target.parent} does not exist")
    with replacing_bytes(target) as file:
        yield (stream := io.TextIOWrapper(file, encoding="utf-8"))
        stream.detach()  # writes what it holds


def data_digest(path: Path) -> str:
    """Digests a data file, all data files of a saved folder in order, or the rows of a data set of the Hub."""
    if HubSplit.parse(path) is not None:
        return _rows_digest(path)
    digests = [file_digest(file) for file in data_files(path)]
    return digest_of(digests) if len(digests) > 1 else digests[0]


def file_digest(file: Path) -> str:
    """Digests every byte; read once per process as long as size, time and place on the disk are as they were."""
    state = file.stat()
    return _bytes_digest(file, state.st_size, state.st_mtime_ns, state.st_ino)


def digest_of(value: Any) -> str:
    """Digests a value that JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _rows_digest(path: Path) -> str:
    return digest_of([str(record) for _, record in read_records(path)])


@functools.cache
def _bytes_digest(file: Path, *_state: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
