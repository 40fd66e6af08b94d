"""Chat messages and tools as the prompt of a row: one text in every kind of file; what is none is named by its row."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from dataset_rows import check_data, write_lines

from hacpo_grading.texts.chat_messages import messages_of, tools_of
from hacpo_mega.data.datasets import layouts_of, read_dataset
from hacpo_mega.data.reading.files import load_prompts


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
        ('[{"role":"user","content":"x"}]', "is chat messages in a text; write them as a list"),
        (json.dumps(said(("user", "x"))), "is chat messages in a text"),
        (json.dumps([{"content": "x", "role": "user"}], indent=1), "is chat messages in a text"),
        (str(said(("system", "x"), ("user", "it's"))), "is chat messages in a text"),
        (said(("user", "\ud800")), "holds half a surrogate pair"),
    ],
)
def test_messages_that_cannot_be_read_are_named_with_their_row(tmp_path, prompt, what):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "fine", "answer": 1}, {"prompt": prompt, "answer": 1})
    (problem,) = check_data([file])
    assert str(problem).startswith(f"{file}:2: field 'prompt' ") and what in str(problem)


@pytest.mark.parametrize("field, value", [("images", ["a.png"]), ("image", {"path": "a.png"}), ("videos", [b"x"])])
def test_rows_with_images_are_named(tmp_path, field, value):
    rows = [{"prompt": "1+1=", "answer": 2, field: nothing} for nothing in (None, [], "a container's")]
    file = write_lines(tmp_path / "a.jsonl", *[row | {"prompt": f"{n}+1="} for n, row in enumerate(rows)])
    assert len(load_prompts([file])) == 3
    table = pyarrow.Table.from_pylist([{"prompt": "1+1=", "answer": 2, field: value}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (problem,) = check_data([tmp_path / "a.parquet"])
    assert str(problem).startswith(
        f"{tmp_path / 'a.parquet'}:1: field {field!r} is not read, for agents see text alone"
    )


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("written", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row_are_part_of_its_prompt(tmp_path, written):
    rows = [{"prompt": "1+1=", "answer": 2, "tools": written}, {"prompt": CHAT, "answer": 3, "tools": written}]
    lines = write_lines(tmp_path / "a.jsonl", *rows, {"prompt": "2+2=", "answer": 4, "tools": None})
    one, chat, none = load_prompts([lines], tools_field="tools")
    assert [tools_of(row.text) for row in (one, chat, none)] == [[TOOL], [TOOL], []]
    assert messages_of(one.text) == said(("user", "1+1=")) and messages_of(chat.text) == CHAT
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
