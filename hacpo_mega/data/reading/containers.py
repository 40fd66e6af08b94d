"""Files, folders and archives of public data -> their rows, each with the place that it is from.

    .jsonl, .txt    JSON Lines         .json   Lines or one document, both also gzipped         .parquet
    .tar.gz, .tgz, .tar of .jsonl and .json, and folder trees of all of these
What cannot be read is a row whose record is a DataProblem. Not here: what a row means (datasets.py).
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hacpo_mega.data.reading.files import (
    MAX_LINE_BYTES,
    MAX_TIMES_UNPACKED,
    UNREADABLE,
    DataProblem,
    most_unpacked,
    open_bytes,
    read_lines,
    read_records,
)
from hacpo_mega.data.reading.saved_folders import is_saved
from hacpo_mega.models.files.documents import MAX_JSON_BYTES, parse_json
from hacpo_mega.models.files.links import require_inside_its_run

Record = dict[str, Any]

LINES = (".jsonl", ".jsonl.gz")
DOCUMENTS = (".json", ".json.gz")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
# Entries of an archive that say something of the next one: a long name, a size, times.
ABOUT_OTHERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, b"X", tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


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
