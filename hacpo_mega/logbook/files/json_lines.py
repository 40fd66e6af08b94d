"""Files of one JSON object per line that a run has written, read back; a line of another shape is named."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hacpo_mega.models.files.documents import parse_json, short
from hacpo_mega.models.files.links import require_inside

CHARACTERS_SHOWN = 80
MAX_COUNT = 2**53  # up to which every reader of JSON has exact integers
MAX_NUMBER = 1e100  # its square is still finite, and float32 ends long before


class FieldType(NamedTuple):
    """The values that a field of a line may have, as text and as a test; `is_needed` if it may not be absent."""

    needs: str
    fits: Callable[[Any], bool]
    is_needed: bool = True

    @property
    def if_given(self) -> "FieldType":
        """The same for a field that older runs do not have."""
        return self._replace(is_needed=False)

    @property
    def or_null(self) -> "FieldType":
        """The same, or null."""
        return self._replace(needs=f"{self.needs}, or null", fits=lambda value: value is None or self.fits(value))


def is_number(value: Any) -> bool:
    """True if a value is a number that one can compute with: not NaN, not beyond MAX_NUMBER."""
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER


def list_of(item: FieldType) -> FieldType:
    """The type of lists of one type."""
    return FieldType(f"a list, each {item.needs}", lambda value: isinstance(value, list) and all(map(item.fits, value)))


def table_of(item: FieldType) -> FieldType:
    """The type of tables whose values are of one type."""
    return FieldType(
        f"a table, each {item.needs}", lambda value: isinstance(value, dict) and all(map(item.fits, value.values()))
    )


TEXT = FieldType("text", lambda value: isinstance(value, str))
COUNT = FieldType("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value <= MAX_COUNT)
NUMBER = FieldType("a number", is_number)
TABLE = FieldType("a table", lambda value: isinstance(value, dict))


def wrong_field(line: Mapping[str, Any], fields: Mapping[str, FieldType], where: str = "") -> str | None:
    """The first field of a line that is missing or of another type, as text; None if all are right."""
    for name, field_type in fields.items():
        if name not in line:
            if field_type.is_needed:
                return f"{where}{name} is missing"
        elif not field_type.fits(line[name]):
            return f"{where}{name} is {short(line[name])}, needs {field_type.needs}"
    return None


def checked(line: dict[str, Any], fields: Mapping[str, FieldType], where: str = "") -> dict[str, Any]:
    """The line. ValueError, with its first wrong field."""
    if reason := wrong_field(line, fields, where):
        raise ValueError(reason)
    return line


def as_line(value: Mapping[str, Any]) -> bytes:
    """A line of such a file. A lone surrogate in a text has no UTF-8; its backslash form is the JSON escape of it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


def dated_line(**fields: Any) -> bytes:
    """A line of these fields that begins with the present time."""
    return json.dumps({"time_unix_s": round(time.time(), 3)} | fields).encode() + b"\n"


def add_dated_line(path: Path, **fields: Any) -> None:
    """Adds a line to a file that nobody else writes now. Removes a last line that a full disk has cut: this one
    would be joined to it."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(dated_line(**fields))


def json_lines(
    path: Path, what: str, read: Callable[[dict[str, Any]], Any] = lambda line: line, root: Path | None = None
) -> Iterator[tuple[int, bytes, Any]]:
    """Number, text and content of every line; the error for a bad line says that it is not `what`.

    `read` makes the content of a line's table; its ValueError says what is wrong. `root` is the run's folder, by
    default the file's: a link out of it is refused (models/files/links.py). A last line without its end (the job was
    killed while writing) is left out, and so are empty ones. ValueError, with the file and the number of the line;
    FileNotFoundError when there is no file.
    """
    require_inside(path.parent if root is None else root, path)
    for number, text in enumerate(_whole_lines(path), start=1):
        if not text:
            continue
        try:
            line = parse_json(text)
            if not isinstance(line, dict):
                raise ValueError("no object")
            content = read(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not {what} ({error}): {text[:CHARACTERS_SHOWN]!r}. Take the line out, or move "
                "the file away, to go on"
            ) from error
        yield number, text, content


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one by one: those of a long run are more than a machine wants to hold."""
    try:
        with path.open("rb") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    return  # still being written: the file may have the rest of it by now
                yield text[:-1]
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read ({reason}): move it away, or mend it") from error
