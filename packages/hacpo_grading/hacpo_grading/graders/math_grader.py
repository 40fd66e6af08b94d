"""Graders for mathematics: the answer of a text against gold, by math-verify, in a guarded worker (judge.py).

Both sides are tidied and parsed whole by math-verify, as the content of a box. The rules of `decide`
come before that; docs/measurements/grading.md says what each gains on labelled pairs and on changed golds.
math-verify's own time limits are off: they need SIGALRM, which only a main thread has, and they
turn a hang into "not equal". Running out of memory is never swallowed here, for the same reason.
Golds may be bare ("18", "\\frac{1}{2}"), in dollars, boxed, a whole solution with a box, or end in "#### 18".
"""

import functools
import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import FiniteSet, Interval

from hacpo_grading.graders.answer_limits import too_large
from hacpo_grading.graders.answer_values import adds_nonfinite, are_far_apart
from hacpo_grading.graders.choice import lone_letter, stated_letter
from hacpo_grading.graders.number_text import (
    is_of_another_value,
    read_decimal_comma,
    read_number,
    read_numeral,
    value_text,
    with_digits,
)
from hacpo_grading.texts.answer_sets import as_sets, with_imaginary_unit
from hacpo_grading.texts.answer_text import after_thinking, gold_answer, last_box, last_boxed, plain, tidy
from hacpo_grading.texts.formula_text import as_formula, with_distinct_letters, with_its_end, with_their_ends
from hacpo_grading.texts.list_text import are_equal_lists, goes_on, repeat_differently
from hacpo_grading.texts.literal_text import last_literal, literal_verdict
from hacpo_grading.texts.units import LONGEST, PERCENT, Quantity, Ratio, read_quantities, read_total, scale

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its time limits are off
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)

MAX_TEXT_CHARACTERS = 2000
LATEX, EXPRESSION = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
MARKED = re.compile(r"(?<!\\)\$[^$]+\$|\\[\[(]")  # where formulas stand between words; "$255" is money
LAST_LINE = re.compile(r"####([^\n#]+)\Z")  # GSM8K's form, which golds have, too
WITH_UNITS = re.compile(r"\\(?:text|mathrm|mbox|circ|%)|%|\d [a-z]")
UNITS = "units of different things"
LITERAL = "a time, a date, a range or letters"
WORD = re.compile(r"(?<![A-Za-z\\])(?!and\b|or\b)[A-Za-z]{2,}|[\u0400-\u04ff\u3040-\u9fff\uac00-\ud7af]{2}")
UNSPACED = re.compile("[\u3000-\u30ff\u3400-\u9fff，：；！？（）]+")  # 答案是42。


@dataclass(frozen=True)
class MatchRules:
    """The rules by which two answers are equal.

    decimals            to how many of them a decimal number must agree
    relative            how far a number may be from gold, as a share of it (a benchmark's own tolerance)
    relations_are_sets  x < 1 equals a gold that is its interval
    targets             what math-verify looks for in a text without a box
    """

    decimals: int = 6
    relative: float = 0.0
    relations_are_sets: bool = True
    targets: tuple = (LATEX, EXPRESSION)


@dataclass(frozen=True)
class Decision:
    """The verdict whether an answer equals gold, its rule, both texts, and their values where they were parsed."""

    is_equal: bool
    rule: str
    gold: str = ""
    answer: str = ""
    gold_read: str = ""
    answer_read: str = ""


RULES = MatchRules()


def boxed(prompt: str, answer: str, gold: str, *, relative: float = 0.0) -> float | None:
    """1 when the last box of the text equals gold, 0 when not, None without a box.

    Boxes beside each other may also be one answer, a list. Text before </think> does not count, and a text that
    opens <think> and never closes it has not answered. With `relative` a number may be off by that share of gold, for
    benchmarks of measured quantities.
    """
    decision = decide_boxed(gold, answer, MatchRules(relative=relative))
    return None if decision is None else float(decision.is_equal)


def anywhere(prompt: str, answer: str, gold: str, *, relative: float = 0.0) -> float | None:
    """1 when an answer anywhere in the text equals gold, boxed or not; None for an empty text.

    For grading answers whose writer was asked for no box; `relative` as in `boxed`.
    """
    text = after_thinking(answer).strip()
    return float(decide_anywhere(gold, text, MatchRules(relative=relative)).is_equal) if text else None


def explain(kind: str, answer: str, gold: str) -> dict[str, Any]:
    """Explains a decision of "math" or "math_any": what was extracted, how both sides were read, which rule decided."""
    text = after_thinking(answer).strip()
    decision = decide_boxed(gold, answer) if kind == "math" else decide_anywhere(gold, text) if text else None
    return asdict(decision or Decision(False, "the text has no answer", gold=box_of(gold_answer(gold))))


def decide_boxed(gold: str, answer: str, rules: MatchRules = RULES) -> Decision | None:
    """Decides if the last box after the reasoning equals gold; None without one, or while the reasoning goes on."""
    text = after_thinking(answer)
    content = last_boxed(text)
    if content is None:
        return None
    gold = box_of(gold_answer(gold))
    decision = decide(gold, content, rules)
    joined = box_of(region(text))
    return decide(gold, joined, rules) if not decision.is_equal and joined != content else decision


def decide_anywhere(gold: str, text: str, rules: MatchRules = RULES) -> Decision:
    """Decides whether an answer in a text equals gold: in its boxes, as the whole text, or where math-verify finds one.

    Gold is always read whole; only the text is searched.
    """
    decision = decide_boxed(gold, text, rules)
    if decision is not None:
        return decision
    gold = box_of(gold_answer(gold))
    if (last := LAST_LINE.search(text)) and (decision := decide(gold, last[1], rules)).is_equal:
        return decision
    if goes_on(gold) == goes_on(text) and is_same_text(plain(gold), plain(text)):
        return Decision(True, "the same text", gold, text)
    if decision := _choice_in_words(gold, text):
        return decision
    has_words = WORD.search(text)
    if not has_words or not MARKED.search(text):
        decision = decide(gold, text, rules)
        if decision.is_equal or not has_words:
            return decision
    if (literal := last_literal(region(text))) and literal_verdict(plain(gold), plain(literal)):
        return Decision(True, LITERAL, gold, literal)
    formulas = with_their_ends(as_formula(UNSPACED.sub("; ", region(text))))
    found = _extracted(re.sub("[−‑]", "-", formulas).replace("\\$", ""), rules.targets)
    read = _shown(found[-1]) if found else ""
    if reason := too_large(tidy(read), tidy(gold)):
        return Decision(False, f"refused: {reason}", gold, read)
    sides = read_quantities(tidy(gold), tidy(text[-LONGEST:]), _has_money(gold, text))
    if (ratio := scale(*(side.measure for side in sides))) is None:
        return Decision(False, UNITS, gold, text[-LONGEST:])
    numbers = read_number(plain(value_text(sides[0].value, ""))), read_number(plain(read))
    if None not in numbers:
        return Decision(_are_equal_numbers(*numbers, sides, ratio, rules), "numbers", gold, read, *map(str, numbers))
    return _compared(gold, read, found, rules)


def _choice_in_words(gold: str, text: str) -> Decision | None:
    """Decides whether a sentence names the letter that gold is; None where gold is no letter or none is named."""
    wanted = lone_letter(gold)
    letter = stated_letter(text) if wanted else None
    return None if letter is None else Decision(letter == wanted, "the letter of a choice", gold, text, wanted, letter)


def _has_money(*sides: str) -> list[bool]:
    return ["\\$" in side for side in sides]


def decide(gold: str, answer: str, rules: MatchRules = RULES) -> Decision:
    """Decides whether two answers are the same: as text, refused, as numbers, else as math-verify sees them."""
    texts = tidy(gold), tidy(answer)
    if goes_on(gold) != goes_on(answer):
        return Decision(False, "a list that goes on", gold, answer)
    if is_same_text(*map(plain, texts)) or is_same_text(*(plain(text.removesuffix("\\ldots")) for text in texts)):
        return Decision(True, "the same text", gold, answer)
    if (letter := lone_letter(answer)) and letter == plain(gold).strip("()."):
        return Decision(True, "the letter of a choice", gold, answer, letter, letter)
    if None in _numbers(*map(plain, texts)) and (reason := too_large(texts[1], texts[0])):
        return Decision(False, f"refused: {reason}", gold, answer)
    if (is_same := literal_verdict(*map(plain, texts))) is not None:
        return Decision(is_same, LITERAL, gold, answer)
    texts = tuple(as_formula(with_digits(text)) for text in texts)
    if any(map(is_of_another_value, texts)) and None not in (totals := [read_total(text) for text in texts]):
        return _decide_values(*totals, (gold, answer), rules)
    if is_of_another_value(texts[1]) and not is_of_another_value(texts[0]):
        return Decision(False, "words that change the value", gold, answer)
    quantities = read_quantities(*texts, _has_money(gold, answer))
    decision = _decide_values(*quantities, (gold, answer), rules)
    if decision.rule != "math-verify":
        return decision

    def are_equal(wanted: str, found: str) -> bool:
        return decide(wanted, found, rules).is_equal

    if decision.is_equal:
        is_overruled = repeat_differently(*texts, are_equal)
    else:
        is_overruled = WITH_UNITS.search("".join(texts)) is not None and are_equal_lists(*texts, are_equal)
    return Decision(not decision.is_equal, "elements of a list", gold, answer) if is_overruled else decision


def _decide_values(gold: Quantity, answer: Quantity, texts: tuple[str, str], rules: MatchRules) -> Decision:
    """Decides whether two quantities are the same: their units first, then their values."""
    if (ratio := scale(gold.measure, answer.measure)) is None:
        return Decision(False, UNITS, *texts)
    values = value_text(gold.value, answer.value), value_text(answer.value, gold.value)
    values = tuple(map(plain, values))
    if (is_same := literal_verdict(*values)) is not None:
        return Decision(is_same, LITERAL, *texts)
    numbers = _numbers(*values)
    if None not in numbers and not ratio.power_of_pi:
        is_equal = _are_equal_numbers(*numbers, (gold, answer), ratio, rules)
        return Decision(is_equal, "numbers", *texts, *map(str, numbers))
    numerals = read_numeral(plain(gold.value)), read_numeral(plain(answer.value))
    if None not in numerals and any(base for _, base in numerals):  # "5 N" is no numeral
        (digits, base), (answer_digits, answer_base) = numerals
        equal = ratio == Ratio() and digits == answer_digits and (base == answer_base or None in (base, answer_base))
        return Decision(equal, "numerals in a base", *texts, *map(str, numerals))
    formulas = with_distinct_letters(gold.formula, ratio.times(answer.formula))
    return _compared(*formulas, _parsed(formulas[1]), rules)


def is_same_text(gold: str, answer: str) -> bool:
    """Tells whether two plain texts are the same and not empty."""
    return gold == answer != ""


def box_of(text: str) -> str:
    """The content of the last boxes of a text, with commas where several stand together; the text without a box."""
    return extract_boxed_content(text, mode="last") if last_boxed(text) is not None else text


def region(text: str) -> str:
    """The part of a long text where its answer is: the last box and a little before it, else its end."""
    if len(text) <= MAX_TEXT_CHARACTERS:
        return text
    box = last_box(text)
    if box is None:
        return text[-MAX_TEXT_CHARACTERS:]
    return text[max(0, box[0] - 200) : box[2] + 1][:MAX_TEXT_CHARACTERS]


def _numbers(gold: str, answer: str) -> tuple[Fraction | None, Fraction | None]:
    """Both values; beside a number with a decimal point also that of one with a decimal comma (1000,99)."""
    numbers = read_number(gold), read_number(answer)
    if numbers[0] is not None and numbers[1] is None and "." in gold:
        return numbers[0], read_decimal_comma(answer)
    if numbers[1] is not None and numbers[0] is None and "." in answer:
        return read_decimal_comma(gold), numbers[1]
    return numbers


def _are_equal_numbers(
    gold: Fraction, answer: Fraction, sides: Sequence[Quantity], ratio: Ratio, rules: MatchRules
) -> bool:
    r"""Tells whether two values are close in gold's unit; 50\% is 50 and 0.5 where the other side is no percentage."""
    percents = [side.measure == PERCENT for side in sides]
    pairs = [(gold, answer * ratio.factor)]
    if percents[0] != percents[1]:
        pairs.append((gold / 100, answer) if percents[0] else (gold, answer / 100))
    return any(_are_close(*pair, rules) for pair in pairs)


def _are_close(gold: Fraction, answer: Fraction, rules: MatchRules) -> bool:
    """Equal; or within the relative tolerance; or, for a gold that is no whole number, equal to so many decimals.

    Below 0.1 as many significant digits count instead, or every small number would be 0. Neither of two
    fractions that are no decimals is a rounding of the other, nor is a whole number one of a fraction.
    """
    size = abs(gold)
    denominators = gold.denominator, answer.denominator
    has_decimal = any(d > 1 and pow(10, d.bit_length(), d) == 0 for d in denominators)
    is_rounded = gold.denominator > 1 and has_decimal
    rounding = min(10 * size, 1) / (2 * 10**rules.decimals) if is_rounded else 0
    return abs(gold - answer) <= max(rounding, size * Fraction(rules.relative))


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> tuple:
    return _parsed(tidy(gold))


def _parsed(answer: str) -> tuple:
    return tuple(_extracted(f"\\boxed{{{with_its_end(as_formula(answer))}}}", (LATEX,), "first_match"))


def _extracted(text: str, targets: tuple, mode: str = "any_match") -> list:
    """Values that math-verify reads; by "first_match" a box is read whole, never a fraction in one it cannot read."""
    try:
        return parse(text, targets, extraction_mode=mode, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []


def _compared(gold: str, answer: str, found: Sequence[Any], rules: MatchRules) -> Decision:
    wanted = _parsed_gold(gold)
    read = (_shown(side[0]) if side else "" for side in (wanted, found))
    return Decision(_are_equal(wanted, found, rules), "math-verify", gold, answer, *read)


def _shown(read: Any) -> str:
    try:
        return str(read)[:200]
    except (ValueError, TypeError) as error:  # sympy sorts what it prints, and nan has no order
        return f"not shown: {error}"


def _are_equal(gold: Sequence[Any], answer: Sequence[Any], rules: MatchRules) -> bool:
    try:
        return any(_is_equal(wanted, found, rules) for wanted, found in itertools.product(gold, answer))
    except MemoryError:
        raise
    except Exception:
        return False


def _is_equal(gold: Any, answer: Any, rules: MatchRules) -> bool:
    """Tells whether math-verify finds two readings equal, asked only where its algebra holds."""
    gold, answer = as_sets(gold, answer, rules.relations_are_sets)
    if any(isinstance(a, Interval) and isinstance(b, FiniteSet) for a, b in ((gold, answer), (answer, gold))):
        return False  # (1, 2) is no set of two
    return any(
        not (adds_nonfinite(*pair) or are_far_apart(*pair, rules.decimals))
        and verify(*pair, float_rounding=rules.decimals, timeout_seconds=None, raise_on_error=True)
        for pair in with_imaginary_unit(gold, answer)
    )
