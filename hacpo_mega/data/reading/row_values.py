"""Values that a row may have: a prompt, as text or chat messages, and a gold answer.

Elsewhere: where rows are (files.py) and which of their fields are read (datasets.py).
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from hacpo_grading.texts.chat_messages import messages_problem, messages_text, tools_problem
from hacpo_mega.models.files.documents import parse_json

NUM_CHARACTERS_SHOWN = 80
GOLD_TYPES = (str, int, float)
# A value of a row in words, by its type.
TYPE_WORDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a table"}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # fields of rows that are no text alone
CHOICES, PASSAGES = ("choices", "options"), ("context", "passage", "article")
NO_ANSWERS = ("proof", "notfound")  # NuminaMath's words for a problem that has none
HALF_A_PAIR = re.compile("[\ud800-\udfff]")
# Messages as JSON or Python writes them: tables of an older writer, and columns of JSON, have a list as its text.
CHAT_IN_A_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(?:role|content|from)\1\s*:.*\}\s*\]\s*""", re.DOTALL)


def quoted(value: object) -> str:
    """A value of a file as a message shows it: in quotes and on one line, at most 80 characters of it."""
    # a long text is cut before it is escaped: a message about 5 MB must not build 5 MB
    cut = value[:NUM_CHARACTERS_SHOWN] if isinstance(value, str) else value
    shown = repr(cut)
    is_whole = cut == value and len(shown) <= NUM_CHARACTERS_SHOWN + 2
    return shown if is_whole else f"{shown[:NUM_CHARACTERS_SHOWN]}..."


def value_problem(value: object, types: tuple[type, ...]) -> str | None:
    """The reason why a value is not a prompt (`types` is str) or a gold answer (GOLD_TYPES); None if it is."""
    if isinstance(value, bool) or not isinstance(value, types):
        needs = "a text or a number" if float in types else "a text"
        return f"is {TYPE_WORDS.get(type(value), type(value).__name__)}, needs {needs} (found {quoted(value)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, needs a finite number"
    if isinstance(value, str) and not value.strip():
        return "is empty"
    if isinstance(value, str) and HALF_A_PAIR.search(value):
        return "holds half a surrogate pair, which no tokenizer can encode"
    return None


def gold_problem(value: object) -> str | None:
    """The reason why a value is not a gold answer; None if it is."""
    return value_problem(value, GOLD_TYPES)


def has_no_answer(prompt_field: str, gold: object) -> bool:
    """True if a gold is NuminaMath's mark of a problem without an answer; elsewhere the word may be one."""
    return prompt_field == "problem" and isinstance(gold, str) and gold.strip().lower() in NO_ANSWERS


def prompt_problem(value: object) -> str | None:
    """The reason why a value is not a prompt, a text or chat messages; None if it is."""
    if isinstance(value, list):
        return messages_problem(value) or value_problem(messages_text(value), (str,))
    is_chat = isinstance(value, str) and CHAT_IN_A_TEXT.fullmatch(value) is not None
    return "is chat messages in a text; write them as a list" if is_chat else value_problem(value, (str,))


def media_problems(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fields of a row that hold images, video or audio, each with the reason why it cannot be used."""
    reason = "is not read, for agents see text alone: leave such rows out, or the field if the text says all"
    return [(field, reason) for field, value in row.items() if _is_media(field, value, row)]


def _is_media(field: str, value: Any, row: Mapping[str, Any]) -> bool:
    """True for a field of MEDIA, also a path that a text refers to, and for an image as `datasets` writes it."""
    if field in MEDIA and value:
        return isinstance(value, list | dict | bytes) or (isinstance(value, str) and "<image" in str(row))
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and first.keys() == {"bytes", "path"} and any(first.values())


def unread_problems(row: Mapping[str, Any], prompt: object) -> list[tuple[str, str]]:
    """The fields of a row with choices or a passage that its prompt, a text, lacks, each with the reason not to use
    it."""
    if not isinstance(prompt, str):
        return []
    given = [(field, row[field]) for field in CHOICES if isinstance(row.get(field), list | dict)]
    given += [(field, row[field]) for field in PASSAGES if isinstance(row.get(field), str)]
    reason = "is not in the prompt: write it there, or leave the field out"
    return [(field, reason) for field, value in given if any(text not in _spaced(prompt) for text in _texts(value))]


def _texts(value: Any) -> list[str]:
    """The texts in a value of a row, however deep."""
    inside = value.values() if isinstance(value, dict) else value
    return [text for one in inside for text in _texts(one)] if isinstance(value, dict | list) else [_spaced(str(value))]


def _spaced(text: str) -> str:
    return " ".join(text.split())


def row_tools_problem(row: Mapping[str, Any], field: str | None) -> str | None:
    """The reason why a row's field is not schemas of tools; None if it is, and for a row without."""
    try:
        tools = _tools(row, field)
    except ValueError as error:
        return f"is no JSON text: {error}"
    if tools is None:
        return None
    return tools_problem(tools) or value_problem(json.dumps(tools, ensure_ascii=False), (str,))


def _tools(row: Mapping[str, Any], field: str | None) -> Any:
    value = row.get(field) if field else None
    return (parse_json(value) if value.strip() else None) if isinstance(value, str) else _without_null_keys(value)


def _without_null_keys(value: Any) -> Any:
    """A value of a table without the empty keys that Parquet gives every row."""
    if isinstance(value, dict):
        return {key: _without_null_keys(inside) for key, inside in value.items() if inside is not None}
    return [_without_null_keys(inside) for inside in value] if isinstance(value, list) else value


def prompt_text(value: str | list[dict[str, str]], row: Mapping[str, Any], tools_field: str | None) -> str:
    """The text that stands everywhere for a valid prompt and its tools."""
    tools = _tools(row, tools_field) or ()
    if isinstance(value, str) and not tools:
        return value
    return messages_text([{"role": "user", "content": value}] if isinstance(value, str) else value, tools)
