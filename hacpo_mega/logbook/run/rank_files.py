"""Files with the present activity of every rank: RUN/ranks/rank_R.json, for `hacpo-mega watch`.

    {"time_unix_s": 1.8e9, "host": "n1", "phase": "learn", "when": "of step 3", "phase_s": 4.2, "num_done": 7,
     "num_before": 16, "waits_for": null, "waited_s": 0.0}

num_done counts the small steps of the phase (an engine's step, a micro-batch, a tensor), num_before has those of the
last phase of that name. A thread writes the file about every second, so that no step waits for a disk; all ranks of a
job together write at most MOST_A_SECOND. A run that ends well removes its files; those of one that was killed stay, and
say where every rank was. They lie in the folder that was opened, wherever that is moved.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacpo_mega.logbook.files.json_lines import COUNT, NUMBER, TEXT, wrong_field
from hacpo_mega.models.files.documents import parse_json
from hacpo_mega.models.files.links import require_inside

if TYPE_CHECKING:  # a page reads these files without torch
    from hacpo_mega.cluster.place import Place

FOLDER, NAME = "ranks", re.compile(r"rank_(\d{1,9})\.json", re.ASCII)
EVERY_S = 1.0
MOST_A_SECOND = 200  # files of a job: a shared file system serves other users as well
MOST_RANKS = 4096  # of a job that writes them; no page shows more
MOST_BYTES = 4096  # of a file that is read
LEAVE_S = 5.0  # for a write that hangs when the run ends
FIELDS = {
    **{"time_unix_s": NUMBER, "host": TEXT, "phase": TEXT, "when": TEXT, "phase_s": NUMBER},
    **{"num_done": COUNT, "num_before": COUNT.or_null, "waits_for": TEXT.or_null, "waited_s": NUMBER},
}


class RankFile(AbstractContextManager["RankFile"]):
    """Writes this rank's file until the run ends. A context; an error at its end leaves the file where it is."""

    def __init__(self, run_dir: Path, place: "Place") -> None:
        """Begins at once. `run_dir` is the run's own by now."""
        self._place, self._name = place, f"rank_{place.coordinate.global_rank}.json"
        self._run_dir, self._folder = None, None
        self._ends = threading.Event()
        size = place.rank_map.world_size
        self._every_s = seconds_between(size)
        self._thread = threading.Thread(target=self._follow, name="rank file", daemon=True)
        if size <= MOST_RANKS:
            with suppress(OSError):  # a run goes on without these files
                self._open(run_dir)
                self._thread.start()
                if place.coordinate.global_rank == 0:
                    self._drop_ranks_from(size)

    def _open(self, run_dir: Path) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY
        self._run_dir = os.open(run_dir, flags)
        with suppress(FileExistsError):
            os.mkdir(FOLDER, dir_fd=self._run_dir)
        self._folder = os.open(FOLDER, flags | os.O_NOFOLLOW, dir_fd=self._run_dir)

    def _drop_ranks_from(self, size: int) -> None:
        """Removes the files of an earlier start of the run that was killed with more ranks."""
        for name in os.listdir(self._folder):
            if (rank := _rank_of(name)) is not None and rank >= size:
                os.unlink(name, dir_fd=self._folder)

    def _follow(self) -> None:
        while True:
            with suppress(OSError):  # full, read-only or away: the run's own writers say so
                self._write()
            if self._ends.wait(self._every_s):
                return

    def _write(self) -> None:
        activity = self._place.watchdog.activity()
        seconds = {"phase_s": round(activity.phase_s, 3), "waited_s": round(activity.waited_s, 3)}
        content = {"time_unix_s": round(time.time(), 3), "host": socket.gethostname()} | activity._asdict() | seconds
        draft = f".{self._name}"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644, dir_fd=self._folder)
        try:
            os.write(file, json.dumps(content).encode() + b"\n")
        finally:
            os.close(file)
        os.replace(draft, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ends.set()
        if kind is not None or self._folder is None:
            return
        self._thread.join(LEAVE_S)
        for name in (self._name, f".{self._name}"):
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
        with suppress(OSError):  # other ranks have files there
            os.rmdir(FOLDER, dir_fd=self._run_dir)


def seconds_between(num_ranks: int) -> float:
    """Seconds between two files of one rank, in a job of so many."""
    return max(EVERY_S, num_ranks / MOST_A_SECOND)


def read_rank_files(run_dir: Path) -> Mapping[int, dict[str, Any]]:
    """The content of all files by rank; one that is no such file, or leads elsewhere, is left out."""
    found: dict[int, dict[str, Any]] = {}
    with suppress(OSError):
        for entry in os.scandir(run_dir / FOLDER):
            rank = _rank_of(entry.name)
            if rank is None or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(OSError, ValueError):
                require_inside(run_dir, Path(entry.path))
                with open(entry.path, "rb") as file:
                    content = parse_json(file.read(MOST_BYTES))
                if isinstance(content, dict) and wrong_field(content, FIELDS) is None:
                    found[rank] = content
    return found


def _rank_of(name: str) -> int | None:
    """The rank whose file has a name; None for another file."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None
