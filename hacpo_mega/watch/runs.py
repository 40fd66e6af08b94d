"""The watched runs: which folders are runs, what state each is in, and one thread that extends their indexes.

A given folder is a run or holds some, or is or holds a study (an experiment, a benchmark, an evaluation). Runs and
studies that appear there later are found, too. A run that is moved or deleted stays in the list as gone, with what its
index has. Nothing is written into a run.
"""

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hacpo_mega.config.checks.run_dirs import CONFIG, LOCK, METRICS, is_run
from hacpo_mega.logbook.run.provenance import exported_steps, read_starts
from hacpo_mega.logbook.run.run_lock import QUIET_S, is_gone
from hacpo_mega.models.files.documents import toml_file
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.watch.index import Index
from hacpo_mega.watch.studies import Study, kinds_of

LOOK_S, IDLE_S = 0.5, 2.0  # seconds between two looks at a running run, and at any other
FIND_S = 10.0  # seconds between two searches for new runs
DEPTH = 3  # levels of folders that are searched for runs
PER_RUN = ("seed", "run_dir")  # settings that differ within a group of runs


class Watched:
    """One run: its index, its settings, its state.

    experiment   the folder in which it was found, None if it was itself given
    """

    def __init__(self, folder: Path, experiment: str | None, say: Callable[[str], None]) -> None:
        self.index = Index(folder, say)
        self.folder, self.experiment = self.index.folder, experiment
        self.id = hashlib.sha256(bytes(self.folder)).hexdigest()[:12]
        self._config: dict[str, Any] = {}
        self._config_state: tuple[int, int] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The run's resolved configuration, as it was last seen; empty where there is none that can be read."""
        path = self.folder / CONFIG
        with suppress(OSError, ValueError):
            info = path.stat()
            if (state := (info.st_mtime_ns, info.st_size)) != self._config_state:
                require_inside(self.folder, path)
                self._config, self._config_state = toml_file(path, "the run_dir of a run"), state
        return self._config

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration flat, "algorithm.method" by its value; agents by their names."""
        return dict(_flat(self.config))

    @property
    def group(self) -> str:
        """A digest that runs share which differ only in their seed and run folder."""
        in_run_dir = f"'{self.config.get('run_dir', '')}/"  # a path inside it differs with it
        shared = [
            (key, value)
            for key, value in sorted(self.settings.items())
            if key not in PER_RUN and in_run_dir not in repr(value)
        ]
        return hashlib.sha256(repr(shared).encode()).hexdigest()[:12]

    @property
    def num_steps(self) -> int | None:
        """Planned steps; None if the configuration is not known."""
        num_steps = self.config.get("num_steps")
        return num_steps if type(num_steps) is int else None

    @property
    def state(self) -> str:
        """The state "gone" (moved or deleted), "running" (by the lock), "finished" (by the export), or "stopped"."""
        if not self.folder.is_dir():
            return "gone"
        lock = self.folder / LOCK
        with suppress(OSError):
            is_fresh = abs(time.time() - lock.stat().st_mtime) < QUIET_S
            with suppress(PermissionError):  # another user's lock: only its time can be read
                is_fresh &= not is_gone(lock.read_text(encoding="utf-8", errors="replace"))
            if is_fresh:
                return "running"
        done = exported_steps(self.folder)
        return "finished" if done is not None and done == (self.num_steps or done) else "stopped"

    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run, oldest first; none where they cannot be read."""
        with suppress(OSError, ValueError):
            return read_starts(self.folder)
        return []


class Runs:
    """All watched runs, in the order in which they were given or found, and the studies.

    `num_changes` counts the changes of either.
    """

    def __init__(self, folders: Sequence[Path], say: Callable[[str], None]) -> None:
        """Raises ValueError, one line, for a folder that is no run and no study, and holds none."""
        self._say, self._folders = say, [Path(folder) for folder in folders]
        self._runs: dict[str, Watched] = {}
        self.studies: dict[str, Study] = {}
        self._changed_at: dict[str, int] = {}  # num_changes at the last change, by id
        self.num_changes = 0
        for folder in self._folders:
            if not any(runs_in(folder)) and not any(studies_in(folder)):
                why = "holds no run, and nothing of experiment, bench or eval" if folder.is_dir() else "is no folder"
                raise ValueError(f"{folder} {why}: give the run_dir of a run, or a folder with runs in it")
        self._find()

    def __iter__(self) -> Iterator[Watched]:
        return iter(list(self._runs.values()))

    def __getitem__(self, name: str) -> Watched:
        """A run by its id. ValueError for an unknown one."""
        if (run := self._runs.get(name)) is None:
            raise ValueError(f"no run {name!r} is watched here")
        return run

    def changed_since(self, num_changes: int) -> list[str]:
        """Ids of the runs and studies that changed after so many changes; all for a number of an earlier server."""
        if num_changes > self.num_changes:
            return [*self._runs, *self.studies]
        return [name for name, at in list(self._changed_at.items()) if at > num_changes]

    def follow(self, ends: threading.Event) -> None:
        """Extends all indexes until `ends` is set. The work of a thread; an error of one run does not end it."""
        states: dict[str, Any] = {}
        looked_at: dict[str, float] = {}
        searched_at = time.monotonic()
        while True:
            has_work = False
            for run in self:
                pause_s = 0.0 if states.get(run.id) == "running" else IDLE_S
                if time.monotonic() - looked_at.get(run.id, -IDLE_S) < pause_s:
                    continue
                looked_at[run.id] = time.monotonic()
                if has_grown := self._extend(run):
                    looked_at[run.id] = -IDLE_S  # again at once
                has_work |= has_grown
                if states.get(run.id) != (state := run.state):
                    states[run.id] = state
                    self._note_change(run)
            for study in list(self.studies.values()):
                if time.monotonic() - looked_at.get(study.id, -IDLE_S) < IDLE_S:
                    continue
                looked_at[study.id] = time.monotonic()
                if states.get(study.id) != (files := study.file_states()):
                    states[study.id] = files
                    self._note_change(study)
            if time.monotonic() - searched_at > FIND_S:
                self._find_again()
                searched_at = time.monotonic()
            if ends.wait(0.01 if has_work else LOOK_S):
                return

    def _extend(self, run: Watched) -> bool:
        try:
            if changed := run.index.extend():
                self._note_change(run)
            return changed
        except (OSError, sqlite3.Error) as error:
            run.index.note(f"the index {run.index.path} cannot be extended ({error}): make room, or set XDG_CACHE_HOME")
            time.sleep(LOOK_S)
            return False

    def _note_change(self, run: Watched | Study) -> None:
        self.num_changes += 1
        self._changed_at[run.id] = self.num_changes

    def _find_again(self) -> None:
        try:
            self._find()
        except (OSError, ValueError, sqlite3.Error) as error:
            self._say(f"a new run cannot be watched yet: {error}")

    def _find(self) -> None:
        for given in self._folders:
            for folder in runs_in(given):
                real = Path(os.path.realpath(folder))
                if all(real != run.folder for run in self._runs.values()):
                    run = Watched(real, None if folder == given else given.resolve().name, self._say)
                    self._runs[run.id] = run
                    self._note_change(run)
            for study in studies_in(given):
                self._add_study(study)
        if len(self._evaluations()) > 1:
            self._add_study(Study(self._folders[0], "evaluations", self._evaluations))

    def _add_study(self, study: Study) -> None:
        if study.id not in self.studies:
            self.studies[study.id] = study
            self._note_change(study)

    def _evaluations(self) -> list[Path]:
        return [study.folder for study in list(self.studies.values()) if study.kind == "eval"]


def runs_in(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folder if it is a run, else the runs in it, by name; no link is followed."""
    with suppress(OSError):
        if (folder / METRICS).is_file() or is_run(folder):
            yield folder
        elif depth:
            for inside in _folders_in(folder):
                yield from runs_in(inside, depth - 1)


def studies_in(folder: Path, depth: int = DEPTH) -> Iterator[Study]:
    """The studies that a folder is or holds, by name, those of runs in it included; no link is followed."""
    with suppress(OSError):
        yield from (Study(folder, kind) for kind in kinds_of(folder))
        within = folder / "evaluations" if (folder / METRICS).is_file() or is_run(folder) else folder
        for inside in _folders_in(within) if depth else ():
            yield from studies_in(inside, depth - 1)


def _folders_in(folder: Path) -> list[Path]:
    """The folders that lie in a folder, by name, without hidden ones and links; OSError where it cannot be read."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]


def _flat(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(table, list) and table and all(isinstance(part, dict) for part in table):
        table = {str(part.get("name", number)): part for number, part in enumerate(table)}
    if not isinstance(table, Mapping):
        yield prefix, table
        return
    for key, value in table.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
