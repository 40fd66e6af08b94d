"""The map of ranks says what every rank's own file says: its phase, whom it waits for, and since when it is silent."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from watched_run import WatchedRun

from hacpo_mega.watch.runs import Watched
from hacpo_mega.watch.views import job


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Two agents on two lanes: ranks 0 and 1 are qwen's, 2 and 3 llama's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = WatchedRun(tmp_path / "run").folder
    (folder / "config.toml").write_text("lanes = 2\n" + (ROOT / "configs/quickstart.toml").read_text())
    (folder / "ranks").mkdir()
    return Watched(folder, None, print)


def tell(run: Watched, rank: int, seconds_ago: float = 0.0, **fields: Any) -> None:
    content = {"time_unix_s": time.time() - seconds_ago, "host": "n1", "phase": "exchange", "when": "of step 3"}
    content |= {"phase_s": 4.0, "num_done": 0, "num_before": None, "waits_for": None, "waited_s": 0.0}
    (run.folder / "ranks" / f"rank_{rank}.json").write_text(json.dumps(content | fields))


def test_ranks_wait_for_those_that_work(run: Watched) -> None:
    for rank in (0, 1):
        tell(run, rank, waits_for="what ranks [0, 2] of lane 0 gather", waited_s=3.5)
    tell(run, 2, seconds_ago=42.0, phase="learn", num_done=6, num_before=8)
    tell(run, 3, phase="learn", num_done=30, num_before=8)
    found = job(run)
    ranks = found["ranks"]
    assert [(rank["agent"], rank["lane"], rank["phase"], rank["node"]) for rank in ranks] == [
        *(("qwen", 0, "exchange", "n1"), ("qwen", 1, "exchange", "n1")),
        *(("llama", 0, "learn", "n1"), ("llama", 1, "learn", "n1")),
    ]
    assert found["waited_for"] == [2, 3]
    assert [rank["progress"] for rank in ranks] == [None, None, 0.75, 1.0]
    assert [rank["silent"] for rank in ranks] == [False, False, True, False] and 42.0 <= ranks[2]["seen_s_ago"] < 60.0
    for rank in (2, 3):
        tell(run, rank, waits_for="a barrier of all ranks")
    assert job(run)["waited_for"] == []


def test_what_is_no_file_of_a_rank_is_left_out(run: Watched, tmp_path: Path) -> None:
    tell(run, 0)
    outside = run.folder / "ranks" / "rank_0.json"
    outside.rename(tmp_path / "secret.json")
    outside.symlink_to(tmp_path / "secret.json")
    for rank, content in ((1, '{"phase": '), (2, "[]"), (3, '{"phase": 1}')):
        (run.folder / "ranks" / f"rank_{rank}.json").write_text(content)
    tell(run, 77)
    found = job(run)
    assert [rank["phase"] for rank in found["ranks"]] == [None] * 4 and found["waited_for"] == []
