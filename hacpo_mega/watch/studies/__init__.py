"""Studies: result folders of `eval`, or of commands of packages beside this one, as data for the page.

Such a package registers its kinds as entry points of hacpo_mega.watch.studies, as hacpo_lab does in setup.py for
`experiment` and `bench`. The content of every study has one shape, which the page draws whatever its kind:

    {"facts": {name: text}, "notes": [text],
     "charts": [{"title", "note", "share", "lines": [{"label", "x": {axis: [..]}, "y", "low", "high"}]}],
     "bars": [{"title", "note", "unit", "rows": [{"label", "whole", "parts": [[name, value, colour], ..]}]}],
     "tables": [{"title", "head", "rows", "notes"}]}

A file that its kind cannot read is shown as one line. Elsewhere: runs (watch/runs.py).
"""

import functools
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from hacpo_mega.logbook.evaluation_file import RESULT
from hacpo_mega.watch.studies.evaluation import answers, evaluation, side_by_side

FileStates = tuple[tuple[str, int, int], ...]  # (path, time of change in ns, bytes)


class StudyKind(NamedTuple):
    """A kind of study.

    is_in     whether a folder with files of these names is a study of the kind
    content   the study in the shape above, by its folder and the method that others are compared with. ValueError, one
              line, for a file that is not what its name says
    """

    is_in: Callable[[Path, Collection[str]], bool]
    content: Callable[[Path, str | None], dict[str, Any]]


class Study:
    """A folder that one command has written, of a kind of `kinds`.

    One of kind "evaluations" shows the evaluations in several folders side by side; `evaluated()` gives the folders.
    """

    def __init__(self, folder: Path, kind: str, evaluated: Callable[[], Sequence[Path]] | None = None) -> None:
        self.folder, self.kind = Path(os.path.realpath(folder)), kind
        self._evaluated = evaluated
        self.id = hashlib.sha256(bytes(self.folder) + kind.encode()).hexdigest()[:12]
        self._cached: tuple[FileStates, str | None, dict[str, Any]] | None = None

    def file_states(self) -> FileStates:
        """States of its files, which change with their content; none where it is gone."""
        states = []
        for folder in (self.folder,) if self._evaluated is None else self._evaluated():
            with suppress(OSError):
                files = [entry for entry in os.scandir(folder) if entry.name.endswith((".json", ".jsonl"))]
                infos = [(entry.path, entry.stat()) for entry in files]
                states += [(path, info.st_mtime_ns, info.st_size) for path, info in infos]
        return tuple(sorted(states))

    def content(self, reference: str | None = None) -> dict[str, Any]:
        """The study as it is now; `reference` is the method that others are compared with.

        ValueError, one line, for a file that is not what its name says, and for a folder that is gone.
        """
        states = self.file_states()
        if self._cached is None or self._cached[:2] != (states, reference):
            if not states:
                raise ValueError(f"{self.folder} is gone or holds no result any more: it was moved or deleted")
            if self._evaluated is None:
                content = kinds()[self.kind].content(self.folder, reference)
            else:
                content = side_by_side(self._evaluated())
            self._cached = (states, reference, content)
        return self._cached[2]

    def answers(self, benchmark: str, verdict: str, text: str, page: int) -> dict[str, Any]:
        """A page of an evaluation's answers. ValueError for a study of another kind."""
        if self.kind != "eval":
            raise ValueError(f"{self.folder} is no evaluation: it has no answers")
        return answers(self.folder, benchmark, verdict, text, page)


@functools.cache
def kinds() -> Mapping[str, StudyKind]:
    """All kinds by name. A function, since other packages' entry points import this file."""
    others = {entry.name: entry.load() for entry in entry_points(group="hacpo_mega.watch.studies")}
    return others | {"eval": StudyKind(lambda _, names: RESULT in names, lambda folder, _: evaluation(folder))}


def kinds_of(folder: Path) -> Iterator[str]:
    """The kinds of study that a folder is."""
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        yield from (name for name, kind in kinds().items() if kind.is_in(folder, names))
