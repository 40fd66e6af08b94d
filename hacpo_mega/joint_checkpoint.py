"""All agents' states as one checkpoint: who writes what, when, and how a job takes it up again.

    every rank    writes and syncs its shards into step_N.writing, in a thread, while training goes on
    the job       looks at the end of every step whether all have; then everybody says what it wrote
    rank 0        writes step.json, renames the folder to step_N: the commit, for all agents at once

A job that dies before the rename has changed nothing; after it, every agent is at step N. The thread speaks only in a
group that training does not use, and changes nothing that training reads.
Not here: what lies on disk (checkpoint.py), what an agent's state is (megatron/sharded_state.py).
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.agent import Agent
from hacpo_mega.checkpoint import (
    WRITING,
    AgentState,
    Checkpoint,
    FileState,
    commit,
    file_sha256,
    find_start,
    folder_of,
    model_digests,
    older_step_offered,
    plain,
    remove_old,
    sync,
)
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import Config
from hacpo_mega.logbook.provenance import installed_versions
from hacpo_mega.megatron.saving import Saving

# What a rank has written: path in the checkpoint, FileState as plain values.
Files = dict[str, dict[str, int | str]]


def agree_on_start(
    place: Place, config: Config, *, fresh: bool = False, accept: Sequence[str] = (), branch: Path | None = None
) -> Checkpoint | None:
    """`find_start` for the whole job, with every byte compared to what was written. Collective over the job.

    Rank 0 looks, so that all ranks go on from one step whatever a shared file system shows them; all ranks read.
    """
    payload = None
    if place.coordinate.global_rank == 0:
        found = find_start(config, fresh=fresh, accept=accept, branch=branch)
        payload = json.dumps(None if found is None else [str(found.folder), found.text()]).encode()
    answer = json.loads(place.share_in_job(payload))
    if answer is None:
        return None
    found = Checkpoint.parse(Path(answer[0]), answer[1])
    for problem in found.altered(slice(place.coordinate.global_rank, None, place.rank_map.world_size)):
        raise ValueError(f"{problem}. {older_step_offered(found.folder.parent.parent, found.step)}")
    return found


@dataclass(frozen=True)
class RunState:
    """What a run is between two steps, on this rank and as plain values, beside the agents' weights and optimizers.

    accuracy           on held-out prompts, mean over the agents; None where the last step had no evaluation
    capability, band   the state of their trackers; no band where the configuration fixes it
    num_skipped        of the agent's last updates, how many in a row were skipped
    alarms             StepReport's state
    """

    steps_done: int
    accuracy: float | None
    capability: dict[str, list[list[float]]]
    band: dict[str, list[float]] | None
    num_skipped: int
    alarms: dict[str, Any]


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that was begun: of which state, where, and what this rank's thread will have written of it."""

    state: RunState
    folder: Path
    writing: Path
    counts: dict[str, int]
    saving: Saving
    files: "Future[Files]"


class ToldToEnd(Exception):
    """The run ends before its last step, by the signal of this number; it is on disk as it was after its last one."""


class JointCheckpoint:
    """This rank's part in the checkpoints of a run.

    safe_step   the step that the run would go on from if it died now; 0 is its start
    """

    def __init__(self, place: Place, config: Config, agent: Agent, state: RunState, *, is_on_disk: bool) -> None:
        """`state` is how the run begins or goes on, `is_on_disk` whether its own folder has a checkpoint of that."""
        self._place, self._config, self._agent = place, config, agent
        self._models = model_digests(config)  # as loaded: the folder may be made anew while the run goes on
        self._is_first = place.coordinate.global_rank == 0
        self._last = time.monotonic()
        self._state = state
        self._is_due = False
        self._pending: _Pending | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._set_safe(state.steps_done if is_on_disk else 0)

    @property
    def is_on(self) -> bool:
        """Whether this run is ever put on disk."""
        return bool(self._config.checkpoint.every_steps or self._config.checkpoint.every_minutes)

    def settle(self, state: RunState) -> None:
        """A step has been done: a checkpoint holds this from now on, however far the next step has come."""
        self._state = state

    def has_work(self) -> bool:
        """Whether the step that has been done ends with a checkpoint, or one is being written. Collective."""
        self._is_due = self._falls_due()
        return self._is_due or self._pending is not None

    def go_on(self) -> None:
        """Commits what all ranks have written by now, and begins the next checkpoint if it is due. Collective.

        Never two at a time: the one before is waited for. So is the run's last one.
        """
        if self._pending and (self._is_due or self._all_have_written(self._pending)):
            self._commit()
        if self._is_due:
            self._begin()
            if not self._config.checkpoint.asynchronous or self._state.steps_done == self._config.num_steps:
                self._commit()

    def keep(self) -> None:
        """Returns when the last step that was done is on disk; before the first one there is nothing to keep.

        No update may have been learnt since: the agents are written as they are. Collective over the job.
        """
        if self._pending:
            self._commit()
        if self._state.steps_done != self.safe_step:
            self._begin()
            self._commit()

    def _falls_due(self) -> bool:
        when, steps_done = self._config.checkpoint, self._state.steps_done
        if steps_done == self._config.num_steps:
            return self.is_on
        if when.every_steps and steps_done % when.every_steps == 0:
            return True
        if not when.every_minutes:
            return False
        # Clocks differ: one of them decides.
        is_late = time.monotonic() - self._last >= 60.0 * when.every_minutes
        return self._place.share_in_job(b"1" if is_late else b"0") == b"1"

    def _begin(self) -> None:
        """Begins to put the run on disk as it was after its last step; from here on it may change."""
        folder = folder_of(self._config.run_dir, self._state.steps_done)
        writing = folder.with_name(folder.name + WRITING)
        if self._is_first:
            shutil.rmtree(writing, ignore_errors=True)  # this job's, resumed from a step before it
            for agent in self._config.agents:
                (writing / agent.name).mkdir(parents=True)
        self._place.barrier()
        counts, saving = self._agent.save(writing / self._agent.name, copies=self._config.checkpoint.asynchronous)
        files = self._writer.submit(self._write, saving, writing)
        self._pending = _Pending(self._state, folder, writing, counts, saving, files)
        self._last = time.monotonic()

    def _commit(self) -> None:
        """Waits until all have written what was begun, commits it, and removes what is no longer kept. Collective."""
        pending, self._pending = self._pending, None
        files = pending.files.result()
        pending.saving.finish()
        files |= self._states_of(pending.writing, self._is_index)
        state = pending.state
        counts = pending.counts | {"band": state.band, "num_skipped": state.num_skipped}
        alarms = [state.alarms] if self._place.is_leader else []
        said = {"agent": self._agent.name, "counts": counts, "alarms": alarms, "files": files}
        # Everybody's shards are on disk when everybody's word has come.
        words = [json.loads(word) for word in self._place.gather_to_first(json.dumps(said).encode())]
        if self._is_first:
            commit(pending.writing, self._record(pending.folder, state, words))
            keep = self._config.checkpoint.model_dump(include={"keep_last", "keep_every", "keep_best"})
            remove_old(self._config.run_dir, **keep)
        self._set_safe(state.steps_done)

    def _all_have_written(self, pending: _Pending) -> bool:
        return self._place.highest_in_job(0 if pending.files.done() else 1) == 0

    def _write(self, saving: Saving, writing: Path) -> Files:
        """In a thread: writes this rank's shards, and reads them once more for what the record says of them."""
        saving.write()
        return self._states_of(writing, self._is_own_shard)

    def _states_of(self, writing: Path, is_wanted: Callable[[str], bool]) -> Files:
        """Size and SHA-256 of the agent's files with a wanted name, all synced."""
        found = {}
        for path in sorted((writing / self._agent.name).iterdir()):
            if is_wanted(path.name):
                sync(path)
                found[path.relative_to(writing).as_posix()] = asdict(FileState(path.stat().st_size, file_sha256(path)))
        return found

    def _is_own_shard(self, name: str) -> bool:
        return name.startswith(f"__{self._place.coordinate.agent_rank}_")

    def _is_index(self, name: str) -> bool:
        """An agent's files that are nobody's shards are its first rank's."""
        return self._place.coordinate.agent_rank == 0 and not name.startswith("__")

    @property
    def outlook(self) -> str:
        """What the next start would do, as it is said when a signal ends the run."""
        where = f"goes on after step {self.safe_step}" if self.safe_step else "begins anew: no step of it is on disk"
        return f"started again, the run {where}"

    def _set_safe(self, step: int) -> None:
        self.safe_step = step
        if self.is_on:
            self._place.foretell(self.outlook)

    def _record(self, folder: Path, state: RunState, words: Sequence[dict[str, dict]]) -> Checkpoint:
        return Checkpoint(
            folder=folder,
            step=state.steps_done,
            config=plain(self._config),
            versions=installed_versions(),
            models=self._models,
            capability=state.capability,
            accuracy=state.accuracy,
            agents={agent.name: _agent_state(agent.name, words) for agent in self._config.agents},
            files={path: FileState(**file) for word in words for path, file in word["files"].items()},
        )


def _agent_state(name: str, words: Sequence[dict[str, Any]]) -> AgentState:
    """An agent's state from what its ranks have said; the words are in the order of ranks, so its cells in theirs."""
    own = [word for word in words if word["agent"] == name]
    return AgentState(**own[0]["counts"], alarms=[alarms for word in own for alarms in word["alarms"]])
