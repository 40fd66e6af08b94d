"""Data sets with defects: every one is named with its line, in few words, and the good rows still come."""

import gzip
import io
import json
import tarfile
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest
from dataset_rows import VERL, problem, write_lines

from hacpo_mega.data.dataset_checks import (
    repetitions,
)
from hacpo_mega.data.datasets import METADATA_TYPES, layouts_of, read_dataset
from hacpo_mega.data.reading.row_values import quoted


def test_defects_are_named_with_their_line_and_good_rows_still_come(tmp_path):
    file = write_lines(
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
    assert [(d.line, d.field, d.reason.split(" (")[0].split(": Unt")[0]) for d in found.defects] == [
        (2, None, "has no complete \\boxed{} to take the answer from"),
        (3, None, "boxes nothing: the last \\boxed{} is empty"),
        (4, None, "has no complete \\boxed{} to take the answer from"),
        (5, None, "is a row of layout 'gsm8k' in a file of 'math'"),
        (6, None, "fits no known layout"),
        (7, None, "invalid JSON"),
        (8, "problem", "has a message 1 that is a str, needs role and content"),
        (9, None, "is malformed"),
        (10, "problem", "is empty"),
    ]


def test_layout_specific_defects(tmp_path):
    either = {**VERL, "reward_model": {"ground_truth": '["1", "2"]'}}
    assert "has 2 final answers" in read_dataset(write_lines(tmp_path / "a.jsonl", either)).defects[0].reason
    two = {"question": "Q", "final_answer": ["1", "2"]}
    assert "has 2 final answers" in read_dataset(write_lines(tmp_path / "b.jsonl", two)).defects[0].reason
    no_target = {**VERL, "reward_model": {"ground_truth": {"question": "q"}}}
    assert (
        "malformed (KeyError: 'target')" in read_dataset(write_lines(tmp_path / "c.jsonl", no_target)).defects[0].reason
    )


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("images", ["a.png"], "is not read, for agents see text alone"),
        ("options", ["2", "3"], "is not in the prompt: write it there"),
        ("choices", {"A": "2", "B": "4"}, "is not in the prompt"),
        ("choices", {"text": ["2", "4"], "label": ["A", "B"]}, "is not in the prompt"),
        ("passage", "Two ones make a two.", "is not in the prompt"),
        ("image_1", {"bytes": "x", "path": None}, "is not read, for agents see text alone"),
        ("picture", [{"bytes": None, "path": "a.png"}], "is not read, for agents see text alone"),
    ],
)
def test_what_a_row_shows_beside_its_text_is_not_left_out(tmp_path, field, value, said):
    for row in ({"problem": "What is 1+1? A) 2", "answer": "2"}, {"prompt": "1+1? A) 2", "answer": "2"}):
        (defect,) = read_dataset(write_lines(tmp_path / "a.jsonl", {**row, field: value})).defects
        assert defect.field == field and said in defect.reason


def test_what_a_row_shows_beside_its_text_may_be_in_it(tmp_path):
    shown = {"choices": {"text": ["2", "3"], "label": ["A", "B"]}, "context": "Two  ones.", "image": "a container's"}
    row = {"question": "Two\nones. What is 1+1? A) 2 B) 3", "answer": "A", "image_1": None, **shown}
    assert len(read_dataset(write_lines(tmp_path / "a.jsonl", row, {**row, "context": ""})).problems) == 2
    (defect,) = read_dataset(write_lines(tmp_path / "b.jsonl", row | {"question": "<image>" + row["question"]})).defects
    assert defect.field == "image"


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("main/train-00000-of-00001.jsonl", "main/test-00000-of-00001.jsonl"),
        ("MATH/train/algebra/1.json", "MATH/test/algebra/1.json"),
    ],
)
def test_a_folder_of_several_splits_is_not_read_as_one(tmp_path, names):
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(tmp_path / name, {"question": f"Q{number}", "answer": "1"})
    (defect,) = read_dataset(tmp_path).defects
    assert str(defect) == f"{tmp_path}: holds the splits test, train; give the files or the folder of one"
    (tmp_path / names[1]).unlink()
    assert [found.prompt for found in read_dataset(tmp_path).problems] == ["Q0"]


def test_damaged_containers(tmp_path):
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        raw = json.dumps({"problem": "P" * 5000, "solution": "\\boxed{1}"}).encode()
        member = tarfile.TarInfo("1.json")
        member.size = len(raw)
        archive.addfile(member, io.BytesIO(raw))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes((tmp_path / "whole.tar.gz").read_bytes()[:60])
    assert "unreadable archive" in read_dataset(cut).defects[0].reason
    (tmp_path / "x.json").write_text('[{"problem": "P", "solution": "\\\\boxed{1}"}, 3]')
    found = read_dataset(tmp_path / "x.json")
    assert (len(found.problems), found.defects[0].reason) == (1, "is a JSON int, needs an object with fields")
    assert read_dataset(tmp_path / "absent.jsonl").defects[0].reason == "does not exist"
    (tmp_path / "none").mkdir()
    assert read_dataset(tmp_path / "none").defects[0].reason == "has no rows"
    (tmp_path / "b.json").write_text("{")
    assert "invalid JSON" in read_dataset(tmp_path / "b.json").defects[0].reason


@pytest.mark.parametrize("kind", [*METADATA_TYPES, tarfile.GNUTYPE_SPARSE])
def test_a_header_of_an_archive_that_fills_the_memory_is_not_read(tmp_path, kind):
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 2**32
    packed = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(2**20))
    (tmp_path / "a.tar.gz").write_bytes(packed)
    (defect,) = read_dataset(tmp_path / "a.tar.gz").defects
    assert "unreadable archive: holds a " in defect.reason


@pytest.mark.nightly
def test_an_archive_of_empty_files_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("hacpo_mega.data.reading.tables.ALWAYS_UNPACKED_BYTES", 100 * tarfile.BLOCKSIZE)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for _ in range(20_000):
            archive.addfile(tarfile.TarInfo("x.txt"))
    (defect,) = read_dataset(tmp_path / "a.tar.gz").defects
    assert "unpacks to more than 200 times its size" in defect.reason


@pytest.mark.nightly
def test_a_parquet_column_that_fills_the_memory_is_not_read(tmp_path):
    """200 different texts of 1 MB, each its own repetition: 4 kB a row on disk, and all of them one group."""
    table = pyarrow.table({"prompt": [f"{n:03}" * 350_000 for n in range(200)], "answer": ["1"] * 200})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    (defect,) = read_dataset(tmp_path / "a.parquet").defects
    assert "one column of a row group unpacks to 210," in defect.reason and "more than 200 times" in defect.reason


def test_members_of_an_archive_that_are_packed_again_are_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
            raw = json.dumps({"problem": "P", "answer": "1"}).encode()
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    found = read_dataset(tmp_path / "a.tar.gz")
    assert len(found.problems) == 1
    assert [str(defect).partition("a.tar.gz/")[2].split(":")[0] for defect in found.defects] == [
        "b.jsonl.gz",
        "c.parquet",
    ]


@pytest.mark.parametrize("field", ["solution", "id", "level"])
def test_half_a_surrogate_pair_is_named_in_every_field_that_is_kept(tmp_path, field):
    row = {"problem": "p", "answer": "1", field: "x \ud800"}
    (defect,) = read_dataset(write_lines(tmp_path / "a.jsonl", row)).defects
    assert (defect.line, defect.field) == (1, field)


def test_what_is_damaged_is_named_where_it_lies(tmp_path):
    text = b"\n".join(json.dumps({"prompt": f"P{i}" * 50, "answer": "1"}).encode() for i in range(2000))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(text, compresslevel=0)[: len(text) // 2])
    found = read_dataset(tmp_path / "cut.jsonl.gz")
    (defect,) = found.defects
    assert 0 < len(found.problems) < 2000 and defect.line == len(found.problems) + 1
    assert "unreadable from here: Compressed file ended" in defect.reason
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"[" + text + b"]")[:-20])
    assert "unreadable: Compressed file ended" in read_dataset(tmp_path / "cut.json.gz").defects[0].reason
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(write_lines(tmp_path / "bad.jsonl", {"prompt": "P", "answer": "1"}, "{"), "d/bad.jsonl")
    (defect,) = read_dataset(tmp_path / "a.tar").defects
    assert str(defect).startswith(f"{tmp_path}/a.tar/d/bad.jsonl:2: invalid JSON")
    for name in ("empty.jsonl", "empty.json", "empty.parquet", "empty.tar.gz", "empty.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
        found = read_dataset(tmp_path / name)
        assert not found.problems and len(found.defects) == 1, name


@pytest.mark.parametrize(
    "gold", [[70], True, {"a": 1}, float("nan"), float("inf"), [], ["1", "2"], "", " ", "\ud800", [[1]]]
)
@pytest.mark.parametrize(
    "row",
    [
        lambda gold: {"prompt": "P", "answer": gold},
        lambda gold: {"question": "P", "answer": gold},
        lambda gold: {"problem": "P", "answer": gold},
        lambda gold: {"problem": "P", "expected_answer": gold},
        lambda gold: {"question": "P", "final_answer": gold},
        lambda gold: {**VERL, "reward_model": {"ground_truth": gold}},
        lambda gold: {**VERL, "reward_model": {"ground_truth": {"target": gold}}},
    ],
)
def test_what_is_no_answer_is_refused_with_its_line(tmp_path, gold, row):
    file = write_lines(tmp_path / "f.jsonl", row("1"), row(gold))
    found = read_dataset(file)
    if row("1").keys() & {"final_answer", "reward_model"} and gold == [70]:  # they may keep it in a list of one
        assert [p.gold for p in found.problems] == ["1", "70"]
        return
    assert [p.gold for p in found.problems] == ["1"]
    assert [(defect.file, defect.line) for defect in found.defects] == [(file, 2)]


def test_list_columns_of_parquet_are_no_golds(tmp_path):
    table = pyarrow.table({"prompt": ["P", "Q"], "answer": [["1"], ["2", "3"]]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    found = read_dataset(tmp_path / "t.parquet")
    assert [str(d).partition(": ")[2] for d in found.defects] == [
        "field 'answer' is a list, needs a text or a number (found ['1'])",
        "field 'answer' is a list, needs a text or a number (found ['2', '3'])",
    ]


def test_two_columns_of_one_name_are_refused(tmp_path):
    """A row would have the last of them, and nobody is asked which is meant."""
    table = pyarrow.Table.from_arrays([pyarrow.array(["P"])] * 3, ["prompt", "answer", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    (defect,) = read_dataset(tmp_path / "t.parquet").defects
    assert str(defect) == (
        f"{tmp_path}/t.parquet:1: has two columns 'prompt', and a row is read by names: rename one of them"
    )
    (tmp_path / "t.jsonl").write_text('{"prompt": "P", "answer": "1", "prompt": "Q"}\n')
    (defect,) = read_dataset(tmp_path / "t.jsonl").defects
    assert "the key 'prompt' is given twice" in str(defect)


@pytest.mark.parametrize("layouts", [partial(layouts_of, "prompt", "prompt", only=only) for only in (True, False)])
def test_one_field_is_not_both_prompt_and_gold(layouts):
    with pytest.raises(ValueError, match="the field 'prompt' is read as the prompt and as the gold answer"):
        layouts()


def test_a_message_about_five_megabytes_is_short(tmp_path):
    huge = "x" * 5_000_000
    for row in (
        {"prompt": [huge], "answer": "1"},
        {"prompt": "P", "answer": [huge]},
        {huge: 1},
        {f"{i}": "" for i in range(1000)},
        {"problem": "P", "solution": huge},
        {**VERL, "prompt": [{"role": huge, "content": "c"}]},
    ):
        (defect,) = read_dataset(write_lines(tmp_path / "huge.jsonl", row)).defects
        assert len(str(defect)) < 400 + len(str(tmp_path)), str(defect)[:500]
    two = [problem("P", huge), problem("P", "1", 2)]
    assert len(str(repetitions(two)[0])) < 300


@pytest.mark.parametrize("value", ["a", "x" * 80, "'\"\n", 7, None, [1, "b"]])
def test_short_values_are_quoted_whole(value):
    assert quoted(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 81, ["x" * 100], "\n" * 80, "\U0001f600" * 100])
def test_long_values_are_cut(value):
    assert quoted(value).endswith("...") and len(quoted(value)) <= 83
