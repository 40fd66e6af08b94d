"""The judge of JSON: the value of the answer equals the value of gold.

The answer is the last fenced block of the text, or the whole text without one. Key order and spacing do not matter, the
order of lists does; 1 equals 1.0 and not true. A key that comes twice, NaN and Infinity are not JSON.
"""

import json
import re
from decimal import Decimal, InvalidOperation
from textwrap import dedent
from typing import Any

from hacpo_grading.texts.answer_text import after_thinking

FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)


def json_equality(prompt: str, answer: str, gold: str) -> float | None:
    """1 for an equal value, 0 for another one or a fenced block that is no JSON, None for other text without any."""
    wanted = _gold_value(gold)
    text, is_fenced = fenced(after_thinking(answer))
    try:
        return float(_parsed(text) == wanted)
    except (ValueError, RecursionError):
        return 0.0 if is_fenced else None


def explain(kind: str, answer: str, gold: str) -> dict[str, Any]:
    """The text that was read as JSON, and where it fails if it does."""
    text, is_fenced = fenced(after_thinking(answer))
    report: dict[str, Any] = {
        "extracted": text[:2000],
        "rule": "the last fenced block" if is_fenced else "the whole text",
    }
    try:
        _parsed(text)
    except (ValueError, RecursionError) as error:
        report["not JSON"] = str(error)
    return report | {"parsed_gold": gold.strip()[:2000]}


def fenced(text: str) -> tuple[str, bool]:
    """The inside of the last complete ``` block and True, or the whole text and False."""
    fences = list(FENCE.finditer(text))
    if len(fences) < 2:
        return text.strip(), False
    opening, closing = fences[len(fences) // 2 * 2 - 2], fences[len(fences) // 2 * 2 - 1]
    inside = text[opening.end() + 1 : closing.start()]
    return dedent(inside) if opening[0][0].isspace() else inside, True  # a block in a list is as far in as its fence


def _gold_value(gold: str) -> Any:
    try:
        return _parsed(gold)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the gold answer {gold[:80]!r} is not JSON: {error}") from error


def _parsed(text: str) -> Any:
    return json.loads(
        text, parse_int=_number, parse_float=_number, parse_constant=_refuse, object_pairs_hook=_without_repetition
    )


def _number(digits: str) -> tuple[str, Decimal]:
    try:
        return "number", Decimal(digits)  # a pair equals no bool and no list
    except InvalidOperation as error:  # an exponent of twenty digits
        raise ValueError("a number too large") from error


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key comes twice")
    return table
