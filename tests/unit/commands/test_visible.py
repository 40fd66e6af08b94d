"""Foreign text is shown and not obeyed: on every way out to a terminal or a browser nothing of it acts."""

import io
import json
import os
import pty
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.cli import app as cli
from hacpo_mega.evaluation.table import BenchmarkResult, Estimate, Evaluation, print_table
from hacpo_mega.logbook.console import Console, warn
from hacpo_mega.models.files.visible import one_line, say, visible
from hacpo_mega.report.html import tag

# Clears the screen, sets the title, writes the clipboard, opens a link, 8-bit codes, overwrites, turns round, hides.
HOSTILE = (
    "\x1b[2J\x1b]0;t\x07\x1b]52;c;QQ==\x1b\\\x1b]8;;http://x\x1b\\\x9b2J\x9d52;c;QQ==\x9c\r\b\x00\x7f\u202eabc\u2066"
    "\u200b\u200d\ufeff\u2028\u2029\u061c\u00ad\U000e0041\u034f\u1160\u17b4\u17b5\u180b\u180f\uffa0\u3164\u115f\ufe0f\U000e0100"
)
UNSEEN = set(HOSTILE) - {chr(sign) for sign in range(0x20, 0x7F)}


def acts(text: str) -> set[str]:
    """The characters of HOSTILE that are in a text as they are."""
    return UNSEEN & set(text)


@given(st.text(alphabet=st.characters() | st.sampled_from([*HOSTILE, "\ud800", "\n", "\t"])))
def test_nothing_unseen_is_left_and_what_is_seen_stays(text):
    shown = visible(text)
    assert all(sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in shown)
    assert not acts(shown) and visible(shown) == shown
    shown.encode()  # a lone surrogate would end the program that prints it
    rest = iter(shown)  # every printable sign is still there, in its order
    seen = (sign for sign in text if sign.isprintable() and "VARIATION SELECTOR" not in unicodedata.name(sign, ""))
    assert all(sign in rest for sign in seen if sign not in UNSEEN)
    assert len(one_line(text).split("\n")) == 1


@pytest.mark.parametrize("text", ["", "\\frac{1}{2}\n\tx", "Größe 中文 ⊃ é 🙂 e\u0301", "a\u00a0b\u202fc"])
def test_what_people_write_is_left_alone(text):
    assert visible(text) == text


def test_each_sign_is_written_out():
    assert visible("\x1b[2J\x9b\u202e\r\U000e0041") == r"\x1b[2J\x9b\u202e\r\U000e0041"


def test_a_terminal_gets_our_codes_and_not_theirs():
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, Console(4, file=terminal) as console:
        console.say(f"warning: {HOSTILE} :warning: [red]\nstep 4/4 | safe 4")
    said = b""
    with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as screen:  # EIO: nobody has the other side
        while part := screen.read(1 << 16):
            said += part
    said = said.decode()
    assert "\x1b[" in said  # of the bar
    assert "\x1b]" not in said and "\x1b[2J\x1b" not in said and "abc\u2066" not in said
    assert r"\x1b[2J\x1b]0;t\x07" in said and r":warning: [red]\nstep 4/4" in said


def test_a_line_of_the_log_is_one_line(capsys):
    file = io.StringIO()
    Console(4, file=file).say(f"the grader says {HOSTILE}\nstep 4/4 | safe 4")
    warn(f"the grader says {HOSTILE}\nstep 4/4 | safe 4")
    for said in (file.getvalue(), capsys.readouterr().err):
        assert said.endswith("\\nstep 4/4 | safe 4\n") and said.count("\n") == 1
        assert not acts(said)


def test_a_page_shows_it(capsys):
    page = tag("pre", HOSTILE + "<b>", title=HOSTILE)
    assert not acts(page) and r"\u202eabc\u2066" in page and "&lt;b&gt;" in page


def test_a_table_of_scores_shows_it(capsys):
    name, half = f"{HOSTILE}[link=http://x]", Estimate(0.5, 0.25, 0.75)
    counts = {"num_problems": 1, "num_dropped": 1, "num_unscored": 0, "num_answers": 1, "num_unjudged": 1}
    result = BenchmarkResult(name, "avg@1", {"avg@1": half}, **counts, no_answer=0.0, cut=0.0, tokens_mean=9.0)
    print_table(Evaluation({"model": name}, (result,), half))
    said = capsys.readouterr().out
    assert not acts(said) and said.count("\x1b") == 0 and said.count("[link") >= 1


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """The command line in this process: exit code, standard output, standard error; neither of them acts."""
    monkeypatch.setattr(sys, "argv", ["hacpo-mega", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert not acts(said.out) and not acts(said.err)
    return end.value.code or 0, said.out, said.err


def named(folder: Path, ending: str) -> Path:
    """A file whose name is as hostile as a file system lets it be."""
    return folder / f"{HOSTILE.replace(chr(0), '').replace('/', '')}{ending}"


def test_an_error_shows_the_name_of_its_file(tmp_path, monkeypatch, capsys):
    code, _, complaint = run(monkeypatch, capsys, "check", named(tmp_path, ".toml"))
    assert code == 2 and r"\x1b[2J" in complaint


def test_a_fault_of_ours_shows_the_text_that_it_quotes(monkeypatch, capsys):
    """A traceback, and still nothing that the terminal obeys."""

    def fail() -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(cli, "app", fail)
    code, _, complaint = run(monkeypatch, capsys, "check", "x.toml")
    assert code == 1 and "Traceback" in complaint and r"\x1b[2J" in complaint


def test_data_inspect_shows_what_rows_say(tmp_path, monkeypatch, capsys):
    file = named(tmp_path, ".jsonl")
    rows = [{"problem": f"{n} {HOSTILE}", "answer": HOSTILE, "subject": HOSTILE} for n in (1, 1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"problem": "1 " + HOSTILE, "answer": "2"}]))
    code, shown, _ = run(monkeypatch, capsys, "data", "inspect", file)
    assert code == 1 and "repeated" in shown and r"\u202e" in shown


def test_grade_shows_what_a_grader_raises_and_its_file_keeps_the_text(tmp_path, monkeypatch, capsys):
    grader = tmp_path / "mine.py"
    grader.write_text("def grade(prompt, answer, gold):\n    raise RuntimeError(answer)\n")
    file, out = tmp_path / "answers.jsonl", named(tmp_path, ".out")
    file.write_text(json.dumps({"gold": "1", "pred": HOSTILE}) + "\n")
    code, shown, _ = run(monkeypatch, capsys, "grade", file, "--out", out, "--reward", f"{grader}:grade")
    assert code == 1 and "unjudged" in shown and r"\x1b[2J" in shown

    file.write_text(json.dumps({"gold": HOSTILE, "pred": HOSTILE}) + "\n")
    code, shown, _ = run(monkeypatch, capsys, "grade", file, "--out", out, "--reward", "exact", "--explain")
    (said,) = map(json.loads, out.read_text().splitlines())
    assert code == 0 and said["explanation"]["gold"] == HOSTILE.strip()


def test_status_shows_what_a_log_says(tmp_path, monkeypatch, capsys):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/config.1.toml").write_text("num_steps = 10\n")
    (tmp_path / "slurm/12.log").write_text(f"warning: the grader failed on {HOSTILE}\n")
    _, shown, _ = run(monkeypatch, capsys, "slurm", "--status", tmp_path)
    assert r"\x1b[2J" in shown


def test_check_shows_a_prompt_as_every_agent_reads_it_and_the_gold(tmp_path, monkeypatch, capsys):
    agents = [agent_table(tmp_path, name, "qwen3", CHARACTERS) for name in ("one", "two")]
    agents[1]["prompt_template"] = "0=0;{prompt}"
    rows = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}{HOSTILE}"} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_config(tmp_path, agents, data={"files": [str(tmp_path / "rows.jsonl")]}, reward={"kind": "exact"})
    capsys.readouterr()  # of making the models
    code, shown, complaint = run(monkeypatch, capsys, "check", "--data", tmp_path / "run.toml")
    assert (code, complaint) == (0, "")
    assert "one reads of the first prompt 4 tokens:\n  | 0+0=\n" in shown
    assert "two reads of the first prompt 8 tokens:\n  | 0=0;0+0=\n" in shown
    assert "its gold, as reward reads it:\n  | 0\\x1b[2J" in shown
    assert "reward: exact (options it has: none); options set: none" in shown
    options = "reward.options={relative=0.1}"
    _, shown, _ = run(monkeypatch, capsys, "check", "--data", tmp_path / "run.toml", "reward.kind=math", options)
    assert "its gold, as reward reads it:\n" in shown and "CANNOT" not in shown
    assert "reward: math (options it has: relative); options set: relative = 0.1\n" in shown


def test_a_long_prompt_is_shown_by_its_beginning_and_its_end(tmp_path, monkeypatch, capsys):
    agents = [agent_table(tmp_path, "a", "qwen3", (*CHARACTERS, "\n"))]
    agents[0]["prompt_template"] = "".join(f"{n}=\n" for n in range(10, 50)) + "{prompt}"
    (tmp_path / "grader.py").write_text("def own(prompt, answer, gold, *, bonus=0.0):\n    return bonus\n")
    rows = [{"problem": f"{n}+{n}=", "answer": str(2 * n) if n < 5 else "proof"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"kind": f"{tmp_path}/grader.py:own", "options": {"bonus": 0.5}}
    data = {"files": [str(tmp_path / "rows.jsonl")], "prompt_field": "problem"}
    tables = {"reward": reward, "data": data, "algorithm": {"method": "gspo"}}
    write_config(tmp_path, agents, rollout={"max_prompt_tokens": 200, "max_answer_tokens": 12}, **tables)
    capsys.readouterr()
    code, shown, complaint = run(
        monkeypatch, capsys, "check", "--data", tmp_path / "run.toml", "training.max_tokens_per_microbatch=256"
    )
    assert (code, complaint) == (0, "")
    assert "  | 19=\n  | ... 21 lines ...\n  | 41=\n" in shown and "  | 49=\n  | 0+0=\n" in shown
    assert "\nwarning: the gold of 3 prompts ('proof') is no answer" in shown
    assert f"reward: {tmp_path}/grader.py:own(prompt, answer, gold, *, bonus=0.0); options set: bonus = 0.5\n" in shown


def test_say_prints_at_once(capsys):
    say(Path("a\x1bb"))
    assert capsys.readouterr().out == "a\\x1bb\n"
