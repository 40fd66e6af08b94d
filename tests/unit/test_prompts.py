"""Prompt files and the sampler: every bad row is named, and a step's prompts depend on (seed, step) alone."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_mega.config.chat_messages import messages_of, tools_of
from hacpo_mega.data.datasets import layouts_of, read_dataset
from hacpo_mega.data.files import PromptRow, check_data, content_id, load_prompts
from hacpo_mega.data.prompts import PromptSampler, rows_of_examples
from hacpo_mega.data.tasks import SkillMix, WarmStartStream, training_examples
from hacpo_mega.grading.grader_calls import messages_in


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_json_lines_and_parquet_give_the_same_rows(tmp_path):
    records = [{"question": "2+2=", "gold": "4"}, {"question": "é 数\n", "gold": "x"}]
    lines = write_lines(tmp_path / "a.jsonl", *records)
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    rows = load_prompts([lines], "question", "gold")
    assert rows == load_prompts([table], "question", "gold")
    assert [(r.text, r.gold) for r in rows] == [("2+2=", "4"), ("é 数\n", "x")]
    assert rows[0].id == "20243c49d24c4af1"  # printf '2+2=' | sha256sum


def test_numbers_are_answers_and_a_byte_order_mark_is_no_error(tmp_path):
    file = tmp_path / "n.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 27.0}\n\n{"prompt": "b", "answer": -3}\n{"prompt": "c", "answer": 0.5}'
    )
    assert [r.gold for r in load_prompts([file])] == ["27", "-3", "0.5"]


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
    problems = check_data([bad, empty, tmp_path / "absent.jsonl", tmp_path], "prompt", "answer")
    found = [(p.file.name, p.line, p.field, p.what.split(" (")[0]) for p in problems]
    assert found == [
        ("bad.jsonl", 2, "prompt", "is missing"),
        ("bad.jsonl", 3, "answer", "is null"),
        ("bad.jsonl", 4, "prompt", "is a int, needs str"),
        ("bad.jsonl", 4, "answer", "is a list, needs str or int or float"),
        ("bad.jsonl", 5, "prompt", "is empty"),
        ("bad.jsonl", 5, "answer", "is empty"),
        ("bad.jsonl", 6, None, "invalid UTF-8 at byte 15 of the line"),
        ("bad.jsonl", 7, None, "invalid JSON: Unterminated string starting at: line 1 column 12"),
        ("bad.jsonl", 8, None, "is a JSON list, needs an object with fields"),
        ("bad.jsonl", 9, "answer", "is a bool, needs str or int or float"),
        ("bad.jsonl", 10, "prompt", f"is the prompt of {bad}:1 again"),
        ("bad.jsonl", 11, "prompt", "holds half a surrogate pair, which no tokenizer can encode"),
        ("empty.jsonl", None, None, "has no rows"),
        ("absent.jsonl", None, None, "does not exist"),
        (tmp_path.name, None, None, "is a folder"),
    ]
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: field 'prompt' is missing") as error:
        load_prompts([bad, empty, tmp_path / "absent.jsonl", tmp_path])
    assert "the row has: answer" in str(error.value)
    assert len(str(error.value).splitlines()) == len(problems)


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
    assert "unreadable Parquet" in check_data([table])[0].what


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


def test_the_first_rows_of_a_data_set_are_streamed_once_and_read_without_it(tmp_path, monkeypatch):
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


def said(*messages):
    return [{"role": role, "content": content} for role, content in messages]


CHAT = said(("system", "Be brief \u00e9."), ("user", "1+1="), ("assistant", "2"), ("user", 'and "+1"?\n'))


def test_messages_are_one_text_in_every_file(tmp_path):
    rows = [{"prompt": CHAT, "answer": "3"}, {"prompt": said(("user", "2+2=")), "answer": "4"}]
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    shuffled = [[{"content": m["content"], "name": None, "role": m["role"]} for m in row["prompt"]] for row in rows]
    table = pyarrow.Table.from_pylist([{"prompt": p, "answer": row["answer"]} for p, row in zip(shuffled, rows)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = load_prompts([lines])
    assert [(row.id, row.text) for row in found] == [(r.id, r.text) for r in load_prompts([tmp_path / "a.parquet"])]
    assert [messages_of(row.text) for row in found] == [row["prompt"] for row in rows]
    assert [problem.prompt for problem in read_dataset(lines).problems] == [row.text for row in found]
    assert found[1].text == '[{"role":"user","content":"2+2="}]'
    assert messages_of(' [{"role":"user","content":"2+2="}]') is None and messages_of("2+2=") is None


@pytest.mark.parametrize(
    "prompt, what",
    [
        ([], "ends with a message of None"),
        (["1+1="], "has a message 1 that is a str, needs role and content"),
        (said(("user", "x"), ("assistant", "y")), "ends with a message of 'assistant'"),
        (said(("tool", "x"), ("user", "y")), "has a message 1 of role 'tool'; roles are system, user, assistant"),
        (said(("user", "x"), ("system", "y"), ("user", "z")), "has a message 2 of role 'system'"),
        (said(("user", " ")), "has a message 1 whose content is no text, or empty"),
        (said(("user", None)), "has a message 1 whose content is no text, or empty"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "with 'tool_calls': only role and content are"),
        (said(("user", [{"type": "image_url"}, {"type": "text"}])), "in parts (image_url, text): images and the like"),
        ('[{"role":"user","content":"x"}]', "is chat messages as JSON text; write them as a list"),
        (said(("user", "\ud800")), "holds half a surrogate pair"),
    ],
)
def test_messages_that_cannot_be_read_are_named_with_their_row(tmp_path, prompt, what):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "fine", "answer": 1}, {"prompt": prompt, "answer": 1})
    (problem,) = check_data([file])
    assert str(problem).startswith(f"{file}:2: field 'prompt' ") and what in str(problem)


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("written", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row_are_part_of_its_prompt(tmp_path, written):
    rows = [{"prompt": "1+1=", "answer": 2, "tools": written}, {"prompt": CHAT, "answer": 3, "tools": written}]
    lines = write_lines(tmp_path / "a.jsonl", *rows, {"prompt": "2+2=", "answer": 4, "tools": None})
    one, chat, none = load_prompts([lines], tools_field="tools")
    assert [tools_of(row.text) for row in (one, chat, none)] == [[TOOL], [TOOL], []]
    assert messages_of(one.text) == said(("user", "1+1=")) and messages_of(chat.text) == CHAT == messages_in(chat.text)
    table = pyarrow.Table.from_pylist([rows[0] | {"tools": [TOOL]}, {"tools": [{"other": 1}]}]).slice(0, 1)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")  # where every tool has every key
    assert load_prompts([tmp_path / "a.parquet"], tools_field="tools")[0].text == one.text
    assert none.text == "2+2=" and {one.text, chat.text}.isdisjoint(r.text for r in load_prompts([lines]))
    layouts = layouts_of("prompt", "answer", only=False, tools_field="tools")
    assert [problem.prompt for problem in read_dataset(lines, layouts).problems] == [one.text, chat.text, none.text]


@pytest.mark.parametrize(
    "tools, what",
    [
        ({"name": "f"}, "is a dict, needs a list of JSON schemas of functions"),
        ("{", "is no JSON text"),
        ([{"type": "function"}], "has a tool 1 without a name"),
        ([TOOL, TOOL], "names one tool twice"),
        ([{"name": "\ud800"}], "half a surrogate pair"),
    ],
)
def test_tools_that_are_none_are_named_with_their_row(tmp_path, tools, what):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "answer": 1, "tools": tools})
    with pytest.raises(ValueError, match=rf"a.jsonl:1: field 'tools' .*{re.escape(what)}"):
        load_prompts([file], tools_field="tools")


def rows(num, skill=""):
    return [PromptRow(content_id(f"{skill}{i}"), f"{skill}{i}", str(i), skill) for i in range(num)]


@given(
    num_rows=st.integers(1, 40),
    lanes=st.integers(1, 4),
    share=st.integers(1, 5),
    updates=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 50),
)
@settings(max_examples=60)
def test_lanes_partition_every_update_and_every_epoch_has_each_prompt_once(num_rows, lanes, share, updates, seed, step):
    per_update = lanes * share
    per_step = updates * per_update
    if num_rows < per_step:
        with pytest.raises(ValueError, match="there are only"):
            PromptSampler(rows(num_rows), seed, per_step, per_update)
        return
    sampler = PromptSampler(rows(num_rows), seed, per_step, per_update)
    whole = sampler.at(step)
    fresh = PromptSampler(rows(num_rows), seed, per_step, per_update)
    of_lanes = [fresh.at(step, lane, lanes) for lane in range(lanes)]
    for update in range(updates):
        mine = slice(update * share, (update + 1) * share)
        together = sum((prompts[mine] for prompts in of_lanes), ())
        assert together == whole[update * per_update : (update + 1) * per_update], "lanes change what shares an update"
    assert [p.index for p in whole] == list(range(per_step))
    seen = Counter(p.text for s in range(num_rows) for p in sampler.at(s))  # num_rows steps are per_step whole epochs
    assert set(seen.values()) == {per_step}
    assert len(seen) == num_rows


def test_resuming_at_an_epoch_boundary_equals_not_stopping():
    """10 rows, 4 a step: step 2 straddles the first boundary, and step 5 starts an epoch exactly."""
    whole = PromptSampler(rows(10), seed=1, prompts_per_step=4, prompts_per_update=2)
    stream = [p.text for step in range(10) for p in whole.at(step)]
    for resumed_at in (2, 3, 5):
        resumed = PromptSampler(rows(10), seed=1, prompts_per_step=4, prompts_per_update=2)
        assert [p.text for s in range(resumed_at, 10) for p in resumed.at(s)] == stream[4 * resumed_at :]
    assert sorted(stream[:10]) == sorted(stream[10:20])
    assert stream[:10] != stream[10:20]


def test_skills_are_balanced_in_every_step_and_lane():
    pool = [row for skill in ("add", "sub", "mul", "srt") for row in rows_of_examples(training_examples(skill))]
    sampler = PromptSampler(pool, seed=1, prompts_per_step=64, prompts_per_update=16, balance_skills=True)
    for step in (0, 1, 999):
        assert Counter(p.skill for p in sampler.at(step)) == {"add": 16, "sub": 16, "mul": 16, "srt": 16}
        assert set(Counter(p.skill for p in sampler.at(step, lane=1, num_lanes=4)).values()) == {4}
    mul = [p.text for step in range(36) for p in sampler.at(step) if p.skill == "mul"]
    assert len(set(mul[:570])) == 570  # the smallest skill goes through its own epoch


def test_another_process_draws_the_same_prompts():
    code = (
        "from hacpo_mega.data.prompts import *; from hacpo_mega.data.tasks import training_examples; "
        "rows = rows_of_examples(training_examples('mul')); "
        "print([p.text for p in PromptSampler(rows, 11, 8, 4).at(75)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, check=True
    )
    here = PromptSampler(rows_of_examples(training_examples("mul")), 11, 8, 4).at(75)
    assert run.stdout.strip() == str([p.text for p in here])


def test_a_run_with_the_seed_of_its_warm_start_does_not_begin_with_what_was_taught():
    """One skill, 320 taught examples of 7,925: by chance 2 or 3 of the first 64 prompts are among them, never most."""
    taught = {example.prompt for example in WarmStartStream([SkillMix("sum", 1.0, 320)], 64, seed=7).examples[0]}
    first = PromptSampler(rows_of_examples(training_examples("sum")), 7, 64, 16).at(0)
    assert len(taught) == 320
    assert sum(prompt.text in taught for prompt in first) < 16


def test_impossible_steps_say_what_would_work():
    with pytest.raises(ValueError, match=r"prompts_per_update \(10\) must be a multiple of lanes \(4\)\. Nearest: 8$"):
        PromptSampler(rows(20), 1, 10, 10).at(0, 0, 4)
    with pytest.raises(ValueError, match=r"multiple of the 2 skills\. Nearest: 6$"):
        PromptSampler(rows(20, "a") + rows(20, "b"), 1, 7, 7, balance_skills=True)
    with pytest.raises(
        ValueError, match=r"takes 10 different prompts of each of 2 skills, but there are only 9 of 'b'\. Nearest: 18$"
    ):
        PromptSampler(rows(20, "a") + rows(9, "b"), 1, 20, 20, balance_skills=True)
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler([], 1, 4, 4)
