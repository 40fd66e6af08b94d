"""Dataset readers: every public layout and every container, written small."""

import gzip
import io
import json
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
from dataset_rows import VERL, problem, write_lines

from hacpo_grading.judgement import Asked
from hacpo_grading.texts.chat_messages import messages_text
from hacpo_grading.workers.grader_calls import GraderCall
from hacpo_mega.data.dataset_checks import (
    overlap,
)
from hacpo_mega.data.datasets import read_dataset, write_dataset
from hacpo_mega.data.reading.files import content_id, load_prompts

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    "layout, record, prompt, answer",
    [
        ("math", {"problem": "P", "solution": "so $\\boxed{\\frac{1}{2}}$", "level": "Level 2"}, "P", "\\frac{1}{2}"),
        ("math", {"problem": "P", "solution": "so $\\boxed 5$."}, "P", "5"),
        ("answered", {"problem": "P", "answer": 27.0, "question": "P"}, "P", "27"),
        ("answered", {"problem": "P", "answer": "025", "solution": "s"}, "P", "025"),  # a text stays as it is
        ("answered", {"problem": "P", "answer": "0007"}, "P", "0007"),
        (
            "answered",
            {"problem": "P", "answer": "\\left( 3, 0 \\right)", "unique_id": "u"},
            "P",
            "\\left( 3, 0 \\right)",
        ),
        ("gsm8k", {"question": "Q", "answer": "<<1+1=2>>2\n#### 1,002"}, "Q", "1002"),
        ("gsm8k", {"question": "Q", "answer": "both\n#### -1,234,567, 3,4"}, "Q", "-1234567, 3,4"),
        ("nemo", {"problem": "P", "expected_answer": "73", "reference_solution": "r"}, "P", "73"),
        ("olympiadbench", {"question": "Q", "final_answer": ["$1$"], "context": None}, "Q", "$1$"),
        ("olympiadbench", {"question": "Q", "final_answer": ["2"], "context": "C"}, "C\n\nQ", "2"),
        ("verl", VERL, "What is $1+1$?", "2"),
        ("verl", {**VERL, "reward_model": {"ground_truth": "3"}}, "What is $1+1$?", "3"),
        ("verl", {**VERL, "reward_model": {"ground_truth": '["10\\\\%"]'}}, "What is $1+1$?", "10\\%"),
        ("verl", {**VERL, "reward_model": {"ground_truth": ["3"]}}, "What is $1+1$?", "3"),
        ("verl", {**VERL, "reward_model": {"ground_truth": '["3'}}, "What is $1+1$?", '["3'),
        ("verl", {**VERL, "prompt": CHAT}, messages_text(CHAT), "2"),
        ("plain", {"prompt": "A) x", "answer": 7, "choices": ["x"]}, "A) x", "7"),
        ("plain", {"prompt": "P", "answer": 7}, "P", "7"),
        ("question", {"question": "Q", "answer": "7"}, "Q", "7"),
    ],
)
def test_every_layout(tmp_path, layout, record, prompt, answer):
    found = read_dataset(write_lines(tmp_path / "f.jsonl", record))
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
    write_lines(tmp_path / "m.jsonl", *records)
    write_lines(tmp_path / "lines.json", *records)
    expected = [(f"P{i}", str(i), "Algebra", "Level 1") for i in range(4)]
    for name in ("MATH", "m.tar.gz", "m.parquet", "m.json", "m.jsonl", "lines.json"):
        found = read_dataset(tmp_path / name)
        assert not found.defects, name
        assert [(p.prompt, p.gold, p.subject, p.level) for p in found.problems] == expected, name
        lines_of_files = [1, 1, 1, 1] if name in ("MATH", "m.tar.gz") else [1, 2, 3, 4]
        assert [p.line for p in found.problems] == lines_of_files, name


def test_what_is_written_is_read_by_a_run(tmp_path):
    found = read_dataset(
        write_lines(
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


def test_a_reward_function_of_verl_gets_its_fields_of_what_is_written(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float((data_source, solution_str, extra_info) == ('gsm8k', ground_truth['target'], {'index': 7}))\n"
    )
    row = {**VERL, "data_source": "gsm8k", "extra_info": {"index": 7}}
    write_dataset(read_dataset(write_lines(tmp_path / "in.jsonl", row)).problems, tmp_path / "out.jsonl")
    (prompt,) = load_prompts([tmp_path / "out.jsonl"])
    call = GraderCall(f"{tmp_path}/reward.py:compute_score", {})
    asked = [Asked(prompt.text, answer, prompt.gold, row=prompt.row) for answer in ("2", "3")]
    assert [outcome.reward for outcome in call.grade(asked)] == [1.0, 0.0]


def test_a_gold_with_letters_is_a_formula_and_no_choice():
    words = [f"word{'abcdefghijklmnopqrstuvwxyz'[i]}" for i in range(26)]
    text, edited = " ".join(words), " ".join([*words[:20], "other", *words[21:]])
    for gold, num_copies in ((r"\frac{2}{3} \frac{C}{S}", 1), ("C", 0), (r"\text{(C)}", 0)):
        assert len(overlap([problem(text, gold)], [problem(edited, gold)])) == num_copies


def golds(found):
    return [(p.prompt, p.gold, p.line) for p in found.problems]


def test_packed_and_odd_files_are_read(tmp_path):
    """gzip by content, an archive of lines, a folder of several kinds, a byte order mark, Windows line ends."""
    rows = [{"prompt": "P é", "answer": "1"}, {"prompt": "Q", "answer": 2}]
    text = "\n".join(map(json.dumps, rows)).encode()
    expected = [("P é", "1", 1), ("Q", "2", 2)]
    for name, raw in (
        ("a.jsonl.gz", gzip.compress(text)),
        ("misnamed.jsonl", gzip.compress(text)),
        ("a.json.gz", gzip.compress(json.dumps(rows).encode())),
        ("lines.json.gz", gzip.compress(text)),
        ("mark.jsonl", b"\xef\xbb\xbf" + text),
        ("mark.json", b"\xef\xbb\xbf" + json.dumps(rows).encode()),
        ("windows.jsonl", text.replace(b"\n", b"\r\n") + b"\r\n\r\n"),
    ):
        (tmp_path / name).write_bytes(raw)
        found = read_dataset(tmp_path / name)
        assert (golds(found), found.defects) == (expected, ()), name
    assert [r.gold for r in load_prompts([tmp_path / "a.jsonl.gz"])] == ["1", "2"]
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "mark.jsonl", "d/a.jsonl")
        archive.add(tmp_path / "mark.json", "d/b.json")
        archive.add(tmp_path / "mark.json", "d/readme.md")
    found = read_dataset(tmp_path / "a.tar.gz")
    assert (golds(found), found.defects) == (expected * 2, ())
    assert [p.source for p in found.problems] == ["d/a.jsonl"] * 2 + ["d/b.json"] * 2
    folder = tmp_path / "folder"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["P é", "Q"], "answer": ["1", "2"]}), folder / "a.parquet")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "notes.txt").write_text("no data")
    assert golds(found := read_dataset(folder)) == expected * 2 and found.defects == ()


def test_data_in_a_folder_that_is_not_read_is_named_once(tmp_path):
    for name in ("b.csv", "c.jsonl.zst", "d/e.parquet.gz", "LICENSE.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    there = read_dataset(tmp_path)
    assert list(map(str, there.defects)) == [
        f"{tmp_path / 'LICENSE.txt'}: is not read in a folder, nor are 3 others: give the files to be read"
    ]
    (tmp_path / "a.jsonl").write_text('{"prompt": "P", "answer": "1"}\n')
    there = read_dataset(tmp_path)
    assert golds(there) == [("P", "1", 1)]
    assert list(map(str, there.defects)) == [
        f"{tmp_path / 'b.csv'}: is not read in a folder, nor are 2 others: give the files to be read"
    ]
