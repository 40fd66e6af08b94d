"""The user sets how long processes wait for each other, and a lane is shut down before its process ends."""

import ast
from types import SimpleNamespace

import torch.distributed as dist
from repository import ROOT

from hacpo_mega.cluster.place import Place


def test_whoever_joins_a_job_says_how_long_it_waits():
    """Not the default of Place.join: 1,800 seconds are too short for unequal agents with long answers."""
    waits = {}
    for file in (ROOT / "hacpo_mega").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Place.join":
                waits[file.name] = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
    assert waits == {
        "build.py": "config.wait_s",
        "doctor.py": "config.wait_s",
        "warm_start.py": "config.wait_s",
        "evaluate.py": "WAIT_S",
        "serve.py": "WAIT_S",
        "meeting.py": "timeout_s",
    }


def test_the_lane_is_shut_down_between_the_last_barrier_and_the_end(monkeypatch):
    """An NCCL group that is only dropped warns, and aborts what it takes for still running."""
    done = []
    place = object.__new__(Place)
    place.lane_group = SimpleNamespace(shutdown=lambda: done.append("lane"))
    place.watchdog = SimpleNamespace(close=lambda: done.append("watchdog"))
    place._sockets = SimpleNamespace(remove=lambda: done.append("sockets"))
    monkeypatch.setattr(Place, "barrier", lambda self: done.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("world"))
    place.close()
    assert done == ["barrier", "watchdog", "lane", "world", "sockets"]
    assert place.lane_group is None
