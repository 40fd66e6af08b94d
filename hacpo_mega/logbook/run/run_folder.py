"""The folder of a run and the files in it.

    config.toml   resolved        starts.jsonl   commit and versions of every start    alarms.jsonl   warnings of steps
    checkpoints/step_*/           hacpo_mega/checkpoint/files.py
    metrics.jsonl, tensorboard/   metrics.py     rollouts/step_*.lane_*.jsonl   rollout_log.py
    agents/<name>/   every agent as a Hugging Face folder, at the end     finished.json   the steps they have learnt

A run never writes over another: an older one at `run_dir` is moved to `run_dir.1`, `run_dir.2`, ... first, unless it is
this run itself, which goes on from a checkpoint. Nor does it write into a folder that has taken the place of its own,
which may have been moved, removed or unmounted.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import tomli_w
from torch import Tensor

from hacpo_mega.checkpoint.files import remove_unfinished
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.watchdog import RunStopped
from hacpo_mega.config import Config
from hacpo_mega.config.checks.run_dirs import CONFIG, METRICS, STARTS
from hacpo_mega.logbook.console import warn
from hacpo_mega.logbook.files.backlog import Backlog
from hacpo_mega.logbook.files.json_lines import dated_line
from hacpo_mega.logbook.files.metrics import MetricsWriter, StepMetrics, metrics_lines
from hacpo_mega.logbook.files.rollout_log import AnswerNotes, RolloutLog, logged_parts
from hacpo_mega.logbook.run.older_runs import move_aside
from hacpo_mega.logbook.run.provenance import ALARMS, FINISHED, read_starts, record_end, record_start
from hacpo_mega.logbook.run.run_lock import RunLock, not_the_folder
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.models.files.replacing import replace_file
from hacpo_mega.models.files.visible import ranges
from hacpo_mega.records import Pool


class RunFolder(AbstractContextManager["RunFolder"]):
    """A process's share of the run folder: rank 0 writes metrics, one leader per lane its rollouts."""

    def __init__(
        self, config: Config, place: Place, lock: RunLock | None, steps_done: int = 0, *, goes_on: bool = False
    ) -> None:
        """Makes the folder, moving an older one aside, or `goes_on` with it. Collective over the job.

        `lock` is that of `run_dir`, None on all ranks but the first. Runs last, after everything that can be refused or
        fail to load, so that no mistake displaces an older run.
        """
        self._place, self._lock = place, lock
        self._path = config.run_dir
        self._stack = ExitStack()
        self._token = "" if lock is None else lock.token
        if lock is not None:
            self._open(config, lock, steps_done, goes_on)
        self._token = place.share_in_job(self._token.encode()).decode()
        is_first = lock is not None
        self._backlog = Backlog(lambda text: warn(f"{place.coordinate}: {text}"), misplaced=self.misplaced)
        writer = MetricsWriter(self._path, steps_done, self._backlog) if is_first else None
        self._metrics = None if writer is None else self._stack.enter_context(writer)
        self._rollouts = self._rollout_log(config, steps_done) if place.is_leader else None

    def _open(self, config: Config, lock: RunLock, steps_done: int, goes_on: bool) -> None:
        """Prepares the folder for a run that begins or resumes."""
        if goes_on:
            if reason := self.misplaced():
                raise ValueError(f"{reason}: put it back, and start the run again")
            require_inside(self._path, *(self._path / name for name in (CONFIG, STARTS, METRICS, FINISHED)))
            leftovers = (f"warning: {line}" for line in remove_unfinished(self._path))
            for line in (*leftovers, *missing_logs(self._path, steps_done)):
                warn(line)
        else:
            if aside := move_aside(self._path):
                warn(f"{self._path} held a run, which is {aside} from now on")
            lock.folder.mkdir(parents=True, exist_ok=True)
            lock.enter(aside)
        models = {agent.name: agent.model for agent in config.agents}
        record_start(self._path, steps_done, models)  # first: a run that is killed right after it is known by this file
        replace_file(self._path / CONFIG, resolved_toml(config))  # a full disk would leave a part of it

    def _rollout_log(self, config: Config, steps_done: int) -> RolloutLog:
        return RolloutLog(
            self._path,
            self._place.lane,
            tuple(agent.name for agent in config.agents),
            self._place.agent,
            self._place.gather_lane,
            writes=self._place.lane_group.rank() == 0,
            steps_done=steps_done,
            backlog=self._backlog,
        )

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        """Writes the reduced metrics of a step, on rank 0."""
        if self._metrics is not None:
            self._metrics.write(step, metrics)

    def write_alarm(self, step: int, text: str) -> None:
        """Notes a warning that a step has raised, on rank 0."""
        if self._metrics is not None:
            self._backlog.append(self._path / ALARMS, dated_line(step=step, text=text))

    def write_rollouts(self, step: int, pool: Pool, advantages_PNG: Tensor, notes: AnswerNotes) -> None:
        """Logs a lane's answers with this learner's advantages and notes. Collective over the leaders."""
        if self._rollouts is not None:
            self._rollouts.write(step, pool, advantages_PNG, notes)

    def misplaced(self) -> str | None:
        """The reason why the content of `run_dir` is not the folder that the run opened; None if it is.

        RunStopped, on rank 0, where it is that folder and another job's by now.
        """
        reason = not_the_folder(self._path, self._token)
        if reason and self._lock is not None and self._lock.is_lost():
            raise RunStopped(
                f"{self._path} is no longer this run's: the lock in it was deleted or is another job's. Nothing more "
                "is written; end the other job, if there is one, and start the run again"
            )
        return reason

    def unwritten(self) -> str | None:
        """The reason why logs of this process are still not on disk; None if all of them are."""
        error = self._backlog.flush()
        return None if error is None else f"logs of {self._path} wait to be written ({error.strerror})"

    def finish(self, steps_done: int) -> None:
        """Notes that every agent is exported as it is after `steps_done` steps. Collective over the job.

        OSError, on rank 0, when the folder is not there.
        """
        self._place.barrier()
        if self._place.coordinate.global_rank == 0:
            if reason := self.misplaced():
                raise OSError(reason)
            record_end(self._path, steps_done)

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)


def resolved_toml(config: Config) -> str:
    """The configuration with every default filled in, as TOML that `load_config` reads back; None is left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def missing_logs(run_dir: Path, steps_done: int) -> Iterator[str]:
    """A line for missing metrics and one for missing answers of the steps that were done.

    A lane's answers are missing where a later lane's are there; of the last lanes nothing can be told.
    """
    try:
        first = read_starts(run_dir)[0]["steps_done"]
    except (ValueError, KeyError, IndexError):  # nothing is known of where it began, and other files tell of it
        first = 0
    expected, done = range(first + 1, steps_done + 1), "which this run has done; it goes on without them"
    path = run_dir / "metrics.jsonl"
    known = {step for step, _ in metrics_lines(path)} if path.exists() else ()
    if missing := [step for step in expected if step not in known]:
        yield f"warning: {path} has no line of steps {ranges(missing)}, {done}"
    lanes = logged_parts(run_dir)
    if missing := [step for step in expected if set(range(max(lanes.get(step, [0])) + 1)) != lanes.get(step, set())]:
        folder = run_dir / "rollouts"
        yield f"warning: {folder} lacks answers of steps {ranges(missing)}, {done}"
