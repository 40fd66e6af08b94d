"""Golds rewritten: with one digit changed, so that they are wrong answers, and in ways that change no meaning."""

import random
import re
from collections.abc import Iterator

MATRIX = re.compile(r"\\begin\{[a-zA-Z]*(?:matrix|array)\*?\}")
KINDS = (
    ("matrix", MATRIX),
    ("text", re.compile(r"\s*\\(?:text|mbox|textbf|textnormal|mathrm)\{[^{}]*\}\s*")),
    ("percent", re.compile(r"%")),
    ("money", re.compile(r"\\\$")),
    ("degrees", re.compile(r"\^\s*(?:\{\\circ\}|\\circ)")),
    ("unit", re.compile(r"\\(?:text|mbox|textnormal|mathrm)\b")),
    ("integer", re.compile(r"\s*-?\d+\s*|\s*-?\d{1,3}(?:,\d{3})+\s*")),
    ("scientific", re.compile(r"\s*-?\d+(?:\.\d+)?e[+-]?\d+\s*")),
    ("decimal", re.compile(r"\s*-?(?:\d{1,3}(?:,\d{3})+|\d*)\.\d+\s*")),
    ("numeral in a base", re.compile(r"[0-9A-F]+_(?:\d+|\{\d+\})")),
    ("interval", re.compile(r"(?s)(?=.*(?:\\infty|\\cup|\[)).*[(\[].*,.*[)\]]")),
    ("inequality", re.compile(r"<|>|\\leq?\b|\\geq?\b|\\neq?\b")),
    ("equation", re.compile(r"=")),
    ("tuple", re.compile(r"\s*(?:\\left)?\s*\(.*,.*\)\s*", re.DOTALL)),
    ("list", re.compile(r",")),
    ("fraction", re.compile(r"\s*-?\\[dtc]?frac\s*(?:\d|\{-?\d+\})\s*(?:\d|\{[\d,]+\})\s*|\s*-?\d+/\d+\s*")),
    ("mixed number", re.compile(r"\s*-?\d+\s*\\[dtc]?frac\s*(?:\d|\{\d+\})\s*(?:\d|\{\d+\})\s*")),
)
FOUND_ANYWHERE = ("matrix", "percent", "money", "degrees", "unit", "inequality", "equation", "list")
MARKED_SIZE = re.compile(r"\\(?:left|right)(?![a-zA-Z])\s*")
LIST_OF_HUNDREDS = re.compile(r"\d,\s+\d{3}(?!\d)")  # "81, 256" without its space is another number
# a space beside one of these signs is typesetting; inside \text, between words and after a command it is not
LOOSE = re.compile(r" *([-+=(){}\[\]&^_/]|,(?!\\!|\d{3})|\\\\) *")


def kind_of(gold: str) -> str:
    """The kind of a gold answer by its text: the first of KINDS, else an expression with or without letters."""
    gold = gold.replace("\\!", "").replace("{,}", ",")
    for kind, pattern in KINDS:
        if pattern.search(gold) if kind in FOUND_ANYWHERE else pattern.fullmatch(gold):
            return kind
    without_commands = re.sub(r"\\[a-zA-Z]+", "", gold)
    return "expression in letters" if re.search(r"[a-zA-Z]", without_commands) else "closed form"


def with_one_digit_changed(gold: str, seed: int = 0) -> Iterator[str]:
    """For every digit of a gold the text with that digit replaced by another one."""
    generator = random.Random(f"{seed} {gold}")
    for place, sign in enumerate(gold):
        if sign.isascii() and sign.isdigit():
            other = generator.choice([digit for digit in "0123456789" if digit != sign])
            yield gold[:place] + other + gold[place + 1 :]


def rewritten(gold: str) -> dict[str, str]:
    """The gold in other spellings of the same answer, by the name of the rewrite; only those that differ from it."""
    has_words = "\\text" in gold or "\\mbox" in gold or "\\$" in gold
    is_number = kind_of(gold) == "integer"
    digits = re.sub(r"\D", "", gold)
    spellings = {
        "itself": gold,
        "in dollars": f"${gold}$",
        "full stop": f"{gold}.",
        "dfrac": re.sub(r"\\[dtc]?frac(?![a-zA-Z])", r"\\dfrac", gold),
        "frac": re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", gold),
        "left and right": _sized(gold),
        "no left and right": MARKED_SIZE.sub("", gold),
        "spaces": gold if has_words or MATRIX.search(gold) else LOOSE.sub(r" \1 ", gold),
        "no spaces": gold if has_words or LIST_OF_HUNDREDS.search(gold) else LOOSE.sub(r"\1", gold),
        "line break": gold.replace(", ", ",\n"),
        "thin spaces": re.sub(r", (?=\S)", r",\\, ", gold),
        "braces round powers": re.sub(r"\^([0-9a-z])", r"^{\1}", gold),
        "thousands": f"{int(digits):,}" if is_number and gold.isdigit() and gold[0] != "0" else gold,
        "no thousands": ("-" if gold.strip().startswith("-") else "") + digits if is_number else gold,
        "with .0": gold + ".0" if is_number and gold.isdigit() else gold,
        "slash": re.sub(r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold) if kind_of(gold) == "fraction" else gold,
        "leading zero": "0" + gold if gold.startswith(".") else gold,
        "powers of ten": re.sub(r"e\+?(-?\d+)$", r" \\times 10^{\1}", gold) if kind_of(gold) == "scientific" else gold,
    }
    if MATRIX.search(gold):
        spellings["another bracket"] = gold.replace("pmatrix", "bmatrix")
        spellings["rows on lines"] = gold.replace("\\\\", "\\\\\n").replace("&", " & ")
    return {name: text for name, text in spellings.items() if name == "itself" or text != gold}


def _sized(gold: str) -> str:
    is_pair = gold[:1] in "([" and gold[-1:] in ")]" and not any(sign in gold[1:-1] for sign in "()[]")
    return f"\\left{gold[:-1]}\\right{gold[-1]}" if is_pair and "\\left" not in gold else gold
