"""The benchmark as a user starts it: the work is what it says, the same for all schedules, and the files are there."""

import json
import math
import subprocess
from pathlib import Path

import pytest
from job import start_command
from run_cases import CHARACTERS, agent_table, write_config

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import all_sources
from hacpo_mega.rollout import wire
from hacpo_mega.rollout.exchange import JUDGED_ROW, ROW

pytestmark = pytest.mark.nightly

TOKENS = 5


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The folder that a benchmark of one measured step wrote, and what it said."""
    folder = tmp_path_factory.mktemp("bench")
    agents = [agent_table(folder, "one", "qwen3", CHARACTERS), agent_table(folder, "two", "llama", CHARACTERS)]
    config = write_config(folder, agents)
    few = ("--answer-tokens", str(TOKENS), "--rounds", "1", "--steps", "1", "--out", str(folder / "out"))
    process = start_command("bench", config, *few)
    out, errors = process.communicate()
    return folder, subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def test_every_schedule_does_the_work_that_was_asked_for(done):
    folder, process = done
    assert process.returncode == 0, process.stderr[-4000:]
    schedules = json.loads((folder / "out/bench.json").read_text())["schedules"]
    assert [schedule["name"] for schedule in schedules] == ["hacpo", "in turns", "gspo_x2", "gspo"]
    # An agent leaves out the other's answers that read differently in its own tokens.
    trained = (range(33, 65), range(33, 65), range(64, 65), range(32, 33))
    for schedule, num_answers, num_trained in zip(schedules, (32, 32, 64, 32), trained, strict=True):
        for agent, found in schedule["agents"].items():
            tokens = found["generated_per_s"] * schedule["wall_s"]
            assert tokens == pytest.approx(TOKENS * num_answers), (schedule["name"], agent)
            assert found["trained_answers"] in num_trained, (schedule["name"], agent)
            # a step and its phases are timed apart, by two ranks, and a crowded machine keeps one of them waiting
            assert (found["idle_share"] is None) if schedule["name"] == "in turns" else found["idle_share"] < 1
            assert found["seconds_per_1000"] == pytest.approx(1000 * schedule["wall_s"] / found["trained_answers"])


def test_memory_processor_seconds_and_bytes_are_those_of_the_work(done):
    folder, _ = done
    schedules = json.loads((folder / "out/bench.json").read_text())["schedules"]
    at_once = [schedule for schedule in schedules if schedule["name"] != "in turns"]
    for schedule, num_answers in zip(at_once, (32, 64, 32), strict=True):
        for agent, found in schedule["agents"].items():
            assert found["cpu_s"].keys() >= {"roll_out", "judge", "score", "exchange", "learn", "other"}
            assert all(0.0 <= found["cpu_s"][phase] <= found["cpu_highest_s"][phase] for phase in found["cpu_s"])
            assert found["peak_bytes"]["learn"] > found["peak_bytes"]["start"] > 0
            sent, weights = found["sent_bytes"], Architecture.from_folder(folder / agent)
            # rewards and answers to the one other leader; a token, also a special one, has a few letters
            fixed_bytes = (
                8
                + JUDGED_ROW.itemsize * num_answers
                + 8
                + wire.HEADER.size
                + num_answers * (ROW.itemsize + 8 + 4 * TOKENS)
            )
            assert fixed_bytes <= sent["exchange/lane"] <= fixed_bytes + 8 * TOKENS * num_answers
            assert sent["publish/engine"] == 4 * sum(math.prod(source.shape) for source in all_sources(weights))
            assert "exchange/row" not in sent and "publish/tp" not in sent  # one lane, one rank


def test_what_it_found_is_told_and_written(done):
    folder, process = done
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        f"bench.{end}" for end in ("csv", "json", "md", "png")
    ]
    assert (folder / "out/bench.md").read_text() in process.stdout
    phases = {line.split(",")[2] for line in (folder / "out/bench.csv").read_text().splitlines()[1:]}
    assert phases >= {"step", "roll_out", "judge", "score", "exchange", "learn", "publish"}
    assert not (folder / "run").exists(), "the configuration's own run folder is left alone"
