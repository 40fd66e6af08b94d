r"""Formulas rewritten for their parser: the same value, where math-verify would read another one or none.

    0.1\overline{6}, 0.(3), 0.333...    the fraction that a repeating decimal is
    \cos 30^\circ                       radians; outside a function a degree is a unit (units.py)
    4.5e33                              4.5 \times 10^{33}, and no product with Euler's number
    3 > x \ge 1                         1 \le x < 3
    ]0,1]                               (0,1]
    R^2 - r^2                           two letters: the parser knows no capitals

Texts are as `tidy` leaves them. Linear in the text.
"""

import re
import string
from fractions import Fraction

E_NOTATION = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]\+?(-?\d+)")
REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\)|\\dot\{?(\d)\}?(\d*)\\dot\{?(\d)\}?)"
    r"(?![\d.])"
)
DOTTED = re.compile(r"(?<![\d.])(\d*)\.(\d*?)((\d)\4{2,}|(\d{2,})\5+)(?:\.\.\.|\\[lc]?dots(?![a-zA-Z]))")
FUNCTION = r"\\(?:sin|cos|tan|cot|sec|csc|cis)(?![a-zA-Z])(?:\^(?:\{[^{}]*\}|\d))?"
GREEK = r"\\(?:alpha|beta|gamma|delta|theta|phi|varphi|omega)(?![a-zA-Z])"
LEAF = rf"(?:\d+(?:\.\d*)?|\.\d+|[a-zA-Z]|{GREEK}|\\frac(?:\{{[^{{}}]*\}}|\d){{2}})"
BRACKETS = r"(?:\((?:[^()]|\([^()]*\))*\)|\{(?:[^{}]|\{[^{}]*\})*\})"
DEGREE = r"\^\s*(?:\{\\circ\}|\\circ(?![a-zA-Z]))"
IN_WORDS = re.compile(r"\\text\{\s*degrees?\s*\}")
ARGUMENT = re.compile(rf"({FUNCTION})\s*((?:\\frac)?(?:{BRACKETS}(?:{BRACKETS})?|{LEAF}+)(?:{DEGREE})?)")
IN_DEGREES = re.compile(rf"({BRACKETS}|{LEAF}){DEGREE}")
OUTWARD = re.compile(r"([\[\]])([^\[\](),]+,[^\[\](),]+)([\[\]])")  # brackets of an open end, as in French
RELATION = re.compile(r"(\\(?:geq?|leq?|gt|lt)(?![a-zA-Z])|>=?|<=?)")
REVERSED = {">": "<", ">=": "\\le ", "\\ge": "\\le ", "\\geq": "\\le ", "\\gt": "<"}
# math-verify drops everything from the first words to a brace at the end, as a unit; it reads \text{ and } as a comma
WORDS = re.compile(r"\\(?:text[a-z]*|mbox|math(?:rm|it|bf))\s*\{(?!\s*(?:and|or)\s*\})[^{}]*\}(?:\^(?:\d|\{-?\d\}))?")
MARKED = re.compile(r"(?:(?<!\\)\$|\\[\[(])[^$]*?\}(?=\s*(?:\$|\\[\])]))")
VALUE = re.compile(r"\d|(?<![\\a-zA-Z])[a-zA-Z]")
LETTER = re.compile(r"\\(?:math[a-z]+|text[a-z]*|mbox|begin|end|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+|\\.|[a-zA-Z]")


def as_formula(text: str) -> str:
    """A tidy text in a form that math-verify reads correctly."""
    text = with_fractions(as_power_of_ten(text))
    if "\\circ" in text or "degree" in text:
        text = ARGUMENT.sub(_in_radians, IN_WORDS.sub(r"^\\circ", text))
    if text.startswith("]") or text.endswith("["):
        text = OUTWARD.sub(lambda found: f"{'[('[found[1] == ']']}{found[2]}{'])'[found[3] == '[']}", text)
    return ascending(text)


def as_power_of_ten(text: str) -> str:
    r"""4.5 \times 10^{33} for "4.5e33"."""
    return E_NOTATION.sub(r"\1\\times 10^{\2}", text) if E_NOTATION.fullmatch(text) else text


def with_fractions(text: str) -> str:
    r"""\frac{1}{3} for every repeating decimal 0.\overline{3} of a text."""
    if "." not in text:
        return text
    return DOTTED.sub(_dotted, REPEATING.sub(_repeating, text))


def with_its_end(formula: str) -> str:
    r"""x_{\text{max}}=\frac{1}{2}\, for x_{\text{max}}=\frac{1}{2}: the parser drops no value behind words."""
    words = WORDS.search(formula) if formula.endswith("}") else None
    return rf"{formula}\," if words and VALUE.search(WORDS.sub("", formula[words.start() :])) else formula


def with_their_ends(text: str) -> str:
    """A text in which `with_its_end` was asked about every formula between dollars or LaTeX's brackets."""
    return MARKED.sub(lambda formula: with_its_end(formula[0]), text) if WORDS.search(text) else text


def ascending(text: str) -> str:
    r"""1 \le x < 3 for "3 > x \ge 1"; other texts as they are."""
    parts = RELATION.split(text)
    if len(parts) < 5 or "," in text or not all(sign in REVERSED for sign in parts[1::2]):
        return text
    return "".join(REVERSED.get(part, part) for part in reversed(parts))


def with_distinct_letters(gold: str, answer: str) -> tuple[str, str]:
    """Both texts, where one has a letter small and large, with another letter in the place of the large one."""
    used = {side: {name for name in LETTER.findall(side) if len(name) == 1} for side in (gold, answer)}
    both = {letter for names in used.values() for letter in names if letter.isupper() and letter.lower() in names}
    taken = {letter.lower() for names in used.values() for letter in names}
    free = iter(letter for letter in string.ascii_lowercase if letter not in taken | set("deio"))
    renamed = dict(zip(sorted(both), free))
    if not renamed:
        return gold, answer
    return tuple(LETTER.sub(lambda name: renamed.get(name[0], name[0]), side) for side in (gold, answer))


def _repeating(found: re.Match[str]) -> str:
    whole, start, *blocks = found.groups("")
    return _as_fraction(whole, start, "".join(blocks))


def _dotted(found: re.Match[str]) -> str:
    return _as_fraction(found[1], found[2], found[4] or found[5])


def _as_fraction(whole: str, start: str, block: str) -> str:
    value = int(f"0{whole}{start}") + Fraction(int(block), 10 ** len(block) - 1)
    value /= 10 ** len(start)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _in_radians(found: re.Match[str]) -> str:
    angle = IN_DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", found[2])
    if angle == found[2]:
        return found[0]
    return f"{found[1]}({angle})"
