"""A disk of 32 MiB that is full for a while: training goes on; nothing is doubled, missing or half there."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from job import play_command, run_group, start_ranks
from run_cases import CHARACTERS, PAIRS, agent_table, write_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hacpo_mega.checkpoint.disk_space import checkpoint_bytes, free_bytes
from hacpo_mega.checkpoint.files import committed_steps, folder_of, read_checkpoint
from hacpo_mega.config import load_config
from hacpo_mega.logbook.files.rollout_log import logged_steps, read_rollouts
from hacpo_mega.logbook.run.provenance import read_starts
from hacpo_mega.megatron.checkpoint.stored_state import NotWritten, Part, write_parts

pytestmark = pytest.mark.nightly

STEPS = 5
DEADLINE_S = 900.0  # of a hang, not of a slow machine


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder]).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


class Run:
    """A run of two agents on a small disk, with a checkpoint of every second step, whose disk fills after the first."""

    def __init__(self, tmp_path: Path, disk: Path, wait_for_room_s: float) -> None:
        agents = [
            agent_table(tmp_path, "one", "qwen3", CHARACTERS),
            agent_table(tmp_path, "two", "llama", CHARACTERS + PAIRS),
        ]
        checkpoint = {"every_steps": 2, "wait_for_room_s": wait_for_room_s}
        self.folder, self.logs, self._filler = disk / "run", tmp_path, disk / "filler"
        self.config = write_config(tmp_path, agents, num_steps=STEPS, checkpoint=checkpoint, run_dir=str(self.folder))
        self.ranks: list[BaseProcess] = []

    def start(self) -> None:
        for said in self.logs.glob("?.out"):
            said.unlink()
        self.ranks = start_ranks(2, self.logs, play_command, "train", str(self.config))

    def fill_after_checkpoint(self) -> None:
        self.wait_until(lambda: committed_steps(self.folder) == [2])
        self.fill(spare=0)

    def fill(self, spare: int) -> None:
        """Fills the disk, but for `spare` bytes."""
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while free_bytes(self.folder) > spare:
                file.write(bytes(4096))

    def keep_full(self) -> None:
        """Takes what a checkpoint gives back that was being written when the disk filled, while the ranks run."""
        while any(rank.is_alive() for rank in self.ranks):
            self.fill(spare=0)
            time.sleep(0.02)

    def clear(self) -> None:
        self._filler.unlink()

    def said(self, name: str) -> str:
        return (self.logs / name).read_text() if (self.logs / name).exists() else ""

    def wait_until(self, has_come: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not has_come():
            assert all(rank.is_alive() for rank in self.ranks) and time.monotonic() < deadline, self.said("0.err")
            time.sleep(0.02)

    def ended(self) -> list[int | None]:
        for rank in self.ranks:
            rank.join(timeout=DEADLINE_S)
        statuses = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
        return statuses

    def assert_every_step_is_there_once(self) -> None:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(STEPS + 1)]
        assert logged_steps(self.folder) == [*range(1, STEPS + 1)]
        for step in range(1, STEPS + 1):
            answers = [answer for prompt in read_rollouts(self.folder, step) for answer in prompt["answers"]]
            assert len(answers) == 8 * 4 * 2
        events = EventAccumulator(str(self.folder / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("agent/one/reward_mean")] == [*range(1, STEPS + 1)]
        assert committed_steps(self.folder)[-1] == STEPS
        assert not list(read_checkpoint(folder_of(self.folder, STEPS)).content_problems())
        assert not [path for path in self.folder.rglob("*") if path.name.endswith((".writing", ".tmp", ".partial"))]


def test_a_disk_that_is_full_until_the_end_is_waited_for_there(tmp_path, disk):
    run = Run(tmp_path, disk, wait_for_room_s=3600.0)
    run.start()
    try:
        run.fill_after_checkpoint()
        run.wait_until(lambda: "waiting for room, for " in run.said("0.out"))
        assert committed_steps(run.folder) == [2]
        run.clear()
    finally:
        statuses = run.ended()
    errors, console = run.said("0.err"), run.said("0.out")
    assert statuses == [0, 0], errors
    assert errors.count("cannot be written (No space left on device): logs stay in memory") == 1, errors
    assert errors.count("the logs are written again; no line is missing") == 1
    assert "warning: there is no checkpoint of step 4: logs of " in console and "step 2 is safe\n" in console
    assert f"step {STEPS}/{STEPS}" in console
    run.assert_every_step_is_there_once()


def test_a_run_ended_by_a_full_disk_says_what_it_needs_and_goes_on_later(tmp_path, disk):
    run = Run(tmp_path, disk, wait_for_room_s=0.0)
    run.start()
    try:
        run.fill_after_checkpoint()
        run.keep_full()
    finally:
        statuses = run.ended()
    (line,) = [line for line in (run.said("0.err") + run.said("1.err")).splitlines() if "not exported" in line]
    assert statuses == [3, 3], run.said("0.err")
    assert line.startswith("the agents are not exported: ") and " bytes are needed, 0 are free on the disk of " in line
    assert line.endswith("; step 2 is safe. Make room, start the run again")
    assert committed_steps(run.folder) == [2] and not list(read_checkpoint(folder_of(run.folder, 2)).content_problems())
    run.clear()
    run.start()
    try:  # less than a checkpoint needs, and more than the export
        run.wait_until(lambda: "goes on after step 2" in run.said("0.out"))
        run.fill(spare=checkpoint_bytes(load_config(run.config)) - 1)
    finally:
        statuses = run.ended()
    assert statuses == [3, 3], run.said("0.err")
    (line,) = [line for line in (run.said("0.err") + run.said("1.err")).splitlines() if "are exported" in line]
    assert line.startswith(f"there is no checkpoint of step {STEPS}: ") and " bytes are needed, " in line
    assert line.endswith("; step 2 is safe. The agents are exported. Make room, start the run again for its last steps")
    exported = exported_files(run.folder)
    run.clear()
    run.start()
    assert run.ended() == [0, 0], run.said("0.err")
    assert [start["steps_done"] for start in read_starts(run.folder)] == [0, 2, 2]
    assert exported and exported_files(run.folder) == exported, "the steps that were done again gave other bits"
    run.assert_every_step_is_there_once()


def exported_files(run_dir: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in (run_dir / "agents").rglob("*.safetensors")}


def write_more_than_fits(folder: Path) -> str:
    """Writes a tenth of a tensor of 40 MB on rank 0 and the rest on rank 1; returns the error on this rank."""
    first, rows = ((0, 1), (1, 9))[dist.get_rank()]
    part = Part((10, 1_000_000), (first, 0), torch.ones(rows, 1_000_000))
    with pytest.raises(NotWritten) as refused:
        write_parts({"param.head": [part]}, folder, dist.group.WORLD)
    return str(refused.value)


def test_a_disk_that_fills_within_a_shard_is_reported_to_every_writer(disk):
    (disk / "shards").mkdir()
    zero, one = run_group(2, write_more_than_fits, disk / "shards")
    assert zero == one
    # the disk is full for whoever comes last
    assert re.match(r"its rank [01] could not write: ", zero), zero
