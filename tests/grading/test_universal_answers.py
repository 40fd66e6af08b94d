"""No answer is right whatever the gold is: no infinite or undefined number in any wrapping; a slice of a search."""

import itertools
import random
import signal

import pytest
from repository import SHARED
from universal_answers import GOLD_FILES, GOLDS, golds_that_take, out_of_time, universal_candidates, wrapped

from hacpo_grading.graders.math_grader import anywhere, boxed
from hacpo_mega.data.datasets import read_dataset

pytestmark = pytest.mark.nightly

UNIVERSAL = (r"1e308^{\infty}", r"1.5e9^{\infty}", r"2\cdot308^{\infty}")


@pytest.fixture(autouse=True)
def a_limit_of_time():
    before = signal.signal(signal.SIGPROF, out_of_time)
    yield
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("number", UNIVERSAL)
def test_what_is_no_number_is_right_for_nothing(number):
    for answer in wrapped(number):
        assert not golds_that_take(answer, GOLDS), answer


@pytest.mark.parametrize("number", [r"\frac{1}{0}", r"\ln 0", r"\tan\frac{\pi}{2}", "nan", r"\infty-\infty", "x/(x-x)"])
def test_what_has_no_value_is_right_for_nothing(number):
    for answer in wrapped(number)[:6]:
        assert not golds_that_take(answer, GOLDS[:6]), answer


def test_no_gold_of_the_public_sets_takes_it():
    if not (SHARED / "data").is_dir():
        pytest.skip(f"no public data in {SHARED / 'data'}")
    problems = [p for name in GOLD_FILES for p in read_dataset(SHARED / "data" / name).problems]
    golds = random.Random(1).sample(sorted({problem.gold for problem in problems}), 300)
    for gold, answer in zip(golds, itertools.cycle(wrapped(UNIVERSAL[0]))):
        assert not golds_that_take(answer, [gold]), (answer, gold)


def test_a_slice_of_the_search():
    for answer in itertools.islice(universal_candidates(seed=7), 25):
        assert len(golds_that_take(answer, GOLDS)) <= 1, answer


@pytest.mark.parametrize(
    "gold, right, wrong",
    [
        (r"(-\infty, 7]", r"(-\infty, 7]", r"(-1e308^{\infty}, 1e308^{\infty}]"),
        (r"[1,\infty)", r"[1, +\infty)", r"[1e308^{\infty}, \infty)"),
        (r"\infty", r"+\infty", r"2^{\infty}"),
        (r"-\infty", r"-\infty", r"\infty"),
        (r"\{1, \infty\}", r"\{\infty, 1\}", r"\{2, \infty\}"),
        ("x > 5", "5 < x", r"x > 1e308^{\infty}"),
        (r"x < \infty", r"\infty > x", r"x < 5"),
        (r"\mathbb{R}", r"(-\infty,\infty)", r"\{1e308^{\infty}\}"),
        ("5%", "0.05", r"1e308^{\infty}\%"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}",
         r"\begin{pmatrix} 1e308^{\infty} \\ 1e308^{\infty} \end{pmatrix}"),
        ("1, 2", "2, 1", "1, 2, 3"),
        (r"\{\sqrt{2}, 3\}", r"\{3, 2^{1/2}\}", r"\{3, 2^{1/2} + 0.001\}"),
        ("x = 5", "5", r"x = y = 1e308^{\infty}"),
    ],
)  # fmt: skip
def test_an_infinity_is_right_where_gold_has_it(gold, right, wrong):
    for grader in (boxed, anywhere):
        assert grader("", f"\\boxed{{{right}}}", gold) == 1.0
        assert grader("", f"\\boxed{{{wrong}}}", gold) == 0.0
