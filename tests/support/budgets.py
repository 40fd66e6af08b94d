"""Seconds that every test file may cost: budgets.toml, files that take longer, and which run first and on one worker.

A budget is seconds of one worker, of two on two quiet cores, waiting included. A machine that is slower or crowded
takes longer over all files alike: seconds are compared with budgets times the median of that slowness, so that one
file stands out and a slow day does not. Nothing here stops a test.
"""

import functools
import math
import os
import statistics
import tomllib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
# The tiers: `make test`; and what `make test-all` has beyond it, of the product and of the lab.
FAST, NIGHTLY, LAB = "fast", "nightly", "lab"
MAKE_TEST = "not nightly and not lab"  # the Makefile's choice of tests
HEADROOM = 1.5
SPARE = 1.2  # a budget is a fifth above what was measured
HEAD = """\
# Seconds of a worker that a file may take in each tier, on two quiet cores, and a fifth more: written by `make budgets`
# from a run's measured seconds (support/budgets.py). Files that a run leaves out keep their number.
"""
# Below these seconds a file is not worth a word, nor a measure of the machine.
FEW_S = 5.0
# So many files measure a machine; fewer may all be of the slow kind.
MANY_FILES = 8

# Files whose jobs have four ranks or more at work; those of test_failure.py and under Slurm wait most of the time.
FOUR_RANKS = {
    "test_actor",
    "test_answers_ahead",
    "test_checkpoint",
    "test_exchange",
    "test_fused_head",
    "test_gradient_invariance",
    "test_megatron_layout",
    "test_overlap",
    "test_place",
    "test_relayout",
    "test_three_agents",
    "test_trainer",
}


class Part(NamedTuple):
    """The tests of a file, named relative to tests/, that one tier runs."""

    tier: str
    file: str


def read_budgets(file: Path = TESTS / "budgets.toml") -> dict[Part, float]:
    """Seconds by part, as budgets.toml lists them."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {Part(tier, file): float(seconds) for tier, files in tables.items() for file, seconds in files.items()}


def write_budgets(seconds: Mapping[Part, float], file: Path = TESTS / "budgets.toml") -> None:
    """A fifth above these seconds; parts that were not run keep theirs, those without a file go."""
    found = {part: budget for part, budget in read_budgets(file).items() if (TESTS / part.file).exists()}
    found |= {part: math.ceil(SPARE * took) for part, took in seconds.items() if not part.file.startswith("gpu/")}
    lines = [HEAD]
    for tier in (FAST, NIGHTLY, LAB):
        of_tier = sorted((part.file, budget) for part, budget in found.items() if part.tier == tier)
        lines += [f"\n[{tier}]\n", *(f'"{name}" = {max(1, round(budget))}\n' for name, budget in of_tier)]
    file.write_text("".join(lines), encoding="utf-8")


def tier_of(keywords: Container[str], file: str) -> str:
    """The tier of a file's test with these keywords, its marker among them."""
    if file.startswith("lab/"):
        return LAB
    return NIGHTLY if NIGHTLY in keywords else FAST


def is_left_out(path: Path) -> bool:
    """True if budgets.toml lists a file of tests/ in other tiers than `make test`'s alone."""
    tiers = _tiers().get(path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else "")
    return tiers is not None and FAST not in tiers


@functools.cache
def _tiers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for part in read_budgets():
        found.setdefault(part.file, set()).add(part.tier)
    return found


def file_of(nodeid: str) -> str:
    """The file of a test, as budgets name it, whatever folder pytest was started in."""
    return nodeid.partition("::")[0].rpartition("tests/")[2]


def scope_of(file: str) -> str:
    """Tests of one scope run on one worker: a file, because its tests share the job that it starts.

    Files beside the folders share what they parse. On a small machine all files of four ranks are one scope: two such
    jobs at a time would crowd it, and every collective would then wait for the scheduler.
    """
    if "/" not in file:
        return "sources"
    is_crowded = (os.cpu_count() or 1) < 8 and PurePosixPath(file).stem in FOUR_RANKS
    return "four ranks" if is_crowded else file


def order(parts: Iterable[Part], budgets: Mapping[Part, float]) -> list[str]:
    """Files in the order they are begun in: what starts no process first; of each kind the longest scope, then file.

    A typing error shows early, and no long file is left to one worker when the others have nothing to do.
    """
    of_file: dict[str, float] = {}
    of_scope: dict[str, float] = {}
    for part in dict.fromkeys(parts):
        seconds = budgets.get(part, 0.0)
        of_file[part.file] = of_file.get(part.file, 0.0) + seconds
        of_scope[scope_of(part.file)] = of_scope.get(scope_of(part.file), 0.0) + seconds

    def place(file: str) -> tuple:
        starts_jobs = "/" in file and not {"unit", "grading"} & set(PurePosixPath(file).parts)
        return starts_jobs, -of_scope[scope_of(file)], scope_of(file), -of_file[file]

    return sorted(of_file, key=place)


def over_budget(seconds: Mapping[Part, float], budgets: Mapping[Part, float]) -> tuple[float, list[str]]:
    """The slowness of this machine, at least 1, and a line for every part that is slower still, the worst first."""
    known = {part: took for part, took in seconds.items() if budgets.get(part, 0.0) >= FEW_S}
    slowness = 1.0
    if len(known) >= MANY_FILES:
        slowness = max(1.0, statistics.median(took / budgets[part] for part, took in known.items()))
    over = []
    for part, took in seconds.items():
        budget = budgets.get(part, 0.0)
        if took > max(FEW_S, HEADROOM * slowness * budget):
            over.append((took - budget, f"{part.file} ({part.tier}): {took:.0f} s, budget {budget:.0f} s"))
    return slowness, [line for _, line in sorted(over, reverse=True)]
