"""A table costs its file nothing where rows share a value: what is read of it is bounded by the file's size."""

import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from dataset_rows import check_data

from hacpo_mega.data.datasets import read_dataset
from hacpo_mega.data.reading import files, tables

pytestmark = pytest.mark.nightly

MANY = 2**31 - 1  # rows: the most that a record batch can say


def saved(folder: Path, *columns: pyarrow.Array) -> Path:
    """The files that save_to_disk would have written of a prompt and an answer."""
    folder.mkdir()
    batch = pyarrow.record_batch(list(columns), names=["prompt", "answer"])
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as out, pyarrow.ipc.new_stream(out, batch.schema) as stream:
        stream.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


def repeated(value: str) -> pyarrow.Array:
    return pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([MANY], pyarrow.int32()), pyarrow.array([value]))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(tables, "ALWAYS_UNPACKED_BYTES", 2**20)
    monkeypatch.setattr(files, "MAX_BAD_ROWS", 1_000)
    monkeypatch.setattr("hacpo_mega.data.datasets.MAX_BAD_ROWS", 1_000)


def test_two_billion_rows_of_nothing_have_an_end(tmp_path):
    nothing = pyarrow.Array.from_buffers(pyarrow.null(), MANY, [None])
    folder = saved(tmp_path / "nulls", nothing, nothing)
    for problems in (check_data([folder]), list(read_dataset(folder).defects)):
        assert len(problems) <= 2_002 and "nothing is read from here on" in problems[-1].reason


def test_two_billion_rows_of_one_text_have_an_end(tmp_path):
    folder = saved(tmp_path / "runs", repeated("1+1="), repeated("2"))
    found = read_dataset(folder)
    assert len(found.problems) < 2**20 / tables.ROW_BYTES
    assert "unpacks to more than 200 times its size" in found.defects[-1].reason
    assert any("is the prompt of" in problem.reason for problem in check_data([folder]))


def test_a_text_that_a_dictionary_repeats_is_counted_each_time(tmp_path):
    """One text of 300 kB on disk, and 3 GB of prompts."""
    numbers, text = pyarrow.array([0] * 10_000, pyarrow.int32()), pyarrow.array(["1" * 300_000])
    texts = pyarrow.DictionaryArray.from_arrays(numbers, text)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts, "answer": ["1"] * 10_000}), tmp_path / "a.parquet")
    tracemalloc.start()
    found = read_dataset(tmp_path / "a.parquet")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "unpacks to more than 200 times its size" in found.defects[-1].reason
    assert len(found.problems) < 1_000 and peak < 2**29
