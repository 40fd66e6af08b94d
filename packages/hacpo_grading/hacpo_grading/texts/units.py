r"""Units of answers: 5 \text{ cm}, \$5, 30^\circ, 60 \text{ miles per hour} as a value and a measure.

A measure is a factor and the powers of its bases, so that 50 mm are 5 cm, and neither 5 m nor 5 kg nor 5 cm^2 are.
A word that is no unit ("students", "ways") is a noun, and nouns are not compared with each other. Texts are as `tidy`
leaves them. Elsewhere: what a value is (number_text.py, math_grader.py).
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

# names | ...; factor; powers of bases. Units that take SI prefixes are in PREFIXED.
TABLE = r"""
m|meter|metre;1;m / inch|inche|in;0.0254;m / foot|feet|ft;0.3048;m / yard|yd;0.9144;m / mile|mi;1609.344;m
angstrom;1e-10;m / g|gram|gramme|gm;1;g / pound|lb;453.59237;g / ounce|oz;28.349523125;g / tonne;1e6;g
ton;907184.74;g / s|second|sec;1;s / minute|min;60;s / hour|hr|h;3600;s / day;86400;s / week|wk;604800;s
month;1;month / year|yr;12;month / l|L|liter|litre;0.001;m3 / gallon|gal;0.003785411784;m3 / cc;0.000001;m3
quart;0.000946352946;m3 / pint;0.000473176473;m3 / acre;4046.8564224;m2 / hectare|ha;1e4;m2
mph;0.44704;m s-1 / kph|kmh|kmph;5/18;m s-1 / degree|deg;1;deg / radian|rad;180;deg pi-1
percent|percentage|pct;1;percent / celsius|degc;1;degc / fahrenheit|degf;1;degf
dollar|usd|buck|$;1;usd / cent|penny|pennie|¢;0.01;usd / euro|eur|€;1;eur / gbp|£;1;gbp / yen|jpy|¥;1;jpy
rupee|rs|inr|₹;1;inr / N|newton;1000;g m s-2 / J|joule;1000;g m2 s-2 / W|watt;1000;g m2 s-3
Pa|pascal;1000;g m-1 s-2 / Hz|hertz;1;s-1 / A|amp|ampere;1;A / K|kelvin;1;K / mol|mole;1;mol / V|volt;1000;g m2 s-3 A-1
ohm;1000;g m2 s-3 A-2 / coulomb;1;A s / farad;0.001;A2 s4 g-1 m-2 / T|tesla;1000;g s-2 A-1 / erg;0.0001;g m2 s-2
eV|electronvolt;1.602176634e-16;g m2 s-2 / dyn|dyne;0.01;g m s-2 / cal|calorie|calory;4184;g m2 s-2
Wh;3600000;g m2 s-2 / atm;101325000;g m-1 s-2 / bar;1e8;g m-1 s-2 / am;1;am / pm;1;pm / unit;1;unit
january;1;jan / february;1;feb / march;1;mar / april;1;apr / may;1;may / june;1;jun / july;1;jul / august;1;aug
september;1;sep / october;1;oct / november;1;nov / december;1;dec
"""
PREFIXED = (
    *("m", "meter", "metre", "g", "gram", "gramme", "s", "second", "sec", "l", "L", "liter", "litre", "N", "newton"),
    *("J", "joule", "W", "watt", "Pa", "pascal", "Hz", "hertz", "A", "amp", "ampere", "K", "mol", "mole", "V", "volt"),
    *("ohm", "T", "tesla", "eV", "electronvolt", "cal", "calorie", "Wh", "bar", "farad", "coulomb"),
)
PREFIXES = {
    "k": 3, "c": -2, "m": -3, "μ": -6, "n": -9, "M": 6, "G": 9, "d": -1, "p": -12, "kilo": 3, "centi": -2, "milli": -3,
    "micro": -6, "nano": -9, "mega": 6, "giga": 9, "deci": -1, "pico": -12, "hecto": 2, "deca": 1, "deka": 1,
}  # fmt: skip
FILLING = """a an and approx approximately about all altogether apart away each every exactly following for from high in
is it left long more old of on only overall roughly tall the there these they thick to total wide answer final average
first nearest remaining respectively with"""
NEUTRAL = frozenset(FILLING.split())
# measures that may stand for each other although their bases differ
LOOSE = {frozenset(pair) for pair in (("deg", "degc"), ("deg", "degf"), ("gbp", "g"))}
MONEY = frozenset(("usd", "eur", "gbp", "jpy", "inr"))
POWER_SUFFIX = {"squared": 2, "cubed": 3}
POWER_PREFIX = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}

WORDS = (
    r"\\(?:text|textrm|textit|textbf|textsf|textnormal|mbox|hbox|mathrm|mathsf|operatorname)\s*"
    r"\{(?:[^{}]|\{[^{}]*\})*\}"
)
POWER = r"\^(?:\{[-+]?\d\}|[-+]?\d)"
BARE = r"(?<![a-zA-Z\\])[a-zA-Z]+"
SIGN = (
    r"\^\s*(?:\{\\circ\}|\\circ(?![a-zA-Z]))|[kMm]?\\Omega(?![a-zA-Z])|\\(?:mu|AA|%|cdot|times)(?![a-zA-Z])"
    r"|[%¢€£¥₹/()\s]"
)
FRACTION = rf"\\frac\{{\s*(?:{WORDS}|{BARE})(?:{POWER})?\s*\}}\{{\s*(?:{WORDS}|{BARE})(?:{POWER})?\s*\}}"
PIECES = rf"(?:(?:{FRACTION}|{WORDS}|{SIGN}|{BARE})(?:{POWER})?)+"
SUFFIX = re.compile(PIECES + r"\Z")
GLUED = re.compile(rf"(.*[\d)}}])([a-zA-Z]{{1,10}}(?:{POWER})?(?:/[a-zA-Z]{{1,10}}(?:{POWER})?)?)", re.DOTALL)
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+"
PARTS = re.compile(rf"\s*({NUMBER})({PIECES}|,)")
LONGEST = 100
CURRENCY_BEFORE = re.compile(
    r"\A([-+]?)\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*)?([€£¥₹]|(?:USD|EUR|GBP|INR|Rs)\b\.?)\s*\}?\s*(?=[\d.\\])"
)
SET = r"\\(?:text[a-z]*|mbox|hbox|mathrm|mathsf|operatorname)(?![a-z])|\\(?:cdot|times)|[~*·]|\\[,;:! ]"
RULES = tuple((re.compile(pattern), by) for pattern, by in (
    (r"\\frac\{(.*?\}?(?:\^\S+)?)\}\{(.*)\}", r" \1 / \2 "),
    (r"\^\s*(?:\{\\circ\}|\\circ)", " degree "),
    (r"\\mu\s*", "μ"), (r"\\Omega", " ohm "), (r"\\AA", " angstrom "), (r"\\?%", " percent "), (SET, " "),
    (r"\^\{\s*([-+]?\d)\s*\}", r"^\1"), (r"\b([ap])\.\s?m\b", r"\1m"), (r"[{}]", ""), (r"\.", " "),
    (r"\bper ?cent\b", "percent"), (r"\bin (?=[a-z])", " "),
    (r"(μ|\b[kM](?= +ohm)|\b(?:kilo|centi|milli|micro|nano|mega|giga)) +(?=[a-zA-Z])", r"\1"),
    (r"\bdegrees? +(?:C|[Cc]elsius)\b", "degc"), (r"\bdegrees? +(?:F|[Ff]ahrenheit)\b", "degf"),
))  # fmt: skip
TOKEN = re.compile(r"[A-Za-zμ]+|\^[-+]?\d|[/$€£¥₹¢]|\S")
DIGIT = re.compile(r"(?<!\^)(?<!\^[-+])\d")


@dataclass(frozen=True)
class Measure:
    """A unit: how large it is in its bases, and their powers. Without powers it is a noun, and no unit."""

    factor: Fraction = Fraction(1)
    powers: frozenset = frozenset()


NOUN = Measure()
PERCENT = Measure(powers=frozenset({("percent", 1)}))


@dataclass(frozen=True)
class Quantity:
    """An answer in two parts: the text of its value, and its unit if it has one."""

    value: str
    measure: Measure | None = None

    @property
    def formula(self) -> str:
        """The value for a parser of formulas, which knows percents."""
        return rf"{self.value}\%" if self.measure == PERCENT else self.value


@dataclass(frozen=True)
class Ratio:
    """The size of an answer's unit, as a multiple of gold's unit."""

    factor: Fraction = Fraction(1)
    power_of_pi: int = 0

    def times(self, formula: str) -> str:
        """The formula in gold's unit."""
        if self == Ratio():
            return formula
        left, equals, formula = formula.rpartition("=")
        pi = rf"\cdot\pi^{{{self.power_of_pi}}}" if self.power_of_pi else ""
        return rf"{left}{equals}\frac{{{self.factor.numerator}}}{{{self.factor.denominator}}}{pi}\cdot({formula})"


def _read_table() -> dict[str, Measure]:
    names = {}
    for entry in TABLE.replace("\n", " / ").split(" / "):
        if entry.strip():
            spelled, factor, bases = entry.strip().split(";")
            powers = (re.fullmatch(r"([a-zA-Z]+)(-?\d)?", base) for base in bases.split())
            measure = Measure(Fraction(factor), frozenset((base[1], int(base[2] or 1)) for base in powers))
            names |= dict.fromkeys(spelled.split("|"), measure)
    for name in PREFIXED:
        for prefix, exponent in PREFIXES.items():
            if (len(prefix) > 1) == (len(name) > 3) or name == "ohm":
                unit = Measure(names[name].factor * Fraction(10) ** exponent, names[name].powers)
                names.setdefault(prefix + name, unit)
    return names


NAMES = _read_table()


def find_unit(name: str) -> Measure | None:
    """The unit of that name, singular or plural; symbols have their own case, words any."""
    for spelled in (name, name.lower()):
        for singular in (spelled, spelled.removesuffix("s"), spelled.removesuffix("es")):
            if (unit := NAMES.get(singular)) is not None and (singular == name or len(singular) > 1):
                return unit
    return None


def read_measure(text: str) -> Measure | None:
    """The measure that a text names; NOUN for words that are no unit, None for none or for more than a unit."""
    for pattern, by in RULES:
        text = pattern.sub(by, text)
    if "\\" in text or DIGIT.search(text):
        return None
    powers, factor, last = Counter(), Fraction(1), None
    times, sign, has_noun = 1, 1, False
    for token in TOKEN.findall(text):
        lower = token.lower()
        if lower in POWER_PREFIX:
            times = POWER_PREFIX[lower]
        elif lower in ("per", "/"):
            sign = -1
        elif last and (token[0] == "^" or lower in POWER_SUFFIX):
            more = sign * (int(token[1:]) if token[0] == "^" else POWER_SUFFIX[lower]) - sign
            powers, factor = _times(powers, factor, last, more)
        elif (unit := find_unit(token)) is not None:
            powers, factor, last = *_times(powers, factor, unit, sign * times), unit
            times = 1
        else:
            has_noun |= len(token) > 1 and lower not in NEUTRAL
    powers = frozenset((base, power) for base, power in powers.items() if power)
    return Measure(factor, powers) if powers else NOUN if has_noun else None


def _times(powers: Counter, factor: Fraction, unit: Measure, exponent: int) -> tuple[Counter, Fraction]:
    powers = Counter(powers)
    for base, power in unit.powers:
        powers[base] += power * exponent
    return powers, factor * unit.factor**exponent


def split_unit(text: str) -> tuple[str, Measure | None]:
    """A tidy text without its unit, and the unit; "5m" is left whole, since m may be a letter (see `glued_unit`)."""
    if before := CURRENCY_BEFORE.match(text):
        return before[1] + text[before.end() :], read_measure(before[2])
    start = max(0, len(text) - LONGEST)
    while found := SUFFIX.search(text, start):
        value, unit = text[: found.start()], found[0]
        start = found.start() + 1
        if not _is_value(value) or unit.count("(") != unit.count(")"):
            continue
        if (measure := read_measure(unit)) is not None and _is_clear(value, unit, measure):
            return value.rstrip(), measure
    return text, None


def _is_value(value: str) -> bool:
    return bool(value.strip()) and value.count("(") == value.count(")") and value.count("{") == value.count("}")


def _is_clear(value: str, unit: str, measure: Measure) -> bool:
    """Tells whether letters not set as text are a unit: known ones, behind a number and a space or a bracket."""
    bare = re.findall(BARE, re.sub(rf"{WORDS}|{SIGN}", " ", unit))
    if not bare or unit.lstrip().startswith("^"):
        return True
    is_known = all(find_unit(name) or name.lower() in (*POWER_PREFIX, *POWER_SUFFIX, "per") for name in bare)
    is_word = len(bare[0]) > 3 and value[-1] in "})"  # `tidy` takes the space behind a bracket
    return is_known and measure != NOUN and (is_word or (value[-1] in "0123456789." and not unit[0].isalpha()))


def read_quantities(gold: str, answer: str, is_money: Sequence[bool]) -> list[Quantity]:
    r"""Both sides; `is_money`: whether a dollar stood in the text. "5m" has a unit only beside another one."""
    sides = [_quantity(text, money) for text, money in zip((gold, answer), is_money)]
    glued = [side if side.measure else Quantity(*glued_unit(side.value)) for side in sides]
    is_product = sides[0].measure is sides[1].measure is None and sorted(gold) == sorted(answer)
    return sides if is_product or None in (glued[0].measure, glued[1].measure) else glued


def _quantity(text: str, is_money: bool) -> Quantity:
    value, measure = split_unit(text)
    if is_money and not (measure and MONEY & dict(measure.powers).keys()):
        return Quantity(value, Measure(powers=frozenset({("usd", 1)})))
    return Quantity(text if measure == NOUN else value, measure)


def glued_unit(text: str) -> tuple[str, Measure | None]:
    """The unit of letters right behind a number or a bracket: "5cm", "5m", "(2)m/s"."""
    found = GLUED.fullmatch(text)
    is_unit = found and all(map(find_unit, re.findall(r"[a-zA-Z]+", found[2])))
    return (found[1], read_measure(found[2])) if is_unit else (text, None)


def read_total(text: str) -> Quantity | None:
    r"""The sum of quantities of one measure, "1 \text{ hour } 30 \text{ minutes}", in the unit of the first."""
    amount, unit, end = Fraction(0), None, 0
    for found in PARTS.finditer(text):
        measure = read_measure(found[2])
        if found.start() != end or measure in (None, NOUN) or (unit and measure.powers != unit.powers):
            return None
        unit, end = unit or measure, found.end()
        amount += Fraction(found[1].replace(",", "")) * measure.factor / unit.factor
    return Quantity(str(amount), unit) if unit and end == len(text) else None


def scale(gold: Measure | None, answer: Measure | None) -> Ratio | None:
    """The ratio of an answer's unit to gold's; None for units of different things."""
    if gold is None or answer is None or gold == answer:
        return Ratio()
    if not gold.powers or not answer.powers:
        return None
    pi = dict(answer.powers).get("pi", 0) - dict(gold.powers).get("pi", 0)
    bases = [{base: power for base, power in side.powers if base != "pi"} for side in (gold, answer)]
    if bases[0] == bases[1]:
        return Ratio(answer.factor / gold.factor, pi)
    return Ratio() if _is_loose(*bases) else None


def _is_loose(gold: dict[str, int], answer: dict[str, int]) -> bool:
    """Tells whether one is only less specific: "units" beside a length or anything else, money without its time."""
    for one, other in ((gold, answer), (answer, gold)):
        if one.keys() == {"unit"}:
            return other.keys() != {"m"} or one["unit"] == other["m"]
    if MONEY & gold.keys() & answer.keys():
        return gold.keys() == MONEY & gold.keys() or answer.keys() == MONEY & answer.keys()
    return frozenset((*gold, *answer)) in LOOSE
