"""The grid beside TRL: its table by hand, how long its answers are, what is of it, what is read again and what is not.

launch/peers/grid.py measures; TRL is in no environment of the tests.
"""

import json
import runpy
import sys
from dataclasses import asdict

import pytest
from repository import ROOT

FOLDER = ROOT / "launch" / "peers"
MIB = 2**20


@pytest.fixture(scope="module")
def grid():
    """The module's names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        names = runpy.run_path(str(FOLDER / "grid.py"))
        yield names
        for name in ("table", "bench"):
            sys.modules.pop(name, None)


def test_the_table_is_the_one_worked_out_by_hand(grid):
    turn = grid["Turn"]
    ours = [turn(1, 1.0, 2.0, 50, 50, 90 * MIB, 0), turn(1, 3.0, 2.0, 50, 50, 80 * MIB, 0)]
    theirs = [turn(1, 4.0, 6.0, 50, 50, 60 * MIB, 0), turn(1, 4.0, 4.0, 50, 50, 60 * MIB, 0)]
    work = ("1M", "1.0M", "300", "20", "256", "24", "4")
    line = grid["grid_markdown"]({work: (ours, theirs)}).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    measured = ["2.00", "4.00", "0.50", "50", "25", "2.00", "50", "20", "2.50", "90", "60", "1.50", "4.00 1.33"]
    assert cells == [*work, *measured]


@pytest.mark.parametrize("num_answers", [8, 16, 256])
def test_the_long_tail_has_the_same_tokens_in_every_step(grid, num_answers):
    steps = [grid["lengths_of"]("tail", num_answers, seed) for seed in range(3)]
    assert sorted(steps[0]) == sorted(steps[1]) == sorted(steps[2]) and steps[0] != steps[1]
    assert max(steps[0]) == 48 and 21.5 <= sum(steps[0]) / num_answers <= 23.5
    assert grid["lengths_of"]("equal", 3, 0) == [24, 24, 24]


def test_the_models_are_as_large_as_they_are_called(grid):
    for name, size in grid["SIZES"].items():
        for prompt, (prompts, updates) in size.prompts.items():
            assert prompts % updates == 0
            total = grid["row_name"](grid["Cell"](name, 300, prompt), "tail")[1]
            assert float(total[:-1]) == pytest.approx(float(name[:-1]), rel=0.07)


def test_a_finished_part_is_read_and_another_commits_is_not(grid, tmp_path, monkeypatch, capsys):
    globals_of_run = grid["run"].__globals__
    turn = asdict(grid["Turn"](1, 2.0, 2.0, 10, 10, MIB, 0))
    made_with = {"commit": "c1", "rounds": 1}
    kinds = {kind: [[turn], [{**turn, "wall_s": 4.0}]] for kind in grid["LENGTHS"]}
    (tmp_path / "1M_v300_p20.json").write_text(json.dumps({"made with": made_with, **kinds}))
    arguments = ["grid.py", "--sizes", "1M", "--vocabularies", "300", "--prompts", "20", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path)])
    asked = grid["arguments"]()

    def refuse(cell, *_):
        raise RuntimeError(f"measures {cell.name}")

    monkeypatch.setitem(globals_of_run, "measure", refuse)
    monkeypatch.setattr("hacpo_mega.logbook.provenance.source_commit", lambda: "c1")
    assert "| 2.00 | 4.00 | 0.50 |" in grid["run"](asked, {}) == (tmp_path / "grid.md").read_text()
    monkeypatch.setattr("hacpo_mega.logbook.provenance.source_commit", lambda: "c2")
    with pytest.raises(RuntimeError, match="measures 1M_v300_p20"):
        grid["run"](asked, {})
