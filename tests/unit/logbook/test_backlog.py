"""Logs that cannot be written for a while: kept, in order, and written once and whole when they can be."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hacpo_mega.config.checks.run_dirs import LOCK
from hacpo_mega.logbook.files.backlog import Backlog
from hacpo_mega.logbook.files.metrics import MetricsWriter, StepMetrics, read_metrics
from hacpo_mega.logbook.run.run_lock import RunLock, not_the_folder


@contextmanager
def without_room(monkeypatch: pytest.MonkeyPatch, spare: int) -> Iterator[None]:
    """A disk that takes `spare` more bytes: the seam is the file that the log opens, as the kernel answers there."""
    left = [spare]
    open_file = Path.open

    def opened(path: Path, *arguments: object, **options: object) -> object:
        file = open_file(path, *arguments, **options)
        return _Full(file, left)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        yield


class _Full:
    def __init__(self, file: object, left: list[int]) -> None:
        self._file, self._left = file, left

    def write(self, content: bytes) -> int:
        if not self._left[0]:
            raise OSError(28, os.strerror(28))
        part = bytes(content)[: self._left[0]]
        self._left[0] -= len(part)
        return self._file.write(part)

    def __enter__(self) -> "_Full":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@pytest.mark.parametrize("spare", [0, 3, 9])
def test_lines_of_a_full_disk_are_written_later_once_and_in_order(tmp_path, monkeypatch, spare):
    """Full in the middle of a line, too: the half of it that fitted is written over."""
    said = []
    backlog, path, whole = Backlog(said.append), tmp_path / "log", tmp_path / "answers"
    backlog.append(path, b"before\n")
    with without_room(monkeypatch, spare):
        for number in range(3):
            backlog.append(path, f"line {number} of many\n".encode())
            backlog.replace(whole, f"answers {number}".encode())
        assert backlog.flush().errno == 28
        assert path.read_bytes() == b"before\n"
        assert not whole.exists()
    assert len(said) == 1 and "No space left on device" in said[0] and str(path) in said[0]
    assert backlog.flush() is None
    assert path.read_text() == "before\nline 0 of many\nline 1 of many\nline 2 of many\n"
    assert whole.read_text() == "answers 2"
    assert said[1:] == ["the logs are written again; no line is missing"]


def test_a_folder_that_vanishes_and_comes_back_has_every_line(tmp_path):
    """A mount that is gone for a while; what stands at its place meanwhile is left alone."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    backlog = Backlog()
    backlog.append(folder / "log", b"1\n")
    folder.rename(away)
    backlog.append(folder / "log", b"2\n")
    folder.mkdir()  # an empty mount point
    backlog.append(folder / "log", b"3\n")
    assert list(folder.iterdir()) == [] and backlog.flush() is not None
    folder.rmdir()
    away.rename(folder)
    backlog.append(folder / "log", b"4\n")
    assert (folder / "log").read_text() == "1\n2\n3\n4\n" and backlog.flush() is None


def test_a_folder_away_before_the_first_line_keeps_its_old_ones(tmp_path):
    """A resumed run has opened none of its files when their disk goes."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    (folder / "log").write_text("1\n2\n")
    backlog = Backlog(misplaced=lambda: None if (folder / "log").exists() else "it is away")
    folder.rename(away)
    backlog.append(folder / "log", b"3\n")
    away.rename(folder)
    backlog.append(folder / "log", b"4\n")
    assert (folder / "log").read_text() == "1\n2\n3\n4\n"


@pytest.mark.parametrize("other", ["nothing", "an empty folder", "another run's"])
def test_nothing_is_written_where_another_folder_stands(tmp_path, other):
    """First lines and whole files too, which no length of before protects."""
    folder, away, said = tmp_path / "run", tmp_path / "away", []
    folder.mkdir()
    with RunLock(folder) as lock:
        backlog = Backlog(said.append, misplaced=lambda: not_the_folder(folder, lock.token))
        folder.rename(away)
        if other != "nothing":
            folder.mkdir()
        if other == "another run's":
            (folder / LOCK).write_text("of another run")
        before = sorted(tmp_path.rglob("*"))
        backlog.append(folder / "log", b"1\n")
        backlog.replace(folder / "answers", b"of step 1")
        assert sorted(tmp_path.rglob("*")) == before
        assert len(said) == 1 and f"{folder} is not the folder that this run opened" in said[0]
        if other != "nothing":
            shutil.rmtree(folder)
        away.rename(folder)
        assert backlog.flush() is None
    assert ((folder / "log").read_text(), (folder / "answers").read_text()) == ("1\n", "of step 1")


def test_more_than_memory_may_hold_is_an_error_that_says_so(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    backlog = Backlog(max_bytes=10)
    backlog.append(folder / "log", b"1\n")
    shutil.rmtree(folder)
    backlog.append(folder / "log", b"0123456\n")
    with pytest.raises(OSError, match="No such file or directory, and more than 10 bytes of logs wait for it"):
        backlog.append(folder / "log", b"0123456\n")


def test_metrics_and_tensorboard_miss_no_step(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path)
    with without_room(monkeypatch, 100):
        for step in range(3):
            writer.write(step, StepMetrics({"x": float(step)}, {}))
        with pytest.raises(OSError, match="No space left"):
            writer.close()
    writer.write(3, StepMetrics({"x": 3.0}, {}))
    writer.close()
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert {step: metrics.values for step, metrics in read.items()} == {n: {"x": float(n)} for n in range(4)}
