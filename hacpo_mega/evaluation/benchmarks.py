"""Benchmarks: the paper's seven as data, and the files they are found in.

Elsewhere: row layouts of a file (data/), prompt formats (config/tables/prompting.py).
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hacpo_mega.data.dataset_checks import Repetition, contradictions
from hacpo_mega.data.datasets import LAYOUTS, Layout, Problem, read_dataset
from hacpo_mega.data.reading.files import DataProblem, PromptRow, describe
from hacpo_mega.data.reading.row_values import quoted

Headline = Literal["avg", "best", "maj"]


@dataclass(frozen=True)
class Benchmark:
    """Problems, answers per problem, and the score that stands for the benchmark.

    temperature   0 is greedy; more than one answer needs sampling
    relative      share of gold by which a number may be off, for the mathematical judges: of measured quantities
    num_repeated  rows of its file that repeat a problem, with the same gold: each problem counts once
    """

    name: str
    rows: tuple[PromptRow, ...] = ()
    num_answers: int = 1
    temperature: float = 0.0
    headline: Headline = "avg"
    relative: float = 0.0
    num_repeated: int = 0

    def __post_init__(self) -> None:
        if self.num_answers < 1 or self.temperature < 0.0:
            raise ValueError(
                f"{self.name}: {self.num_answers} answers at temperature {self.temperature:g}; needs at least one "
                "answer and a temperature of 0 or more"
            )
        if self.num_answers > 1 and self.temperature == 0.0:
            raise ValueError(
                f"{self.name}: {self.num_answers} answers at temperature 0 are the same answer {self.num_answers} "
                "times; give a temperature, or ask for one answer"
            )


def describe_benchmark(benchmark: Benchmark) -> dict[str, Any]:
    """A benchmark as settings record it; the problems by a hash of prompts and gold answers in order."""
    content = json.dumps([(row.id, row.text, row.gold) for row in benchmark.rows]).encode()
    return {
        "name": benchmark.name,
        "num_problems": len(benchmark.rows),
        "content": hashlib.sha256(content).hexdigest()[:16],
        "num_answers": benchmark.num_answers,
        "temperature": benchmark.temperature,
        "relative": benchmark.relative,
    }


class SuiteEntry(NamedTuple):
    """One benchmark of a suite without its rows, and where its file may lie below the user's folder, first found
    first."""

    benchmark: Benchmark
    places: tuple[str, ...]


# arXiv 2603.02604: best@30 on AIME2025, avg@1 elsewhere, answers up to 8,192 tokens. It prints no temperature for these
# numbers: one answer is greedy here, as in the authors' validation, and thirty are drawn at the training's temperature.
# Minerva's golds are physical quantities; the grader of arXiv 2206.14858, as it was published, compares them by
# numpy.isclose, whose relative tolerance is 1e-5.
PAPER_MAX_TOKENS = 8192
PAPER_SUITE = (
    SuiteEntry(Benchmark("math500"), ("math500/test", "math500", "MATH-500/test", "math_oai/test")),
    SuiteEntry(Benchmark("math"), ("math/test", "math/harness_test", "math/MATH_original_test", "math", "MATH/test")),
    SuiteEntry(Benchmark("gsm8k"), ("gsm8k/test", "gsm8k")),
    SuiteEntry(
        Benchmark("aime25", num_answers=30, temperature=1.0, headline="best"),
        ("aime25/test", "aime25/nemo_test", "aime25", "aime2025/test"),
    ),
    SuiteEntry(Benchmark("amc23"), ("amc23/test", "amc23")),
    SuiteEntry(
        Benchmark("minerva_math", relative=1e-5), ("minerva_math/test", "minerva_math/qwen_test", "minerva_math")
    ),
    SuiteEntry(Benchmark("olympiadbench"), ("olympiadbench/test", "olympiadbench")),
)
SUFFIXES = (".jsonl", ".parquet", ".json", ".txt", ".tar.gz")


def find_suite(suite: Sequence[SuiteEntry], folder: Path) -> dict[str, Path]:
    """The file of every entry below `folder`, by name. One ValueError names all that are not there."""
    found = {entry.benchmark.name: _first_file(folder, entry.places) for entry in suite}
    missing = [(one.name, places) for one, places in suite if found[one.name] is None]
    if missing:
        lines = [f"  {name}: none of {', '.join(places)} ({'|'.join(SUFFIXES)})" for name, places in missing]
        raise ValueError(f"{folder} lacks {len(missing)} of {len(suite)} benchmarks:\n" + "\n".join(lines))
    return found


def _first_file(folder: Path, places: Iterable[str]) -> Path | None:
    candidates = (folder / f"{place}{suffix}" for place in places for suffix in SUFFIXES)
    return next((file for file in candidates if file.is_file()), None)


def load_suite(suite: Sequence[SuiteEntry], folder: Path, limit: int | None = None) -> tuple[Benchmark, ...]:
    """The benchmarks of a suite, of each the first `limit` problems. ValueError for missing files and for bad rows."""
    read = {name: read_rows(file) for name, file in find_suite(suite, folder).items()}
    return tuple(
        replace(one, rows=read[one.name].rows[:limit], num_repeated=read[one.name].num_repeated) for one, _ in suite
    )


def load_benchmarks(
    files: Sequence[Path],
    num_answers: int,
    temperature: float,
    limit: int | None = None,
    layouts: Mapping[str, Layout] = LAYOUTS,
) -> tuple[Benchmark, ...]:
    """Every file as a benchmark of its own (`names_of`). ValueError for bad rows."""
    return tuple(
        Benchmark(name, read.rows[:limit], num_answers, temperature, num_repeated=read.num_repeated)
        for name, read in zip(names_of(files), [read_rows(file, layouts) for file in files])
    )


class ReadRows(NamedTuple):
    """The different problems of a file, in order, and how many of its rows repeat one of them."""

    rows: tuple[PromptRow, ...]
    num_repeated: int


def read_rows(file: Path, layouts: Mapping[str, Layout] = LAYOUTS) -> ReadRows:
    """The problems of a file in one of the layouts. One ValueError names its bad rows, and rows that repeat an earlier
    text with another gold, since either may be right."""
    dataset = read_dataset(file, layouts)
    if dataset.defects:
        raise ValueError(describe(dataset.defects))
    groups: dict[str, list[Problem]] = defaultdict(list)
    for problem in dataset.problems:
        groups[problem.prompt].append(problem)
    disputed = [found for group in groups.values() for found in contradictions(group)]
    if disputed:
        raise ValueError(describe([_contradiction(file, found) for found in disputed]))
    return ReadRows(tuple(group[0].row for group in groups.values()), len(dataset.problems) - len(groups))


def _contradiction(file: Path, found: Repetition) -> DataProblem:
    place, earlier = (file / p.source.partition("#")[0] if file.is_dir() else file for p in (found.second, found.first))
    golds = f"{quoted(found.second.gold)} here, {quoted(found.first.gold)} there"
    what = f"has the problem of {earlier}:{found.first.line} again, with another gold ({golds}); keep one of them"
    return DataProblem(place, found.second.line, None, what)


def names_of(files: Sequence[Path]) -> tuple[str, ...]:
    """Names that are file names too: the stem, with as many folders before it as it takes to tell all files apart.

    A stem that says only which split it is ("test") always takes its folder along. ValueError for a file given twice.
    """
    parts = [(*file.resolve().parts[1:-1], file.name.split(".")[0]) for file in files]
    if len(set(parts)) < len(parts):
        raise ValueError(f"a benchmark file is given twice: {', '.join(map(str, files))}")
    depth = 2 if any(path[-1] in ("test", "train", "dev", "validation") for path in parts) else 1
    while len({path[-depth:] for path in parts}) < len(parts):
        depth += 1
    return tuple("_".join(path[-depth:]) for path in parts)
