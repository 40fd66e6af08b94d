"""Answers that are refused by their text alone, before a parser that is exponential in them sees them.

Every rule compares with the gold, so that a gold which is itself long, deep or large can still be answered. A refused
answer is a wrong answer: no gold of MATH, Minerva or OlympiadBench is refused as an answer to itself.
"""

import re

MAX_CHARACTERS = 400
MAX_NESTING = 12
MAX_DIGITS = 40
MAX_EXPONENT_DIGITS = 4
# what sympy would calculate, and may never end
CALCULATION = re.compile(r"\\(?:sum|prod|i*int|oint|lim|limsup|liminf|bmod|pmod|mod|gcd)(?![a-zA-Z])")
FACTORIAL = re.compile(r"(?:\d{4}|[)}\]!])!(?!=)|\\[dt]?binom.*(?:\d{4}|\^)")
DIGITS = re.compile(r"\d+")
EXPONENT = re.compile(r"\^(?:\{([^{}]*)\}|\(([^()]*)\)|([^\W_]+))")
POWER_OF_A_POWER = re.compile(r"\^(?:\{[^{}]*\}|\w+)\^")


def too_large(answer: str, gold: str) -> str | None:
    """The reason to refuse a tidy answer beside a tidy gold, or None. Linear in the answer."""
    answer, gold = answer.replace("**", "^"), gold.replace("**", "^")
    if len(answer) > max(MAX_CHARACTERS, 4 * len(gold)):
        return f"longer than {MAX_CHARACTERS} characters"
    if nesting(answer) > max(MAX_NESTING, nesting(gold)):
        return f"brackets nested deeper than {MAX_NESTING}"
    if _longest_number(answer) > max(MAX_DIGITS, _longest_number(gold)):
        return f"a number of more than {MAX_DIGITS} digits"
    if powers(answer) > max(1, powers(gold)):
        return "a power in an exponent"
    if _exponent_digits(answer) > max(MAX_EXPONENT_DIGITS, _exponent_digits(gold)):
        return f"an exponent of more than {MAX_EXPONENT_DIGITS} digits"
    last_side = answer[_last_equals(answer) :]
    for unfinished in (CALCULATION, FACTORIAL):
        if (found := unfinished.search(last_side)) and not unfinished.search(gold):
            return f"{found.group()} left to be calculated"
    return None


def nesting(text: str) -> int:
    """The depth to which the brackets of a text are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


def powers(text: str) -> int:
    """The number of powers that stand in each other's exponents: 2 for "2^{3^4}" and "2^3^4"."""
    is_exponent: list[bool] = []  # of every bracket that is open
    highest = 2 if POWER_OF_A_POWER.search(text) else 0
    previous = ""
    for character in text:
        if character in "{([":
            is_exponent.append(previous == "^")
            highest = max(highest, sum(is_exponent))
        elif character in "})]" and is_exponent:
            is_exponent.pop()
        elif previous == "^":
            highest = max(highest, sum(is_exponent) + 1)
        previous = character
    return highest


def _last_equals(text: str) -> int:
    """The position behind the last "=" that is not inside brackets (as in the bounds of a sum); 0 without one."""
    depth = last = 0
    for end, character in enumerate(text, start=1):
        depth += (character in "{([") - (character in "})]")
        last = end if character == "=" and depth == 0 else last
    return last


def _longest_number(text: str) -> int:
    return max(map(len, DIGITS.findall(text)), default=0)


def _exponent_digits(text: str) -> int:
    return max((_longest_number("".join(groups)) for groups in EXPONENT.findall(text)), default=0)
