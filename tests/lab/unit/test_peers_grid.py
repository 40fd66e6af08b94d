"""The grid beside TRL: its table by hand, how long its answers are, what is of it, what is read again and what is not.

launch/peers/grid.py measures; TRL is in no environment of the tests.
"""

import io
import json
import runpy
import sys

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
        yield vars(sys.modules["cells"]) | names
        for name in ("table", "bench", "cells", "paced"):
            sys.modules.pop(name, None)


def test_the_table_is_the_one_worked_out_by_hand(grid):
    turn = grid["Turn"]
    ours = [turn(1, 1.0, 2.0, 50, 50, 90 * MIB, 0), turn(1, 3.0, 2.0, 50, 50, 80 * MIB, 0)]
    theirs = [turn(1, 4.0, 6.0, 50, 50, 60 * MIB, 0), turn(1, 4.0, 4.0, 50, 50, 60 * MIB, 0)]
    work = ("1.0M", "300, 20", "256, 24", "2")
    line = grid["grid_markdown"]({work: (ours, theirs)}).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [*work, "50", "25", "2.00 (1.33 to 4.00)", "50", "20", "2.50", "90", "60", "1.50"]


def test_ranks_of_a_job_are_one_turn(grid):
    """The slowest has the clock; processors and memory are of all."""
    said = [{"steps": [[1.0, 0.9], [3.0, 2.0]], "peak_bytes": 7, "imported_bytes": 2}]
    said.append({"steps": [[2.0, 1.5], [1.0, 0.5]], "peak_bytes": 5, "imported_bytes": 3})
    job = sys.modules["paced"].PacedJob([io.StringIO(json.dumps(rank) + "\n") for rank in said])
    assert job.turns([10, 20]) == [grid["Turn"](1, 2.0, 2.4, 10, 10, 12, 5), grid["Turn"](1, 3.0, 2.5, 20, 20, 12, 5)]


def test_processes_share_cores_and_the_prompts_of_an_update(grid):
    def names(*cell, cores):
        return list(grid["layouts_of"](grid["Cell"](*cell), cores))

    assert names("1M", 300, 20, cores=2) == ["1", "lanes 2", "tp 2"]  # 8 prompts an update
    assert names("1M", 300, 20, cores=6) == ["1", "lanes 2", "tp 2"] and names("1M", 300, 20, cores=1) == ["1"]
    assert names("60M", 300, 400, cores=2) == ["1", "tp 2"]  # one prompt
    assert names("120M", 300, 20, cores=2) == ["1", "tp 2"]  # too large
    cell = grid["Cell"]
    assert [grid["rounds_of"](cell(size, 300, 400), 3) for size in ("1M", "60M", "120M")] == [3, 2, 1]


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
            total = grid["row_name"](grid["Cell"](name, 300, prompt), "tail")[0]
            assert float(total[:-1]) == pytest.approx(float(name[:-1]), rel=0.07)


def test_a_finished_part_is_read_and_another_commits_is_not(grid, tmp_path, monkeypatch, capsys):
    def turns(*walls_s):
        return [grid["Turn"](1, wall_s, 2.0, 10, 10, MIB, 0) for wall_s in walls_s]

    # Two processes are slower where answers have one length, and faster in all.
    found = {"equal": {"1": turns(2.0), "2": turns(2.5), "TRL": turns(4.0)}}
    found["tail"] = {"1": turns(3.0), "2": turns(1.0), "TRL": turns(4.0)}
    made_with = {"commit": "c1", "rounds": 1, "cores": 2}
    grid["write_part"](tmp_path / "1M_v300_p20.json", made_with, found)
    arguments = ["grid.py", "--sizes", "1M", "--vocabularies", "300", "--prompts", "20", "400", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path)])
    asked, measured = grid["arguments"](), []

    def refuse(cell, *_):
        measured.append(cell.name)
        raise RuntimeError("a trainer failed")

    names = grid["run"].__globals__
    monkeypatch.setitem(names, "measure", refuse)
    monkeypatch.setitem(names, "num_cores", lambda: 2)
    monkeypatch.setattr("hacpo_mega.logbook.run.provenance.source_commit", lambda: "c1")
    with pytest.raises(RuntimeError, match=r"1 parts failed; the others: .*grid.md"):
        grid["run"](asked, {})
    assert measured == ["1M_v300_p400"] and capsys.readouterr().err == "a trainer failed\n"
    rows = (tmp_path / "grid.md").read_text().splitlines()[2:]
    assert ["| 2 | 8 | 5 | 1.60 (1.60 to 1.60) |" in rows[0], "| 2 | 20 | 5 | 4.00 (4.00 to 4.00) |" in rows[1]] == [
        True
    ] * 2
    monkeypatch.setattr("hacpo_mega.logbook.run.provenance.source_commit", lambda: "c2")
    with pytest.raises(RuntimeError, match="2 parts failed"):
        grid["run"](asked, {})
