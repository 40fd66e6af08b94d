# ruff: noqa: E501, SIM905
"""A search for universal answers: answers of random constructs that the graders take for right whatever the gold is.

    python tests/support/corpora/universal_answers.py --answers 100000 [--seed 1] [--data DATA]

Every answer is held against golds that have nothing in common, one of each kind; one that is right for two of them is
held against all golds, and printed with its share of them. A policy can learn any share that is not tiny. Elsewhere:
answers that break a grader (hostile_answers.py).
"""

import argparse
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hacpo_grading.graders import answer_values, math_grader
from hacpo_grading.graders.math_grader import anywhere, boxed
from hacpo_mega.data.datasets import read_dataset

# one gold of each kind, none equal to another
GOLDS = (
    "734197", "-31", "0.3719", r"\frac{37}{91}", r"7\sqrt{23}", r"\pi^2+3", "x^2+3x+17", "(41, -57)", "(-83, 67]",
    "13, 58, 211", r"\begin{pmatrix} 13 \\ -7 \end{pmatrix}", "y = 23x-19", r"\{5, 47\}", "x > 29", r"3-8i", r"17\%",
    r"(-\infty, -43) \cup (71, \infty)", r"\text{east}",
)  # fmt: skip
GOLD_FILES = ("math500/test.jsonl", "minerva_math/qwen_test.jsonl", "aime24/qwen_test.jsonl", "amc23/test.jsonl")
NUM_GOLDS = 200

NUMBERS = (
    "0 1 -1 2 8 -3 99 0.5 -0.0 1e308 1e999 1.5e9 10^{9} 10^{9999} 2^{-9999} 9^{9^9} 0^0 0^{-1} 1/0 0/0 "
    r"\frac{1}{0} \frac{0}{0} \infty -\infty +\infty \pi e i \ln0 \log0 \tan90^\circ \tan(\pi/2) \frac{\pi}{2} \zeta(1) "
    r"\Gamma(0) \sqrt{-1} 0! (-1)! (1/2)! 171! \binom{0}{0} \binom{-1}{0} \binom{2}{\infty} 50\% 1e-400 0x10 1_2 "
    r"2\frac{0}{0} 1\frac{1}{2} 12,345 1.\overline{3} 0.\overline{9} \infty! \aleph_0 nan oo zoo inf NaN ∞ ½ ² ５ ٣ Ⅷ"
).split()
LETTERS = (
    r"x y n k z \alpha \theta f(x) f(0) g(x,y) x_1 \vec{v} \mathbb{R} \mathbb{Z} \mathbb{C} \emptyset \varnothing "
    r"\{\} () [] \text{} \text{any} \text{true} \text{None} \ldots \cdots ? * _ \_ \square \phantom{5} ~ \, \\ & ... …"
).split()
AROUND = r"""
{a}+{b} {a}-{b} {a}-{a} {a}*{b} {a}{b} {a}/{b} {a}^{{{b}}} ({a})^{{{b}}} {a}^{{-{b}}} \frac{{{a}}}{{{b}}} \frac{{{a}}}{{{a}-{a}}} 0\cdot{a} {a}\cdot0^{{-1}}
\sqrt{{{a}}} \sqrt[{b}]{{{a}}} \sqrt[0]{{{a}}} |{a}| -{a} {a}! ({a})! \binom{{{a}}}{{{b}}} \log_{{{a}}}{{{b}}} \log({a}) \ln({a}) \sin({a}) \tan({a}) \arcsin({a}) \exp({a})
\lim_{{x\to{a}}}{b} \lim_{{x\to0}}\frac{{{a}}}{{x}} \sum_{{n={a}}}^{{{b}}}n \sum_{{n=1}}^{{\infty}}{a} \prod_{{n=1}}^{{\infty}}{a} \int_{{{a}}}^{{{b}}}x\,dx \int{a}\,dx \frac{{d}}{{dx}}{a} \max({a},{b}) \min({a},{b}) \gcd({a},{b})
\{{{a}\}} \{{{a},{b}\}} ({a},{b}) ({a},{b}] [{a},{b}) [{a},{b}] ({a},{a}) {a},{b} {a},{a},{a} {a};{b} {a}\text{{ or }}{b} {a}\text{{ and }}{b} {a}\cup{b} {a}\cap{b} {a}\setminus{b} \{{x\mid x={a}\}} \{{x:x\ne{a}\}} ({a},{b})\cup({b},{a}) \mathbb{{R}}\setminus\{{{a}\}}
\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}} \begin{{pmatrix}}{a}&{b}\\{b}&{a}\end{{pmatrix}} \begin{{cases}}{a}\\{b}\end{{cases}} \begin{{vmatrix}}{a}&{b}\\{b}&{a}\end{{vmatrix}} \det{a} {a}^T {a}\times{b} \langle{a},{b}\rangle
x={a} y={a} {a}={b} {a}={b}={a} x={a},y={b} x<{a} x>{a} {a}<x<{b} x\ne{a} {a}\le{b} x\in{a} x\equiv{a}\pmod{b} {a}\approx{b} {a}\sim{b} \not{a} \pm{a} {a}\pm{b} \mp{a} {a}:{b} {a}\to{b} {a}\%
{a}\text{{ cm}} {a}^\circ \${a} {a}_{{{b}}} {a}_{{2}} {a}e{b} {a}\times10^{{{b}}} {a}\bmod{b} \lfloor{a}\rfloor \lceil{a}\rceil \overline{{{a}}} \Re({a}) \Im({a}) \arg({a}) {a}\mathrm{{i}} f({a}) f(x)={a} \text{{{a}}} \mathbf{{{a}}} \boxed{{{a}}} {a}\ldots{b} {a},\ldots,{b}
""".split()


WRAPPINGS = r"""
{0} \{{{0}\}} y={0} {0},{0} {0},{0},{0} ({0},{0}) ({0},{0}] [{0},{0}] \{{{0},{0}\}} ({0},{0},{0}) x=y={0} x<{0} -{0} {0}\%
x+{0} {0}x \frac{{{0}}}{{2}} \frac{{1}}{{{0}}} \sqrt{{{0}}} |{0}| {0}\text{{ or }}{0} x\in\{{{0}\}} \pm{0} ({0})+3i f(x)={0}
({0},{0})\cup({0},{0}) \begin{{pmatrix}}{0}\\{0}\end{{pmatrix}} \{{{0}\}}\text{{cm}} \text{{}}{0} 0\cdot{0} {0}-{0} \mathbb{{R}}\setminus\{{{0}\}}
""".split()


class OutOfTime(BaseException):
    """Not an Exception: the graders must not take it for their own."""


def universal_candidates(seed: int) -> Iterator[str]:
    """Contents of boxes without end: pieces up to four deep, and one piece again where a construct has several."""
    generator = random.Random(seed)

    def piece(depth: int) -> str:
        if depth == 0 or generator.random() < 0.1:
            return generator.choice(LETTERS if generator.random() < 0.2 else NUMBERS)
        return generator.choice(AROUND).format(a=piece(depth - 1), b=piece(generator.randrange(depth)))

    while True:
        yield piece(generator.choice((1, 1, 2, 2, 2, 3, 3, 4)))


def wrapped(number: str) -> list[str]:
    """A number in all places where one may stand in an answer."""
    return [wrapping.format(number) for wrapping in WRAPPINGS]


def golds_that_take(answer: str, golds: Sequence[str], seconds: float = 0.5, is_boxed: bool = True) -> list[str]:
    """The golds for which an answer is right; one on which the grader does not end counts as wrong."""
    return [gold for gold in golds if _is_right(answer, gold, seconds, is_boxed)]


def _is_right(answer: str, gold: str, seconds: float, is_boxed: bool) -> bool:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return bool(boxed("", f"\\boxed{{{answer}}}", gold) if is_boxed else anywhere("", answer, gold))
    except (OutOfTime, MemoryError, RecursionError):
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def out_of_time(*_: object) -> None:
    """The handler of SIGPROF that whoever calls `golds_that_take` sets."""
    raise OutOfTime


def read_each_answer_once() -> None:
    """Keeps the graders' findings on an answer for the next gold: the same verdicts in half the time."""
    for module, name in (
        (math_grader, "_parsed"),
        (math_grader, "_shown"),
        (answer_values, "_nonfinite"),
        (answer_values, "value_of"),
    ):
        setattr(module, name, _kept(getattr(module, name)))


def _kept(function: Callable, most: int = 4096) -> Callable:
    """By the identity of what was read, since a matrix has no hash and 1 equals 1.0; strings by their text."""
    held: dict[tuple, tuple] = {}

    def once(read: Any, *more: bool, **named: bool) -> Any:
        key = (read if isinstance(read, str) else id(read), *more, *named.values())
        if key not in held:
            if len(held) >= most:
                held.clear()
            held[key] = read, function(read, *more, **named)  # `read` is kept too, or its id would be used again
        return held[key][1]

    return once


def main() -> None:
    """Prints each answer that is right for two of GOLDS, with the share of all golds that it is right for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGPROF, out_of_time)
    sys.set_int_max_str_digits(0)
    read_each_answer_once()
    found = (
        [problem.gold for name in GOLD_FILES for problem in read_dataset(asked.data / name).problems]
        if asked.data
        else []
    )
    golds = random.Random(0).sample(sorted(set(found)), NUM_GOLDS) if found else list(GOLDS)
    for number, answer in zip(range(asked.answers), universal_candidates(asked.seed)):
        for is_boxed in (True, number % 4 != 0):
            if len(taken := golds_that_take(answer, GOLDS, is_boxed=is_boxed)) > 1:
                share = len(golds_that_take(answer, golds, is_boxed=is_boxed)) / len(golds)
                print(f"{share:.1%} {'boxed' if is_boxed else 'bare'} {answer!r} {taken}", flush=True)
            if is_boxed and number % 4:
                break
        if number % 1000 == 999:
            print(f"{number + 1} answers", flush=True)


if __name__ == "__main__":
    main()
