"""Studies: folders that `experiment`, `bench` and `eval` have written, read as they are documented, for the page.

Each becomes tables, charts and bars of one shape, which the page draws without knowing whose they are:

    {"facts": {name: text}, "notes": [text],
     "charts": [{"title", "note", "share", "lines": [{"label", "x": {axis: [..]}, "y", "low", "high"}]}],
     "bars": [{"title", "note", "unit", "rows": [{"label", "whole", "parts": [[name, value, colour], ..]}]}],
     "tables": [{"title", "head", "rows", "notes"}]}

A file of another shape is one line. Elsewhere: runs (watch/runs.py), and what these commands write (hacpo_lab).
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hacpo_mega.watch.studies.benchmark import SCALING, TIMES, benchmark, scaling
from hacpo_mega.watch.studies.evaluation import SCORES, answers, evaluation, side_by_side
from hacpo_mega.watch.studies.experiment import EVIDENCE, PACKED, experiment, is_packed

ONE_RUN = re.compile(r".+\.lr-.+\.seed-\d+\.json")  # of an experiment's folder of results
Look = tuple[tuple[str, int, int], ...]


class Study:
    """A folder that one command has written. `kind` is "experiment", "bench", "scaling" or "eval".

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
            own = KINDS[self.kind](self.folder, reference) if self._parts is None else side_by_side(self._parts())
            self._kept = (looks, reference, own)
        return self._kept[2]

    def answers(self, benchmark: str, verdict: str, text: str, page: int) -> dict[str, Any]:
        """A page of an evaluation's answers. ValueError for a study of another kind."""
        if self.kind != "eval":
            raise ValueError(f"{self.folder} is no evaluation: it has no answers")
        return answers(self.folder, benchmark, verdict, text, page)


KINDS: dict[str, Callable[[Path, str | None], dict[str, Any]]] = {
    "experiment": experiment,
    "bench": lambda folder, _: benchmark(folder / TIMES),
    "scaling": lambda folder, _: scaling(folder / SCALING),
    "eval": lambda folder, _: evaluation(folder / SCORES),
}


def kinds_of(folder: Path) -> Iterator[str]:
    """The kinds of study that a folder is by the names of its files, and by the first line of runs.jsonl."""
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
        is_experiment = EVIDENCE in names or any(map(ONE_RUN.fullmatch, names))
        if is_experiment or (PACKED in names and is_packed(folder / PACKED)):
            yield "experiment"
        yield from (kind for kind, name in (("bench", TIMES), ("scaling", SCALING), ("eval", SCORES)) if name in names)
