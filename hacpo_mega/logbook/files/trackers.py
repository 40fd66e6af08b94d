"""Experiment trackers: send the numbers of `metrics.jsonl` also to packages that show them elsewhere.

Write-only: nothing is read back, `metrics.jsonl` stays the truth. wandb, trackio and swanlab speak nearly the same
calls; mlflow and comet_ml have adapters of their own; a class of the user's is named as module:CLASS or FILE.py:CLASS.
(accelerate.tracking, the one layer over all five, has no histograms, tables for wandb alone, and no way to go on with a
run.) A failing tracker is reported once, and training goes on. Elsewhere: whether a package is there at all
(config/checks/input_checks.py).
"""

import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hacpo_mega.config import Config
from hacpo_mega.config.user_code import named_function
from hacpo_mega.logbook.files.metrics import StepMetrics

IDENTITY = "tracked_as"  # the file of a run folder that names the run for its trackers


@dataclass(frozen=True)
class TrackedRun:
    """Data for a tracker when a run begins or goes on.

    name       of this run and of no other, the same when it goes on
    settings   the whole configuration as plain values
    """

    project: str
    name: str
    goes_on: bool
    run_dir: Path
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """A tracker, made with a TrackedRun. One of the user's may leave `show` out."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Every number of a step."""

    def show(self, step: int, columns: Sequence[str], rows: Sequence[list], spread: Mapping[str, list[float]]) -> None:
        """A table of sampled answers, and lists of numbers for histograms, by name."""

    def finish(self) -> None:
        """Waits until it has sent all of its data."""


class _LikeWandb:
    """wandb, trackio and swanlab: wandb knows a run by its id, trackio by its name, swanlab by an id as well."""

    def __init__(self, package: str, run: TrackedRun) -> None:
        # Imported here: it takes seconds of rank 0, which a run without this tracker is spared.
        self._package, self._api = package, importlib.import_module(package)
        run_keys: dict[str, Any] = {"name": run.name, "resume": "allow"}
        if package == "wandb":
            run_keys |= {"id": identifier(run.name), "dir": str(run.run_dir)}
        elif package == "swanlab":  # an id there is letters and digits alone
            run_keys |= {"id": identifier(run.name, signs="")[-64:], "logdir": str(run.run_dir / "swanlab")}
        self._api.init(project=run.project, config=dict(run.settings), **run_keys)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._api.log(dict(numbers), step=step)

    def show(self, step: int, columns: Sequence[str], rows: Sequence[list], spread: Mapping[str, list[float]]) -> None:
        if self._package == "swanlab":  # it has no histogram
            chart = importlib.import_module("swanlab").echarts.Table()
            shown = {"answers": chart.add(list(columns), [list(map(str, row)) for row in rows])} if rows else {}
        else:
            shown = {name: self._api.Histogram(values) for name, values in spread.items()}
            if rows:
                shown["answers"] = self._api.Table(columns=list(columns), data=[list(row) for row in rows])
        if shown:
            self._api.log(shown, step=step)

    def finish(self) -> None:
        self._api.finish()


class _Mlflow:
    """mlflow: where MLFLOW_TRACKING_URI says, else mlruns/ of the current folder. It has no histogram."""

    def __init__(self, run: TrackedRun) -> None:
        self._api = importlib.import_module("mlflow")
        self._api.set_experiment(run.project)
        tracked_as = identifier(run.name)  # a name may hold the filter's own quotes
        found = self._api.search_runs(filter_string=f"tags.tracked_as = '{tracked_as}'", output_format="list")
        if run.goes_on and found:
            self._api.start_run(run_id=found[0].info.run_id)
            return
        self._api.start_run(run_name=run.name, tags={"tracked_as": tracked_as})
        self._api.log_dict(dict(run.settings), "config.json")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._api.log_metrics(dict(numbers), step=step)

    def show(self, step: int, columns: Sequence[str], rows: Sequence[list], spread: Mapping[str, list[float]]) -> None:
        if rows:  # a file for each step; mlflow's log_table would read and write those of all steps before
            data = [[None if value != value else value for value in row] for row in rows]
            self._api.log_dict({"columns": list(columns), "data": data}, f"answers/step_{step:06d}.json")

    def finish(self) -> None:
        self._api.end_run()


class _Comet:
    """comet_ml, with the key and workspace of its own settings; COMET_OFFLINE_DIRECTORY and the like hold."""

    def __init__(self, run: TrackedRun) -> None:
        api = importlib.import_module("comet_ml")
        key = identifier(run.name, signs="").ljust(32, "0")[-50:]  # 32 to 50 letters and digits
        self._experiment = api.start(project_name=run.project, experiment_key=key, mode="get_or_create")
        self._experiment.set_name(run.name)
        self._experiment.log_parameters(dict(run.settings), nested_support=True)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(numbers), step=step)

    def show(self, step: int, columns: Sequence[str], rows: Sequence[list], spread: Mapping[str, list[float]]) -> None:
        for name, values in spread.items():
            self._experiment.log_histogram_3d(values, name=name, step=step)
        if rows:
            self._experiment.log_table(f"answers_{step:06d}.csv", [list(row) for row in rows], headers=list(columns))

    def finish(self) -> None:
        self._experiment.end()


def _start_tracker(tracker: str, run: TrackedRun) -> Tracker:
    if ":" in tracker:
        return named_function(tracker)(run)
    if tracker == "mlflow":
        return _Mlflow(run)
    return _Comet(run) if tracker == "comet_ml" else _LikeWandb(tracker, run)


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers of a run, on the job's rank 0; the other ranks have quiet ones."""

    def __init__(self, config: Config, say: Callable[[str], None], *, goes_on: bool, quiet: bool = False) -> None:
        """Starts the run at every tracker of [logging], or resumes it; the run folder exists.

        `say` gets a tracker's first error; none is ever raised. A `quiet` one has no tracker.
        """
        self._say = say
        self._failed: set[str] = set()
        self._open: dict[str, Tracker] = {}
        names = () if quiet else config.logging.trackers
        if names:
            name = f"{config.run_dir.name}-{identity(config.run_dir, goes_on)}"
            run = TrackedRun(config.logging.project, name, goes_on, config.run_dir, config.model_dump(mode="json"))
        for tracker in names:
            with self._failure_reported_once(tracker):
                self._open[tracker] = _start_tracker(tracker, run)

    def __bool__(self) -> bool:
        return bool(self._open)

    def log(self, step: int, metrics: StepMetrics) -> None:
        """Every number of a step, by the names of metrics.jsonl."""
        for name, tracker in self._open.items():
            with self._failure_reported_once(name):
                tracker.log(step, metrics.values | metrics.timing)

    def show(self, step: int, columns: Sequence[str], rows: Sequence[list], spread: Mapping[str, list[float]]) -> None:
        """Answers of a step as a table, and lists of numbers for histograms, by name."""
        for name, tracker in self._open.items():
            with self._failure_reported_once(name):
                if hasattr(tracker, "show"):
                    tracker.show(step, columns, rows, spread)

    def close(self) -> None:
        """Waits until the trackers have all they were sent."""
        for name, tracker in self._open.items():
            with self._failure_reported_once(name):
                tracker.finish()

    @contextmanager
    def _failure_reported_once(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._say(f"{name} failed ({reason}); this is said once, training goes on, metrics.jsonl is whole")
            self._failed.add(name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # an error ends the job now, and does not wait for anybody's network
            self.close()


def identifier(name: str, signs: str = "._-") -> str:
    """A run's name as trackers take it for an id: letters and digits of ASCII and some signs, 128 at most. It keeps its
    end, which tells runs apart."""
    plain = (sign if sign.isascii() and (sign.isalnum() or sign in signs) else "_" for sign in name)
    return "".join(plain if signs else (sign for sign in plain if sign != "_"))[-128:]


def identity(run_dir: Path, goes_on: bool) -> str:
    """Eight characters that tell this run from others of the same folder name; those of its start if it `goes_on`."""
    path = run_dir / IDENTITY
    if goes_on and path.is_file():
        return path.read_text(encoding="utf-8")
    fresh = secrets.token_hex(4)
    path.write_text(fresh, encoding="utf-8")
    return fresh
