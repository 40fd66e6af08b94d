"""Dataset readers: every public layout written small, every defect named with its line, and the real files' counts."""

import io
import json
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
from repository import SHARED

from hacpo_mega.commands.inspect_data import inspect_dataset, inspect_overlap
from hacpo_mega.data.dataset_checks import (
    deduplicated,
    normalised,
    overlap,
    prompt_lengths,
    repetitions,
    without_overlap,
)
from hacpo_mega.data.datasets import Problem, read_dataset, write_dataset
from hacpo_mega.data.files import content_id, load_prompts

REAL = SHARED / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"real mathematics files are not in {REAL}")


def lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


VERL = {
    "prompt": [{"role": "user", "content": "What is $1+1$?"}],
    "reward_model": {"style": "rule", "ground_truth": {"question": "q", "solution": "s", "target": "2"}},
}


@pytest.mark.parametrize(
    "layout, record, prompt, answer",
    [
        ("math", {"problem": "P", "solution": "so $\\boxed{\\frac{1}{2}}$", "level": "Level 2"}, "P", "\\frac{1}{2}"),
        ("math", {"problem": "P", "solution": "so $\\boxed 5$."}, "P", "5"),
        ("answered", {"problem": "P", "answer": 27.0, "question": "P"}, "P", "27"),
        ("answered", {"problem": "P", "answer": "025", "solution": "s"}, "P", "25"),
        (
            "answered",
            {"problem": "P", "answer": "\\left( 3, 0 \\right)", "unique_id": "u"},
            "P",
            "\\left( 3, 0 \\right)",
        ),
        ("gsm8k", {"question": "Q", "answer": "<<1+1=2>>2\n#### 1,002"}, "Q", "1002"),
        ("nemo", {"problem": "P", "expected_answer": "73", "reference_solution": "r"}, "P", "73"),
        ("olympiadbench", {"question": "Q", "final_answer": ["$1$"], "context": None}, "Q", "$1$"),
        ("olympiadbench", {"question": "Q", "final_answer": ["2"], "context": "C"}, "C\n\nQ", "2"),
        ("verl", VERL, "What is $1+1$?", "2"),
        ("verl", {**VERL, "reward_model": {"ground_truth": "3"}}, "What is $1+1$?", "3"),
        ("plain", {"prompt": "P", "answer": 7}, "P", "7"),
        ("question", {"question": "Q", "answer": "7"}, "Q", "7"),
    ],
)
def test_every_layout(tmp_path, layout, record, prompt, answer):
    found = read_dataset(lines(tmp_path / "f.jsonl", record))
    assert (found.layout, found.defects) == (layout, ())
    (problem,) = found.problems
    assert (problem.prompt, problem.gold, problem.id, problem.line) == (prompt, answer, content_id(prompt), 1)


def test_containers_hold_the_same_problems(tmp_path):
    records = [
        {"problem": f"P{i}", "solution": f"\\boxed{{{i}}}", "type": "Algebra", "level": "Level 1"} for i in range(4)
    ]
    folder = tmp_path / "MATH" / "train" / "algebra"
    folder.mkdir(parents=True)
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        for i, record in enumerate(records):
            raw = json.dumps(record).encode()
            (folder / f"{i}.json").write_bytes(raw)
            member = tarfile.TarInfo(f"MATH/train/algebra/{i}.json")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "m.parquet")
    (tmp_path / "m.json").write_text(json.dumps(records, indent=1))
    lines(tmp_path / "m.jsonl", *records)
    lines(tmp_path / "lines.json", *records)
    expected = [(f"P{i}", str(i), "Algebra", "Level 1") for i in range(4)]
    for name in ("MATH", "m.tar.gz", "m.parquet", "m.json", "m.jsonl", "lines.json"):
        found = read_dataset(tmp_path / name)
        assert not found.defects, name
        assert [(p.prompt, p.gold, p.subject, p.level) for p in found.problems] == expected, name
        assert [p.line for p in found.problems] == [1, 2, 3, 4], name


def test_what_is_written_is_read_by_a_run(tmp_path):
    found = read_dataset(
        lines(
            tmp_path / "in.jsonl",
            {"problem": "P é", "solution": "\\boxed{1}"},
            {"problem": "Q", "solution": "\\boxed{2}"},
        )
    )
    write_dataset(found.problems, tmp_path / "out.jsonl")
    assert [(r.id, r.text, r.gold) for r in load_prompts([tmp_path / "out.jsonl"])] == [
        (content_id("P é"), "P é", "1"),
        (content_id("Q"), "Q", "2"),
    ]
    again = read_dataset(tmp_path / "out.jsonl")
    assert [(p.id, p.prompt, p.gold, p.solution) for p in again.problems] == [
        (p.id, p.prompt, p.gold, p.solution) for p in found.problems
    ]


def test_defects_are_named_with_their_line_and_good_rows_still_come(tmp_path):
    file = lines(
        tmp_path / "bad.jsonl",
        {"problem": "fine", "solution": "\\boxed{1}"},
        {"problem": "no box", "solution": "it is 1"},
        {"problem": "empty box", "solution": "\\boxed{}"},
        {"problem": "cut", "solution": "\\boxed{1"},
        {"question": "other layout", "answer": "#### 2"},
        {"text": "no layout"},
        '{"problem": "trunc',
        {"problem": ["a list"], "solution": "\\boxed{1}"},
        {"problem": "P", "solution": 7},
        {"problem": "", "solution": "\\boxed{1}"},
    )
    found = read_dataset(file)
    assert [p.prompt for p in found.problems] == ["fine"]
    assert [(d.line, d.field, d.what.split(" (")[0].split(": Unt")[0]) for d in found.defects] == [
        (2, None, "has no complete \\boxed{} to take the answer from"),
        (3, "answer", "is empty"),
        (4, None, "has no complete \\boxed{} to take the answer from"),
        (5, None, "is a row of layout 'gsm8k' in a file of 'math'"),
        (6, None, "fits no known layout"),
        (7, None, "invalid JSON"),
        (8, "prompt", "is ['a list'], needs text"),
        (9, None, "is malformed"),
        (10, "prompt", "is empty"),
    ]


def test_layout_specific_defects(tmp_path):
    chat = {**VERL, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    assert "messages of system, user" in read_dataset(lines(tmp_path / "a.jsonl", chat)).defects[0].what
    two = {"question": "Q", "final_answer": ["1", "2"]}
    assert "has 2 final answers" in read_dataset(lines(tmp_path / "b.jsonl", two)).defects[0].what
    no_target = {**VERL, "reward_model": {"ground_truth": {"question": "q"}}}
    assert "malformed (KeyError: 'target')" in read_dataset(lines(tmp_path / "c.jsonl", no_target)).defects[0].what


def test_damaged_containers(tmp_path):
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        raw = json.dumps({"problem": "P" * 5000, "solution": "\\boxed{1}"}).encode()
        member = tarfile.TarInfo("1.json")
        member.size = len(raw)
        archive.addfile(member, io.BytesIO(raw))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes((tmp_path / "whole.tar.gz").read_bytes()[:60])
    assert "unreadable archive" in read_dataset(cut).defects[0].what
    (tmp_path / "x.json").write_text('[{"problem": "P", "solution": "\\\\boxed{1}"}, 3]')
    found = read_dataset(tmp_path / "x.json")
    assert (len(found.problems), found.defects[0].what) == (1, "x.json: is a JSON int, needs an object")
    assert read_dataset(tmp_path / "absent.jsonl").defects[0].what == "does not exist"
    (tmp_path / "none").mkdir()
    assert read_dataset(tmp_path / "none").defects[0].what == "has no rows"
    (tmp_path / "b.json").write_text("{")
    assert "invalid JSON" in read_dataset(tmp_path / "b.json").defects[0].what


def problem(prompt, answer="1", line=1):
    return Problem(content_id(prompt), prompt, answer, source="f", line=line)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("What is $1+1$?", "what is  1 + 1 ?", True),
        ("Find $\\left(x\\right)$.", "Find $(x)$", True),
        (
            "Find $\\dfrac12$. Let's think step by step and output the final answer within \\boxed{}.",
            "Find $\\frac12$.",
            True,
        ),
        ("Compute $\\tan 22.5^\\circ.$", "Compute $\\tan 225^\\circ$.", False),
        ("Add 1 2", "Add 12", False),
        ("Find x+1", "Find x-1", False),
        ("Find $f(x)$", "Find $g(x)$", False),
    ],
)
def test_normalised_text(one, other, same):
    assert (normalised(one) == normalised(other)) == same


def test_repetitions_overlap_and_what_is_left():
    training = [problem("A?", "1", 1), problem("B", "2", 2), problem("a", "3", 3), problem("B", "2", 4)]
    found = repetitions(training)
    assert [(r.first.line, r.second.line, r.exact, r.agrees) for r in found] == [
        (1, 3, False, False),
        (2, 4, True, True),
    ]
    assert str(found[0]) == "f:3 repeats f:1 but for spelling, with other answers ('1', '3')"
    assert [p.line for p in deduplicated(training)] == [1, 2]
    evaluation = [problem("b.", "2"), problem("C")]
    assert [(r.first.line, r.second.prompt) for r in overlap(training, evaluation)] == [(2, "b.")]
    assert [p.line for p in without_overlap(training, evaluation)] == [1, 3]


def test_lengths_by_hand():
    lengths = prompt_lengths([problem("a" * n) for n in range(1, 101)], Characters(), max_prompt_tokens=95)
    assert (lengths.median, lengths.percentile_99, lengths.longest, lengths.num_over_limit) == (51, 100, 100, 5)
    with pytest.raises(ValueError, match="no problems"):
        prompt_lengths([], Characters(), 95)


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
        assert [str(d).rpartition(":")[2].split(" ", 1)[1] for d in found.defects] == [
            "field 'answer' is empty"
        ] * num_empty


@real
def test_real_golds(datasets):
    assert (
        sum("," in json.loads(line)["answer"].rpartition("####")[2] for line in (REAL / "gsm8k/train.jsonl").open())
        == 79
    )
    for name in ("gsm8k/train.jsonl", "amc23/test.jsonl", "aime24/qwen_test.jsonl", "aime25/nemo_test.txt"):
        assert all(str(int(p.gold)) == p.gold for p in datasets[name].problems), name
    twice = [
        sorted(int(p.gold) for p in datasets[f"aime24/{n}"].problems) for n in ("qwen_test.jsonl", "nemo_test.txt")
    ]
    assert twice[0] == twice[1]


@real
def test_real_overlaps(datasets):
    """MATH-500 is in the test split and not in train; verl's prompts are the train problems behind an instruction."""
    train, test = (datasets[f"math/MATH_original_{split}.tar.gz"].problems for split in ("train", "test"))
    math500 = datasets["math500/test.jsonl"].problems
    assert len(overlap(test, math500)) == 500
    assert overlap(train, math500) == []
    assert len(overlap(train, datasets["math/verl_train.parquet"].problems)) == 7496
    assert len(overlap(test, datasets["math/harness_test.jsonl"].problems)) == 5000
    leaked = {r.second.source for r in overlap(train, test)}
    assert leaked == {
        f"MATH/test/{name}.json" for name in ("algebra/636", "intermediate_algebra/965", "precalculus/24307")
    }
    assert overlap(without_overlap(train, test), test) == []


class Characters:
    def encode_prompt(self, text):
        return list(text)


def test_inspection_in_words(tmp_path):
    records = [{"problem": f"P{'x' * i}", "solution": "\\boxed{1}", "type": "Algebra"} for i in range(8)]
    file = lines(tmp_path / "t.jsonl", *records, records[0], {**records[1], "solution": "\\boxed{2}"}, *["{"] * 7)
    found = inspect_dataset(file, {"a": Characters()}, max_prompt_tokens=7)
    text = "\n".join(found.lines).replace(str(tmp_path), "D")
    assert text.splitlines()[:4] == [
        "D/t.jsonl: 10 problems, layout math",
        "  subjects: Algebra 10",
        "  a: prompt tokens median 4, 99 % 8, longest 8; 1 over 7",
        "  7 cannot be used:",
    ]
    assert "    D/t.jsonl:11: invalid JSON" in text
    assert "    ... and 2 more" in text
    contradiction = "    t.jsonl:10 repeats t.jsonl:2 exactly, with other answers ('1', '2')"
    assert f"  1 repeated with another gold answer:\n{contradiction}" in text
    assert "  1 repeated:\n    t.jsonl:9 repeats t.jsonl:1 exactly" in text
    assert not found.is_sound
    assert inspect_dataset(lines(tmp_path / "ok.jsonl", *records), {}, 7).is_sound
    assert not inspect_dataset(tmp_path / "absent.jsonl", {"a": Characters()}, 7).is_sound


def test_inspection_of_overlap(tmp_path):
    training = lines(tmp_path / "t.jsonl", {"problem": "P?", "solution": "\\boxed{1}"})
    clean = lines(tmp_path / "c.jsonl", {"question": "Q", "answer": "#### 1"})
    leaky = lines(tmp_path / "l.jsonl", {"question": "p", "answer": "#### 1"}, {"question": "q", "answer": "#### 1"})
    assert inspect_overlap([training], [clean]).is_sound
    found = inspect_overlap([training], [clean, leaky])
    assert not found.is_sound
    assert found.lines[0] == f"none of {clean} in the training data"
    assert found.lines[1:] == (
        f"  1 of {leaky} also in the training data:",
        "    l.jsonl:1 repeats t.jsonl:1 but for spelling",
    )
