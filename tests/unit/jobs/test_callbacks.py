"""Callbacks of `hacpo_mega.train`, on what ranks have written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.config import load_config
from hacpo_mega.jobs import from_python
from hacpo_mega.models.files.replacing import replace_file


def test_each_line_of_a_run_is_read_once_for_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None without a callback; all of a file that takes the place of the one before, as when a run goes on."""
    read, file = [], tmp_path / "run/metrics.jsonl"
    lines = [json.dumps({"step": step, "values": {"x": step}, "timing": {}}) + "\n" for step in range(6)]

    def ranks(_words: list[str], _world_size: int, look: Callable[[], None]) -> int:
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        for step, line in enumerate(lines):
            if step == 4:
                replace_file(file, "".join(lines[:4]))
            with file.open("a") as metrics:
                for part in (line[:9], line[9:]):  # a look may come between
                    metrics.write(part)
                    metrics.flush()
                    look()
        return 0

    parse = from_python.parse_json
    monkeypatch.setattr(from_python, "run_on_this_machine", ranks)
    monkeypatch.setattr(from_python, "parse_json", lambda line: read.append(parse(line)["step"]) or parse(line))
    monkeypatch.setattr(from_python, "read_metrics", lambda path: pytest.fail("all lines are read again"))
    config, shown = load_config(write_config(tmp_path, [agent_table(tmp_path, "a", "qwen3", CHARACTERS)])), {}
    from_python.train(config)
    assert read == []
    shutil.rmtree(tmp_path / "run")
    from_python.train(config, on_step=lambda step, numbers: shown.update({step: numbers["x"]}))
    assert shown == {step: float(step) for step in range(6)}
    assert read == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
