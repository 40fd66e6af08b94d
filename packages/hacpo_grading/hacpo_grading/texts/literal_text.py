r"""Answers that are no arithmetic: times of day, dates, ranges, telephone numbers, orders of letters, congruences.

A parser of formulas would evaluate them: 12:30 becomes 2/5, 2024-01-05 becomes 2018, HTT and THT the same product.
Hence they are compared as texts. A time may lack a.m. or p.m. on one side; 2:3 is a ratio, and 1:2:3 equals 2:4:6.
Texts are as `plain` leaves them.
"""

import re
from collections import Counter
from fractions import Fraction

HALF = r"(?:([ap])\.?m\.?|(morning|midnight)|(noon|afternoon|evening|night))"
CLOCK = re.compile(rf"(\d{{1,2}}):([0-5]\d)(?::([0-5]\d))?{HALF}?|(\d{{1,2}}){HALF}")
SURE_CLOCK = re.compile(r"(?<![\d:])\d{1,2}:0\d(?::\d\d)?(?![\d:])|:\d\d:\d\d(?!\d)|\d(?:[ap]\.?m\.?|o'clock)")
FILLING = re.compile(r"[\s{}~]|o'?clock|\b(?:at|in|the|of)\b|\\[,;:! ]")
DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}|\d\d([-/.])\d\d\3\d\d")
DASH = re.compile(r"--+|[–—‐‑]|(?<=\d)\s*to\s*(?=\d)", re.IGNORECASE)
RUN = re.compile(r"\(?\d[\d.:]*\)?(?:-\d[\d.:]*)+")
PADDED_RUN = re.compile(r"0\d+(?:-\d+)+|\d+(?:-\d+)*-0\d+(?:-\d+)*")
MODULUS = re.compile(r"\(?\\?(?:[pb]?mod|operatorname\{mod\})\s*(?:\{(\d+)\}|(\d+))\)?")
CONGRUENCE = re.compile(r"(?:([a-zA-Z])(?:\\equiv|≡|=))?(-?\d+(?:,-?\d+)*)\s*\0(\d+)")  # 3;2 is a list
RATIO = re.compile(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?){2,9}")
IN_A_SENTENCE = re.compile(r"\d+(?:[:/–-]\d+)+(?:\s*[ap]\.?m\b)?", re.IGNORECASE)
CAPITALS = re.compile(r"[A-Z]{3,}")
BETWEEN_LETTERS = re.compile(r"\s|\\(?:to|rightarrow)(?![a-zA-Z])")
BETWEEN_WORDS = re.compile(r"\s*(?:,|;|\band\b|\bor\b)\s*(?:(?:and|or)\b\s*)?")


def literal_verdict(gold: str, answer: str) -> bool | None:
    """Tells whether two plain texts say the same where one is no arithmetic; None where both may be evaluated."""
    for read in (_clock, _run_of_digits, _letters, _congruence, _ratio):
        wanted, found = read(gold, True), read(answer, False)
        if wanted is not None:
            found = read(answer, True) or read(answer.upper(), True)
            return found is not None and _is_same(wanted, found)
        if found is not None:
            return False
    return None


def last_literal(text: str) -> str | None:
    """The last time, date or range of a sentence."""
    found = IN_A_SENTENCE.findall(text)
    return found[-1] if found else None


def _is_same(wanted: tuple, found: tuple) -> bool:
    if wanted[0] != "clock":
        return wanted == found
    (*time, half), (*other, other_half) = wanted[1:], found[1:]
    if half and other_half:
        return _on_24(time, half) == _on_24(other, other_half)
    return time == other or _on_24(time, half) == _on_24(other, other_half)


def _on_24(time: list[int], half: str) -> list[int]:
    hour, *rest = time
    if half and hour <= 12:
        hour = hour % 12 + (12 if half == "p" else 0)
    return [hour, *rest]


def _clock(text: str, is_gold: bool) -> tuple | None:
    """Hour, minute, second and half of the day; of an answer only where it can be no ratio."""
    if not is_gold and not SURE_CLOCK.search(text.lower()):
        return None
    found = CLOCK.fullmatch(FILLING.sub("", text.lower()))
    if found is None:
        return None
    hour, minute, second, *halves = found.groups("")
    half = halves[0] or "a" * bool(halves[1]) or "p" * bool(halves[2])
    if not hour:
        hour, half = halves[3], halves[4] or "a" * bool(halves[5]) or "p" * bool(halves[6])
    return ("clock", int(hour), int(minute or 0), int(second or 0), half) if int(hour) <= 24 else None


def _run_of_digits(text: str, is_gold: bool) -> tuple | None:
    """Digits with dashes between them, or a date; of an answer only where it can be no subtraction."""
    text = DASH.sub("-", text).replace(" ", "")
    if DATE.fullmatch(text) or PADDED_RUN.fullmatch(text) or (is_gold and RUN.fullmatch(text)):
        return "digits", text
    return None


def _letters(text: str, is_gold: bool) -> tuple | None:
    """Three capitals or more, or a list of such words, which has no order."""
    if not is_gold:
        return None
    words = [BETWEEN_LETTERS.sub("", word) for word in BETWEEN_WORDS.split(text.strip("{}\\ "))]
    if words and all(map(CAPITALS.fullmatch, words)):
        return "letters", frozenset(Counter(words).items())
    return None


def _congruence(text: str, is_gold: bool) -> tuple | None:
    r"""The modulus and the residues of "x \equiv 5 \pmod{7}"."""
    found = CONGRUENCE.fullmatch(MODULUS.sub("\0\\1\\2", text).replace(" ", "")) if is_gold else None
    if found is None or int(found[3]) == 0:
        return None
    return "congruence", int(found[3]), frozenset(int(residue) % int(found[3]) for residue in found[2].split(","))


def _ratio(text: str, is_gold: bool) -> tuple | None:
    """The terms of "1:2:3" in parts of the first; two terms are a fraction."""
    terms = [Fraction(term) for term in text.split(":")] if RATIO.fullmatch(text) else [0]
    return ("ratio", *(term / terms[0] for term in terms)) if terms[0] else None
