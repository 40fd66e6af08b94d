"""A run whose grader sleeps, spins, ends, raises and forks over some answers costs these answers, and nothing else."""

import math
from pathlib import Path

import pytest
from graders import fate_of
from repository import ROOT
from run_cases import CHARACTERS, GRADER, PAIRS, agent_table, train, write_config

from hacpo_mega.logbook.files.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly
VERDICTS = {"sleeps": "timeout", "spins": "timeout", "ends": "error", "raises": "error", "forks": "correct"}


def test_hostile_graders_cost_their_answers_and_nothing_of_the_run(tmp_path):
    agents = [
        agent_table(tmp_path, "qwen", "qwen3", CHARACTERS),
        agent_table(tmp_path, "llama", "llama", CHARACTERS + PAIRS),
    ]
    reward = {"kind": f"{GRADER}:hostile", "timeout_s": 0.5, "num_workers": 2, "max_unjudged_share": 1.0}
    metrics = train(write_config(tmp_path, agents, reward=reward, checkpoint={"every_steps": 1}))
    assert sorted(metrics) == [0, 1, 2]
    answers = [
        (answer, line["gold"])
        for step in (1, 2)
        for line in read_rollouts(tmp_path / "run", step)
        for answer in line["answers"]
    ]
    assert len(answers) == 2 * 2 * 8 * 4
    met = set()
    for answer, gold in answers:
        fate = "right" if answer["text"] == gold else fate_of(answer["text"])
        met.add(fate)
        verdict = VERDICTS.get(fate, "correct" if fate == "right" else "wrong")
        assert (answer["verdict"], answer["reward"]) == (verdict, float(verdict == "correct")), answer["text"]
    assert met & VERDICTS.keys(), "no answer tried anything"
    for step in (1, 2):
        assert all(math.isfinite(value) for value in metrics[step].values.values())
    assert not orphans(), "what a grader has left running ends with its worker"


def orphans() -> list[str]:
    """Grading workers and what they have forked whose run is gone: others' judges have a parent."""
    processes = [process for process in Path("/proc").glob("[0-9]*") if str(ROOT) in read(process / "cmdline")]
    commands = {process: read(process / "cmdline") for process in processes if "PPid:\t1\n" in read(process / "status")}
    return [command for command in commands.values() if "start_worker.py" in command]


def read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
