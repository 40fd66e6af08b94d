"""Experiment trackers: what `metrics.jsonl` says of a step is also told to wandb or trackio, through one adapter.

Write-only: nothing is read back, `metrics.jsonl` stays the truth. Both packages speak the same three calls (init, log,
finish); what differs is how a run is named so that a resumed one goes on. A tracker that fails is complained of once,
and training goes on. Not here: whether a package is there at all (config/input_checks.py).
"""

import importlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from hacpo_mega.config import Config
from hacpo_mega.logbook.metrics import StepMetrics

IDENTITY = "tracked_as"  # the file of a run folder that names the run for its trackers


class Trackers:
    """The trackers of a run, on the job's rank 0; the other ranks have quiet ones."""

    def __init__(self, config: Config, say: Callable[[str], None], *, goes_on: bool, quiet: bool = False) -> None:
        """Begins the run at every tracker of [logging], or goes on with it; the run folder exists.

        `say` is told of a tracker's first error, of which there is never an exception. A `quiet` one has no tracker.
        """
        self._say = say
        self._complained: set[str] = set()
        self._open: dict[str, ModuleType] = {}
        packages = () if quiet else config.logging.trackers
        name = f"{config.run_dir.name}-{identity(config.run_dir, goes_on)}" if packages else ""
        for package in packages:
            with self._tolerated(package):
                # Only a run that asks for a tracker pays for its import, seconds of rank 0.
                tracker = importlib.import_module(package)
                shown = {"project": config.logging.project, "config": config.model_dump(mode="json")}
                tracker.init(**shown, **_naming(package, name, config.run_dir))
                self._open[package] = tracker

    def log(self, step: int, metrics: StepMetrics) -> None:
        """Every number of a step, by the names of metrics.jsonl."""
        for package, tracker in self._open.items():
            with self._tolerated(package):
                tracker.log(metrics.values | metrics.timing, step=step)

    def close(self) -> None:
        """Waits until the trackers have what they were told."""
        for package, tracker in self._open.items():
            with self._tolerated(package):
                tracker.finish()

    @contextmanager
    def _tolerated(self, package: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if package not in self._complained:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._say(f"{package} failed ({reason}); this is said once, training goes on, metrics.jsonl is whole")
            self._complained.add(package)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # an error ends the job now, and does not wait for anybody's network
            self.close()


def identity(run_dir: Path, goes_on: bool) -> str:
    """Eight characters that tell this run from others of the same folder name; those it began with if it `goes_on`."""
    path = run_dir / IDENTITY
    if goes_on and path.is_file():
        return path.read_text(encoding="utf-8")
    fresh = secrets.token_hex(4)
    path.write_text(fresh, encoding="utf-8")
    return fresh


def _naming(package: str, name: str, run_dir: Path) -> dict[str, Any]:
    """The arguments by which `init` finds a run again: wandb knows it by its id, trackio by its name."""
    naming: dict[str, Any] = {"name": name, "resume": "allow"}
    return naming | {"id": name, "dir": str(run_dir)} if package == "wandb" else naming
