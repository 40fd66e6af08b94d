"""The judge of mathematics on golds as people type them, and on golds with one thing changed or beside guesses.

    python spelling_benchmark.py --data DATA [--half held-out] [--per-kind 8]

Golds of MATH, Minerva and OlympiadBench, so many of each kind of gold; kinds of spelling by name (answer_spellings.py).
Rules are made with golds and kinds of the seen half; both belong to a half by their hash (grading_benchmark.in_half).
"""

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "support" / "corpora"))

from answer_spellings import CHANGES, SPELLINGS, spelled
from gold_mutations import kind_of
from grading_benchmark import golds_of, in_half, limited, plain_math_verify

from hacpo_grading.graders import math_grader
from hacpo_mega.data.datasets import read_dataset


@dataclass
class Found:
    """The numbers of answers judged, of those judged wrongly, and of these the ones that math-verify judges rightly."""

    total: int = 0
    wrong: Counter = field(default_factory=Counter)
    math_verify_right: int = 0
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)


def golds_by_kind(data: Path, half: str | None, per_kind: int) -> list[str]:
    """So many golds of every kind; the same ones in every run."""
    olympiad = (problem.gold.strip("$") for problem in read_dataset(data / "olympiadbench/test.jsonl").problems)
    by_kind = defaultdict(list)
    for gold in dict.fromkeys((*golds_of(data), *olympiad)):
        if in_half(half, gold):
            by_kind[kind_of(gold)].append(gold)
    return [
        gold
        for kind in sorted(by_kind)
        for gold in random.Random(5).sample(by_kind[kind], len(by_kind[kind]))[:per_kind]
    ]


def judged(golds: Sequence[str], kinds: Mapping[str, tuple], half: str | None, is_equal: bool) -> Found:
    """Every gold in every kind of spelling of a half that applies, at most four of one kind of gold each."""
    found, times = Found(), Counter()
    kinds = {name: kind for name, kind in kinds.items() if in_half(half, name)}
    for gold in random.Random(1).sample(golds, len(golds)):
        for name, text in spelled(gold, kinds):
            times[name, kind_of(gold)] += 1
            if times[name, kind_of(gold)] > 4:
                continue
            answer = f"\\boxed{{{text}}}"
            found.total += 1
            if (limited(math_grader.boxed, answer, gold) == 1.0) != is_equal:
                found.wrong[name] += 1
                found.examples[name] = gold, text
                found.math_verify_right += (limited(plain_math_verify, answer, gold) == 1.0) == is_equal
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; prints what was accepted, and what was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--half", choices=("seen", "held-out"), help="of golds and kinds; all without it")
    parser.add_argument("--per-kind", type=int, default=8)
    options = parser.parse_args(arguments)
    golds = golds_by_kind(options.data, options.half, options.per_kind)
    for what, kinds, is_equal in (("changed, accepted", CHANGES, False), ("spelled, refused", SPELLINGS, True)):
        found = judged(golds, kinds, options.half, is_equal)
        wrong, total = found.wrong.total(), found.total
        print(f"{what}: {wrong} of {total} ({wrong / total:.2%}), math-verify right: {found.math_verify_right}")
        for name, number in found.wrong.most_common():
            print(f"    {number:3} {name!r}: {found.examples[name]}")


if __name__ == "__main__":
    main()
