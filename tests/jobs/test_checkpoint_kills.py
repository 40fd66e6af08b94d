"""A job that is killed in any stage of a checkpoint: the next start always finds a whole step, and nothing is lost.

Two agents with real actors and no engines, one process each. Every job takes up what the one before has left, commits a
step, and is killed (SIGKILL to both processes) in the next one's checkpoint, in a stage of its own.
"""

import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from actor_cases import make_actor, random_samples
from job import run_ranks, start_ranks, wait_for_ranks
from run_cases import CHARACTERS, write_config
from tiny_models import make_model

import hacpo_mega.megatron.checkpoint.sharded_state
import hacpo_mega.trainer.joint_checkpoint
from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint, remove_unfinished
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import OptimizerConfig, load_config
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.samples.tokenizers import make_tokenizer
from hacpo_mega.trainer.joint_checkpoint import JointCheckpoint, RunState, agree_on_start
from hacpo_mega.trainer.joint_disk import JointDisk

pytestmark = pytest.mark.nightly
FOREVER_S = 3600.0


class Stage(NamedTuple):
    """Where a job is killed: by rank 0, at the call of a function with a fitting first argument; and what is left."""

    owner: Any
    name: str
    fits: Callable[[Any], bool]
    is_called: bool  # whether the function does its work before
    is_committed: bool
    rank_1_writes: bool = True
    asynchronous: bool = True


ANY = lambda first: True  # noqa: E731
IS_NEW, IS_OLD = (lambda path, end=end: str(path).endswith(end) for end in (".writing", ".removing"))
IS_NO_PROBE = lambda path: not str(path).endswith(".probe")  # noqa: E731
STAGES = {
    "before an agent writes": Stage(
        hacpo_mega.megatron.checkpoint.sharded_state, "write_parts", ANY, False, False, rank_1_writes=False
    ),
    "between the agents": Stage(
        hacpo_mega.megatron.checkpoint.sharded_state, "write_parts", ANY, True, False, rank_1_writes=False
    ),
    "when all have written": Stage(hacpo_mega.trainer.joint_checkpoint, "commit", ANY, False, False),
    "before the rename": Stage(pathlib.Path, "rename", IS_NEW, False, False, asynchronous=False),
    "after the rename": Stage(pathlib.Path, "rename", IS_NEW, True, True),
    "before the retention": Stage(
        hacpo_mega.trainer.joint_checkpoint, "remove_old", ANY, False, True, asynchronous=False
    ),
    "as the retention begins": Stage(shutil, "rmtree", IS_OLD, False, True),
    "in the retention": Stage(os, "unlink", IS_NO_PROBE, True, True),
}
LOGS = SimpleNamespace(unwritten=lambda: None, misplaced=lambda: None)  # nothing waits to be written
NUM_STEPS = sum(1 + stage.is_committed for stage in STAGES.values()) + 1


def play(config_file: Path, run_dir: Path, last_step: int, name: str | None) -> None:
    """Goes on from the newest step to `last_step`, each with a checkpoint; in the last one comes the stage `name`."""
    stage = STAGES.get(name)
    mode = "true" if stage is None or stage.asynchronous else "false"
    config = load_config(config_file, [f"run_dir={run_dir}", f"checkpoint.asynchronous={mode}"])
    with Place.join(RankMap.of(config)) as place:
        processes = [int(payload) for payload in place.gather_job(str(os.getpid()).encode())]
        start = agree_on_start(place, config)
        if place.coordinate.global_rank == 0:
            run_dir.mkdir(exist_ok=True)
            remove_unfinished(run_dir)
        model, optimizer = config.agents[place.agent].model, OptimizerConfig(lr=1e-3)
        actor = make_actor(model, optimizer=optimizer, total_updates=NUM_STEPS)
        agent = SimpleNamespace(
            name=place.coordinate.agent_name, save=partial(save, actor), not_finite=actor.not_finite
        )
        if start is not None:
            counts = start.agents[agent.name]
            actor.load(start.folder / agent.name, num_updates=counts.num_updates, num_applied=counts.num_applied)
        steps_done = 0 if start is None else start.step
        checkpoint = JointCheckpoint(
            place, config, agent, JointDisk(place, config, LOGS, print), state_after(steps_done), is_on_disk=bool(start)
        )
        for step in range(steps_done + 1, last_step + 1):
            samples = [sample for sample in random_samples(4, seed=step) if sample.num_trained]
            actor.learn_supervised(samples, 30)
            if stage is not None and step == last_step:
                arm(stage, place.coordinate.global_rank, processes)
            checkpoint.set_state(state_after(step))
            assert checkpoint.has_work()
            checkpoint.advance()
            checkpoint.save_now()


def save(actor: Actor, folder: Path, *, copies: bool) -> tuple[dict[str, int | str], Callable[[], None]]:
    """As Agent.save."""
    counts, write = actor.save(folder, copies=copies)
    return {**counts, "dtype": "float32"}, write


def state_after(step: int) -> RunState:
    return RunState(step, None, {"history": [[0.1 * step, 0.5]]}, 0, {}, None)


def arm(stage: Stage, rank: int, processes: list[int]) -> None:
    """Rank 0 kills all processes of the job when it comes to the stage, itself last."""
    original = getattr(stage.owner, stage.name)

    def fatal(first: Any, *others: Any, **options: Any) -> Any:
        if not stage.fits(first):
            return original(first, *others, **options)
        if stage.is_called:
            original(first, *others, **options)
        for process in reversed(processes):
            os.kill(process, signal.SIGKILL)

    if rank == 0:
        setattr(stage.owner, stage.name, fatal)
    elif not stage.rank_1_writes:
        hacpo_mega.megatron.checkpoint.sharded_state._write = lambda *_: time.sleep(FOREVER_S)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, dict[str, tuple[int, list[int], list[str]]]]:
    """The folder of it all; and by stage the step that was to be written, the committed ones found, all names there."""
    folder = tmp_path_factory.mktemp("kills")
    agents = []
    for name, family in (("one", "qwen3"), ("two", "llama")):
        make_model(folder / name, family, head_dim=32)
        make_tokenizer(folder / name, CHARACTERS)
        agents.append({"name": name, "model": str(folder / name)})
    config = write_config(folder, agents, num_steps=99, checkpoint={"every_steps": 1, "keep_last": 1})
    run_dir, last, found = folder / "killed", 0, {}
    for number, (name, stage) in enumerate(STAGES.items()):
        logs = folder / f"logs_{number}"
        logs.mkdir()
        ranks = start_ranks(2, logs, play, config, run_dir, last + 2, name)
        wait_for_ranks(ranks)
        said = [(logs / f"{rank}.err").read_text() for rank in range(2)]
        assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * 2, (name, said)
        names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        found[name] = (last + 2, committed_steps(run_dir), names)
        last += 1 + stage.is_committed
    run_ranks(2, play, config, run_dir, NUM_STEPS, None)
    run_ranks(2, play, config, folder / "undisturbed", NUM_STEPS, None)
    return folder, found


@pytest.mark.parametrize("name", STAGES)
def test_the_next_start_finds_the_step_before_or_the_new_one(killed, name):
    """The chain of jobs above has gone on from it; here is what it found, and that the stage was reached."""
    step, committed, names = killed[1][name]
    assert committed[-1] == step - 1 + STAGES[name].is_committed
    new, old = f"step_{step:06d}", f"step_{step - 1:06d}"
    left = {
        "after the rename": [old, new],
        "before the retention": [old, new],
        "as the retention begins": [f"{old}.removing", new],
        "in the retention": [f"{old}.removing", new],
    }
    assert names == left.get(name, [old, f"{new}.writing"])


def test_eight_kills_later_the_agents_are_what_they_would_have_been(killed):
    one, other = (read_checkpoint(folder_of(killed[0] / run, NUM_STEPS)) for run in ("killed", "undisturbed"))
    shards = {path: file for path, file in one.files.items() if path.endswith(".distcp")}
    assert len(shards) == 2
    assert {path: other.files[path] for path in shards} == shards
    assert (one.agents, one.capability) == (other.agents, other.capability)
    assert [path.name for path in one.folder.parent.iterdir()] == [one.folder.name]
