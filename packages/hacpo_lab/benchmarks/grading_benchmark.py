"""Graders measured on labelled pairs, on rewritten golds, on labelled GSM8K answers and on hostile answers.

    python grading_benchmark.py labelled --data DATA [--half held-out] [--other NAME=FILE.py:function]
    python grading_benchmark.py mutations --data DATA [--golds 200] [--plain]
    python grading_benchmark.py gsm8k --data DATA/example_model_solutions.jsonl
    python grading_benchmark.py ablation --data DATA [--golds 150]
    python grading_benchmark.py hostile [--answers 2000]

prints the tables of docs/measurements/grading.md. --half: of the pairs those whose hash falls into it; rules are made
with the seen half alone, and what they are worth is read off the held-out one (and see spelling_benchmark.py).
A grader is (prompt, answer, gold) -> reward or None, as everywhere.
"""

import argparse
import functools
import hashlib
import json
import random
import re
import resource
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "support" / "corpora"))

from gold_mutations import kind_of, rewritten, with_one_digit_changed
from hostile_answers import GENERATED_GOLD, generated_answers
from math_verify import parse, verify

from hacpo_grading.graders import math_grader
from hacpo_grading.judge import Judge
from hacpo_grading.judgement import Asked
from hacpo_grading.texts.answer_text import last_boxed
from hacpo_mega.data.datasets import read_dataset

Grader = Callable[[str, str, str], float | None]
FORMS = ("bare", "gold boxed", "bare, loose", "gold boxed, loose")
MARKED = ("$", "\\[", "\\(", "\\boxed")
GOLD_FILES = (
    "math/MATH_original_train.tar.gz", "math/MATH_original_test.tar.gz", "math500/test.jsonl",
    "minerva_math/qwen_test.jsonl",
)  # fmt: skip
# a rule and what stands in its place when it is switched off
GRADER, TEXT = "hacpo_grading.graders.math_grader.", "hacpo_grading.texts.answer_text."
RULES: dict[str, dict[str, Callable]] = {
    "typesetting is removed": {GRADER + "tidy": str.strip, TEXT + "tidy": str.strip},
    "the same text": {GRADER + "is_same_text": lambda gold, answer: False},
    "refusals": {GRADER + "too_large": lambda answer, gold: None},
    "numbers": {GRADER + "read_number": lambda text: None},
    "decimal comma": {GRADER + "read_decimal_comma": lambda text: None},
    "numerals in a base": {GRADER + "read_numeral": lambda text: None},
    "numbers far apart": {GRADER + "are_far_apart": lambda gold, answer, decimals: False},
    "numbers that are no values": {GRADER + "adds_nonfinite": lambda gold, answer: False},
    "boxes that stand together": {GRADER + "box_of": lambda text: last_boxed(text) or text},
}


def in_half(half: str | None, *texts: str) -> bool:
    """Tells whether a thing told by these texts belongs to a half ("seen" or "held-out"); all belongs to None."""
    is_held_out = hashlib.sha256("\0".join(texts).encode()).digest()[0] % 2 == 1
    return half is None or is_held_out == (half == "held-out")


class OutOfTime(BaseException):
    """The CPU time of one answer is spent; no `except Exception` of a library keeps it."""


def limited(grader: Grader, answer: str, gold: str, seconds: float = 10.0) -> float | None:
    """A reward under a limit of CPU time; 0 for an answer that overruns."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return grader("", answer, gold)
    except OutOfTime:
        return 0.0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple:
    return tuple(parse(text if any(sign in text for sign in MARKED) else f"\\boxed{{{text}}}", parsing_timeout=None))


def plain_math_verify(prompt: str, answer: str, gold: str) -> float:
    """math-verify's own parse and verify, bare strings boxed."""
    return float(verify(list(_parsed(gold)), list(_parsed(answer)), timeout_seconds=None))


def normalised_strings(prompt: str, answer: str, gold: str) -> float | None:
    """The last box equals gold after the usual clean-up of strings: sizes, units, dollars, fractions and spaces."""
    content = last_boxed(answer)
    return None if content is None else float(_normalised(content) == _normalised(last_boxed(gold) or gold))


def _normalised(text: str) -> str:
    text = re.sub(r"\\[,;:! ]|\\(?:left|right)(?![a-z])|\\?\$|\\?%|\^\{?\\circ\}?|\\text\{ .*\}", "", text.strip())
    text = re.sub(r"\\[dt]frac", r"\\frac", text.partition("=")[2] if text[1:2] == "=" else text)
    text = re.sub(r"\\frac ?(\w) ?(\w)", r"\\frac{\1}{\2}", re.sub(r"\\sqrt ?(\w)", r"\\sqrt{\1}", text))
    text = re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    return re.sub(r"\s", "", re.sub(r"(?<![\d])\.(?=\d)", "0.", text).rstrip("."))


@dataclass
class Tally:
    """The number of those graded in each class, and of those graded otherwise than the label says."""

    total: Counter = field(default_factory=Counter)
    wrong: Counter = field(default_factory=Counter)
    examples: list[tuple] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, grader: Grader, group: str, answer: str, gold: str, is_equal: bool) -> None:
        """Grades one pair."""
        start = time.process_time()
        agrees = (limited(grader, answer, gold) == 1.0) == is_equal
        self.cpu_s += time.process_time() - start
        self.total[group] += 1
        if not agrees:
            self.wrong[group] += 1
            self.examples.append((group, gold, answer, is_equal))

    @property
    def cpu_per_thousand(self) -> float:
        return 1000 * self.cpu_s / max(1, self.total.total())


def math_verify_form(form: str, prompt: str, answer: str, gold: str) -> float:
    """math-verify with texts as they are ("bare"), or gold in a box ("gold boxed"), strictly or not ("loose")."""
    gold_read = _parsed(gold) if "boxed" in form else parse(gold, parsing_timeout=None)
    return float(
        verify(list(gold_read), parse(answer, parsing_timeout=None), strict="loose" not in form, timeout_seconds=None)
    )


def labelled_cases(data: Path, half: str | None = None) -> list[tuple[str, str, str, bool]]:
    """(source, answer, gold, whether they are equal) of the public labelled pairs; one pair is in one half only."""
    cases = [json.loads(line) for line in (data / "grader_cases.jsonl").open()]
    as_text = lambda value: "" if value is None else str(value)  # noqa: E731
    pairs = [(case["source"], as_text(case["pred"]), as_text(case["gold"]), case["equal"]) for case in cases]
    return [pair for pair in pairs if in_half(half, pair[2], pair[1])]


def labelled(grader: Grader, cases: Iterable[tuple[str, str, str, bool]]) -> Tally:
    """A grader against the labels, by source."""
    tally = Tally()
    for source, answer, gold, is_equal in cases:
        tally.add(grader, source, answer, gold, is_equal)
    return tally


def in_a_box(grader: Grader) -> Grader:
    """A grader of boxes, given bare answers: they are put into a box first."""
    return lambda prompt, answer, gold: grader(
        prompt, answer if "\\boxed" in answer else f"\\boxed{{{answer.strip().strip('$')}}}", gold
    )


def golds_of(data: Path, limit: int | None = None, seed: int = 3) -> list[str]:
    """The distinct golds of MATH, MATH-500 and Minerva; of those that are no whole numbers a sample of `limit`."""
    golds = list(dict.fromkeys(p.gold for name in GOLD_FILES for p in read_dataset(data / name).problems))
    if limit is None:
        return golds
    golds = [gold for gold in golds if kind_of(gold) != "integer"]
    random.Random(seed).shuffle(golds)
    return golds[:limit]


def mutated(grader: Grader, golds: Iterable[str]) -> tuple[Tally, Tally]:
    """Every digit of every gold changed (right is: wrong), and every rewrite of it (right is: correct), by kind."""
    changed, same = Tally(), Tally()
    for gold in golds:
        kind = kind_of(gold)
        for text in with_one_digit_changed(gold):
            changed.add(grader, kind, f"\\boxed{{{text}}}", gold, False)
        for text in rewritten(gold).values():
            same.add(grader, kind, f"\\boxed{{{text}}}", gold, True)
    return changed, same


def gsm8k_cases(file: Path) -> list[tuple[str, str, str, bool]]:
    """(model, boxed answer, gold, label) of OpenAI's example_model_solutions.jsonl: 4 models on 1,319 problems."""
    cases = []
    for line in file.open():
        row = json.loads(line)
        for model, found in row.items():
            if isinstance(found, dict):
                answer = found["solution"].rpartition("A:")[2].strip()
                gold = row["ground_truth"].rpartition("A:")[2].strip()
                cases.append((model, f"\\boxed{{{answer}}}", gold, found["is_correct"]))
    return cases


def without(rule: str) -> ExitStack:
    """A context in which one rule of the grader is switched off."""
    stack = ExitStack()
    for name, replacement in RULES[rule].items():
        stack.enter_context(mock.patch(name, replacement))
    math_grader._parsed_gold.cache_clear()
    stack.callback(math_grader._parsed_gold.cache_clear)
    return stack


def print_by_group(tallies: dict[str, Tally]) -> None:
    """A table: groups down, graders across, agreements of all."""
    groups = list(dict.fromkeys(group for tally in tallies.values() for group in tally.total))
    print("| | pairs |", " | ".join(tallies), "|")
    print("|" + "---|" * (len(tallies) + 2))
    for group in groups:
        total = next(iter(tallies.values())).total[group]
        print(f"| {group} | {total} |", " | ".join(str(total - t.wrong[group]) for t in tallies.values()), "|")
    total = next(iter(tallies.values())).total.total()
    shares = (f"{total - t.wrong.total()} ({1 - t.wrong.total() / total:.1%})" for t in tallies.values())
    print(f"| all | {total} |", " | ".join(shares), "|")
    print("| CPU s per 1,000 | |", " | ".join(f"{t.cpu_per_thousand:.2f}" for t in tallies.values()), "|")


def print_mutations(changed: Tally, same: Tally) -> None:
    """A table: kinds of gold down, false acceptances and false refusals across."""
    print("| kind of gold | digits changed | accepted | rewrites | refused |\n|---|---|---|---|---|")
    for kind in sorted(same.total, key=same.total.__getitem__, reverse=True):
        print(f"| {kind} | {changed.total[kind]} | {changed.wrong[kind]} | {same.total[kind]} | {same.wrong[kind]} |")
    shares = [f"{t.wrong.total()} ({t.wrong.total() / t.total.total():.2%})" for t in (changed, same)]
    print(f"| all | {changed.total.total()} | {shares[0]} | {same.total.total()} | {shares[1]} |")
    cpu = 1000 * (changed.cpu_s + same.cpu_s) / (changed.total.total() + same.total.total())
    print(f"CPU seconds per 1,000 answers: {cpu:.2f}")
    for example in (*changed.examples, *same.examples):
        print("   ", example)


@dataclass(frozen=True)
class HostileRun:
    """The cost of generated hostile answers to their worker, and what they got."""

    verdicts: tuple[str, ...]
    cpu_s: float
    peak_bytes: int
    ran_code: bool


def hostile_run(number: int, seed: int = 0) -> HostileRun:
    """Judges generated answers in one worker, as training does; its CPU time and its peak memory are the kernel's."""
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "ran"
        answers = generated_answers(number, seed, str(canary))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with Judge("math", num_workers=1, timeout_s=5.0) as judge:
            judged = judge.judge([Asked("", answer, GENERATED_GOLD) for answer in answers])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        verdicts = tuple(judgement.verdict.name for judgement in judged)
        return HostileRun(verdicts, cpu_s, 1024 * after.ru_maxrss, canary.exists())


def run_ablation(data: Path, num_golds: int) -> None:
    """Prints the agreement on labelled pairs, and what a sample of mutations gets wrong, without each rule."""
    cases, golds = labelled_cases(data), golds_of(data, num_golds)
    print("| without | labelled pairs that agree | accepted | refused | CPU s per 1,000 |\n|---|---|---|---|---|")
    for rule in (None, *RULES):
        with without(rule) if rule else ExitStack():
            pairs = labelled(math_grader.anywhere, cases)
            changed, same = mutated(math_grader.boxed, golds)
        agree = pairs.total.total() - pairs.wrong.total()
        cpu = 1000 * (changed.cpu_s + same.cpu_s) / (changed.total.total() + same.total.total())
        errors = f"{changed.wrong.total()} of {changed.total.total()} | {same.wrong.total()} of {same.total.total()}"
        print(f"| {rule or 'nothing'} | {agree} | {errors} | {cpu:.2f} |", flush=True)


def grader_of(spec: str) -> Grader:
    """The function that FILE.py:function names."""
    file, _, function = spec.rpartition(":")
    return runpy.run_path(file)[function]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; prints tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("labelled", "mutations", "gsm8k", "ablation", "hostile"))
    parser.add_argument("--half", choices=("seen", "held-out"), help="of the labelled pairs; all without it")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--golds", type=int, help="how many golds to sample; all without it (ablation: 150)")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--plain", action="store_true", help="mutations for math-verify alone")
    parser.add_argument("--other", action="append", default=[], help="NAME=FILE.py:function of another grader of boxes")
    options = parser.parse_args(arguments)
    others = {name: grader_of(spec) for name, _, spec in (other.partition("=") for other in options.other)}
    others["strings"] = normalised_strings
    if options.what == "labelled":
        graders = {"ours": math_grader.anywhere, "math-verify": plain_math_verify}
        graders |= {name: in_a_box(grader) for name, grader in others.items()}
        cases = labelled_cases(options.data, options.half)
        graders |= {f"math-verify {form}": functools.partial(math_verify_form, form) for form in FORMS}
        tallies = {name: labelled(grader, cases) for name, grader in graders.items()}
        print_by_group(tallies)
        for example in tallies["ours"].examples:
            print("   ", example)
    elif options.what == "gsm8k":
        graders = {"ours": math_grader.boxed, "math-verify": plain_math_verify} | others
        cases = gsm8k_cases(options.data)
        tallies = {name: labelled(grader, cases) for name, grader in graders.items()}
        print_by_group(tallies)
        for example in tallies["ours"].examples:
            print("   ", example)
    elif options.what == "mutations":
        grader = plain_math_verify if options.plain else math_grader.boxed
        print_mutations(*mutated(grader, golds_of(options.data, options.golds)))
    elif options.what == "ablation":
        run_ablation(options.data, options.golds or 150)
    else:
        runs = [hostile_run(options.answers) for _ in range(2)]
        for run in runs:
            print(
                dict(Counter(run.verdicts)), f"{run.cpu_s:.1f} CPU s, {run.peak_bytes >> 20} MiB, code: {run.ran_code}"
            )
        print("verdicts that differ:", sum(a != b for a, b in zip(runs[0].verdicts, runs[1].verdicts)))


if __name__ == "__main__":
    main()
