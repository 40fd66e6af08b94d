"""`hacpo-mega data` and `hacpo-mega grade` with wrong input: refused in one line a problem, and no file harmed."""

import json
import os
import threading

import pytest
from typer.testing import CliRunner

from hacpo_grading.judge import Judge
from hacpo_mega.cli.app import app
from hacpo_mega.commands.convert_data import convert
from hacpo_mega.commands.grade import grade
from hacpo_mega.commands.inspect_data import inspect
from hacpo_mega.data.datasets import read_dataset, write_dataset
from hacpo_mega.data.reading.files import refuse_overwriting, replacing

ROWS = [{"prompt": "How many legs has a dog?", "answer": "4"}, {"prompt": "How much is 1 + 1?", "answer": "2"}]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def refused(*arguments):
    """The answer of a command line to wrong input: the ValueError that `main` prints before it exits with 2."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(done.exception, ValueError), (done.exit_code, done.output, done.exception)
    return str(done.exception)


@pytest.fixture
def train(tmp_path):
    return write(tmp_path / "train.jsonl", *ROWS)


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_file_that_does_not_exist_is_refused(tmp_path, train, command):
    out = tmp_path / "out.jsonl"
    options = ["--out", out] if command == "convert" else []
    absent, gone = tmp_path / "absent.jsonl", tmp_path / "gone.jsonl"
    assert (
        refused("data", command, absent, train, gone, *options) == f"{absent}: does not exist\n{gone}: does not exist"
    )
    compared = "--without" if command == "convert" else "--against"
    assert refused("data", command, train, compared, absent, *options) == f"{absent}: does not exist"
    empty = write(tmp_path / "empty.jsonl")
    assert refused("data", command, train, compared, empty, *options) == f"{empty}: has no rows"
    nothing = write(tmp_path / "nothing.jsonl", "{")
    assert f"{nothing}:1: invalid JSON" in refused("data", command, train, compared, nothing, *options)
    assert not out.exists()


def test_nothing_is_said_before_everything_is_there(tmp_path, train):
    with pytest.raises(ValueError, match="does not exist"):
        inspect([train], [], [tmp_path / "absent.jsonl"], 10, None)


def test_golds_that_are_none_are_listed_with_their_line(tmp_path):
    file = write(tmp_path / "f.jsonl", *[{"prompt": str(i), "answer": a} for i, a in enumerate(([70], True, {"a": 1}))])
    file.write_text(file.read_text() + '{"prompt": "3", "answer": NaN}\n{"prompt": "4", "answer": "4"}\n')
    message = refused("data", "convert", file, "--out", tmp_path / "out.jsonl")
    for line, found in ((1, "is a list"), (2, "is true or false"), (3, "is a table"), (4, "is nan")):
        assert f"{file}:{line}: field 'answer' {found}" in message
    assert len(message.splitlines()) == 5 and not (tmp_path / "out.jsonl").exists()
    done = CliRunner().invoke(app, ["data", "inspect", str(file)])
    assert done.exit_code == 1 and "4 cannot be used" in done.output


def test_rows_that_cannot_be_read_are_left_out_on_request(tmp_path):
    good, bad = {"prompt": "Good", "answer": "1"}, {"prompt": "Empty", "answer": ""}
    file, out = write(tmp_path / "f.jsonl", bad, good), tmp_path / "out.jsonl"
    message = refused("data", "convert", file, "--out", out)
    assert message.endswith(f"{out} not written; --skip-bad leaves these rows out") and not out.exists()
    done = CliRunner().invoke(app, ["data", "convert", str(file), "--out", str(out), "--skip-bad"])
    assert done.exit_code == 1, "the finding is no secret"
    assert f"1 rows that cannot be read left out too:\n    {file}:1: field 'answer' is empty" in done.output
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["Good"]
    message = refused("data", "convert", out, "--out", tmp_path / "x.jsonl", "--without", file, "--skip-bad")
    assert message.endswith(f"{tmp_path / 'x.jsonl'} not written"), "a row may be the one that was copied"


def test_golds_that_mark_a_problem_without_an_answer_are_one_line(tmp_path):
    """NuminaMath's `proof` and `notfound`: a seventh of its rows, to which no answer would be right."""
    golds = ["4", "proof", "notfound", "Proof", "not a proof"]
    numina = write(tmp_path / "n.jsonl", *({"problem": str(i), "answer": gold} for i, gold in enumerate(golds)))
    out = tmp_path / "out.jsonl"
    line = f"{numina}:2: field 'answer' is 'proof', which is no answer (the first of 3 such rows)"
    assert refused("data", "convert", numina, "--out", out).startswith(f"{line}\n{out} not written")
    done = CliRunner().invoke(app, ["data", "convert", str(numina), "--out", str(out), "--skip-bad"])
    assert line in done.output and [json.loads(row)["answer"] for row in out.read_text().splitlines()] == golds[::4]
    words = write(tmp_path / "words.jsonl", {"prompt": "A word of p, r, o, o, f", "answer": "proof"})
    assert not read_dataset(words).defects


def test_an_evaluation_file_with_bad_rows_is_no_proof(tmp_path, train):
    """A row that cannot be read may be the one that was copied: not written, and a finding."""
    torn = write(tmp_path / "torn.jsonl", {"prompt": "Other", "answer": "1"}, {"prompt": "Torn"})
    message = refused("data", "convert", train, "--out", tmp_path / "out.jsonl", "--without", torn)
    assert f"{torn}:2: fits no known layout (the row has: prompt)" in message
    done = CliRunner().invoke(app, ["data", "inspect", str(train), "--against", str(torn)])
    assert done.exit_code == 1 and f"1 of {torn} cannot be compared" in done.output


def spellings_of(file):
    """The same file by other names: relative, with a detour, by a symbolic and by a hard link."""
    linked, hard = file.with_name("linked.jsonl"), file.with_name("hard.jsonl")
    linked.symlink_to(file)
    hard.hardlink_to(file)
    return [file, os.path.relpath(file), file.parent / ".." / file.parent.name / file.name, linked, hard]


def test_what_is_read_is_not_written_over(tmp_path, train):
    before = train.read_bytes()
    other = write(tmp_path / "other.jsonl", {"prompt": "Other", "answer": "1"})
    for out in spellings_of(train):
        assert "is what is read" in refused("data", "convert", train, "--out", out)
        assert "is what is read" in refused("data", "convert", other, "--out", out, "--without", train)
        assert "is what is read" in refused("grade", train, "--out", out, "--reward", "exact")
        assert train.read_bytes() == before
    assert "is what is read" in refused("data", "convert", tmp_path, "--out", tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()
    refuse_overwriting(tmp_path / "new.jsonl", [train, tmp_path / "absent.jsonl"])


@pytest.mark.parametrize("command", ["convert", "grade"])
def test_where_nothing_can_be_written_is_said(tmp_path, train, command):
    start = ["data", "convert"] if command == "convert" else ["grade"]
    options = [] if command == "convert" else ["--reward", "exact"]
    (tmp_path / "folder").mkdir()
    assert "is a folder" in refused(*start, train, "--out", tmp_path / "folder", *options)
    assert "does not exist" in refused(*start, train, "--out", tmp_path / "no" / "out.jsonl", *options)


def test_grading_a_missing_file_writes_nothing(tmp_path):
    for file, what in ((tmp_path / "absent.jsonl", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=what), Judge("exact") as judge:
            grade(file, tmp_path / "out.jsonl", judge)
    assert list(tmp_path.iterdir()) == []


def test_contradicting_golds_are_listed_and_left_out(tmp_path):
    """Nobody can say which is right, so neither stays; problems repeated with one gold stay once."""
    rows = [*ROWS, {"prompt": "how many legs has a dog", "answer": "5"}, ROWS[1], {"prompt": "Other", "answer": "1"}]
    file, out = write(tmp_path / "f.jsonl", *rows), tmp_path / "out.jsonl"
    done = CliRunner().invoke(app, ["data", "convert", str(file), "--out", str(out)])
    assert done.exit_code == 1
    assert "2 problems; 2 repetitions and 0 evaluation problems left out" in done.output
    assert "1 problems with contradicting gold answers left out too:" in done.output
    assert "f.jsonl:3 repeats f.jsonl:1 (same normalised), with other answers ('4', '5')" in done.output
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["How much is 1 + 1?", "Other"]
    only = write(tmp_path / "only.jsonl", ROWS[0], {**ROWS[0], "answer": "5"})
    assert "none of 2 problems is left" in refused("data", "convert", only, "--out", tmp_path / "none.jsonl")
    why = refused("data", "convert", only, "--out", tmp_path / "none.jsonl", "--prompt-field", "question", "--skip-bad")
    assert "only.jsonl:1: field 'question' is missing" in why and "none of 0 problems is left" in why


def test_a_copy_in_other_words_is_left_out(tmp_path):
    text = "A train leaves at 9 and goes 60 km an hour for 3 hours, then turns and goes back at half of that"
    file = write(tmp_path / "f.jsonl", {"prompt": f"Solve this. {text}. When is it there?", "answer": "18"}, ROWS[0])
    test = write(tmp_path / "test.jsonl", {"question": f"{text}?", "answer": "So #### 18"})
    findings = convert([file], tmp_path / "out.jsonl", [test])
    assert findings.is_sound and "1 problems; 0 repetitions and 1 evaluation problems left out" in findings.lines[0]
    assert [p.prompt for p in read_dataset(tmp_path / "out.jsonl").problems] == [ROWS[0]["prompt"]]
    done = CliRunner().invoke(app, ["data", "inspect", str(file), "--against", str(test)])
    assert done.exit_code == 1
    assert f"1 of 1 of {test} also in the training data (1 contained):" in done.output


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, train):
    """A failure in the middle leaves the old file and nothing beside it; a link stays a link."""
    out = tmp_path / "out.jsonl"
    out.write_text("old")

    def problems():
        yield from read_dataset(train).problems
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_dataset(problems(), out)
    assert out.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "train.jsonl"]
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    with replacing(link) as stream:
        stream.write("new")
        stream.flush()
        assert out.read_text() == "old"
    assert link.is_symlink() and out.read_text() == "new"


def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device, not a file"), replacing(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_grader_that_fails_midway_leaves_the_old_verdicts(tmp_path):
    file = write(tmp_path / "f.jsonl", {"gold": "1", "pred": "1"})
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    done = threading.Event()

    class Failing(Judge):
        def judge(self, *arguments):
            done.set()
            raise RuntimeError("no grader left")

    with pytest.raises(RuntimeError, match="no grader left"), Failing("exact") as judge:
        grade(file, out, judge)
    assert done.is_set() and out.read_text() == "old"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["f.jsonl", "out.jsonl"]
