# ruff: noqa: E501
"""Mathematics: what equals a gold answer and what does not; what is refused unread; where an answer is in a text."""

import functools
import random
from fractions import Fraction

import pytest
import sympy.physics.units as physics
from gold_mutations import kind_of
from grading_benchmark import golds_of
from repository import SHARED
from sympy.physics.units.systems.si import SI
from written_answers import written_pairs

from hacpo_grading.graders.answer_limits import powers, too_large
from hacpo_grading.graders.math_grader import MatchRules, anywhere, boxed, decide, explain
from hacpo_grading.graders.number_text import read_decimal_comma, read_number, read_numeral
from hacpo_grading.texts.answer_text import plain, tidy
from hacpo_grading.texts.units import find_unit

COLUMN = r"\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix}"

EQUAL = [
    # matrices, whole
    (COLUMN, r"\begin{pmatrix}-2\\-14\\-7\end{pmatrix}"),
    (COLUMN, r"\begin{bmatrix} -2 \\ -14 \\ -7 \end{bmatrix}"),
    (r"\begin{pmatrix} 1/2 & 3 \\ 0 & 1 \end{pmatrix}", r"\begin{bmatrix}\frac12&3\\0&1\end{bmatrix}."),
    # money and units
    (r"\$18.90", "18.9"),
    ("18.9", r"\$18.90"),
    ("12", r"\$12 \text{ each}"),
    ("10", r"10\text{ units}"),
    (r"\$2.75", r"$\$2.75$"),
    # numbers
    ("5/2", "2 1/2"),
    (r"2\frac{1}{2}", "2.5"),
    ("1000.99", "1000,99"),
    ("1000,99", "1000.99"),
    ("1,234,567", "1 234 567"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    ("10{,}000", "10000"),
    (r"\frac{1}{3}", "0.333333"),
    (r"-\frac{2010012}{2010013}", "-0.9999995"),
    ("27.0", "27"),
    (".5", r"\frac12"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("4.5e33", r"4.5\cdot 10^{33}"),
    ("4.5e33", "4.5e33"),
    ("4.5e33", r"45 \times 10^{32}"),
    ("4.5e33", "4.5 x 10^{33}"),
    (r"\frac{\pi}{2}", r"\dfrac\pi2"),
    (r"\frac{1}{\pi}", r"\frac{1}\pi"),
    (r"\frac{a}{2b}", r"\frac12 \frac ab"),
    ("-0.5", r"{-}0{.}5"),
    (r"\begin{pmatrix}0\\1\end{pmatrix}", r"\begin{pmatrix}0\\[4pt]1\end{pmatrix}"),
    (r"\text{(B)}", r"\textbf{(B) }5"),
    ("B", "B. 42"),
    ("3.0e-9", r"3\times10^{-9}"),
    ("1101_2", "1101_{2}"),
    ("1101_2", "1101"),
    ("0.0011_{2}", "0.0011"),
    # equations up to a factor, lists without order, spellings
    ("2x+2y=4", "x+y=2"),
    ("x=5", "5"),
    ("1,2,3", "3, 1, 2"),
    (r"-2, 2", r"\pm 2"),
    (r"\dfrac{7}{8}", r"\frac{7}{8}."),
    (r"\left( 4, \frac{\pi}{3} \right)", r"( 4 ,\, \frac{\pi}{3} )"),
    (r"x^2+2x+1", "(x+1)^2"),
    (r"x \le 7", r"7 \ge x"),
    ("answer is 10000", "10^4"),
    (r"\text{east}", "east"),
    # a gold that is itself large is answered by its own text
    (r"2^{3^{4^5}}", r"2^{3^{4^{5}}}"),
]

DIFFERENT = [
    (COLUMN, "-7"),
    (COLUMN, r"\begin{pmatrix} 9 \\ 9 \\ -7 \end{pmatrix}"),
    (COLUMN, r"\begin{pmatrix} -2 & -14 & -7 \end{pmatrix}"),
    (COLUMN, r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}"),
    ("21/2", "2 1/2"),
    (r"-\frac{2010012}{2010013}", r"-\frac{2010013}{2010013}"),
    (r"\frac{2010012}{2010013}", "1"),
    ("12", "1 2"),
    ("A", "(A) or (B)"),
    ("A", "(A)^2"),
    ("A", r"(A) \cup B"),
    ("A", "(A) - B"),
    ("b", "(b)+1"),
    ("(a)", "(a) and (b)"),
    ("(5,120)", "5120"),
    ("5120", "(5,120)"),
    ("1234", "1, 234"),
    ("1,5", "1.5"),
    (r"\leftarrow", r"\rightarrow"),
    ("5x-7y+11z+4=0", "x+y-z+2=0"),
    ("y=7x+3", "y=2x+3"),
    ("(5, 4)", "(3, 4)"),
    ("(1,2)", "(2,1)"),
    ("10,4,2", "4,12,2"),
    ("[1,2]", "[1,2)"),
    ("8", "7 or 8"),
    ("7", r"x \le 7"),
    ("7", r"x \ne 7"),
    ("4.5e33", "4.6e33"),
    ("4.5e-33", "4.6e-33"),
    ("1.5e-9", "0"),
    ("0", "0.0000001"),
    ("1/3", "0.33"),
    ("12", "12.0000001"),
    ("3032_5", "3032_9"),
    ("1101_2", "13"),
    ("-37_8", "-37_9"),
    ("0.0011_{2}", "0.0011_{5}"),
    (r"\frac{3992004}{3988009}", r"\frac{3992005}{3988009}"),
    ("10^{10}", "10^{11}"),
    (r"\text{even}", "neve"),
    ("734197", r"1e308^{\infty}"),
    ("5", r"\infty"),
    ("", ""),
]


# as people type them (N2 to N5 of a review, and kinds that it did not have)
TYPED = [
    ("5", r"5 \text{ N}"), ("0.5", r"0.5\text{ L}"), (r"\$2", r"2 \text{ USD}"), ("23.40", "23.40 dollars"),
    ("4.5e33", r"4.5 \times 10^{33} \text{ erg/s}"), ("4.5e33", r"n = 4.5 \cdot 10^{33} \mathrm{~cm}"),
    ("5", r"{\bf 5}"), ("5", r"\mathbf 5"), ("5", r"\color{red} 5"), (r"\frac12", r"\textcolor{blue}{\frac{1}{2}}"),
    ("2", r"17 \bmod 5 = 2"), ("5", r"5~\text{cm}"), ("(5,6)", "(5,~6)"), (r"54^\circ", "54°"), ("5", r"\SI{5}{m}"),
    (r"\sqrt{15}", "√15"), (r"2\pi", "2 pi"), ("3+4i", "3+4*i"), ("(1,8)", "{(1,8)}"), ("x^2-5", "x²-5"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{psmallmatrix}1\\2\end{psmallmatrix}"),
    ("5", r"\text{The answer is } 5"), ("5", r"5 \checkmark"), ("(-3,7)", r"\text{Therefore, } (-3,7)"),
]  # fmt: skip
# no value, several values, or another one
GUESSES = [
    r"5 \text{ apples and } 6 \text{ pears}", r"5 \text{ (or } 977 \text{)}", r"5 \text{ or more}",
    r"5 \text{ million}",
    r"\{4, 5, 6\}", "5, 6", "5 or 6", r"x = 5 \lor x = 6", r"\phantom{5}", r"977\phantom{5}", r"\SI{977}{5}",
    r"\overset{5}{977}", r"\neq 5", r"\text{not } 5", r"\checkmark", r"\text{N}", "5√2", "5²",
]  # fmt: skip


# (gold, answers that are right, answers that are wrong), by kind
WRITTEN = [
    # a unit is a part of gold, and may lack in an answer; a gold without one takes any
    (r"5\text{ cm}", ("5", "5 cm", "5cm", r"5\,\mathrm{cm}", r"50\text{ mm}", r"0.05\text{ m}", r"\SI{5}{\centi\meter}"),
     (r"5\text{ m}", "5 m", "5m", r"5\text{ kg}", r"5\text{ cm}^2", r"5\%", r"\$5", r"5^\circ", r"\SI{5}{m}", r"5\text{ apples}")),
    (r"12\text{ cm}^2", (r"12\text{ square centimeters}", r"12\text{ cm^2}", r"12\text{ square units}"),
     (r"12\text{ cm}^3", r"12\text{ cm}", r"12\text{ cubic units}")),
    (r"3\text{ hours}", (r"180\text{ minutes}", r"2\text{ hours } 60\text{ minutes}", r"3\text{ hrs}"),
     (r"3\text{ minutes}", r"2\text{ hours } 30\text{ minutes}")),
    (r"\$5", ("5", r"5\text{ dollars}", r"500\text{ cents}", r"\$5.00"), (r"5\%", "€5", r"5\text{ cents}", r"5\text{ euros}")),
    (r"60\text{ mph}", (r"60\text{ miles per hour}", r"60\,\frac{\text{mi}}{\text{h}}"), (r"60\text{ km/h}", r"60\text{ miles}")),
    (r"2\sqrt{3}\text{ m}", (r"2\sqrt{3}", r"\sqrt{12}\text{ m}", r"200\sqrt{3}\text{ cm}"), (r"2\sqrt{3}\text{ cm}",)),
    (r"20^\circ\text{C}", (r"20\,^\circ C", "20℃", "20"), (r"20^\circ\text{F}", r"20\text{ K}")),
    (r"180^\circ", (r"180\text{ degrees}", r"\pi\text{ radians}", "180º"), (r"180\text{ radians}", r"180\text{ cm}")),
    (r"7\text{ students}", ("7", r"7\text{ people}"), (r"7\text{ cm}",)),
    (r"5\text{ cm}, 6\text{ cm}", ("5, 6", r"6\text{ cm} \text{ and } 50\text{ mm}"), (r"5\text{ kg}, 6\text{ kg}",)),
    ("2, 2, 3", ("2,3,2", r"\{3,2,2\}", "2, 3"), ("2, 3, 3", "3,2,3", "2,2")), ("1, 1", ("1",), ("2, 2",)),
    ("1.5", (r"1.5\,\Omega", r"1.5\,\mu\mathrm{m}", r"1.5\,\AA", "1.5 Å", r"1.5\,k\Omega", r"1.5\text{ kJ/mol}"), ()),
    # degrees inside functions are radians
    (r"\cos 30^\circ", (r"\frac{\sqrt3}{2}", r"\sin 60^{\circ}", r"\cos\frac{\pi}{6}", r"\cos 30\text{ degrees}"), (r"\cos 30",)),
    ("1", (r"\tan 45^\circ", r"\tan(45°)"), (r"\tan 45",)),
    (r"\sin 10^\circ", (r"\cos 80^\circ",), (r"\sin 10", r"\cos 10^\circ")),
    # percents, repeating decimals, numbers in words
    ("12.5", (r"12.5\%", r"12.5\text{ percent}"), (r"125\%",)),
    (r"16\frac{2}{3}\%", (r"\frac16", r"16\frac23", r"\frac{50}{3}\%"), (r"\frac{1}{6}\%",)),
    ("1,234.5", (r"1{,}234.5\%",), ()),
    (r"\frac{9}{11}", (r"0.\overline{81}", r"0.\overline{8181}", "0.(81)", r"0.8181\ldots"), (r"0.\overline{8}", "0.81")),
    (r"1.2\overline{34}", (r"\frac{611}{495}",), ("1.234", r"1.\overline{234}")),
    (r"\frac16", ("0.1666...", "0.16666...."), ("0.1666", "0.666...")), ("0.333", ("0.333...",), ("0.334...",)),
    ("21", (r"\text{twenty-one}", r"\text{Twenty-one apples}"), (r"\text{twenty}", r"\text{twenty-one million}")),
    ("1000000", ("1.000.000",), ("1.000", "1.000.00")), ("1000.5", ("1.000,50", "1.000,5"), ("1.000.5",)),
    # lists that go on, and with semicolons
    ("1, 2, 3", (), (r"1, 2, 3, \ldots", "1,2,3,...", r"1, 2, 3, \dots", "1, 2, 3, …", "1; 2; 3; ...")),
    (r"1, 2, 3, \ldots", ("1,2,3,...", r"1,2,3,\dots"), ("1, 2, 3", r"1, 2, 4, \ldots")),
    (r"\{1,2,\ldots,10\}", (), (r"\{1,2,10\}",)), (r"\{1,2,3\}", (), (r"\{1,2,3,\ldots\}",)),
    ("3;2", ("2, 3",), ("1;2", "1, 2")), ("1;2", ("1, 2",), ("3;2",)),
    # words before the value and between values, none of which is lost
    (r"\frac34", (r"P(\text{win}) = \frac{3}{4}", r"P_{\text{win}} = \frac{3}{4}"), (r"\frac34 \text{ or else } \frac{5}{11}",)),
    (r"\lambda_{\text{red}} / \sqrt{2}", (r"\frac{\lambda_{\text{red}}}{\sqrt{2}}",),
     (r"\lambda_{\text{red}} / \sqrt{3}", r"\lambda_{\text{blue}} / \sqrt{2}", r"\lambda_{\text{red}}")),
    (r"7 \text{ apples}, 9 \text{ pears}", ("7, 9",), ("7", r"7 \text{ apples}, 8 \text{ pears}")),
    ("7", (r"7 \text{ blobs}/\text{day}^2",), (r"7 \text{ apples}, 9 \text{ pears}", r"7 \text{ if } x>0, 9 \text{ otherwise}")),
    # no arithmetic
    ("12:30", (r"12\!:\!30",), ("2:5", "6:15", r"\frac25", "12:35")),
    (r"4:20\text{ p.m.}", (r"4:20 \text{ PM}", "16:20", "4:20"), (r"4:20\text{ a.m.}",)),
    ("2024-01-05", ("2024-01-05",), ("2018", "2024-01-06")),
    ("10-20", ("10–20", r"10\text{ to }20"), ("-10", "10-21")),
    ("HTT", (r"\text{HTT}", "H T T", "htt"), ("THT", "TTH")),
    ("HTT, THT", ("THT, HTT",), ("TTH, HTT",)),
    ("2:3", ("4:6", r"\frac23"), ("3:2",)), ("1:2:3", ("2:4:6",), ("1:6", r"\frac16")),
    (r"x \equiv 5 \pmod{7}", (r"x \equiv 12 \ (\text{mod } 7)", r"5 \bmod 7"), (r"x \equiv 5 \pmod{8}", "5")),
    ("101_2", (r"101_{\text{two}}", r"101 \text{ (base 2)}"), (r"101_{\text{three}}",)),
    # sets, inequalities, letters, one-character signs
    (r"(0,\infty)", ("x > 0", "0 < y"), (r"x \ge 0", "x < 0")),
    (r"(-\infty,-1)\cup(2,\infty)", (r"x<-1 \text{ or } x>2",), (r"x<-1 \text{ or } x \ge 2", "-1<x<2")),
    (r"(-\infty,-3)\cup(3,\infty)", ("|x|>3",), ("|x|<3", "x>3")), (r"x \ne 2", (r"\mathbb{R}\setminus\{2\}",), ("x=2",)),
    (r"x \ge 3", (r"3 \le x",), ("x = 3",)), ("x = 3", ("3",), (r"x \ge 3",)), (r"\text{Yes}", (r"\text{Yes.}",), (r"\text{No.}",)),
    ("(0,1]", ("]0,1]", r"\left]0,1\right]"), ("]0,1[", "[0,1]")), ("]0,1[", ("(0,1)",), ("[0,1[",)),
    (r"(-\infty,1)\cup(2,\infty)", (r"]-\infty,1[\cup]2,\infty[",), (r"]-\infty,1]\cup]2,\infty[",)),
    ("1<x<3", ("3>x>1", "(1,3)", r"x>1 \text{ and } x<3"), ("1>x>3", r"1\le x<3")), ("a<b<c", ("c>b>a",), ("a>b>c",)),
    (r"\emptyset", (r"\varnothing", "∅", r"\{\}"), (r"\{0\}",)),
    (r"e^{i\pi/3}", (r"\frac12+\frac{\sqrt3}{2}i",), (r"\frac12-\frac{\sqrt3}{2}i",)), ("i", (r"\sqrt{-1}",), ("1", "-i")),
    (r"\frac{1}{2^{98}}", (), (r"\frac{1}{2^{98}} i",)), ("R^2-r^2", ("(R-r)(R+r)",), ("0", "r^2-R^2")),
    ("-5", ("－５", "−5", "‑5"), ("５",)), (r"\frac52", ("2½", "2.5"), ("½",)), ("0.001", ("10⁻³",), ("10³",)),
    (r"\sqrt[3]{2}", ("∛2",), ("√2",)), ("10^{100}", ("1" + "0" * 100,), ("1" + "0" * 99,)),
]  # fmt: skip


@pytest.mark.parametrize("gold, right, wrong", WRITTEN)
def test_answers_that_are_more_than_a_formula(gold, right, wrong):
    assert [answer for answer in right if boxed("", f"\\boxed{{{answer}}}", gold) != 1.0] == []
    assert [answer for answer in wrong if boxed("", f"\\boxed{{{answer}}}", gold) != 0.0] == []


@pytest.mark.parametrize(
    "rounds, seed", [(2, 1), pytest.param(100, 2, marks=pytest.mark.nightly)], ids=["a few", "five thousand"]
)
def test_what_models_write_is_right_or_wrong_by_construction(rounds, seed):
    pairs = dict.fromkeys(written_pairs(rounds, seed))  # three in ten are drawn again
    assert [p for p in pairs if (boxed("", f"\\boxed{{{p[1]}}}", p[0]) == 1.0) != p[2]] == []


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason=f"no public data in {SHARED / 'data'}")
@pytest.mark.nightly
def test_public_golds_with_a_unit():
    golds = [gold for gold in golds_of(SHARED / "data") if kind_of(gold) in ("decimal", "fraction", "closed form")]
    golds = [gold for gold in golds if not set("^:") & set(gold)]  # a degree is a power, too, and a time takes no unit
    for gold in random.Random(3).sample(golds, 150):
        for unit, others in (
            (r"\text{ cm}", (r"\text{ m}", r"\text{ kg}", r"\text{ cm}^2")),
            (r"^\circ", (r"\text{ ft}",)),
        ):
            assert boxed("", f"\\boxed{{{gold}}}", gold + unit) == 1.0
            assert boxed("", f"\\boxed{{{gold + unit}}}", gold) == 1.0
            assert all(boxed("", f"\\boxed{{{gold + other}}}", gold + unit) == 0.0 for other in others if gold != "0")


NAMES = {
    "cm": "cm", "kilometer": "km", "inch": "inch", "ft": "foot", "yards": "yard", "miles": "mile", "mg": "milligram",
    "kg": "kg", "lbs": "pound", "ms": "millisecond", "minutes": "minute", "hours": "hour", "days": "day", "L": "liter",
    "mL": "milliliter", "N": "newton", "J": "joule", "W": "watt", "Pa": "pascal", "Hz": "hertz", "V": "volt", "ohm": "ohm",
    "T": "tesla", "farad": "farad", "coulomb": "coulomb", "atm": "atm", "bar": "bar", "quart": "quart",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_units_are_as_large_as_those_of_sympy(name):
    unit, other = find_unit(name), getattr(physics, NAMES[name])
    bases = {"m": physics.meter, "g": physics.gram, "s": physics.second, "A": physics.ampere}
    expected = physics.convert_to(other, [physics.meter, physics.gram, physics.second, physics.ampere], SI)
    ours = float(unit.factor)
    for base, power in unit.powers:
        ours *= bases[base] ** power
    assert float(expected / ours) == pytest.approx(1.0, rel=1e-6)


SENTENCES = [
    (r"5 \text{ cm}", "The length is 5 cm.", 1.0), (r"5 \text{ cm}", "The length is 5 m.", 0.0),
    (r"5 \text{ cm}", "The length is $5$ kg", 0.0), (r"3\text{ hours}", "It takes 3 minutes.", 0.0),
    (r"50\%", "so it is 0.5", 1.0), ("12:30", "The train leaves at 12:30.", 1.0), ("12:30", "It leaves at 2:05.", 0.0),
    (r"\frac13", r"we get $0.\overline{3}$.", 1.0), (r"\frac12", r"It is $\sin 30^\circ$.", 1.0),
    ("-3", "Therefore the value is −3.", 1.0), (r"\frac13", "so it is 0.333...", 1.0),
    ("42", r"In total it costs \$42.00 per day.", 1.0), ("30", r"It costs \$30 and then \$42.", 0.0),
    ("1200", "3 * 400 = 1200\n#### 1,200", 1.0), ("3", "3 * 400 = 1200\n#### 1,200", 0.0),
    (r"\frac12", "so\n#### 1/2", 1.0),
    (r"\frac34", r"So it is $P(\text{win}) = \frac{3}{4}$.", 1.0), (r"\frac34", r"It is $\frac34 \text{ or else } \frac{5}{11}$.", 0.0),
    ("42", "答案是42。", 1.0), ("42", "所以共有 $6 \\times 7 = 42$ 个苹果。", 1.0), ("7", "所以共有 $6 \\times 7 = 42$ 个苹果。", 0.0),
    ("-3", "The value is ‑3.", 1.0),
    ("B", "It's not A, therefore I think it's B", 1.0), ("B", "The answer is for sure D, it can't be B", 0.0),
    ("(D) Alina", "D", 1.0), ("(D) Alina", "B", 0.0),
]  # fmt: skip


@pytest.mark.parametrize("gold, text, reward", SENTENCES)
def test_units_times_and_letters_in_sentences(gold, text, reward):
    assert anywhere("", text, gold) == reward


@pytest.mark.parametrize("gold, answer", TYPED)
def test_answers_as_people_type_them(gold, answer):
    assert boxed("", f"so $\\boxed{{{answer}}}$.", gold) == 1.0


@pytest.mark.parametrize("answer", GUESSES)
def test_lists_of_guesses_and_words_that_change_a_value_are_wrong(answer):
    assert boxed("", f"\\boxed{{{answer}}}", "5") == 0.0


def test_a_box_that_cannot_be_read_is_not_searched_for_a_fraction():
    assert boxed("", r"\boxed{\overset{\frac{10}{9}}{977}}", r"\frac{10}{9}") == 0.0


def test_anywhere_takes_the_gold_itself_and_knows_money():
    assert anywhere("", "The box has $5 and it is red", "The box has $5 and it is red") == 1.0
    assert anywhere("", "it costs $255 each", "255") == 1.0


@pytest.mark.parametrize("gold, answer", EQUAL)
def test_equal(gold, answer):
    assert boxed("", f"so $\\boxed{{{answer}}}$.", gold) == 1.0
    assert anywhere("", answer, gold) == 1.0


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_different(gold, answer):
    assert boxed("", f"so $\\boxed{{{answer}}}$.", gold) == 0.0
    assert not anywhere("", answer, gold)


@pytest.mark.parametrize(
    "gold, text, reward",
    [
        ("18", "3 < 4, so the answer is 18", 1.0),
        ("18", "3 < 4, so there are 18 of them", 1.0),
        ("4", "3 < 4, so the answer is 18", 0.0),
        ("(5, 4)", "the pair is $(5,4)$", 1.0),
        ("(5, 4)", "the pair is $(3,4)$", 0.0),
        ("y = 7x + 3", "the line is $y = 2x + 3$", 0.0),
        ("3", "y = 2x + 3", 0.0),
        ("1,2", r"either \boxed{1} or \boxed{2}", 1.0),
        ("the answer is 18", "18", 1.0),
        (r"thus $\boxed{2}, \boxed{3}$", "$2,3$", 1.0),
        ("18", "I do not know", 0.0),
        ("18", " ", None),
    ],
)
def test_an_answer_anywhere_against_a_gold_read_whole(gold, text, reward):
    assert anywhere("", text, gold) == reward


@pytest.mark.parametrize(
    "gold, text, reward",
    [
        ("18", r"\boxed{17} no, \boxed{18}", 1.0),
        ("18", r"\boxed{18} no, \boxed{17}", 0.0),
        ("1,2", r"$x=\boxed{1}$ and $x=\boxed{2}$", 1.0),
        ("Natalia sold 9.\n#### 7,000", r"\boxed{7000}", 1.0),
        (r"hence $\boxed{\frac{1}{2}}$.", r"\boxed{0.5}", 1.0),
        ("5", r"<think>\boxed{5}</think> it is five", None),
        ("5", r"<think>perhaps \boxed{5}", None),
    ],
)
def test_the_last_box(gold, text, reward):
    assert boxed("", text, gold) == reward


# each of these keeps a plain math-verify busy for seconds or for ever, or fills its memory
ENDLESS = [
    r"12^{23^{31^{22}}}", "9^{9^{9^{9}}}", "2^{10000000000}", "((9!)!)!", "100000!", r"\binom{10^9}{7}",
    "(" * 40 + "8" + ")" * 40,
    r"\sum_{k=1}^{9999}k^{k}", r"\int_0^1 \sin(x^x)dx",
    r"\prod_{k=1}^{999999}k", "8" * 41, "1+" * 300 + "1", "9**9**9**9", "9^9^9^9", "2^99999",
]  # fmt: skip


@pytest.mark.parametrize("answer", ENDLESS)
def test_endless_answers_are_refused_unread(answer, monkeypatch):
    monkeypatch.setattr("hacpo_grading.graders.math_grader.parse", lambda *_, **__: pytest.fail("it was parsed"))
    decision = decide("7", answer)
    assert not decision.is_equal
    assert decision.rule.startswith(("refused: ", "numbers"))
    assert decide(answer, answer).is_equal  # the same text needs no parser


def test_what_a_gold_needs_is_not_refused():
    assert too_large(r"2^{100000}+1", r"2^{100000}") is None
    assert too_large(r"\sum_{k=1}^n k", r"\sum_{k=1}^n k^2") is None
    assert too_large("1+" * 300 + "1", "1+" * 100) is None
    assert too_large(r"\lim_{x\to0}\frac{\sin x}{x}=1", "1") is None  # what is to be calculated is before the answer
    assert too_large("x != 5", "5") is None
    assert too_large(r"\binom{10}{3}", "120") is None
    assert (powers("2^3"), powers("2^{3^4}"), powers("2^{3}^{4}"), powers("x_{a^2}")) == (1, 2, 2, 1)


@pytest.mark.parametrize(
    "text, value",
    [
        ("7,000", Fraction(7000)),
        ("27.0", Fraction(27)),
        ("(073)", Fraction(73)),
        ("-.5", Fraction(-1, 2)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"1\frac{3}{4}", Fraction(7, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("21/2", Fraction(21, 2)),
        ("4.5e-3", Fraction(45, 10_000)),
        (r"4.5\times10^{-3}", Fraction(45, 10_000)),
        ("10^{3}", Fraction(1000)),
        ("1 000 000", Fraction(10**6)),
        ("1 2", None),
        ("1,23", None),
        ("12,34,567", None),
        ("(5,120)", None),
        ("1/0", None),
        (r"1\frac{-3}{4}", None),
        ("x", None),
        ("", None),
        ("\u0668", None),
    ],
)
def test_numbers_as_they_are_written(text, value):
    assert read_number(text) == value


def test_numerals_and_decimal_commas():
    assert read_numeral("1101_2") == ("1101", 2)
    assert read_numeral("A1_{16}") == ("A1", 16)
    assert read_numeral("1101") == ("1101", None)
    assert read_numeral("12units") is None
    assert read_decimal_comma("1000,99") == Fraction(100_099, 100)
    assert [read_decimal_comma(text) for text in ("1,5", "1,234", "1, 23", "1,2,3")] == [None] * 4


@pytest.mark.parametrize(
    "text, tidied",
    [
        (r"$\left( 1 ,\, \dfrac{1}{2} \right)$.", r"(1,\frac{1}{2})"),
        (r"\leftarrow", r"\leftarrow"),
        (r"1 \\ 2 \\, 3", r"1\\2\\,3"),
        ("1, 234", "1, 234"),
        ("1 2", "1 2"),
        (r"\sin x", r"\sin x"),
        (r"\$ 5", "5"),
        (r"\times 10", r"\times 10"),
        (r"2\$3", "2 3"),
        ("The final answer is: 18.", "18"),
        (r"\Bigl( x \Bigr)", "(x)"),
    ],
)
def test_typesetting_is_removed_and_nothing_else(text, tidied):
    assert tidy(text) == tidied
    assert tidy(tidied) == tidied
    assert plain(tidied) == plain(text)


def test_a_tolerance_belongs_to_the_benchmark():
    grade = functools.partial(boxed, relative=0.01)
    assert grade("", r"\boxed{1.46e-5}", "1.45e-5") == 1.0
    assert grade("", r"\boxed{1.47e-5}", "1.45e-5") == 0.0
    assert grade("", r"\boxed{100}", "101") == 1.0
    assert grade("", "100", "101") is None
    assert boxed("", r"\boxed{1.46e-5}", "1.45e-5") == 0.0
    assert anywhere("", "it is 100", "101", relative=0.01) == 1.0
    assert anywhere("", "it is 100", "101") == 0.0
    assert decide(r"\cos^{10}(\frac{\pi}{10})", "0.6054", MatchRules(decimals=4)).is_equal


def test_an_explanation_says_what_was_read_and_which_rule_decided():
    assert explain("math", r"so \boxed{0.50}", r"\frac12") == {
        "is_equal": True, "rule": "numbers", "gold": r"\frac12", "answer": "0.50",
        "gold_read": "1/2", "answer_read": "1/2",
    }  # fmt: skip
    found = explain("math", r"\boxed{x(x+1)}", "x^2+x")
    assert (found["is_equal"], found["rule"], found["gold_read"]) == (True, "math-verify", "x**2 + x")
    assert explain("math", "no box", "5")["rule"] == "the text has no answer"
    assert explain("math", r"\boxed{9^{9^{9^9}}}", "5")["rule"] == "refused: a power in an exponent"
    assert explain("math_any", "it is 5", "5")["is_equal"]
    assert explain("math_any", "", "5") == explain("math", "", "5")
