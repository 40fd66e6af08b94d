r"""Lists, sets and tuples as texts: their elements, for elements that a parser of formulas cannot read.

5 \text{ cm}, 6 \text{ cm} or (20\%, 1\frac{1}{2}): each element is an answer of its own. Texts are as `tidy` leaves
them.
"""

import re
from collections.abc import Callable, Sequence

SEPARATOR = re.compile(r"\\(?:text|mbox|mathrm|textbf)\{\s*[,;]?\s*(?:and|or)\s*\}|\b(?:and|or)\b|[,;]")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
BRACKETS = ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))
GOES_ON = re.compile(r"[,;]\s*(?:\\[a-z]?dots[a-z]?(?![a-zA-Z])|\.\.|…)")
MAX_ELEMENTS = 6


def goes_on(text: str) -> bool:
    r"""Tells whether a list as it is typed leaves elements out: "1, 2, 3, \ldots" or "1, 2, ..., 10"."""
    return GOES_ON.search(text) is not None


def elements_of(text: str) -> tuple[str, list[str]]:
    """Both brackets of a list, "" for a bare one, and its elements; no elements for a text that is no list."""
    brackets = ""
    for opening, closing in BRACKETS:
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : len(text) - len(closing)]
            if _split(inner) is not None:
                brackets, text = opening + closing, inner
                break
    parts = [part.strip() for part in _split(text) or ()]
    parts = [part for part in parts if part]
    return ("" if brackets == r"\{\}" else brackets), parts if 2 <= len(parts) <= MAX_ELEMENTS else []


def are_equal_lists(gold: str, answer: str, is_equal: Callable[[str, str], bool]) -> bool:
    """Tells whether each element of one equals another of the other; in their order in brackets and with equations."""
    (brackets, wanted), (other_brackets, found) = elements_of(gold), elements_of(answer)
    if not wanted or len(wanted) != len(found) or brackets != other_brackets:
        return False
    has_order = bool(brackets) or "=" in gold + answer  # x = 1, y = 2 is not 2, 1
    return all(map(is_equal, wanted, found)) if has_order else _is_matched(wanted, found, is_equal)


def repeat_differently(gold: str, answer: str, is_equal: Callable[[str, str], bool]) -> bool:
    """Tells whether bare lists of as many elements repeat different ones: 2, 2, 3 and 2, 3, 3 are one set to a
    parser."""
    (brackets, wanted), (other_brackets, found) = elements_of(gold), elements_of(answer)
    if brackets or other_brackets or len(wanted) != len(found) or len(set(wanted)) == len(wanted):
        return False
    return not _is_matched(wanted, found, is_equal)


def _is_matched(wanted: Sequence[str], found: list[str], is_equal: Callable[[str, str], bool]) -> bool:
    for element in wanted:
        partner = next((other for other in found if is_equal(element, other)), None)
        if partner is None:
            return False
        found.remove(partner)
    return True


def _split(text: str) -> list[str] | None:
    """The parts between the separators outside brackets; None where brackets do not match."""
    ends = {found.start(): found.end() for found in SEPARATOR.finditer(text)}
    thousands = {found.start() for found in THOUSANDS.finditer(text)}
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        if depth == 0 and position in ends and position not in thousands:
            parts.append(text[start:position])
            start = position = ends[position]
            continue
        depth += (text[position] in "{([") - (text[position] in "})]")
        if depth < 0:
            return None
        position += 1
    return [*parts, text[start:]] if depth == 0 else None
