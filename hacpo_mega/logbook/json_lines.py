"""Files of one JSON object per line that a run has written, read back; a line that is none is named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hacpo_mega.models.documents import parse_json
from hacpo_mega.models.links import require_inside

CHARACTERS_SHOWN = 80


def json_lines(path: Path, what: str, root: Path | None = None) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Number, text and content of every line; `what` it should be is told of one that is none.

    `root` is the run's folder, by default the file's: a link out of it is refused (models/links.py). A last line
    without its end (the job was killed while writing) is left out, and so are empty ones. ValueError, with the file and
    the number of the line; FileNotFoundError when there is no file.
    """
    require_inside(path.parent if root is None else root, path)
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read ({why}): move it away, or mend it") from error
    for number, text in enumerate(lines, start=1):
        if not text:
            continue
        try:
            line = parse_json(text)
        except ValueError as error:
            raise bad_line(path, number, text, what, str(error)) from error
        if not isinstance(line, dict):
            raise bad_line(path, number, text, what, "no object")
        yield number, text, line


def bad_line(path: Path, number: int, text: bytes, what: str, why: str) -> ValueError:
    """The one line that says so."""
    shown = repr(text[:CHARACTERS_SHOWN])
    return ValueError(
        f"{path}, line {number}: not {what} ({why}): {shown}. Take the line out, or move the file away, to go on"
    )
