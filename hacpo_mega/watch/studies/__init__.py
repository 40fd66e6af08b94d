"""Studies: folders that `eval` has written, or commands of packages beside this one, read as documented, for the page.

Such a package gives its kinds as entry points of hacpo_mega.watch.studies, as hacpo_lab does in setup.py for
`experiment` and `bench`. Each becomes tables, charts and bars of one shape, which the page draws without knowing whose
they are:

    {"facts": {name: text}, "notes": [text],
     "charts": [{"title", "note", "share", "lines": [{"label", "x": {axis: [..]}, "y", "low", "high"}]}],
     "bars": [{"title", "note", "unit", "rows": [{"label", "whole", "parts": [[name, value, colour], ..]}]}],
     "tables": [{"title", "head", "rows", "notes"}]}

A file of another shape is one line. Elsewhere: runs (watch/runs.py).
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

Look = tuple[tuple[str, int, int], ...]


class StudyKind(NamedTuple):
    """A kind of study.

    is_in    whether a folder with files of these names is one
    shown    everything of it; the second argument is the method that others are compared with. ValueError, one line,
             for a file that is not what its name says
    """

    is_in: Callable[[Path, Collection[str]], bool]
    shown: Callable[[Path, str | None], dict[str, Any]]


class Study:
    """A folder that one command has written, of a kind of `kinds`.

    One of kind "evaluations" lays all evaluations in the folders that `parts` names side by side.
    """

    def __init__(self, folder: Path, kind: str, parts: Callable[[], Sequence[Path]] | None = None) -> None:
        self.folder, self.kind = Path(os.path.realpath(folder)), kind
        self._parts = parts
        self.id = hashlib.sha256(bytes(self.folder) + kind.encode()).hexdigest()[:12]
        self._kept: tuple[Look, str | None, dict[str, Any]] | None = None

    def looks(self) -> Look:
        """Paths, times and sizes of its files, which change with their content; none where it is gone."""
        found = []
        for folder in (self.folder,) if self._parts is None else self._parts():
            with suppress(OSError):
                files = [entry for entry in os.scandir(folder) if entry.name.endswith((".json", ".jsonl"))]
                infos = [(entry.path, entry.stat()) for entry in files]
                found += [(path, info.st_mtime_ns, info.st_size) for path, info in infos]
        return tuple(sorted(found))

    def shown(self, reference: str | None = None) -> dict[str, Any]:
        """Everything of it, as it is now; `reference` is the method that others are compared with.

        ValueError, one line, for a file that is not what its name says, and for a folder that is gone.
        """
        looks = self.looks()
        if self._kept is None or self._kept[:2] != (looks, reference):
            if not looks:
                raise ValueError(f"{self.folder} is gone or holds no result any more: it was moved or deleted")
            shown = kinds()[self.kind].shown if self._parts is None else lambda *_: side_by_side(self._parts())
            own = shown(self.folder, reference)
            self._kept = (looks, reference, own)
        return self._kept[2]

    def answers(self, benchmark: str, verdict: str, text: str, page: int) -> dict[str, Any]:
        """A page of an evaluation's answers. ValueError for a study of another kind."""
        if self.kind != "eval":
            raise ValueError(f"{self.folder} is no evaluation: it has no answers")
        return answers(self.folder, benchmark, verdict, text, page)


@functools.cache
def kinds() -> Mapping[str, StudyKind]:
    """All kinds by name. Not before they are asked for: those of other packages import this file."""
    others = {entry.name: entry.load() for entry in entry_points(group="hacpo_mega.watch.studies")}
    own = StudyKind(lambda _, names: RESULT in names, lambda folder, _: evaluation(folder))
    return others | {"eval": own}


def kinds_of(folder: Path) -> Iterator[str]:
    """The kinds of study that a folder is."""
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        yield from (name for name, kind in kinds().items() if kind.is_in(folder, names))
