"""Grading files: a verdict on the line of its row, whatever the rows around it are; and rewards that are composed."""

import json

import pytest
from typer.testing import CliRunner

from hacpo_grading.graders.graders import arithmetic, exact, length_penalised, requiring_format
from hacpo_grading.judge import Judge
from hacpo_mega.cli.app import app
from hacpo_mega.commands import grade
from hacpo_mega.config.user_code import parse_options
from hacpo_mega.evaluation.answers import Answer, AnswerFile


def lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def graded(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_has_its_line(tmp_path):
    file = lines(
        tmp_path / "in.jsonl",
        {"gold": "0.5", "pred": "so \\boxed{\\frac12}"},
        {"gold": "3", "pred": "\\boxed{4}"},
        {"gold": "3", "pred": "3"},
        {"gold": "3"},
        '{"gold": "3", "pred"',
        {"gold": "", "pred": "\\boxed{4}"},
        {"gold": 27.0, "pred": "\\boxed{27}", "stop": "length"},
        {"gold": 27.0, "pred": "\\boxed{27}"},
        {"gold": "3", "pred": ["\\boxed{3}"]},
        {"gold": "3", "pred": "\\boxed{3}", "stop": "tired"},
    )
    with Judge("math", num_workers=1, timeout_s=20.0, require_stop=True) as judge:
        found = grade.grade(file, tmp_path / "out.jsonl", judge)
    replies = graded(tmp_path / "out.jsonl")
    assert [reply["line"] for reply in replies] == list(range(1, 11))
    assert [reply.get("verdict") for reply in replies] == [
        "correct", "wrong", "no_answer", None, None, None, "no_answer", "correct", None, None
    ]  # fmt: skip
    assert [reply["reward"] for reply in replies if "reward" in reply] == [1.0, 0.0, 0.0, 0.0, 1.0]
    *counts, speed = found.lines[:4]
    assert counts == ["correct: 2", "wrong: 1", "no_answer: 2"] and "CPU seconds per 1,000 answers" in speed
    rest = "\n".join(found.lines[4:])
    for line, what in (
        (4, "field 'pred' is missing"),
        (5, "invalid JSON"),
        (6, "field 'gold' is empty"),
        (9, "field 'pred' is a list, needs text"),
        (10, "field 'stop' is 'tired', needs one of eos, length, abort, cut"),
    ):
        assert replies[line - 1]["problem"].startswith(what) and f"in.jsonl:{line}: {what}" in rest
    assert rest.endswith("\n--gold-field and --pred-field name other columns") and not found.is_sound


def test_an_unjudged_answer_has_no_reward(tmp_path):
    file = lines(tmp_path / "in.jsonl", {"gold": "no number", "pred": "7"}, {"gold": "7", "pred": "7.0"})
    (tmp_path / "mine.py").write_text(
        "from hacpo_grading.graders import *\nfrom hacpo_grading.graders.number import Number\n"
        "reward = length_penalised(Number(), 1, 5)\n"
    )
    with Judge(f"{tmp_path / 'mine.py'}:reward", num_workers=1) as judge:
        found = grade.grade(file, tmp_path / "out.jsonl", judge)
    (unjudged,) = [line for line in found.lines if " unjudged, " in line]
    assert unjudged.startswith("1 unjudged, the fault of the judge; the first error: ValueError: the gold answer")
    assert graded(tmp_path / "out.jsonl") == [
        {"line": 1, "verdict": "error", "reward": None},
        {"line": 2, "verdict": "wrong", "reward": 0.5},  # 3 characters, half way from 1 to 5
    ]


def test_a_gold_that_cannot_be_graded_costs_its_own_row(tmp_path):
    file = lines(tmp_path / "in.jsonl", {"gold": "no number", "pred": "7"}, {"gold": "7", "pred": "7.0"})
    with Judge("number") as judge:
        grade.grade(file, tmp_path / "out.jsonl", judge)
    assert [(r["verdict"], r["reward"]) for r in graded(tmp_path / "out.jsonl")] == [("error", None), ("correct", 1.0)]


def test_more_rows_than_one_batch_and_a_file_without_any(tmp_path):
    file = lines(tmp_path / "in.jsonl", *[{"gold": str(i % 7), "pred": str(i % 5)} for i in range(5000)])
    with Judge("exact") as judge:
        found = grade.grade(file, tmp_path / "out.jsonl", judge)
        replies = graded(tmp_path / "out.jsonl")
        assert [r["line"] for r in replies] == list(range(1, 5001))
        assert [r["reward"] for r in replies] == [float(i % 7 == i % 5) for i in range(5000)]
        assert f"correct: {sum(i % 7 == i % 5 for i in range(5000))}" in found.lines
        (tmp_path / "none.jsonl").write_text("\n\n")
        assert "has no rows" in grade.grade(tmp_path / "none.jsonl", tmp_path / "out2.jsonl", judge).lines[-1]
        with pytest.raises(ValueError, match=r"absent\.jsonl: does not exist"):
            grade.grade(tmp_path / "absent.jsonl", tmp_path / "out3.jsonl", judge)


def test_the_answers_of_an_evaluation_and_fields_of_other_names_are_read(tmp_path):
    """Eval's own lines, written by its own writer, get the verdicts that stand in them; a grader gets the row."""
    said = [("1", "one 1", "correct"), ("2", "\u20282", "wrong"), ("3", "3\r", "correct")]
    answers = [
        Answer(f"id{i}", 0, 1, "[1+1=]", gold, text, None, verdict, float(verdict == "correct"), "eos", 3)
        for i, (gold, text, verdict) in enumerate(said)
    ]
    written = AnswerFile(tmp_path, "bench", 0)
    written.append(answers)
    written.close()
    (tmp_path / "own.py").write_text("def own(answer, gold, verdict): return float(verdict == 'correct')\n")
    file = tmp_path / "answers/bench.lane_0000.jsonl"
    with Judge(f"{tmp_path}/own.py:own") as judge:
        found = grade.grade(file, tmp_path / "out.jsonl", judge)
    assert found.is_sound and [reply["verdict"] for reply in graded(tmp_path / "out.jsonl")] == [
        "correct", "wrong", "correct"
    ]  # fmt: skip
    other = lines(tmp_path / "in.jsonl", {"target": "5", "said": "5"}, {"target": "5", "said": "6", "gold": "6"})
    options = ["--reward", "exact", "--pred-field", "said", "--gold-field", "target"]
    done = CliRunner().invoke(app, ["grade", str(other), "--out", str(tmp_path / "out.jsonl"), *options])
    assert (done.exit_code, done.output.startswith("correct: 1\nwrong: 1\n")) == (0, True), done.output


def test_prompts_that_are_chat_messages_are_so_for_a_grader_of_trls(tmp_path):
    (tmp_path / "own.py").write_text(
        "def own(prompts, completions, **kwargs):\n"
        "    return [float(p[0]['content'] == c[0]['content']) for p, c in zip(prompts, completions)]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": "a"}], "gold": "1", "pred": said} for said in "ab"]
    with Judge(f"{tmp_path}/own.py:own") as judge:
        grade.grade(lines(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl", judge)
    assert [reply["reward"] for reply in graded(tmp_path / "out.jsonl")] == [1.0, 0.0]


@pytest.mark.parametrize("field", ["prompt", "prompt_seen"])
def test_all_answers_to_a_prompt_are_a_group_wherever_they_stand(tmp_path, monkeypatch, field):
    monkeypatch.setattr(grade, "ROWS_AT_A_TIME", 2)
    (tmp_path / "own.py").write_text("def own(answer, group): return len(group) / 8\n")
    asked = "aabcabaa"
    rows = [{field: p, "gold": "1", "text": "1", "verdict": "wrong", "rollout": i} for i, p in enumerate(asked)]
    with Judge(f"{tmp_path}/own.py:own") as judge:
        grade.grade(lines(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl", judge)
    assert [reply["reward"] for reply in graded(tmp_path / "out.jsonl")] == [asked.count(p) / 8 for p in asked]


def test_verdicts_are_explained_on_request(tmp_path):
    rows = [
        {"gold": "200", "pred": "so \\boxed{201 J}"},
        {"gold": "7", "pred": ["no text"]},
        {"gold": "7", "pred": "7"},
    ]
    file, out = lines(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    arguments = ["grade", str(file), "--out", str(out), "--reward", "number", "--option", "rel_tol=0.01", "--explain"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output  # one row cannot be read
    first, bad, last = graded(out)
    assert first["reward"] == 1.0 and first["explanation"] == {
        "extracted": "201 J",
        "parsed_answer": 201.0,
        "parsed_gold": 200.0,
        "rule": "|answer - gold| <= max(0.01 |gold|, 0)",
    }
    assert "explanation" not in bad
    assert last["explanation"]["extracted"] == "7"


def test_options_of_a_judge_are_numbers_truths_or_text():
    pairs = ["a=1", "b=0.5", "c=true", "d=x=y", "e=null", "f="]
    assert parse_options(pairs) == {"a": 1, "b": 0.5, "c": True, "d": "x=y", "e": "null", "f": ""}
    for pair in ("rel_tol", "=1"):
        with pytest.raises(ValueError, match="has no value; write KEY=VALUE"):
            parse_options([pair])


def test_penalties_compose():
    penalised = length_penalised(requiring_format(exact, r"^\s*1", reward_without=0.5), 2, 10)
    assert penalised("", "1", "1") == 1.0
    assert penalised("", "    1 ", "1") == 0.5  # 6 characters: half way from 2 to 10
    assert penalised("", "2", "2") == 0.5
    assert penalised("", "1" * 10, "1" * 10) == 0.0
    assert penalised("", "1" * 99, "1" * 99) == 0.0
    assert penalised("", "3", "2") == 0.0
    assert length_penalised(arithmetic, 2, 10)("", "no semicolon", "1") is None


def test_impossible_penalties():
    with pytest.raises(ValueError, match=r"free_characters \(10\) must be below characters_to_zero \(10\)"):
        length_penalised(exact, 10, 10)
    with pytest.raises(ValueError, match="from 0 to 1"):
        requiring_format(exact, "x", reward_without=1.5)
