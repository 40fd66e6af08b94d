"""A run's folder that is moved, replaced, taken or damaged under a job of two agents: nothing is written elsewhere.

Real actors and no engines, as in test_checkpoint_kills.py. The first job finds its folder away before a checkpoint,
while one is written, and with another in its place; at last its lock is deleted. The second goes on before a damaged
step.
"""

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from actor_cases import make_actor, random_samples
from job import start_ranks, wait_for_ranks
from run_cases import CHARACTERS, write_config
from test_checkpoint_kills import save, state_after
from tiny_models import make_model

from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import OptimizerConfig, load_config
from hacpo_mega.config.checks.run_dirs import LOCK
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.logbook.files.metrics import StepMetrics, read_metrics
from hacpo_mega.logbook.run.run_folder import RunFolder
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.samples.tokenizers import make_tokenizer
from hacpo_mega.trainer.build import _say_begin
from hacpo_mega.trainer.joint_checkpoint import JointCheckpoint, agree_on_start
from hacpo_mega.trainer.joint_disk import JointDisk

pytestmark = pytest.mark.nightly


class Job:
    """One rank of a run of two agents, step by step; `said` is what its console would have."""

    def __init__(self, place: Place, config_file: Path, last_whole: bool) -> None:
        self.place, self.config, self.said = place, load_config(config_file), list[str]()
        self.is_first = place.coordinate.global_rank == 0
        lock = RunLock(self.config.run_dir) if self.is_first else None
        start = agree_on_start(place, self.config, last_whole=last_whole)
        self.steps_done = 0 if start is None else start.step
        self.folder = RunFolder(self.config, place, lock, self.steps_done, goes_on=start is not None)
        self.actor = make_actor(
            self.config.agents[place.agent].model, optimizer=OptimizerConfig(lr=1e-3), total_updates=9
        )
        name = place.coordinate.agent_name
        agent = SimpleNamespace(name=name, save=partial(save, self.actor), not_finite=self.actor.not_finite)
        if start is not None:
            counts = start.agents[name]
            self.actor.load(start.folder / name, num_updates=counts.num_updates, num_applied=counts.num_applied)
        self.disk = JointDisk(place, self.config, self.folder, self.said.append)
        state = state_after(self.steps_done)
        self.checkpoint = JointCheckpoint(place, self.config, agent, self.disk, state, is_on_disk=start is not None)

    def learn(self) -> None:
        """A step up to the begin of its checkpoint."""
        self.steps_done += 1
        samples = [sample for sample in random_samples(4, seed=self.steps_done) if sample.num_trained]
        self.actor.learn_supervised(samples, 30)
        self.folder.write_step(self.steps_done, StepMetrics({"step": float(self.steps_done)}, {}))
        self.checkpoint.set_state(state_after(self.steps_done))
        assert self.checkpoint.has_work()
        self.checkpoint.advance()

    def rename(self, source: Path, target: Path) -> None:
        """By rank 0, when nobody writes there, and before anybody goes on."""
        self.place.barrier()
        if self.is_first:
            source.rename(target)
        self.place.barrier()


def play_away(config_file: Path, notes: Path) -> None:
    """The first job: five steps whose folder is away at times, and one whose lock is."""
    with Place.join(RankMap.of(load_config(config_file))) as place:
        job = Job(place, config_file, last_whole=False)
        run, away = job.config.run_dir, job.config.run_dir.with_name("away")
        found = {}

        def note(name: str) -> None:
            place.barrier()
            there = sorted(path.name for path in run.rglob("*")) if run.exists() else None
            steps = {"safe": job.checkpoint.safe_step, "safe_now": job.checkpoint.safe_now}
            found[name] = steps | {"there": there, "said": job.said[-1:], "outlook": job.checkpoint.outlook}
            job.said.clear()
            place.barrier()

        job.learn()
        job.checkpoint.save_now()
        job.rename(run, away)
        job.learn()
        note("away before a checkpoint")
        job.rename(away, run)
        job.learn()
        job.checkpoint.save_now()
        note("back")
        job.learn()  # begins the checkpoint of step 4
        job.rename(run, away)
        job.checkpoint.save_now()
        note("away while a checkpoint is written")
        if job.is_first:
            (run / "checkpoints").mkdir(parents=True)
            (run / LOCK).write_text("of another run")
        job.learn()
        note("another run in its place")
        if job.is_first:
            (run / "checkpoints").rmdir()
            (run / LOCK).unlink()
            run.rmdir()
        job.rename(away, run)
        job.learn()
        job.checkpoint.save_now()
        note("back again")
        if job.is_first:
            notes.write_text(json.dumps(found))
            (run / LOCK).unlink()
        job.learn()
        raise AssertionError("it has written without its lock")


def play_on(config_file: Path) -> None:
    """The second job: goes on, from the newest whole step, up to step 6."""
    with Place.join(RankMap.of(load_config(config_file))) as place:
        job = Job(place, config_file, last_whole=True)
        assert job.steps_done == 3
        while job.steps_done < 6:
            job.learn()
        job.checkpoint.save_now()
        for impossible in ("n" * 300, "metrics.jsonl/x"):  # waiting would mend neither, and take wait_for_room_s
            with pytest.raises(OSError, match=r"File name too long|Not a directory"):
                job.disk.patiently(partial(job.disk.attempt, os.mkdir, job.config.run_dir / impossible))
        assert not any("waiting" in line for line in job.said)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> tuple[Path, dict, list[str]]:
    """The run's folder, what the first job noted, and what rank 0 of each job wrote to standard error."""
    folder = tmp_path_factory.mktemp("places")
    agents = []
    for name, family in (("one", "qwen3"), ("two", "llama")):
        make_model(folder / name, family, head_dim=32)
        make_tokenizer(folder / name, CHARACTERS)
        agents.append({"name": name, "model": str(folder / name)})
    config = write_config(folder, agents, num_steps=99, checkpoint={"every_steps": 1, "keep_last": 9})
    said, run = [], folder / "run"
    for play, arguments, statuses in ((play_away, (folder / "notes",), [3, 3]), (play_on, (), [0, 0])):
        logs = folder / play.__name__
        logs.mkdir()
        ranks = start_ranks(2, logs, play, config, *arguments)
        wait_for_ranks(ranks)
        said.append((logs / "0.err").read_text())
        assert [rank.exitcode for rank in ranks] == statuses, said
        if play is play_away:
            damage(next((folder_of(run, 6) / "one").glob("*.distcp")))
    return run, json.loads((folder / "notes").read_text()), said


def damage(file: Path) -> None:
    """One bit, and the time of before."""
    before = os.stat(file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_no_checkpoint_is_committed_into_a_folder_that_is_not_the_runs(jobs):
    _, found, _ = jobs
    assert {name: note["safe"] for name, note in found.items()} == {
        "away before a checkpoint": 1,
        "back": 3,
        "away while a checkpoint is written": 3,
        "another run in its place": 3,
        "back again": 6,
    }
    for name, note in found.items():
        is_back = name.startswith("back")
        assert note["safe_now"] == (note["safe"] if is_back else 0), "nothing is safe that is not on disk"
        assert note["outlook"].endswith(f"after step {note['safe']}" if is_back else "no step of it is on disk"), name
        if not is_back:
            assert note["there"] == ([".lock", "checkpoints"] if name.startswith("another") else None), name
            assert "is not the folder that this run opened" in note["said"][0], name
            assert f"step {note['safe']} was safe in the folder that was there: put it back" in note["said"][0], name


def test_no_line_is_missing_when_the_folder_has_come_back(jobs):
    run, _, said = jobs
    assert list(read_metrics(run / "metrics.jsonl")) == [1, 2, 3, 4, 5, 6]
    assert said[0].count("the logs are written again; no line is missing") == 2, said[0]


def test_a_run_whose_lock_was_deleted_stops_before_it_writes(jobs):
    run, _, said = jobs
    assert f"{run} is no longer this run's: the lock in it was deleted or is another job's." in said[0]
    assert "Traceback" not in said[0]


def test_the_last_whole_step_leads_to_the_bits_of_the_damaged_one(jobs):
    run, _, said = jobs
    assert committed_steps(run) == [1, 3, 4, 5, 6]
    aside = run / "checkpoints/damaged_step_000006"
    (line,) = [line for line in said[1].splitlines() if "damaged" in line]
    assert line.endswith(f".distcp is damaged: it is not what was written (SHA-256 differs); moved to {aside}")
    (was, now) = (json.loads((folder / "step.json").read_text()) for folder in (aside, folder_of(run, 6)))
    for path, file in was["state"]["files"].items():
        assert not path.endswith(".distcp") or now["state"]["files"][path] == file
    assert not list(read_checkpoint(folder_of(run, 6)).content_problems())


def test_a_start_says_what_a_success_is_where_its_method_asks_for_one(tmp_path):
    file = write_config(tmp_path, [{"name": name, "model": str(tmp_path / name)} for name in ("a", "b")])
    unsaid = "reward.success is not given: nothing says which answers are a success, so those with the full reward of 1"
    for overrides, is_said in (
        (["algorithm={method='sgt'}"], True),
        (["algorithm={capability_metric='positive_rate'}"], True),
        (["algorithm={capability_metric='positive_rate'}", "reward.success=0.5"], False),
        ([], False),
    ):
        console = SimpleNamespace(said=[])
        console.say = console.said.append
        _say_begin(console, load_unchecked(file, overrides), None, is_first=True, on_cpu=True)
        assert [line.startswith(unsaid) for line in console.said] == [False, True][: 1 + is_said]
