"""The report that a run writes beside its training and at its end."""

import itertools
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hacpo_mega.trainer.observers import Reports


def reports_of(run_dir: Path, every: int | str = "end", signals: tuple[int, ...] = ()) -> Reports:
    """Reports of a run of three steps whose one rank is told `signals`, a look each."""
    told = itertools.chain(signals, itertools.repeat(0))
    place = SimpleNamespace(
        coordinate=SimpleNamespace(global_rank=0),
        agreed_signal=lambda: next(told),
        share_in_job=lambda payload: payload,
    )
    logging = SimpleNamespace(report=every)
    return Reports(SimpleNamespace(run_dir=run_dir, num_steps=3, wait_s=0.2, logging=logging), place)


@pytest.mark.nightly
def test_a_report_that_cannot_be_written_fails_no_run(tmp_path, monkeypatch):
    nowhere = tmp_path / "nowhere"
    assert reports_of(nowhere).finish().startswith(f"no report: ValueError: {nowhere} ")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert reports_of(tmp_path).finish() == "no report: its process has ended with status 1"
    monkeypatch.setattr(sys, "executable", str(nowhere))
    assert reports_of(tmp_path).finish().startswith("no report: [Errno 2] No such file")


def test_a_signal_leaves_the_last_report_out(tmp_path, monkeypatch):
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec sleep 3600\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    line = reports_of(tmp_path, signals=(0, 0, signal.SIGTERM)).finish()
    assert line.startswith("no report: told to end before it was written; hacpo-mega report ")


def test_a_report_every_few_steps_begins_none_at_the_last(monkeypatch, tmp_path):
    """The run writes that one itself, when the step is on disk and the one before is done."""
    begun, done = [], Mock(returncode=0, **{"communicate.return_value": ("", "")})
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: begun.append(command[-1]) or done)
    for first, expected in ((1, 2), (3, 0)):  # the whole run, and one that goes on with its last step
        reports = reports_of(tmp_path, 1)
        for step in range(first, 4):
            reports.before_writing(step, None)
        assert begun == [str(tmp_path)] * expected
        assert reports.finish() == f"the report: {tmp_path / 'report.html'}"
        assert begun == [str(tmp_path)] * (expected + 1)
        begun.clear()
