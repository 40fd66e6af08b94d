"""One checkpoint of all agents: who writes what and when, and how a job resumes from it.

    every rank    writes and syncs its shards into step_N.writing, in a thread, while training goes on
    the job       checks at the end of every step whether all are done; then each announces its files
    rank 0        writes step.json, renames the folder to step_N: the commit, for all agents at once

A job that dies before the rename has changed nothing; after it, every agent is at step N. If the disk refuses a
checkpoint, all ranks remove it and report it, and training goes on to the next one. The thread communicates only in a
group that training does not use, and changes nothing that training reads.

Elsewhere: the files (checkpoint/files.py), an agent's state (megatron/checkpoint/sharded_state.py).
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from hacpo_mega.agent.agent import Agent
from hacpo_mega.checkpoint.disk_space import checkpoint_bytes, probe, require_bytes, require_room
from hacpo_mega.checkpoint.files import (
    COMMITTED,
    WRITING,
    AgentState,
    Checkpoint,
    FileState,
    StartOptions,
    commit,
    file_sha256,
    folder_of,
    model_digests,
    older_step_offered,
    plain,
    remove_old,
    set_aside,
    sync,
)
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import Config
from hacpo_mega.logbook.console import warn
from hacpo_mega.logbook.files.metrics import require_readable_metrics
from hacpo_mega.logbook.run.provenance import installed_versions
from hacpo_mega.logbook.run.run_inputs import run_inputs, start_with_same_inputs
from hacpo_mega.megatron.checkpoint.stored_index import read_index
from hacpo_mega.megatron.checkpoint.stored_state import NotWritten
from hacpo_mega.rollout.ready_answers import SUFFIX, ReadyAnswers
from hacpo_mega.trainer.joint_disk import JointDisk, disk_error

# Files that a rank has written: path in the checkpoint -> FileState as plain values.
Files = dict[str, dict[str, int | str]]


def agree_on_start(place: Place, config: Config, **options: Unpack[StartOptions]) -> Checkpoint | None:
    """`find_start` for the whole job, with every byte checked against its checksum. Collective over the job.

    Rank 0 chooses the step, so all ranks resume from one, whatever a shared file system shows them; all verify. With
    `last_whole`, damaged steps are skipped and, once a whole one is found, moved aside and named.
    """
    is_first, damaged = place.coordinate.global_rank == 0, dict[int, str]()
    last_whole = options.get("last_whole", False)
    while True:
        payload = None
        if is_first:
            found = start_with_same_inputs(config, **options, damaged=damaged)
            require_room(config, fresh=options.get("fresh", False))
            if found is not None and found.folder == folder_of(config.run_dir, found.step):
                require_readable_metrics(config.run_dir)
            payload = json.dumps(None if found is None else [str(found.folder), found.text()]).encode()
        shared = json.loads(place.share_in_job(payload))
        if shared is None:
            return None
        found = Checkpoint.parse(Path(shared[0]), shared[1])
        share = slice(place.coordinate.global_rank, None, place.rank_map.world_size)
        is_own = found.folder == folder_of(config.run_dir, found.step)
        if (problem := place.first_message(next(found.content_problems(share), None))) is None:
            break
        if not (is_own and last_whole):
            raise ValueError(f"{problem}. {older_step_offered(found.folder.parent.parent, found.step)}")
        damaged[found.step] = problem
    if is_first:
        for name in found.agents:  # refuses a forged index before a model is loaded
            read_index(found.folder / name)
        for line in set_aside(config.run_dir, found.step, damaged) if is_own and last_whole else ():
            warn(line)
    return found


@dataclass(frozen=True)
class RunState:
    """State of a run between two steps on this rank, without the agents' weights and optimizers.

    accuracy           mean reward on held-out prompts, over the agents; None if the last step had no evaluation
    capability         CapabilityTracker's state
    num_skipped        skipped updates in a row up to now
    alarms             StepReport's state
    ready              prefetched answers to the next step's prompts, with rollout.one_step_off
    """

    steps_done: int
    accuracy: float | None
    capability: dict[str, list[list[float]]]
    num_skipped: int
    alarms: dict[str, Any]
    ready: ReadyAnswers | None


@dataclass(frozen=True)
class _Pending:
    """A checkpoint in progress.

    folder, writing   its path once committed, and until then
    counts            this rank's fields of AgentState
    files             those that this rank's thread writes
    """

    state: RunState
    folder: Path
    writing: Path
    counts: dict[str, int | str]
    files: Future[Files]


class TerminationRequested(Exception):
    """A signal, whose number it holds, ends the run before its last step; its last finished step is on disk."""


class JointCheckpoint:
    """This rank's part in the checkpoints of a run.

    safe_step         step that the run would resume from if it died now; 0 is its start
    last_step_error   why the run's last step could not be saved, after the full wait; None if it was saved
    """

    last_step_error: str | None

    def __init__(
        self, place: Place, config: Config, agent: Agent | None, disk: JointDisk, state: RunState, *, is_on_disk: bool
    ) -> None:
        """`state` is the run's state at the start; `is_on_disk`: its own folder has a checkpoint of it.

        `agent` is None on a rank that only generates: it takes part in every agreement, and writes nothing.
        """
        self._place, self._config, self._agent, self._disk = place, config, agent, disk
        self._is_first, self._name = place.coordinate.global_rank == 0, place.coordinate.agent_name
        # Digests as of now, when they are loaded: a folder or a file may be replaced while the run goes on.
        self._models, self._inputs = (model_digests(config), run_inputs(config)) if self._is_first else ({}, {})
        self._begun_at = time.monotonic()
        self._state = state
        self._is_due, self.last_step_error = False, None
        self._unremoved: set[str] = set()  # warnings already given about expired steps
        self._pending: _Pending | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._set_safe(state.steps_done if is_on_disk else 0)

    def set_state(self, state: RunState) -> None:
        """Sets the state after a finished step, which checkpoints save even while the next step is in progress."""
        self._state = state

    def has_work(self) -> bool:
        """True if a checkpoint is due after the last step, or one is being written. Collective."""
        self._is_due = self._falls_due()
        return self._is_due or self._pending is not None

    def advance(self) -> None:
        """Commits a checkpoint that all ranks have written, and begins the next if it is due. Collective.

        Before it begins one it waits for the previous one, so that two never overlap. The run's last one is complete
        when it returns, and waits for room on the disk.
        """
        if self._pending and (self._is_due or self._all_have_written(self._pending)):
            self._try(self._commit)
        if self._is_due and self._is_finite():
            is_last = self._state.steps_done == self._config.num_steps
            save = self._begin if self._config.checkpoint.asynchronous else self._save
            problem = self._try(partial(self._disk.patiently, self._save) if is_last else save)
            self.last_step_error = problem if is_last else None

    def save_now(self) -> None:
        """Blocks until the last finished step, if there is one, is on disk. Collective over the job.

        The agents are written as they are: none may have learnt since.
        """
        if self._pending:
            self._try(self._commit)
        if self._state.steps_done != self.safe_step and self._is_finite():
            self._try(self._save)

    def _falls_due(self) -> bool:
        config, steps_done = self._config.checkpoint, self._state.steps_done
        if steps_done == self._config.num_steps:
            return config.is_on
        if config.every_steps and steps_done % config.every_steps == 0:
            return True
        if not config.every_minutes:
            return False
        # Clocks differ: rank 0's decides.
        is_late = time.monotonic() - self._begun_at >= 60.0 * config.every_minutes
        return self._place.share_in_job(b"1" if is_late else b"0") == b"1"

    def _is_finite(self) -> bool:
        """True if every agent's state is finite: a broken one must not displace the steps before it. Collective.

        If it is not, a warning is printed; training goes on until training.max_skipped_updates ends it.
        """
        problem = self._place.first_message(self._agent and self._agent.not_finite())
        if problem:
            text = f"there is no checkpoint of step {self._state.steps_done}: {problem}"
            self._disk.say(f"warning: {text}; {self._disk.outlook(self.safe_step)}")
        return not problem

    def _try(self, save: Callable[[], None]) -> str | None:
        """Calls `save`; returns, and prints, the disk's refusal. Training goes on, and older checkpoints stay."""
        try:
            return save()
        except OSError as problem:
            text = f"{problem}; {self._disk.outlook(self.safe_step)}"
            self._disk.say(f"warning: {text}")
            self._set_safe(self.safe_step)  # its folder may be gone
            return text

    # The methods below raise OSError, on every rank, if the disk refuses a write or logs wait to be written.

    def _save(self) -> None:
        """Saves the last finished step and waits for it."""
        self._begin()
        self._commit()

    def _begin(self) -> None:
        """Begins to save the run as it was after its last step; from here on the live state may change."""
        folder = folder_of(self._config.run_dir, self._state.steps_done)
        writing = folder.with_name(folder.name + WRITING)
        with self._removed_if_refused(writing):
            self._disk.require_logs()
            self._disk.attempt(self._make_folders, writing)
            self._disk.attempt(probe, writing / self._name, str(self._place.coordinate.agent_rank))
        counts: dict[str, int | str] = {}
        files: Future[Files] = Future()
        if self._agent is None:
            files.set_result({})
        else:
            counts, write = self._agent.save(writing / self._name, copies=self._config.checkpoint.asynchronous)
            files = self._writer.submit(self._write, write, writing, self._state.ready)
        self._pending = _Pending(self._state, folder, writing, counts, files)
        self._begun_at = time.monotonic()

    def _commit(self) -> None:
        """Waits until all ranks have written, commits the checkpoint, and removes expired ones. Collective."""
        pending, self._pending = self._pending, None
        message: dict[str, Any] = {"agent": self._name}
        with self._removed_if_refused(pending.writing):
            # If no rank reports a problem, all shards are on disk.
            self._disk.attempt_write(self._finish, pending, message)
            messages = [json.loads(payload) for payload in self._place.gather_to_first(json.dumps(message).encode())]
            self._disk.require_folder()
            self._disk.attempt(self._commit_on_first, pending, messages)
        self._set_safe(pending.state.steps_done)

    @contextmanager
    def _removed_if_refused(self, writing: Path) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            if self._is_first and not self._disk.is_away:
                shutil.rmtree(writing, ignore_errors=True)
            step = int(COMMITTED.match(writing.name)[1])
            raise disk_error(problem.errno, f"there is no checkpoint of step {step}: {problem}") from problem

    def _all_have_written(self, pending: _Pending) -> bool:
        return self._place.highest_in_job(0 if pending.files.done() else 1) == 0

    def _make_folders(self, writing: Path) -> None:
        """Makes the folders, on rank 0, if the disk has room for the checkpoint."""
        if self._is_first:
            shutil.rmtree(writing, ignore_errors=True)  # this job's, resumed from a step before it
            require_bytes(checkpoint_bytes(self._config), self._config.run_dir)
            writing.parent.mkdir(exist_ok=True)  # nothing above it: that is the run's own, or away
            writing.mkdir()
            for agent in self._config.agents:
                (writing / agent.name).mkdir()

    def _write(self, write: Callable[[], None], writing: Path, ready: ReadyAnswers | None) -> Files:
        """Writes this rank's shards, in a thread, and reads them once more for their checksums."""
        try:
            write()
        except NotWritten:
            raise
        except OSError as error:  # this rank's alone: the others of its agent still wait for it, so the job must end
            raise RuntimeError(f"{writing}: {error}") from error
        if ready is not None and self._place.is_leader:
            ready.write(writing / self._name / f"__{self._place.coordinate.world_rank}{SUFFIX}")
        return self._file_states(writing, self._is_own_shard)

    def _finish(self, pending: _Pending, message: dict[str, Any]) -> None:
        """Adds this rank's files and counts to `message`."""
        files = pending.files.result() | self._file_states(pending.writing, self._is_index)
        state = pending.state
        counts = pending.counts | {"num_skipped": state.num_skipped}
        message |= {"counts": counts, "alarms": [state.alarms] if self._place.is_leader else [], "files": files}

    def _commit_on_first(self, pending: _Pending, messages: Sequence[dict[str, Any]]) -> None:
        if self._is_first:
            commit(pending.writing, self._record(pending.folder, pending.state, messages))
            keep = self._config.checkpoint.model_dump(include={"keep_last", "keep_every", "keep_best"})
            unremoved: set[str] = set()
            with suppress(OSError):  # the next commit removes what is left
                unremoved = set(remove_old(self._config.run_dir, **keep))
            for line in sorted(unremoved - self._unremoved):
                self._disk.say(f"warning: {line}")
            self._unremoved = unremoved

    def _file_states(self, writing: Path, is_wanted: Callable[[str], bool]) -> Files:
        """Size and SHA-256 of the agent's files with a wanted name, all synced."""
        states = {}
        for path in sorted((writing / self._name).iterdir()):
            if is_wanted(path.name):
                sync(path)
                states[path.relative_to(writing).as_posix()] = asdict(FileState(path.stat().st_size, file_sha256(path)))
        return states

    def _is_own_shard(self, name: str) -> bool:
        return name.startswith(f"__{self._place.coordinate.world_rank}_")

    def _is_index(self, name: str) -> bool:
        """True on the agent's first rank for files that are no rank's shard."""
        return self._place.coordinate.agent_rank == 0 and not name.startswith("__")

    @property
    def safe_now(self) -> int:
        """`safe_step` if this process finds it on disk; 0 if it is gone, and the run would start over."""
        return self.safe_step if self._disk.has(self.safe_step) else 0

    @property
    def outlook(self) -> str:
        """Text on what the next start would do, printed when a signal ends the run."""
        where = f"goes on after step {step}" if (step := self.safe_now) else "begins anew: no step of it is on disk"
        return f"started again, the run {where}"

    def _set_safe(self, step: int) -> None:
        self.safe_step = step
        if self._config.checkpoint.is_on:
            self._place.watchdog.exit_message = self.outlook

    def _record(self, folder: Path, state: RunState, messages: Sequence[dict[str, dict]]) -> Checkpoint:
        return Checkpoint(
            folder=folder,
            step=state.steps_done,
            config=plain(self._config),
            versions=installed_versions(),
            models=self._models,
            inputs=self._inputs,
            capability=state.capability,
            accuracy=state.accuracy,
            agents={agent.name: _agent_state(agent.name, messages) for agent in self._config.agents},
            files={path: FileState(**file) for one in messages for path, file in one["files"].items()},
        )


def _agent_state(name: str, messages: Sequence[dict[str, Any]]) -> AgentState:
    """An agent's state from its ranks' messages, which are in the order of ranks, and so of its cells."""
    own = [message for message in messages if message["agent"] == name]
    return AgentState(**own[0]["counts"], alarms=[alarms for message in own for alarms in message["alarms"]])
