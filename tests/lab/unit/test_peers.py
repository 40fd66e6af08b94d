"""TRL beside this project: what is read of it, how turns add up, the table by hand, what is refused before any work.

Both trainers are measured by launch/peers/bench.py alone: TRL is in no environment of the tests.
"""

import json
import runpy
import sys
from argparse import Namespace

import pytest
from repository import ROOT
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.config import load_config

FOLDER = ROOT / "launch" / "peers"
TABLE = runpy.run_path(str(FOLDER / "table.py"))
Turn = TABLE["Turn"]
STEP = {"wall_s": 2.0, "cpu_s": 3.0, "generated_tokens": 40, "trained_tokens": 40}
FOUND = {
    "steps": [STEP, {**STEP, "wall_s": 4.0}],
    "peak_bytes": 500,
    "imported_bytes": 300,
    "prompt_tokens": 12,
    "threads": 2,
    "dtype": "float32",
}


def read(tmp_path, text: str) -> Turn:
    (tmp_path / "measured.json").write_text(text)
    asked = {"tokens": [40, 40], "prompt_tokens": 12, "threads": 2}
    return TABLE["whole"](TABLE["read_turn"](tmp_path / "measured.json", **asked))


def test_a_turn_is_the_sum_of_its_steps(tmp_path):
    assert read(tmp_path, json.dumps(FOUND)) == Turn(2, 6.0, 6.0, 80, 80, 500, 300)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "not what trl_gspo.py writes .JSONDecodeError"),
        (json.dumps({**FOUND, "steps": [{"wall_s": 1.0}]}), "not what trl_gspo.py writes .KeyError: 'cpu_s'"),
        (
            json.dumps({**FOUND, "steps": [STEP]}),
            r"generated \[40\] and trained .*, asked were \[40, 40\]",
        ),
        (json.dumps({**FOUND, "steps": [STEP, {**STEP, "trained_tokens": 38}]}), r"trained \[40, 38\] tokens"),
        (json.dumps({**FOUND, "prompt_tokens": 13}), "TRL had .'prompt_tokens': 13.*hacpo_mega .'prompt_tokens': 12"),
        (json.dumps({**FOUND, "threads": 1}), "not the same work"),
        (json.dumps({**FOUND, "dtype": "bfloat16"}), "not the same work"),
    ],
)
def test_other_work_is_no_measurement(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint) as refused:
        read(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_trainers_at_once_share_the_clock_and_in_turns_the_memory():
    one, other = Turn(2, 6.0, 6.0, 80, 80, 500, 300), Turn(2, 4.0, 3.0, 80, 80, 700, 200)
    assert TABLE["at_once"]([one, other]) == Turn(2, 6.0, 9.0, 160, 160, 1200, 500)
    assert TABLE["in_turns"]([one, other]) == Turn(2, 10.0, 9.0, 160, 160, 700, 300)


def test_the_table_is_the_one_worked_out_by_hand():
    mib = 2**20
    ours = [Turn(2, 2.0, 2.0, 50, 50, 90 * mib, 60 * mib), Turn(2, 3.0, 2.0, 50, 50, 80 * mib, 60 * mib)]
    theirs = [Turn(2, 8.0, 8.0, 50, 50, 70 * mib, 40 * mib), Turn(2, 6.0, 4.0, 50, 50, 70 * mib, 40 * mib)]
    lines = TABLE["to_markdown"]({("qwen", "hacpo_mega"): ours, ("qwen", "TRL"): theirs}).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[2] == ["qwen", "hacpo_mega", "1.25", "1.00 1.50", "40", "50", "90", "60", "1.00", "1.00 1.00", "1.00"]
    assert rows[3] == ["qwen", "TRL", "3.50", "4.00 3.00", "14", "17", "70", "40", "2.80", "4.00 2.00", "3.00"]


def test_memory_is_that_of_this_process():
    assert 2**20 < TABLE["resident"]("VmRSS") <= TABLE["resident"]("VmHWM")


@pytest.fixture
def peer(tmp_path):
    """A Python that says it has TRL."""
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\necho trl 1.0\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--peer", "nowhere/python"], "nowhere/python is not there: make bench-peers creates it"),
        (["--peer", sys.executable], "No package metadata was found for trl"),
        (["--rounds", "0"], "--rounds (0) and --steps (3) must be at least 1"),
        (["lanes=2"], "qwen has several processes"),
        (["agents.qwen.model=nowhere"], "nowhere holds no model: hacpo-mega init"),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments, complaint, peer, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    config = str(ROOT / "configs" / "quickstart.toml")
    monkeypatch.setattr(sys, "argv", ["bench.py", config, "--peer", str(peer), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / "bench.py"), run_name="__main__")
    sys.modules.pop("table")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1 and complaint in said, said


def test_both_answer_the_prompts_of_the_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    bench = runpy.run_path(str(FOLDER / "bench.py"))
    sys.modules.pop("table")
    config = load_config(write_config(tmp_path, [agent_table(tmp_path, "wide", "qwen3", CHARACTERS)]))
    machine = bench["Machine"](config, None, Namespace(steps=2), {})
    assert len(machine._prompts) == (bench["WARM_UP"] + 2) * config.training.prompts_per_step
    assert all(machine._prompts)
