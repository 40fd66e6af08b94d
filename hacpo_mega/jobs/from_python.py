"""`hacpo_mega.train`: a whole job on this machine from a script or a notebook, and its callbacks.

The ranks are processes of their own, started as `hacpo-mega train` starts them, so that nothing has to be set before
Python starts and the caller stays free of torch's and vLLM's state. Callbacks run in the caller's process, on data from
the run's files, and cannot change the run.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from hacpo_mega.checkpoint.files import StartOptions, committed_steps
from hacpo_mega.cluster.launcher_env import REFUSED, RESUMABLE, SIGNALLED
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.security.private_folder import job_folder
from hacpo_mega.config import Config, load_config
from hacpo_mega.config.checks.input_checks import missing_models
from hacpo_mega.jobs.local import run_on_this_machine, train_arguments
from hacpo_mega.logbook.console import warn
from hacpo_mega.logbook.files.metrics import StepMetrics, by_step, metrics_of, read_metrics
from hacpo_mega.logbook.files.rollout_log import logged_parts, read_rollouts
from hacpo_mega.logbook.run.run_folder import resolved_toml
from hacpo_mega.logbook.run.run_inputs import start_with_same_inputs
from hacpo_mega.logbook.steps.held_out import held_out
from hacpo_mega.models.files.documents import parse_json
from hacpo_mega.models.files.links import require_inside

OnStep = Callable[[int, Mapping[str, float]], None]
OnAnswers = Callable[[int, list[dict[str, Any]]], None]
OnEvaluation = Callable[[int, Mapping[str, float]], None]


class RunFailed(RuntimeError):
    """Raised if a rank has ended with an error, which it has printed itself; `exit_code` as in
    docs/reference/exit-codes.md."""

    def __init__(self, run_dir: Path, exit_code: int) -> None:
        super().__init__(f"the run {run_dir} ended with exit code {exit_code}; its ranks have printed the reason above")
        self.exit_code = exit_code


@dataclass(frozen=True)
class TrainedRun:
    """A run on disk.

    is_finished   False when a signal ended it before num_steps; the next start resumes it
    agents        the Hugging Face folder of every agent by name; empty unless the run is finished
    """

    run_dir: Path
    is_finished: bool
    agents: Mapping[str, Path]

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step and name (docs/reference/metrics.md); step 0 is the evaluation before training."""
        path = self.run_dir / "metrics.jsonl"
        steps = read_metrics(path) if path.exists() else {}
        return {step: metrics.values | metrics.timing for step, metrics in steps.items()}


def train(
    config: Config | str | Path,
    *overrides: str,
    on_step: OnStep | None = None,
    on_answers: OnAnswers | None = None,
    on_evaluation: OnEvaluation | None = None,
    **start_options: Unpack[StartOptions],
) -> TrainedRun:
    """Trains all agents of a configuration on this machine, as `hacpo-mega train` does, and waits for the end.

    config          a Config, or the path of a TOML file to which `overrides` (key=value) apply
    on_step         is given a step, and its metrics by name
    on_answers      is given a step, and a table per prompt of it: the lines of rollouts/ (docs/reference/metrics.md)
    on_evaluation   is given a step, and by agent the held-out mean reward, an accuracy where rewards are 0 or 1
    start_options   fresh, accept, branch, last_whole: the options of `hacpo-mega train`

    ValueError, a line per problem, for wrong input, before any rank starts if it can be found by then; RunFailed when a
    rank fails; KeyboardInterrupt after Ctrl-C, when all ranks have ended. An exception of a callback ends the ranks,
    too, and is raised again.
    """
    if isinstance(config, Config):
        if overrides:
            raise ValueError(
                "overrides go with the path of a file; a Config is changed by config.model_copy(update=...)"
            )
    else:
        config = load_config(config, overrides)
    if missing := missing_models(config):
        raise ValueError("\n".join(missing))
    start_with_same_inputs(config, **start_options)
    callbacks = _Callbacks(config, on_step, on_answers, on_evaluation, is_fresh=bool(start_options.get("fresh")))
    with job_folder() as folder:
        file = folder / "run.toml"
        file.write_text(resolved_toml(config), encoding="utf-8")
        command = ["train", str(file), *train_arguments(start_options)]
        code = run_on_this_machine(command, RankMap.of(config).world_size, callbacks.call)
    callbacks.call(is_over=True)
    if code == SIGNALLED + 2:
        raise KeyboardInterrupt
    if code == REFUSED:
        raise ValueError(f"the run {config.run_dir} was refused; its ranks have printed the reason above")
    if code not in (0, RESUMABLE):
        raise RunFailed(config.run_dir, code)
    agents = {agent.name: config.run_dir / "agents" / agent.name for agent in config.agents}
    return TrainedRun(config.run_dir, code == 0, agents if code == 0 else {})


class _Callbacks:
    """Calls the callbacks with the new steps of a running run; each step once, in order."""

    def __init__(self, config: Config, on_step: OnStep | None, on_answers: OnAnswers | None,
                 on_evaluation: OnEvaluation | None, *, is_fresh: bool) -> None:  # fmt: skip
        self._run_dir, self._lanes = config.run_dir, config.lanes
        self._names = [agent.name for agent in config.agents]
        self._on_step, self._on_answers, self._on_evaluation = on_step, on_answers, on_evaluation
        done = [] if is_fresh else committed_steps(config.run_dir)
        self._step = self._answers_step = max(done, default=-1)
        self._inode, self._offset = 0, 0  # of metrics.jsonl: the file, and the bytes of it that were read
        with suppress(OSError):  # lines of earlier starts are skipped
            stat = os.stat(self._run_dir / "metrics.jsonl")
            self._inode, self._offset = stat.st_ino, stat.st_size
        self._warned: set[str] = set()  # callbacks whose data could once not be read

    def call(self, *, is_over: bool = False) -> None:
        """Calls them with the steps that are new since the last time; `is_over`: the run writes no more."""
        if self._on_step is self._on_answers is self._on_evaluation is None:
            return
        for step, metrics in (self._read("on_step", self._new_metrics) or {}).items():
            if step > self._step:
                self._step = step
                self._call_with_metrics(step, metrics)
        if self._on_answers is not None:
            self._call_with_answers(is_over)

    def _new_metrics(self) -> dict[int, StepMetrics]:
        """Steps written since the last call; all steps where the file was replaced or has shrunk."""
        path, lines = self._run_dir / "metrics.jsonl", list[bytes]()
        require_inside(self._run_dir, path)
        with suppress(FileNotFoundError), path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._inode, self._offset = stat.st_ino, 0
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
            self._offset += sum(len(line) + 1 for line in lines)
        return by_step(metrics_of(parse_json(line)) for line in lines if line)

    def _call_with_metrics(self, step: int, metrics: StepMetrics) -> None:
        if self._on_step is not None:
            self._on_step(step, metrics.values | metrics.timing)
        scores = {name: held_out(metrics.values, name) for name in self._names}
        rewards = {name: score.value for name, score in scores.items() if score is not None}
        if self._on_evaluation is not None and rewards:
            self._on_evaluation(step, rewards)

    def _call_with_answers(self, is_over: bool) -> None:
        """Waits for the files of all lanes: each lane writes its own prompts of a step, in its own time."""
        while self._answers_step < self._step:
            step = self._answers_step + 1
            lanes = logged_parts(self._run_dir).get(step, set())
            if step > 0 and len(lanes) < self._lanes and not is_over:
                return
            self._answers_step = step
            if lanes and (prompts := self._read("on_answers", read_rollouts, self._run_dir, step)) is not None:
                self._on_answers(step, prompts)

    def _read(self, callback: str, reader: Callable[..., Any], *arguments: Any) -> Any:
        """Data for a callback, by `reader`; if that fails None, with a warning the first time: the run must go on."""
        try:
            return reader(*arguments)
        except Exception as error:
            if callback not in self._warned:
                self._warned.add(callback)
                reason = f"{type(error).__name__}: {error}"
                warn(f"{callback} is not shown a step ({reason}); this is said once, training goes on")
            return None
