"""Numbers as mathematicians write them -> exact fractions, without a parser of formulas.

Read are whole and decimal numbers with thousands separated by commas or spaces, fractions, mixed numbers, powers of ten
and numerals in a base. Anything else is None: whoever asks then needs math-verify. Texts are as `plain` leaves them.
"""

import re
from fractions import Fraction

from hacpo_grading.texts.formula_text import with_fractions

MAX_DIGITS = 1000
WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
DECIMAL = re.compile(rf"([+-]?)({WHOLE}(?:\.\d*)?|\.\d+)")
TEN = r"10\^(?:\{([+-]?\d{1,3})\}|([+-]?\d))"
POWER_OF_TEN = re.compile(rf"([+-]?)({WHOLE}(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{{1,3}})|(?:\\times|\\cdot|\*|×|·){TEN})")
BARE_POWER = re.compile(rf"([+-]?){TEN}")
FRACTION = re.compile(r"([+-]?)(\d+)?\\frac(?: ?(\d)|\{([+-]?\d+)\}) ?(?:(\d)|\{([+-]?\d+)\})")
SLASH = re.compile(r"([+-]?)(?:(\d+) )?(\d+)/(\d+)")
NUMERAL = re.compile(
    r"(-?[0-9A-Z]+(?:\.[0-9A-Z]+)?)_(?:(\d)|\{(\d+|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|sixteen)\})"
)
BARE_NUMERAL = re.compile(r"-?[0-9A-Z]*[0-9][0-9A-Z]*(?:\.[0-9A-Z]+)?")
DECIMAL_COMMA = re.compile(r"[+-]?(?:\d+,(?:\d\d|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+)")
DOTTED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:\.\d{3}){2,}")

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
SMALL = {word: value for value, word in enumerate((*ONES.split(), "eighteen", "nineteen"))}
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
SMALL |= {word: 10 * place for place, word in enumerate(TENS.split(), start=2)}
LARGE = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
WORD_NUMBER = re.compile(rf"(?:\b(?:{'|'.join((*SMALL, *LARGE, 'and'))})\b[\s-]*)+", re.IGNORECASE)
IN_WORDS = re.compile(
    rf"\\(?:text|mbox|mathrm|textbf)\s*\{{\s*({WORD_NUMBER.pattern})([^{{}}]*)\}}|{WORD_NUMBER.pattern}", re.IGNORECASE
)
BASE_IN_WORDS = re.compile(r"\s*\(?(?:\\text\{\s*)?\(?\bbase[\s-]*(?:\}\s*)?(\d+|[a-z]+)\s*\)?\}?\)?\Z")
MANY = re.compile(
    rf"({WHOLE}(?:\.\d+)?)\s*(?:\\(?:text|mbox|mathrm|textbf)\s*\{{\s*)?\b({'|'.join(LARGE)})s?\b([^{{}}]*)(\}}?)",
)
# words set as text, with powers, \text{m}/\text{s}^2, or a bare word behind a digit
UNIT = re.compile(
    r"(?:(?:/|\\cdot)?\s*\\(?:text|textrm|textit|textbf|mbox|mathrm|operatorname)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
    r"(?:\^(?:\{[-\d]+\}|\d))?)+\Z|(?<=\d) (?!(?:sin|cos|tan|sec|cot|csc|log|exp|sqrt|or)\b)[a-z]{4,}(?: [a-z]+)*\Z"
)
NO_UNIT = re.compile(r"(?i)(?<![a-z])(?:and|no|per ?cent\w*|pct|mod|base|i|e)(?![a-z])|[%=<>,]")
OTHER_VALUE = re.compile(
    r"(?i)(?<![a-z])(?:or|not?|twice|thrice|wrong|false|incorrect|except|than|least|most|more|less|hundred|thousand|[mbtr]+illion|dozen)s?(?![a-z])"
)
# words between two values, which a parser of formulas would drop with all that follows: "5 apples and 6 pears"
BETWEEN = re.compile(
    r"\d.*\\(?:text|textbf|textit|mbox|mathrm)\s*\{(?!\s*(?:and|or)\s*\})[^{}]*[a-zA-Z][^{}]*\}\s*[-(]?\s*\d", re.DOTALL
)
LAST_SIDE = re.compile(r"(?:[a-zA-Z](?:_\w)?|(?=.*\\)(?:[\d .+\-{}()]|\\(?:bmod|cdot|times|div|frac))+)=([^=]+)")


def value_text(text: str, other: str) -> str:
    r"""A tidy answer where it may be a number: without its unit, and of "17 \bmod 5 = 2" beside no equation the 2."""
    unit = UNIT.search(text)
    if unit and unit.start() > 0 and not NO_UNIT.search(unit[0]) and not OTHER_VALUE.search(unit[0]):
        text = text[: unit.start()]
    side = None if "=" in other else LAST_SIDE.fullmatch(text)
    return side[1] if side else text


def is_of_another_value(text: str) -> bool:
    """Tells whether words make a tidy answer another one: "5 million", "5 or more", "5 apples and 6 pears"."""
    unit = UNIT.search(text)
    return BETWEEN.search(text) is not None or (unit is not None and OTHER_VALUE.search(unit[0]) is not None)


def with_digits(text: str) -> str:
    r"""A tidy answer whose number is in words in digits: "\text{seven}", "5 \text{ million dollars}"."""
    text = BASE_IN_WORDS.sub(r"_{\1}", text)
    if (found := IN_WORDS.fullmatch(text)) is not None:
        value = _number_of_words(found[1] or found[0])
        if value is not None:
            return rf"{value}\text{{ {found[2]}}}" if found[2] else str(value)
    if (found := MANY.fullmatch(text)) is not None:
        value = Fraction(_digits(found[1])) * LARGE[found[2]]
        value = str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
        return rf"{value}\text{{{found[3]}}}" if found[3].strip() else value
    return text


def _number_of_words(text: str) -> int | None:
    """The value of "two thousand and twenty-one"; None for words that are no one number."""
    total = group = 0
    previous = None
    for word in re.findall(r"[a-z]+", text.lower()):
        if word in SMALL:
            if previous in SMALL and not (SMALL[previous] >= 20 and 0 < SMALL[word] < 10):
                return None
            group += SMALL[word]
        elif word in LARGE:
            group = max(group, 1) * LARGE[word]
            if LARGE[word] >= 1000:
                total, group = total + group, 0
        previous = word
    return None if previous in (None, "and") else total + group


def read_number(text: str) -> Fraction | None:
    r"""The value of "7,000", "1.000.000", "27.0", "(073)", "-\frac{1}{2}", "2 1/2" or "4.5\times10^{33}", else None."""
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
        if "," in text:
            return None  # a pair
    if len(text) > MAX_DIGITS or not text.isascii():
        return None
    text = with_fractions(text.replace(".", "") if DOTTED_THOUSANDS.fullmatch(text) else text)
    if found := DECIMAL.fullmatch(text):
        return _signed(found[1], Fraction(_digits(found[2])))
    if found := POWER_OF_TEN.fullmatch(text):
        return _signed(found[1], Fraction(_digits(found[2])) * _power(found[3] or found[4] or found[5]))
    if found := BARE_POWER.fullmatch(text):
        return _signed(found[1], _power(found[2] or found[3]))
    if found := FRACTION.fullmatch(text):
        return _mixed(found[1], found[2], found[3] or found[4], found[5] or found[6])
    if found := SLASH.fullmatch(text):
        return _mixed(*found.groups())
    return None


def read_numeral(text: str) -> tuple[str, int | None] | None:
    """Digits and base of "1101_2"; the base is None for bare digits, and all is None for anything else."""
    if found := NUMERAL.fullmatch(text):
        base = found[2] or found[3]
        return found[1], int(base) if base.isdigit() else SMALL[base]
    return (text, None) if BARE_NUMERAL.fullmatch(text) else None


def read_decimal_comma(text: str) -> Fraction | None:
    """The value of "1000,99", "1.000,5" where the comma is a decimal point: not before three digits, or thousands."""
    is_one = DECIMAL_COMMA.fullmatch(text) and len(text) <= MAX_DIGITS
    return Fraction(text.replace(".", "").replace(",", ".")) if is_one else None


def _digits(text: str) -> str:
    return "0" + text.replace(",", "").replace(" ", "").rstrip(".")


def _power(exponent: str) -> Fraction:
    return Fraction(10) ** int(exponent)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _mixed(sign: str, whole: str | None, numerator: str, denominator: str) -> Fraction | None:
    if int(denominator) == 0 or (whole and (int(numerator) < 0 or int(denominator) < 0)):
        return None
    return _signed(sign, int(whole or 0) + Fraction(int(numerator), int(denominator)))
