"""Prompt files, saved folders and named data sets: equal rows from all of them, and every bad row named."""

import importlib.util
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from dataset_rows import VERL, check_data, write_lines

from hacpo_mega.config import RolloutConfig
from hacpo_mega.config.tables.schema import DataConfig, EvaluationConfig
from hacpo_mega.data.datasets import layouts_of, read_dataset
from hacpo_mega.data.prompt_sets import held_out_prompts, left_out_line
from hacpo_mega.data.reading.files import SeenPrompts, load_prompts, read_prompts


def test_json_lines_and_parquet_give_the_same_rows(tmp_path):
    records = [{"question": "2+2=", "gold": "4"}, {"question": "é 数\n", "gold": "x"}]
    lines = write_lines(tmp_path / "a.jsonl", *records)
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    rows = load_prompts([lines], "question", "gold")
    assert rows == load_prompts([table], "question", "gold")
    assert [(r.text, r.gold) for r in rows] == [("2+2=", "4"), ("é 数\n", "x")]
    assert rows[0].id == "20243c49d24c4af1"  # printf '2+2=' | sha256sum


def test_a_number_that_is_none_is_null_in_the_fields_of_a_row(tmp_path):
    """A table writes NaN for a gap, and the log of a run's answers holds every field of their row."""
    records = [{"prompt": "a", "answer": "1", "x": float("nan"), "y": [float("inf"), 0.5]}]
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a", "answer": "1", "x": NaN, "y": [Infinity, 0.5]}\n')
    for file in (table, lines):
        (row,) = load_prompts([file])
        assert row.row == '{"answer": "1", "x": null, "y": [null, 0.5]}'


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
def test_a_narrow_float_is_the_number_that_its_file_means(kind, tmp_path):
    """0.1 of 32 bits is 0.10000000149011612, which no answer is."""
    numbers = [0.1, None, -2.5, 3.0, 1234.0]
    golds = pyarrow.array(numbers, pyarrow.float64()).cast(kind)
    table = pyarrow.table({"prompt": list("abcde"), "answer": golds, "x": golds})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = read_prompts([tmp_path / "a.parquet"], "prompt", "answer")
    assert [row.gold for row in found.rows] == ["0.1", "-2.5", "3", "1234"]
    assert found.rows[0].row == '{"answer": 0.1, "x": 0.1}' and len(found.problems) == 1


def test_numbers_are_answers_and_a_byte_order_mark_is_no_error(tmp_path):
    file = tmp_path / "n.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 27.0}\n\n{"prompt": "b", "answer": -3}\n{"prompt": "c", "answer": 0.5}'
        b'\n{"prompt": "d", "answer": 6.022e23}\n{"prompt": "e", "answer": 12345678901234567890}'
    )
    assert [r.gold for r in load_prompts([file])] == ["27", "-3", "0.5", "6.022e+23", "12345678901234567890"]


def test_every_problem_of_every_file_at_once(tmp_path):
    bad = write_lines(
        tmp_path / "bad.jsonl",
        {"prompt": "fine", "answer": "1"},
        {"answer": "1"},
        {"prompt": "p", "answer": None},
        {"prompt": 7, "answer": ["x"]},
        {"prompt": " ", "answer": ""},
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": "cut',
        [1, 2],
        {"prompt": "p", "answer": True},
        {"prompt": "fine", "answer": "2"},
        b'{"prompt": "\\ud800", "answer": "1"}',
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    (table := tmp_path / "table.csv").write_text("prompt,answer\n1+1,2\n")
    problems = check_data([bad, empty, tmp_path / "absent.jsonl", tmp_path, table], "prompt", "answer")
    found = [(p.file.name, p.line, p.field, p.reason.split(" (")[0]) for p in problems]
    assert found == [
        ("bad.jsonl", 2, "prompt", "is missing"),
        ("bad.jsonl", 3, "answer", "is null"),
        ("bad.jsonl", 4, "prompt", "is a number, needs a text"),
        ("bad.jsonl", 4, "answer", "is a list, needs a text or a number"),
        ("bad.jsonl", 5, "prompt", "is empty"),
        ("bad.jsonl", 5, "answer", "is empty"),
        ("bad.jsonl", 6, None, "invalid UTF-8 at byte 15 of the line"),
        ("bad.jsonl", 7, None, "invalid JSON: Unterminated string starting at: line 1 column 12"),
        ("bad.jsonl", 8, None, "is a JSON list, needs an object with fields"),
        ("bad.jsonl", 9, "answer", "is true or false, needs a text or a number"),
        ("bad.jsonl", 10, "prompt", f"is the prompt of {bad}:1 again"),
        ("bad.jsonl", 11, "prompt", "holds half a surrogate pair, which no tokenizer can encode"),
        ("empty.jsonl", None, None, "has no rows"),
        ("absent.jsonl", None, None, "does not exist"),
        (tmp_path.name, None, None, "is a folder"),
        ("table.csv", None, None, "is csv; JSON Lines and Parquet are read: pyarrow.csv.read_csv, pyarrow.parquet"),
    ]
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: field 'prompt' is missing") as error:
        load_prompts([bad, empty, tmp_path / "absent.jsonl", tmp_path, table])
    assert "the row has: answer" in str(error.value)
    assert len(str(error.value).splitlines()) == len(problems)


def test_repeated_rows_are_reported_in_one_line_and_may_be_kept_once(tmp_path):
    """Ten prompts a hundred times each, as public sets have them; in two files, so a line each."""
    rows = [{"q": str(i), "a": f"gold {i}"} for _ in range(100) for i in range(10)]
    one, other = write_lines(tmp_path / "all my 'one'.jsonl", *rows), write_lines(tmp_path / "other.jsonl", *rows[:3])
    found = read_prompts([one, other], "q", "a")
    assert [str(problem).partition(" (")[0] for problem in found.problems] == [
        f"{one}:11: field 'q' is the prompt of {one}:1 again",
        f"{other}:1: field 'q' is the prompt of {one}:1 again",
    ]
    told = found.problems[0].reason
    assert "the first of 990 such rows" in told and 'data.repeated = "keep_first"' in told
    command = told.partition("`")[2].partition("`")[0]
    options = ["--prompt-field", "q", "--gold-field", "a", "--out", "NEW.jsonl"]
    assert shlex.split(command) == ["hacpo-mega", "data", "convert", str(one), *options]  # as pasted
    kept = read_prompts([one, other], "q", "a", keep_first=True)
    assert (kept.problems, kept.num_repeated) == ([], 993)
    assert [(row.text, row.gold) for row in kept.rows] == [(str(i), f"gold {i}") for i in range(10)]


def test_rows_that_an_evaluation_leaves_out_are_counted(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", *({"prompt": "1" * length, "answer": 1} for length in range(1, 8)))
    config = SimpleNamespace(data=DataConfig(generator="arithmetic"), rollout=RolloutConfig(max_prompt_tokens=6))
    for most, num_left_out in ((3, 4), (600, 1)):
        config.evaluation = EvaluationConfig(files=[file], num_prompts=most)
        prompts, num = held_out_prompts(config, lambda texts, _most: list(map(len, texts)))
        assert [len(prompt.text) for prompt in prompts] == [*range(1, 1 + min(most, 6))] and num == num_left_out
    assert left_out_line(num).startswith("1 left out (evaluation.num_prompts, ")


def test_contradicting_rows_and_leaked_held_out_rows_are_always_refused(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", *({"prompt": p, "answer": a} for p, a in ("a1", "b2", "a1", "a3")))
    held_out = write_lines(tmp_path / "a b.jsonl", *({"prompt": p, "answer": a} for p, a in ("c1", "b2", "c1", "b9")))
    seen = SeenPrompts()
    trained = read_prompts([train], "prompt", "answer", seen, keep_first=True)
    (contradiction,) = trained.problems
    assert trained.num_repeated == 1 and contradiction.line == 4
    assert f"is the prompt of {train}:1 again (with another gold: '3', there '1'" in contradiction.reason
    measured = read_prompts([held_out], "prompt", "answer", seen, keep_first=True)
    (leak,) = measured.problems
    assert (leak.line, measured.num_repeated) == (2, 1)
    assert f"is the prompt of {train}:2 again (the first of 2 such rows, which would be trained on" in leak.reason
    assert f"`hacpo-mega data convert {train} --out NEW.jsonl --without '{held_out}'`" in leak.reason


def test_a_missing_field_names_the_command_that_reads_public_layouts_once(tmp_path):
    table = tmp_path / "of verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL] * 3), table)
    told = [problem.reason for problem in check_data([table], "prompt", "reward_model.ground_truth")]
    command = f"`hacpo-mega data convert '{table}' --out NEW.jsonl` reads public layouts"
    assert [command in what for what in told] == [True, False, False]


def test_a_long_list_of_problems_is_cut_with_a_count(tmp_path):
    file = write_lines(tmp_path / "bad.jsonl", *[{"prompt": str(i)} for i in range(57)])
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: [\s\S]*\.\.\. and 37 more problems") as error:
        load_prompts([file])
    assert len(str(error.value).splitlines()) == 21


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_damaged_parquet_file_is_a_problem_not_a_crash(tmp_path, keep):
    table = tmp_path / "cut.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 50, "answer": ["b"] * 50}), table)
    table.write_bytes(table.read_bytes()[:keep])
    assert "unreadable Parquet" in check_data([table])[0].reason


def test_a_column_of_categories_is_read_whole(tmp_path):
    """A dictionary that all batches of a file share is no part of each."""
    texts = [f"{number} " + "word " * 1_600 for number in range(600)]
    columns = {"prompt": pyarrow.array(texts).dictionary_encode(), "answer": ["1"] * 600}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert [row.text for row in load_prompts([tmp_path / "a.parquet"])] == texts


def test_a_date_beyond_those_of_python_is_a_problem_not_a_crash(tmp_path):
    dates = pyarrow.array([10**12, 0], pyarrow.timestamp("s"))
    table = pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "date": dates})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [str(problem) for problem in check_data([tmp_path / "a.parquet"])] == [
        f"{tmp_path / 'a.parquet'}:1: date value out of range"
    ]


def save(folder, *shards, **state):
    """As `datasets.save_to_disk` writes a split: https://huggingface.co/docs/datasets/process#save."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, records in zip(names, shards):
        table = pyarrow.Table.from_pylist(records)
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]} | state))
    return folder


RECORDS = [{"question": f"{i}+1=", "gold": i + 1} for i in range(40)]


def test_a_saved_folder_has_the_rows_of_its_files_in_order(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", *RECORDS)
    saved = save(tmp_path / "saved" / "train", RECORDS[:23], RECORDS[23:])
    assert load_prompts([saved], "question", "gold") == load_prompts([lines], "question", "gold")
    assert [problem.gold for problem in read_dataset(saved, layouts_of("question", "gold", only=True)).problems] == [
        str(i + 1) for i in range(40)
    ]
    assert str(check_data([saved], "prompt", "gold")[3]) == (
        f"{saved}:4: field 'prompt' is missing (the row has: gold, question)"
    )


def test_a_folder_that_is_no_split_is_a_line(tmp_path):
    save(tmp_path / "all" / "test", RECORDS)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    save(tmp_path / "chosen", RECORDS, _indices_data_files=[{"filename": "x.arrow"}])
    save(tmp_path / "away", RECORDS, _data_files=[{"filename": "../all/test/data-00000-of-00001.arrow"}])
    save(tmp_path / "empty", RECORDS, _data_files=None)
    packed = save(tmp_path / "packed", RECORDS) / "data-00000-of-00001.arrow"
    table = pyarrow.Table.from_pylist([{"question": "1" * 10**6, "gold": 1}])
    with pyarrow.ipc.new_stream(packed, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    assert packed.stat().st_size < 10**4
    cut = save(tmp_path / "cut", RECORDS) / "data-00000-of-00001.arrow"
    cut.write_bytes(cut.read_bytes()[:500])
    says = {
        "all": f"is a data set of splits (test); give one of them: {tmp_path}/all/test",
        "chosen": "is a selection by indices",
        "away": "names '../all/test/data-00000-of-00001.arrow'; the data files of a saved folder lie in it",
        "empty": "has a state.json that names no data files (TypeError",
        "cut": "unreadable Arrow: ",
        "packed": "holds compressed Arrow data, which save_to_disk does not write",
    }
    for name, what in says.items():
        (problem, *_) = check_data([tmp_path / name], "question", "gold")
        assert what in str(problem), name


def test_a_folder_that_datasets_has_saved(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the `datasets` library is not installed")
    split = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict(train=split, test=split.select([3, 5])).save_to_disk(tmp_path / "saved")
    assert [row.text for row in load_prompts([tmp_path / "saved" / "test"], "question", "gold")] == ["3+1=", "5+1="]
    assert len(load_prompts([tmp_path / "saved" / "train"], "question", "gold")) == 40
    assert "splits (test, train)" in str(check_data([tmp_path / "saved"])[0])


def test_a_data_set_by_its_name(tmp_path, monkeypatch):
    """The library's own reading of a repository's layout: a folder of that name stands for the Hub."""
    datasets = pytest.importorskip("datasets", reason="the `datasets` library is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "org" / "name").mkdir(parents=True)
    files = [{"split": split, "path": f"{split}.parquet"} for split in ("train", "test")]
    card = f"---\nconfigs: {json.dumps([{'config_name': 'main', 'data_files': files}])}\n---\n"
    (tmp_path / "org" / "name" / "README.md").write_text(card)
    for split, records in (("train", RECORDS), ("test", RECORDS[:2])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / f"org/name/{split}.parquet")
    monkeypatch.chdir(tmp_path)
    lines = write_lines(tmp_path / "a.jsonl", *RECORDS)
    named = load_prompts([Path("hub:org/name/main/train")], "question", "gold")
    assert named == load_prompts([lines], "question", "gold")
    says = {"main/no": 'Unknown split "no"', "other/test": "BuilderConfig 'other' not found", "test": None}
    for name, what in says.items():
        problems = check_data([Path("hub:org/name") / name], "question", "gold")
        assert what in str(problems[0]) if what else not problems, problems


def test_the_first_rows_of_a_data_set_are_streamed_once_and_then_cached(tmp_path, monkeypatch):
    """The second file cannot be read: whoever opens it fails."""
    datasets = pytest.importorskip("datasets", reason="the `datasets` library is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "train-0.parquet")
    (folder / "train-1.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    expected = load_prompts([write_lines(tmp_path / "a.jsonl", *RECORDS)], "question", "gold")
    for num_first in (17, 32):
        assert load_prompts([Path(f"hub:org/name/train[:{num_first}]")], "question", "gold") == expected[:num_first]
    for name, what in (("train[:41]", "Could not open Parquet"), ("no[:1]", "cannot be loaded (Bad split: no")):
        (problem,) = check_data([Path(f"hub:org/name/{name}")], "question", "gold")
        assert what in str(problem) and "`hacpo-mega check CONFIG --data` downloads it" in str(problem)
    shutil.rmtree(folder)  # as for ranks, which cannot ask
    assert load_prompts([Path("hub:org/name/train[:17]")], "question", "gold") == expected[:17]
    (problem,) = check_data([Path("hub:org/name/train[:18]")], "question", "gold")
    assert "org/name" in str(problem) and "on a machine with network" in str(problem)


@pytest.mark.parametrize(
    "name",
    ["hub:gsm8k", "hub:openai/gsm8k", "hub:../x/main/train", "hub:a/b/c/d/e", "hub:", "hub:a/b/c[3:]", "hub:a/b/c[:0]"],
)
def test_half_a_name_is_a_line(name):
    (problem,) = check_data([Path(name)])
    assert "is no data set of the Hub; write hub:ORG/NAME[@REVISION]/[CONFIG/]SPLIT, or SPLIT[:ROWS]" in str(problem)


def test_a_name_needs_the_library(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = check_data([Path("hub:openai/gsm8k@main/main/train")])
    assert "needs the library datasets, which is not installed here; `pip install 'datasets>=4'`" in str(problem)
