"""Graders for mathematics: the answer of a text against gold, by math-verify, in a guarded worker (judge.py).

math-verify's own time limits are off: they need SIGALRM, which only a main thread has, and they turn a hang into "not
equal". Without them a hang is the guard's business, and it is reported as a time-out.
An answer that cannot be parsed or compared is wrong; running out of memory is an error, so it is never swallowed here.
Golds may be bare ("18", "\\frac{1}{2}"), in dollars, boxed, a whole solution with a box, or end in "#### 18".
"""

import functools
import logging
import re
from dataclasses import dataclass
from fractions import Fraction

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Equality, Expr, UnevaluatedExpr
from sympy.core.relational import Relational

from hacpo_mega.data.answer_text import after_thinking, gold_answer, last_box, last_boxed

logging.getLogger("math_verify").setLevel(logging.ERROR)  # or it warns that its time limits are off
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)

MAX_PARSED_CHARACTERS = 2000
MAX_BOX_CHARACTERS = 1000
MAX_NESTING = 20
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+")
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
NO_SENTENCE = re.compile(r"[\\<>≠≤≥]")
MATHEMATICS = ("$", "\\[", "\\(", "\\boxed", "\\begin")


@dataclass(frozen=True)
class MatchRules:
    """What counts as an answer and as equal.

    `latex` and `expressions` are looked for, and in `sentences` without any LaTeX the last number is the answer; floats
    are rounded to `decimals`; with `relations_are_sets` x < 1 equals its interval.
    """

    latex: bool = True
    expressions: bool = True
    sentences: bool = True
    decimals: int = 6
    relations_are_sets: bool = False

    @property
    def targets(self) -> tuple:
        """What math-verify is to look for. A box comes before anything else in the text."""
        latex = (LatexExtractionConfig(boxed_match_priority=0),) if self.latex else ()
        return (*latex, ExprExtractionConfig()) if self.expressions else latex


RULES = MatchRules()
BOX_RULES = MatchRules(sentences=False)  # or "7 or 8" in a box would be both


def boxed(prompt: str, answer: str, gold: str) -> float | None:
    """1 when the last box of the text equals gold, 0 when not, None without a box.

    What comes before </think> does not count, and a text that opens <think> and never closes it has not answered.
    """
    text = after_thinking(answer)
    content = None if "<think>" in text else last_boxed(text)
    if content is None:
        return None
    if len(content) > max(MAX_BOX_CHARACTERS, len(gold)):  # half of it would be another answer: it is not parsed at all
        return float(plain(gold_answer(gold)) == plain(content))
    return float(equal(gold_answer(gold), content, BOX_RULES))


def anywhere(prompt: str, answer: str, gold: str) -> float | None:
    """1 when an answer anywhere in the text equals gold as math-verify sees it, boxed or not; None for an empty text.

    For grading answers whose writer was asked for no box. Neighbouring boxes are one answer, a list.
    """
    text = after_thinking(answer).strip()
    return float(equal(gold_answer(gold), text)) if text else None


def equal(gold: str, answer: str, rules: MatchRules = RULES) -> bool:
    """Whether two answers are the same: as text, as exact whole numbers, else as math-verify sees them."""
    plain_gold, plain_answer = plain(gold), plain(answer)
    if plain_gold == plain_answer:
        return bool(plain_gold)
    numbers = as_integer(plain_gold), as_integer(plain_answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    gold, answer = region(gold), region(answer)
    if nesting(answer) > max(MAX_NESTING, nesting(gold)):  # the parser is exponential in it, and no answer needs it
        return False
    return any(_verified(g, a, rules) for g in _parsed(gold, rules) for a in _parsed(answer, rules))


def region(text: str) -> str:
    """The part of a long text where its answer is: the last box and a little before it, else its end."""
    if len(text) <= MAX_PARSED_CHARACTERS:
        return text
    box = last_box(text)
    if box is None:
        return text[-MAX_PARSED_CHARACTERS:]
    return text[max(0, box[0] - 200) : box[2] + 1][:MAX_PARSED_CHARACTERS]


def nesting(text: str) -> int:
    """How deep the brackets of a text are nested."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return deepest


def plain(answer: str) -> str:
    """An answer without what never changes its meaning: its box, dollars, sizes, spaces, a final full stop."""
    text = answer.strip().rstrip(".").strip()
    for noise in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "\\$", "$"):
        text = text.replace(noise, "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    # "1, 234" is a list and "1,234" a number, so a space after a comma stays
    return re.sub(r"(?<!,)\s+", "", TEXT_COMMAND.sub(r"\1", text))


def as_integer(text: str) -> int | None:
    """A plain whole number, thousands commas allowed ("7,000", "27.0", "(073)"); None for anything else."""
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if len(text) > 1000 or not text.isascii() or not NUMBER.fullmatch(text):
        return None
    number = Fraction(text.replace(",", ""))
    return int(number) if number.denominator == 1 else None


@functools.lru_cache(maxsize=256)
def _parsed(answer: str, rules: MatchRules) -> tuple:
    is_marked = any(sign in answer for sign in MATHEMATICS)
    forms = (answer,) if is_marked or not rules.latex else (f"\\boxed{{{answer}}}",)
    if rules.sentences and not is_marked and " " in answer and not NO_SENTENCE.search(answer):
        forms = (*forms, answer)
    return tuple(found for form in forms for found in _extracted(form, rules))


def _extracted(text: str, rules: MatchRules) -> list:
    try:
        return parse(text, rules.targets, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []


def _verified(gold: object, answer: object, rules: MatchRules) -> bool:
    try:
        if _is_bound(gold) != _is_bound(answer) and (_is_number(gold) or _is_number(answer)):
            return False  # math-verify takes the right side of x <= 7 and finds it equal to 7
        if _are_far_apart(gold, answer, 10.0**-rules.decimals):
            return False
        return verify(
            gold,
            answer,
            float_rounding=rules.decimals,
            allow_set_relation_comp=rules.relations_are_sets,
            timeout_seconds=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, Expr) and bool(value.is_number)


def _is_bound(value: object) -> bool:
    """An inequality, or "not equal"."""
    return isinstance(value, Relational) and not isinstance(value, Equality)


def _are_far_apart(gold: object, answer: object, tolerance: float) -> bool:
    """Whether both are numbers in closed form and differ. sympy would try to simplify their difference, for ever."""
    if not all(_is_number(x) and not x.has(UnevaluatedExpr) for x in (gold, answer)):
        return False  # a percentage is unevaluated: 9% equals both 0.09 and 9
    values = [x.evalf(30) for x in (gold, answer)]
    if not all(value.is_finite and value.is_Number for value in values):
        return False
    return bool(abs(values[0] - values[1]) > tolerance * max(1, abs(values[0])))
