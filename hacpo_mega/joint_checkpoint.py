"""All agents' states as one checkpoint: who writes what, when, and how a job takes it up again.

    every rank    writes and syncs its shards into step_N.writing, and says what it wrote
    the job       waits until everybody has said so
    rank 0        writes step.json, renames the folder to step_N: the commit, for all agents at once

A job that dies before the rename has changed nothing; after it, every agent is at step N.
Not here: what lies on disk (checkpoint.py), what an agent's state is (megatron/sharded_state.py).
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hacpo_mega.agent import Agent
from hacpo_mega.algorithm import BandTracker, CapabilityTracker
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


class JointCheckpoint:
    """This rank's part in the checkpoints of a run.

    safe_step   the step that the run would go on from if it died now; 0 is its start
    """

    def __init__(self, place: Place, config: Config, agent: Agent, safe_step: int) -> None:
        self._place, self._config, self._agent = place, config, agent
        self._models = model_digests(config)  # as loaded: the folder may be made anew while the run goes on
        self._is_first = place.coordinate.global_rank == 0
        self._last = time.monotonic()
        self.safe_step = safe_step

    @property
    def is_on(self) -> bool:
        """Whether this run is ever put on disk."""
        return bool(self._config.checkpoint.every_steps or self._config.checkpoint.every_minutes)

    def is_due(self, steps_done: int) -> bool:
        """Whether a step that has just been done ends with a checkpoint. Collective over the job."""
        when = self._config.checkpoint
        if steps_done == self._config.num_steps:
            return self.is_on
        if when.every_steps and steps_done % when.every_steps == 0:
            return True
        if not when.every_minutes:
            return False
        # Clocks differ: one of them decides.
        is_late = time.monotonic() - self._last >= 60.0 * when.every_minutes
        return self._place.share_in_job(b"1" if is_late else b"0") == b"1"

    def save(self, steps_done: int, capability: CapabilityTracker, band: BandTracker | None) -> None:
        """Puts the run on disk as it is after `steps_done` steps, and removes what is no longer kept."""
        folder = folder_of(self._config.run_dir, steps_done)
        writing = folder.with_name(folder.name + WRITING)
        if self._is_first:
            shutil.rmtree(writing, ignore_errors=True)  # this job's, resumed from a step before it
            for agent in self._config.agents:
                (writing / agent.name).mkdir(parents=True)
        self._place.barrier()
        counts = self._agent.save(writing / self._agent.name)
        state = AgentState(**counts, band=None if band is None else band.state_dict())
        said = {"agent": self._agent.name, "state": asdict(state), "files": self._written(writing)}
        # Everybody's shards are on disk when everybody's word has come.
        words = [json.loads(word) for word in self._place.gather_to_first(json.dumps(said).encode())]
        if self._is_first:
            commit(writing, self._record(folder, steps_done, capability, words))
            remove_old(self._config.run_dir, self._config.checkpoint.keep_last, self._config.checkpoint.keep_every)
        self.safe_step, self._last = steps_done, time.monotonic()

    def _written(self, writing: Path) -> dict[str, dict[str, int | str]]:
        """What this rank has written, synced: its own shards, and of an agent's first rank the index too."""
        rank = self._place.coordinate.agent_rank
        found = {}
        for path in sorted((writing / self._agent.name).iterdir()):
            is_shard = path.name.startswith("__")
            if path.name.startswith(f"__{rank}_") if is_shard else rank == 0:
                sync(path)
                state = FileState(path.stat().st_size, file_sha256(path))
                found[path.relative_to(writing).as_posix()] = asdict(state)
        return found

    def _record(
        self, folder: Path, steps_done: int, capability: CapabilityTracker, words: Sequence[dict[str, dict]]
    ) -> Checkpoint:
        return Checkpoint(
            folder=folder,
            step=steps_done,
            config=plain(self._config),
            versions=installed_versions(),
            models=self._models,
            capability=capability.state_dict(),
            agents={word["agent"]: AgentState(**word["state"]) for word in words},
            files={path: FileState(**file) for word in words for path, file in word["files"].items()},
        )
