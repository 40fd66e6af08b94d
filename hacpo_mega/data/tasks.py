"""The built-in learning task: worked arithmetic, five skills, small enough to learn on two CPU cores.

    skill  prompt        gold answer (working;result)
    add    47+85=        7+5=12,4+8+1=13;132      no `+1` without a carry
    sub    83-47=        13-7=6,7-4=3;36          the borrow is applied to both digits
    mul    47*6=         7*6=42,4*6+4=28;282      no `+c` without a carry
    srt    s5281=        1,2,5,8;1258
    sum    47+85+36+12=  7+5=12,12+6=18,18+2=20,4+8+2=14,14+3=17,17+1=18;180      running totals of both columns
    chain  47+35-21=     7+5=12,4+3+1=8,2-1=1,8-2=6;61      an addition and a subtraction, in two halves:
                         7+5=12,4+3+1=8;82-21               and 2-1=1,8-2=6;61
    sum and chain by running totals of whole numbers, which a warm start may teach instead; terms in any order:
                         36+85=121,121+12=133,133+47=180;180

The first four are the quickstart's, with answers of 12 to 19 characters; those of `sum` have 38 to 51.

The working is what the warm start teaches; only the result after `;` is judged (graders.py). Three sets of prompts are
disjoint in content: training, validation (the evaluations of a run) and test (what an experiment reports). A prompt's
set follows from the sha256 of its content, in which terms that commute and digits to sort have one order: no set has a
prompt that another one has in another order.
Everything here is a pure function of its arguments: every process of a run makes the same examples.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hacpo_mega.config.tables.agents import SkillShare

EVALUATION_PROMPTS_PER_SKILL = 150


@dataclass(frozen=True)
class Example:
    """A prompt of the task with its worked solution and its result; a warm start teaches `answer`.

    `call` is the expression that a calculator is asked for instead of working; empty without one.
    `partner_answer` is another agent's half of the work, which stands between prompt and answer.
    """

    skill: str
    prompt: str
    working: str
    result: str
    call: str = ""
    partner_answer: str = ""

    @property
    def answer(self) -> str:
        return f"{self.working};{self.result}"

    @property
    def id(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


def addition(a: int, b: int) -> Example:
    """a + b for two-digit a, b: units, then tens with the carry."""
    units = a % 10 + b % 10
    carry = "+1" if units >= 10 else ""
    tens = a // 10 + b // 10 + units // 10
    working = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}{carry}={tens}"
    return Example("add", f"{a}+{b}=", working, str(a + b))


def subtraction(a: int, b: int) -> Example:
    """a - b for two-digit a >= b: a borrow changes both digits before anything is subtracted."""
    borrow = int(a % 10 < b % 10)
    units, tens = a % 10 + 10 * borrow, a // 10 - borrow
    working = f"{units}-{b % 10}={units - b % 10},{tens}-{b // 10}={tens - b // 10}"
    return Example("sub", f"{a}-{b}=", working, str(a - b))


def multiplication(a: int, b: int) -> Example:
    """a * b for two-digit a and one-digit b: units, then tens with the carry."""
    units = a % 10 * b
    carry = f"+{units // 10}" if units >= 10 else ""
    working = f"{a % 10}*{b}={units},{a // 10}*{b}{carry}={a // 10 * b + units // 10}"
    return Example("mul", f"{a}*{b}=", working, str(a * b))


def sorting(digits: str) -> Example:
    """Four digits in ascending order."""
    ordered = sorted(digits)
    return Example("srt", f"s{digits}=", ",".join(ordered), "".join(ordered))


def column_sum(*terms: int) -> Example:
    """The sum of two-digit terms: running totals of the units, then of the tens, whose first step adds the carry."""
    steps, total = [], 0
    for column in (1, 10):
        carry = total // 10
        first, *others = [term // column % 10 for term in terms]
        total = first
        for digit in others:
            added = f"{digit}+{carry}" if carry else f"{digit}"
            steps.append(f"{total}+{added}={total + digit + carry}")
            total, carry = total + digit + carry, 0
    return Example("sum", "+".join(map(str, terms)) + "=", ",".join(steps), str(sum(terms)))


def chain(a: int, b: int, c: int, part: str | None = None) -> Example:
    """a + b - c for two-digit a, b, c and a + b; or its first or its second half."""
    added, left = addition(a, b), subtraction(a + b, c)
    first = Example("chain", f"{a}+{b}-{c}=", added.working, f"{a + b}-{c}")
    if part == "first":
        return first
    second = replace(first, working=left.working, result=left.result)
    if part == "second":
        return replace(second, partner_answer=first.answer)
    return replace(second, working=f"{added.working},{left.working}")


def totals(example: Example, order: Sequence[float]) -> Example:
    """A sum or chain worked by running totals of whole numbers: the added terms by their number in `order`, which has
    one for each, then what is subtracted."""
    terms = [int(term) for term in re.findall("[+-]?[0-9]+", example.prompt)]
    total, *others = (term for _, _, term in sorted(zip([term < 0 for term in terms], order, terms)))
    steps = []
    for term in others:
        steps.append(f"{total}{term:+d}={total + term}")
        total += term
    return replace(example, working=",".join(steps))


def _numbers(word: str, count: int, offsets: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """`count` fixed tuples of numbers below 2^32: the four bytes from each of `offsets` in sha256 of "`word` n"."""
    for n in range(count):
        digest = hashlib.sha256(f"{word} {n}".encode()).digest()
        yield tuple(int.from_bytes(digest[offset : offset + 4], "big") for offset in offsets)


def _terms_of_chains() -> Iterable[tuple[int, int, int]]:
    """10,000 fixed a, b, c from 10 to 99 with a + b <= 99 and c <= a + b."""
    for one, two, three in _numbers("chain", 10_000, (0, 4, 8)):
        a = 10 + one % 80
        b = 10 + two % (90 - a)
        yield a, b, 10 + three % (a + b - 9)


def _terms_of_sums() -> Iterable[tuple[int, ...]]:
    """10,000 fixed quadruples of numbers from 10 to 99, drawn by sha256 from the 65,610,000 that there are."""
    for numbers in _numbers("sum", 10_000, (0, 4, 8, 12)):
        yield tuple(10 + number % 90 for number in numbers)


SKILLS: Mapping[str, Callable[[], Iterable[Example]]] = {
    "add": lambda: (addition(a, b) for a in range(10, 100) for b in range(10, 100)),
    "sub": lambda: (subtraction(a, b) for a in range(10, 100) for b in range(10, a + 1)),
    "mul": lambda: (multiplication(a, b) for a in range(10, 100) for b in range(2, 10)),
    "srt": lambda: (sorting(f"{n:04d}") for n in range(10_000)),
    "sum": lambda: (column_sum(*terms) for terms in _terms_of_sums()),
    "chain": lambda: {example.prompt: example for example in (chain(*terms) for terms in _terms_of_chains())}.values(),
}


PromptSet = Literal["training", "validation", "test"]


def content_of(prompt: str) -> str:
    """The prompt with terms that commute, or digits to sort, in ascending order: 85+47= is 47+85=, s5281= s1258=."""
    if prompt.startswith("s"):
        return f"s{''.join(sorted(prompt[1:-1]))}="
    terms, *rest = re.split("(?=[-=])", prompt)  # what is subtracted keeps its place
    return "".join(("+".join(sorted(terms.split("+"))), *rest))


def prompt_set(prompt: str) -> PromptSet:
    """The set of a prompt, by its content alone: one in five is for validation, one in five for the test."""
    bucket = hashlib.sha256(content_of(prompt).encode()).digest()[0] % 5
    return {0: "validation", 1: "test"}.get(bucket, "training")


def _examples(skill: str, chosen: PromptSet) -> tuple[Example, ...]:
    return tuple(example for example, its_set in _with_sets(skill) if its_set == chosen)


@functools.cache
def _with_sets(skill: str) -> tuple[tuple[Example, PromptSet], ...]:
    return tuple((example, prompt_set(example.prompt)) for example in SKILLS[skill]())


def training_examples(skill: str) -> tuple[Example, ...]:
    """Every training example of a skill, in a fixed order."""
    return _examples(skill, "training")


def evaluation_examples(skill: str, num_examples: int = EVALUATION_PROMPTS_PER_SKILL) -> tuple[Example, ...]:
    """The validation set of a skill: its first prompts in order of their sha256."""
    held_out = _examples(skill, "validation")
    assert num_examples <= len(held_out), (skill, num_examples, len(held_out))
    return tuple(sorted(held_out, key=lambda e: hashlib.sha256(e.prompt.encode()).digest())[:num_examples])


def examples_for_test(skill: str) -> tuple[Example, ...]:
    """Every test example of a skill, in a fixed order: no run reads them but an experiment's, at its end."""
    return _examples(skill, "test")


class WarmStartStream:
    """Batches of worked examples: `.at(update)` is a pure function of (seed, update).

    A weak skill is a small share of the batches drawn from few distinct examples, which are chosen once by the seed.
    Prompts of the validation and test sets never occur.
    """

    def __init__(self, skills: Mapping[str, SkillShare], batch_size: int, seed: int) -> None:
        self.shares = tuple(skills.values())
        self.batch_size = batch_size
        self.seed = seed
        self.examples = tuple(_example_pool(*item, number, seed) for number, item in enumerate(skills.items()))

    def at(self, update: int) -> tuple[Example, ...]:
        """The examples of one update, `batch_size` of them, drawn with replacement."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, 1, update))))
        bounds = np.cumsum([part.share for part in self.shares])
        skills = np.searchsorted(bounds / bounds[-1], rng.random(self.batch_size), side="right")
        picks = rng.random(self.batch_size)
        drawn = [self.examples[skill][int(pick * len(self.examples[skill]))] for skill, pick in zip(skills, picks)]
        asks = rng.random(self.batch_size) < [self.shares[skill].with_tool for skill in skills]
        halves = (_half(self.shares[skill], draw) for skill, draw in zip(skills, rng.random(self.batch_size)))
        terms = (map(int, re.findall("[0-9]+", e.prompt)) for e in drawn)
        taught = [e if half is None else chain(*abc, half) for e, abc, half in zip(drawn, terms, halves, strict=True)]
        # A later feature draws last, so that the draws above stay as they were before it existed.
        draws = rng.random((self.batch_size, 5))
        by_totals = draws[:, 4] < [self.shares[skill].totals for skill in skills]
        taught = [totals(e, order) if by else e for e, order, by in zip(taught, draws[:, :4].tolist(), by_totals)]
        return tuple(replace(e, call=e.prompt.removesuffix("=")) if ask else e for e, ask in zip(taught, asks))


def _half(part: SkillShare, draw: float) -> str | None:
    """Half of a chain that an example teaches, by a draw from [0, 1); None: all of it."""
    if draw < part.first:
        return "first"
    return "second" if draw < part.first + part.second else None


def _example_pool(skill: str, part: SkillShare, number: int, seed: int) -> tuple[Example, ...]:
    pool = training_examples(skill)
    if part.num_examples is None:
        return pool
    assert part.num_examples <= len(pool), (skill, part, len(pool))
    # raw words and a stable sort: numpy guarantees the raw stream of a bit generator for ever, not its permutation()
    words = np.random.PCG64(np.random.SeedSequence((seed, 0, number))).random_raw(len(pool))
    return tuple(pool[i] for i in np.argsort(words, kind="stable")[: part.num_examples])
