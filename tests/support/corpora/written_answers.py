r"""Golds and answers as models write them, right or wrong by construction: exact fractions, no parser, no grader.

Every function makes pairs of one kind from a random generator: (gold, answer, whether they are equal).
"""

import math
import random
from collections.abc import Iterator
from fractions import Fraction

Pair = tuple[str, str, bool]
# how large a unit is in the first unit of its group
UNITS = (
    {"cm": 1, "mm": Fraction(1, 10), "m": 100, "km": 100_000, "inches": Fraction("2.54"), "feet": Fraction("30.48")},
    {"g": 1, "kg": 1000, "mg": Fraction(1, 1000)}, {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400},
    {"cm^2": 1, "m^2": 10_000, "square meters": 10_000}, {"cm^3": 1, "mL": 1, "liters": 1000},
    {"m/s": 1, "km/h": Fraction(5, 18), "meters per second": 1}, {"cents": 1, "dollars": 100}, {"euros": 1},
    {"N": 1, "kN": 1000}, {"J": 1, "kJ": 1000}, {"degrees": 1}, {"percent": 1},
)  # fmt: skip
SETS = (r"{}\text{{ {}}}", r"{} \text{{ {}}}", r"{}\,\mathrm{{{}}}", r"{}~\text{{{}}}", r"{}\mbox{{ {}}}", "{} {}")
TO_19 = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES = (*TO_19.split(), "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def fraction(value: Fraction) -> str:
    """A value as a LaTeX fraction."""
    return rf"{'-' * (value < 0)}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def units(rng: random.Random) -> Iterator[Pair]:
    """A value with a unit: without it, in another spelling, converted, and with a unit of something else."""
    group, other_group = rng.sample(UNITS, 2)
    unit, other = rng.choice(list(group)), rng.choice(list(other_group))
    value = Fraction(rng.randint(1, 400), 4)
    number = f"{float(value):g}"
    gold = rng.choice(SETS[:5]).format(number, unit)
    yield gold, number, True
    yield number, gold, True
    yield gold, rng.choice(SETS).format(number, unit), True
    yield gold, rng.choice(SETS).format(number, other), False
    for name, size in group.items():
        converted = value * group[unit] / size
        yield gold, rng.choice(SETS).format(fraction(converted), name), True
        if group[unit] != size:
            yield gold, rng.choice(SETS).format(number, name), False


def percents(rng: random.Random) -> Iterator[Pair]:
    """A percentage is its number and a hundredth of it."""
    value = Fraction(rng.randint(1, 999), rng.choice((1, 2, 3, 8, 10)))
    written = rng.choice((r"{}\%", "{}%", r"{}\text{{ percent}}", r"{}\,\%")).format(fraction(value))
    for number in (value, value / 100):
        yield fraction(number), written, True
        yield written, fraction(number), True
    yield written, fraction(value * 100), False
    yield written, rf"{fraction(value + 1)}\%", False


def repeating_decimals(rng: random.Random) -> Iterator[Pair]:
    """A repeating decimal is a fraction, alone and in a tuple."""
    whole, start, block = str(rng.randint(0, 20)), rng.choice(("", "0", "16")), str(rng.randint(1, 98))
    value = Fraction(int(whole + start)) + Fraction(int(block), 10 ** len(block) - 1)
    value /= 10 ** len(start)
    mark = rng.choice((r"\overline{{{}}}", r"\bar{{{}}}", "({})"))
    text = f"{whole}.{start}" + mark.format(block)
    yield text, fraction(value), True
    yield fraction(value), text, True
    yield text, f"{whole}.{start}" + mark.format(block * 2), True
    yield f"({text}, 3)", f"({fraction(value)}, 3)", True
    yield text, f"{whole}.{start}{block}", False


def angles(rng: random.Random) -> Iterator[Pair]:
    """A degree inside a function is a part of pi."""
    angle, name = rng.randrange(5, 90, 5), rng.choice(("sin", "cos"))
    gold = rf"\{name} {angle}^\circ"
    yield gold, rf"\{name}\frac{{{angle}\pi}}{{180}}", True
    yield gold, rf"\{'cos' if name == 'sin' else 'sin'}\left({90 - angle}^{{\circ}}\right)", True
    yield gold, f"{getattr(math, name)(math.radians(angle)):.8f}", True
    yield gold, rf"\{name} {angle}", False


def times_and_dates(rng: random.Random) -> Iterator[Pair]:
    """Answers that are no arithmetic."""
    hour, minute, day, month = rng.randint(1, 12), rng.randrange(10, 60), rng.randint(1, 27), rng.randint(1, 12)
    yield f"{hour}:{minute}", rf"{hour}\!:\!{minute}", True
    yield f"{hour}:{minute}", rf"\frac{{{hour}}}{{{minute}}}", False
    yield f"{hour}:{minute}", f"{2 * hour}:{2 * minute}", False
    yield rf"{hour}:{minute}\text{{ p.m.}}", rf"{hour}:{minute} \text{{PM}}", True
    yield rf"{hour}:{minute}\text{{ p.m.}}", rf"{hour}:{minute}\text{{ a.m.}}", False
    date = f"2024-{month:02}-{day:02}"
    yield date, date, True
    yield date, str(2024 - month - day), False
    yield date, f"2024-{month:02}-{day + 1:02}", False
    letters = rng.sample("ABCDEFGH", 4)
    yield "".join(letters), rf"\text{{{''.join(letters)}}}", True
    yield "".join(letters), "".join(reversed(letters)), False
    yield f"{hour}-{hour + minute}", str(-minute), False


def intervals(rng: random.Random) -> Iterator[Pair]:
    """An inequality is a set of numbers."""
    low, high = sorted(rng.sample(range(-30, 30), 2))
    yield f"[{low},{high})", rf"{low} \le x < {high}", True
    yield f"[{low},{high})", rf"{high} > x \ge {low}", True
    yield f"[{low},{high})", rf"{low} < x < {high}", False
    yield rf"({low},\infty)", f"x > {low}", True
    yield rf"({low},\infty)", f"x < {low}", False
    union = rf"(-\infty,{low}) \cup [{high},\infty)"
    yield union, rf"x < {low} \text{{ or }} x \ge {high}", True
    yield union, rf"x < {low} \text{{ or }} x > {high}", False


def words(rng: random.Random) -> Iterator[Pair]:
    """A number in words, one in millions, congruences and ratios."""
    number = rng.randint(20, 99)
    said = TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    yield str(number), rf"\text{{{said}}}", True
    yield str(number + 1), rf"\text{{{said}}}", False
    yield rf"{number} \text{{ million}}", f"{number},000,000", True
    yield str(number), rf"{number} \text{{ million}}", False
    residue, modulus = number % 19, 19
    yield rf"x \equiv {residue} \pmod{{{modulus}}}", rf"x\equiv {residue + modulus} \ (\text{{mod }}{modulus})", True
    yield rf"x \equiv {residue} \pmod{{{modulus}}}", rf"x \equiv {residue + 1} \pmod{{{modulus}}}", False
    yield f"1:2:{number}", f"3:6:{3 * number}", True
    yield f"1:2:{number}", rf"\frac{{1}}{{{2 * number}}}", False


KINDS = (units, percents, repeating_decimals, angles, times_and_dates, intervals, words)


def written_pairs(rounds: int, seed: int) -> Iterator[Pair]:
    """So many rounds of every kind."""
    rng = random.Random(seed)
    for _ in range(rounds):
        for kind in KINDS:
            yield from kind(rng)
