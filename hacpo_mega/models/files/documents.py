"""JSON and TOML documents of any origin: reading is bounded, and every fault is one line. No torch.

Elsewhere: the meaning of a document (its reader knows), and JSON Lines, whose lines are bounded too
(data/reading/files.py).
"""

import codecs
import difflib
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# The deepest that anybody writes is a tokenizer.json, of about ten levels.
MAX_DEPTH = 64
SHOWN = 80  # characters of a value that a line shows
# Bound of one document: the largest tokenizer.json has 35 MB, the index of a thousand shards 10.
MAX_JSON_BYTES = 256 * 2**20
# tomllib takes a second for each of these.
MAX_TOML_BYTES = 2**20
# tomllib copies a dotted key once for every part.
LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}""")
# Python writes and reads no decimal number of more than 4,300 digits.
LONG_NUMBER = re.compile(r"(?<![\w])[+-]?(?:\d[\d_]{4299}|0[xob][\da-fA-F_]{1000})")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document. ValueError, one line, for no JSON, a key that is given twice, and too deep ones."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    except MemoryError as error:
        raise ValueError("needs more memory than there is") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error
    _require_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML document. ValueError, one line, for invalid TOML, and for an absurdly large document."""
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"has more than {MAX_TOML_BYTES:,} characters")
    for pattern, problem in ((LONG_KEY, f"a key of more than {MAX_DEPTH} parts"), (LONG_NUMBER, "a number too long")):
        if found := pattern.search(text):
            raise ValueError(f"{problem} (at line {text.count(chr(10), 0, found.start()) + 1})")
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    _require_depth(table)
    return table


def json_file(file: Path) -> Any:
    """The value in a JSON file. ValueError, one line that names the file, when there is none."""
    try:
        return parse_json(_bytes_of(file, MAX_JSON_BYTES))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error


def toml_file(file: Path, expected: str) -> dict[str, Any]:
    """The table in a TOML file; `expected` ends the line that says there is none. ValueError, one line, for that."""
    try:
        return parse_toml(_bytes_of(file, 4 * MAX_TOML_BYTES).decode("utf-8-sig"))  # some editors put a mark first
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}); give {expected}") from error
    except UnicodeDecodeError as error:
        found = (
            "this is UTF-16; save it as UTF-8"
            if error.object.startswith(UTF_16)
            else f"invalid UTF-8 at byte {error.start}"
        )
        raise ValueError(f"{file}: not valid TOML: {found}") from error
    except ValueError as error:
        raise ValueError(f"{file}: not valid TOML: {error}{_language_hint(file)}") from error


def _language_hint(file: Path) -> str:
    """The end of a line about a file that is no TOML: whether it looks like YAML or JSON."""
    lines = (line.strip() for line in _bytes_of(file, 4 * MAX_TOML_BYTES).decode().split("\n"))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if first.startswith("{"):
        return '; this looks like JSON, and TOML has num_steps = 5 for "num_steps": 5'
    if first == "---" or re.match(r"[\w.-]+:(\s|$)", first):
        return "; this looks like YAML, and TOML has num_steps = 5 for num_steps: 5, and [data] for data:"
    return ""


def one_line(text: str) -> str:
    """A name from a document for a line of text: without control characters, of at most 80 characters."""
    cut = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return cut if cut.isprintable() else repr(cut)[1:-1]


def short(value: Any) -> str:
    """A value for a line of text: as Python writes it, at most about 80 characters."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python writes no number of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)  # a long text is cut before it is escaped
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about a word that is none of `known`: the nearest of them, as a question, or nothing."""
    # difflib takes seconds for a long text, and none is near to it
    is_word = isinstance(word, str) and len(word) <= SHOWN
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff) if is_word else []
    return f"; did you mean {near[0]!r}?" if near else ""


def require_file(file: Path) -> None:
    """ValueError for a path that exists and is neither file nor folder: a pipe would block, a device never ends."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise ValueError("is a pipe or a device, not a file")


def _bytes_of(file: Path, most: int) -> bytes:
    require_file(file)
    with file.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"has more than {most:,} bytes")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError for a repeated key, since either value may be meant."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {one_line(repr(twice))} is given twice")
    return table


def _require_depth(value: Any) -> None:
    """ValueError for a value that recursion in a reader would not survive; itself it does not recurse."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        parts = (part for table in level for part in (table.values() if isinstance(table, dict) else table))
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")
