"""The public mathematics files as they are: rows, golds, and what they share."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from repository import SHARED

from hacpo_mega.data.dataset_checks import (
    normalised,
    overlap,
    without_overlap,
)
from hacpo_mega.data.datasets import read_dataset

pytestmark = pytest.mark.nightly

REAL = SHARED / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"real mathematics files are not in {REAL}")
COUNTS = {  # of SOURCES.md beside the files: rows, of which without an answer in the box
    "math/MATH_original_train.tar.gz": (7500, 2),
    "math/MATH_original_test.tar.gz": (5000, 0),
    "math/harness_test.jsonl": (5000, 0),
    "math/verl_train.parquet": (7500, 4),
    "math500/test.jsonl": (500, 0),
    "gsm8k/train.jsonl": (7473, 0),
    "gsm8k/test.jsonl": (1319, 0),
    "amc23/test.jsonl": (40, 0),
    "aime24/qwen_test.jsonl": (30, 0),
    "aime24/nemo_test.txt": (30, 0),
    "aime25/nemo_test.txt": (30, 0),
    "minerva_math/qwen_test.jsonl": (272, 0),
    "olympiadbench/test.jsonl": (675, 0),
    "model_outputs/qwen_math_cot_100.jsonl": (100, 0),
}


@pytest.fixture(scope="module")
def datasets():
    return {name: read_dataset(REAL / name) for name in COUNTS}


@real
def test_real_files_have_the_rows_they_should(datasets):
    """Two MATH solutions box nothing, and verl's copy lost the answer of two more; each is named."""
    for name, (num_rows, num_empty) in COUNTS.items():
        found = datasets[name]
        assert len(found.problems) + len(found.defects) == num_rows, name
        boxes = ["boxes nothing: the last \\boxed{} is empty", "field 'reward_model.ground_truth' is empty"]
        expected = boxes[name.endswith("parquet")] if num_empty else ""
        assert [str(d).split(": ", 1)[1] for d in found.defects] == [expected] * num_empty, name
    members = [str(d.file.relative_to(REAL)) for d in datasets["math/MATH_original_train.tar.gz"].defects]
    assert members == [f"math/MATH_original_train.tar.gz/MATH/train/number_theory/{n}.json" for n in (7115, 7117)]


@real
def test_real_golds(datasets):
    assert (
        sum("," in json.loads(line)["answer"].rpartition("####")[2] for line in (REAL / "gsm8k/train.jsonl").open())
        == 79
    )
    for name in ("gsm8k/train.jsonl", "amc23/test.jsonl", "aime25/nemo_test.txt"):  # aime24 has 025, a text
        assert all(str(int(p.gold)) == p.gold for p in datasets[name].problems), name
    twice = [
        sorted(int(p.gold) for p in datasets[f"aime24/{n}"].problems) for n in ("qwen_test.jsonl", "nemo_test.txt")
    ]
    assert twice[0] == twice[1]


@real
def test_real_overlaps(datasets):
    """MATH-500 is in the test split, and all but two problems of it not in train; verl's prompts are the train problems
    behind an instruction. Normalised text alone finds 3 of the 21 problems that train and test share."""
    train, test = (datasets[f"math/MATH_original_{split}.tar.gz"].problems for split in ("train", "test"))
    math500 = datasets["math500/test.jsonl"].problems
    assert len(overlap(test, math500)) == 500
    leaked = {r.second.source.partition("#")[2] for r in overlap(train, math500)}
    assert leaked == {"test/intermediate_algebra/337.json", "test/algebra/170.json"}
    verl = overlap(train, datasets["math/verl_train.parquet"].problems)
    assert (len(verl), {r.kind for r in verl}) == (7496, {"same normalised"})
    assert len(overlap(test, datasets["math/harness_test.jsonl"].problems)) == 5000
    found = overlap(train, test)
    assert {r.second.source for r in found if r.kind == "same normalised"} == {
        f"MATH/test/{name}.json" for name in ("algebra/636", "intermediate_algebra/965", "precalculus/24307")
    }
    assert Counter(r.kind for r in found) == {"same normalised": 3, "contained": 18}
    assert overlap(without_overlap(train, test), test) == []


@real
def test_real_copies_are_found_and_nothing_else(datasets):
    """Two editions of AIME 2024 share 23 of 30 by normalised text; benchmarks of other sources share nothing."""
    editions = [datasets[f"aime24/{name}"].problems for name in ("qwen_test.jsonl", "nemo_test.txt")]
    assert Counter(r.kind for r in overlap(*editions)) == {"same text": 3, "same normalised": 20, "contained": 7}
    train = (*datasets["math/MATH_original_train.tar.gz"].problems, *datasets["gsm8k/train.jsonl"].problems)
    names = ("aime24/qwen_test.jsonl", "aime25/nemo_test.txt", "amc23/test.jsonl", "minerva_math/qwen_test.jsonl")
    assert overlap(train, [p for name in (*names, "gsm8k/test.jsonl") for p in datasets[name].problems]) == []
    olympiad = overlap(train, datasets["olympiadbench/test.jsonl"].problems)
    assert [(r.kind, r.first.gold in r.second.gold) for r in olympiad] == [
        ("contained", True), ("contained", True), ("contained", True), ("same normalised", True), ("contained", True)
    ]  # fmt: skip


@real
def test_edited_copies_of_a_real_benchmark_are_found(datasets):
    """All 272 Minerva problems, rewritten as an editor would: fonts, spacing, units without LaTeX, a new first line."""
    minerva = datasets["minerva_math/qwen_test.jsonl"].problems
    edited = [
        replace(p, prompt="Give the final value.\n" + re.sub(r"\\mathrm\{~?([A-Za-z/ ]+)\}", r"\\text{ \1}", p.prompt))
        for p in minerva
    ]
    assert not {normalised(p.prompt) for p in minerva} & {normalised(p.prompt) for p in edited}
    found = overlap(edited, minerva)
    assert [r.second.line for r in found] == [p.line for p in minerva]
    assert without_overlap(edited, minerva) == ()
