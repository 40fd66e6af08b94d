r"""The judge of numbers with units: 3.0e8 m/s against 3.00 \times 10^8, within a relative tolerance.

The number is the last one of the last box, or of the whole text without a box; so it is in gold. Exponents and indices
of units and names (m/s^2, v_1, H2O) are no numbers. Units are not converted: 50 % equals 50 and not 0.5. "1 000" is a
thousand, "3 1/2" a mixed number.
"""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from hacpo_grading.graders.options import NUMBER_OPTIONS, wrong_value
from hacpo_grading.texts.answer_text import after_thinking, boxed_or_all, gold_answer, unicode_as_latex

APART = re.compile(r"\\ |(?<=[^\\],)\\[,;:]")  # a space between words, or behind a comma: "5,\,600" is a list
MINUS = re.compile(r"(?<![\w)\]}])–(?=\.?\d)")
SPACING = re.compile(r"\\[,;!:]|\\left|\\right|\\?\$")
# The lookbehinds let a match begin at the first digit of a run alone, or a long text would take quadratic time.
THIN = "[ ~]"
GROUPED = re.compile(rf"(?<![\w.,^])(?<!\d{THIN})[1-9]\d{{0,2}}(?:{THIN}\d{{3}}){{1,6}}(?! ?\d)")
PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
ARGUMENT = rf"\s*(?:\{{\s*(?:([+-])\s?)?({PLAIN})\s*\}}|(\d))"
WHOLE = r"(?<![\w.^/])(?<!/ )(\d{1,3}(?:,\d{3}){1,4}(?!\d)|\d{1,15}) *"
FRACTION = re.compile(
    rf"(?:(?<![\w)\]}}])([+-])\s?)?(?:{WHOLE})?\\(?:[cdt]?frac|nicefrac|sfrac)(?![A-Za-z]){ARGUMENT}{ARGUMENT}(?!\.?\d)"
)
MAX_DIGITS = 30  # of a proper fraction: Python makes no int of thousands
MIXED = re.compile(rf"{WHOLE}(?<= )(\d{{1,15}})\s?/\s?(\d{{1,15}})(?!\w|\.\d)")
# "2**3" and "2 ** 3" are powers; in "**5**" and "**Answer:** 5" the stars are bold type.
RAISES = r"(?:\s*\^\s*|\*\*(?=\S)| \*\* )"
TEN_TO = re.compile(
    rf"(?:(?<=[\d.])\s*(?:\\times|\\cdot|[*xX])\s*|(?<![\d.\w]))10{RAISES}"
    r"(?:[{(]\s*([+-]?\d{1,6})\s*[})](?=(\w?))|([+-]?\d{1,6}))"
)
TIMES = "\u23e8"  # times ten to the power of what follows: 1/2 x 10^3 is 500
RAISED = re.compile(r"[\^_]\s*(?:\{[^{}]*\}|[+-]?\w)|(?:(?<=[\w)\]}])\*\*|(?<=[\w)\]}] )\*\* )[+-]?\d+")
COMMAND = re.compile(r"\\[A-Za-z]+")
NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}])([+-])\s?)?(?<![\w.])({PLAIN})(?:(?:{TIMES}|[eE](?=[+-]?\d{{1,6}}(?!\w)))([+-]?\d{{1,6}}))?"
    rf"(?:\s?/\s?((?:{PLAIN})(?:[eE][+-]?\d{{1,6}})?)(?!\w|\.\d)(?:{TIMES}([+-]?\d{{1,6}}))?)?"
)


@dataclass(frozen=True, kw_only=True)
class Number:
    """1 when the number of the answer is within a tolerance of that of gold, 0 when not, None without a number.

    rel_tol   of the magnitude of gold      abs_tol   for golds of 0
    """

    rel_tol: float = 1e-6
    abs_tol: float = 0.0

    def __post_init__(self) -> None:
        if problem := wrong_value(NUMBER_OPTIONS, asdict(self)):
            raise ValueError(problem)

    def __call__(self, prompt: str, answer: str, gold: str) -> float | None:
        """The grader."""
        wanted = self._wanted(gold)
        found = last_number(boxed_or_all(after_thinking(answer)))
        if found is None:
            return None
        return float(abs(found - wanted) <= max(self.rel_tol * abs(wanted), self.abs_tol))

    def explain(self, answer: str, gold: str) -> dict[str, Any]:
        """The text that was searched, the number found in it, that of gold, and the tolerance."""
        where = boxed_or_all(after_thinking(answer))
        found, wanted = last_number(where), self._wanted(gold)
        return {
            "extracted": where[-200:],
            "parsed_answer": found,
            "parsed_gold": wanted,
            "rule": f"|answer - gold| <= max({self.rel_tol:g} |gold|, {self.abs_tol:g})",
        }

    def _wanted(self, gold: str) -> float:
        wanted = last_number(boxed_or_all(gold_answer(gold)))
        if wanted is None or not math.isfinite(wanted):
            raise ValueError(f"the gold answer {gold[-80:]!r} has no number in it")
        return wanted


def last_number(text: str) -> float | None:
    """The last number of a text; None without any."""
    text = MINUS.sub("-", APART.sub(" ", unicode_as_latex(text)))
    text = GROUPED.sub(lambda grouped: re.sub(r"\D", "", grouped[0]), text)  # before "9 $200" loses its dollar
    text = SPACING.sub("", text).replace("{,}", ",")
    text = MIXED.sub(lambda mixed: _with_whole(*mixed.groups()) or mixed[0], FRACTION.sub(_as_quotient, text))
    text = TEN_TO.sub(_as_exponent, text)
    text = COMMAND.sub(" ", RAISED.sub(" ", text))
    numbers = list(NUMBER.finditer(text))
    return _value(*numbers[-1].groups()) if numbers else None


def _as_quotient(fraction: re.Match[str]) -> str:
    """Sign, numerator and denominator in one line; a number before it that is no whole part of it stays apart."""
    before, whole, sign, numerator, digit, lower_sign, denominator, lower_digit = fraction.groups("")
    numerator, denominator = numerator or digit, denominator or lower_digit
    quotient = _with_whole(whole, numerator, denominator) if whole and not sign + lower_sign else None
    apart, before = (before + whole, "") if whole and quotient is None else ("", before)
    is_negative = (before + sign + lower_sign).count("-") % 2
    return f"{apart} {'-' if is_negative else ''}{quotient or f'{numerator}/{denominator}'} "


def _with_whole(whole: str, numerator: str, denominator: str) -> str | None:
    """A mixed number as a quotient; None where the rest is no proper fraction."""
    digits = numerator + denominator
    if len(digits) > MAX_DIGITS or not digits.isdigit() or not int(numerator) < int(denominator):
        return None
    return f"{int(whole.replace(',', '')) * int(denominator) + int(numerator)}/{denominator}"


def _as_exponent(power: re.Match[str]) -> str:
    follows_a_number = not power.group().startswith("10")
    return f"{TIMES if follows_a_number else '1e'}{power[1] or power[3]}{' ' if power[2] else ''}"


def _value(sign: str | None, digits: str, exponent: str | None, divisor: str | None, power: str | None) -> float | None:
    value = float(f"{sign or ''}{digits.replace(',', '')}e{exponent or 0}")
    denominator = float((divisor or "1").replace(",", ""))
    scale = int(power or 0) * (1 if exponent is None else -1)  # 1/2 x 10^3 is 500, but 1 x 10^2 / 2 x 10^3 0.05
    return value / denominator * float(f"1e{scale}") if denominator else None
