"""Whole runs that end before their last step: by themselves, since going on would train nothing, or by Ctrl-C.

Each ends with an exit code of its own, one line, and files that explain it (docs/reference/exit-codes.md).
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from job import play_command, start_command, start_ranks
from processes import descendants, is_running
from run_cases import CHARACTERS, GRADER, PAIRS, agent_table, write_config

from hacpo_mega.checkpoint.files import committed_steps
from hacpo_mega.config import Config, load_config
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.provenance import read_alarms

pytestmark = pytest.mark.nightly

DEADLINE_S = 900.0  # of a hang, not of a slow machine


def play(config: Path, num_ranks: int = 2) -> tuple[list[int], list[str], str]:
    """Trains: the ranks' exit statuses, the lines any of them wrote to stderr, and rank 0's console."""
    folder = config.parent
    ranks = start_ranks(num_ranks, folder, play_without_bounds, "train", str(config))
    for process in ranks:
        process.join(timeout=DEADLINE_S)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    errors = [line for rank in range(num_ranks) for line in (folder / f"{rank}.err").read_text().splitlines()]
    return statuses, errors, (folder / "0.out").read_text()


def play_without_bounds(*arguments: str) -> None:
    """The command, in which a weight decay of 1000, the most that a file may say, is 1e300: it takes all weights."""
    from hacpo_mega.cli import start

    def load(*given: Any, **how: Any) -> Config:
        config = load_config(*given, **how)
        decays = [agent.optimizer.weight_decay and 1e300 for agent in config.agents]
        agents = [
            agent.model_copy(update={"optimizer": agent.optimizer.model_copy(update={"weight_decay": decay})})
            for agent, decay in zip(config.agents, decays)
        ]
        return config.model_copy(update={"agents": tuple(agents)})

    start.load_config = load
    play_command(*arguments)


def exploding(folder: Path, **layout: int) -> list[dict]:
    """A sound agent, and one whose weights are infinite after its first update (`play_without_bounds`)."""
    fine = agent_table(folder, "fine", "qwen3", CHARACTERS)
    broken = agent_table(folder, "broken", "llama", CHARACTERS + PAIRS, **layout)
    return [fine, broken | {"optimizer": {"lr": 1.0, "weight_decay": 1000.0}}]


def test_a_run_whose_updates_are_all_skipped_stops_with_their_samples(tmp_path):
    """The first of the four updates of step 1 breaks the model, and the others are skipped."""
    training = {"prompts_per_step": 8, "prompts_per_update": 2, "max_tokens_per_microbatch": 256}
    config = write_config(tmp_path, exploding(tmp_path), training=training | {"max_skipped_updates": 3})
    statuses, errors, _ = play(config)
    assert statuses == [3, 3], errors
    (line,) = errors
    start = (
        "broken: the last 3 updates in a row were skipped (training.max_skipped_updates), up to update 4 of step 1: "
    )
    assert line.startswith(start), line
    (file,) = (tmp_path / "run" / "logs").iterdir()
    assert f"{file.parent}/broken.cell_*.skipped_updates.json" in line
    updates = json.loads(file.read_text())["updates"]
    assert [update["update"] for update in updates] == [2, 3, 4]
    assert {sample["ratio"] for sample in updates[0]["samples"]} == {"nan"}
    assert not (tmp_path / "run" / "agents").exists()


def test_a_model_that_broke_in_the_step_before_stops_with_its_samples_too(tmp_path):
    """Two updates a step: the second of the first step is skipped, and both of the second, whose scores are NaN."""
    training = {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256}
    reward = {"kind": f"{GRADER}:odd_length"}
    tables = {"training": training | {"max_skipped_updates": 3}, "reward": reward, "num_steps": 4}
    statuses, errors, _ = play(write_config(tmp_path, exploding(tmp_path), **tables))
    assert statuses == [3, 3], errors
    (line,) = [line for line in errors if not line.startswith("warning")]
    assert ", up to update 2 of step 2: loss nan" in line, line
    (file,) = (tmp_path / "run" / "logs").iterdir()
    updates = json.loads(file.read_text())["updates"]
    assert [(update["step"], update["update"]) for update in updates] == [(1, 2), (2, 1), (2, 2)]
    assert {sample["source_logprob"] for sample in updates[1]["samples"] if sample["source"] == 1} == {"nan"}
    values = read_metrics(tmp_path / "run/metrics.jsonl")[1].values
    assert values["agent/fine/num_skipped_updates"] == 0


def test_a_model_that_is_not_finite_is_neither_stored_nor_exported(tmp_path):
    """Its second and last update was skipped by both of its cells: counted once, warned about, and too few to stop."""
    training = {"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256}
    config = write_config(tmp_path, exploding(tmp_path, cells_per_lane=2), num_steps=1, training=training)
    statuses, errors, console = play(config, num_ranks=3)
    assert statuses == [3, 3, 3], errors
    (line,) = errors
    folder = tmp_path / "run" / "agents"
    assert line.startswith(f"{folder}/broken is not written: model.embed_tokens.weight holds "), line
    assert not [path for path in folder.iterdir() if path.name not in ("fine", ".fine.partial")]
    values = read_metrics(tmp_path / "run/metrics.jsonl")[1].values
    assert [values[f"agent/{name}/num_skipped_updates"] for name in ("fine", "broken")] == [0, 1]
    assert "warning: the gradient norm of broken is nan" in console
    alarms = [(alarm["step"], alarm["text"]) for alarm in read_alarms(tmp_path / "run")]
    assert [step for step, text in alarms if text.startswith("warning: the gradient norm of broken is nan")] == [1]
    assert all(text in console for _, text in alarms)
    said = r"warning: there is no checkpoint of step 1: param\.model\.\S+ of broken is not finite; step 0 is safe\n"
    assert re.search(said, console)
    assert not list((tmp_path / "run/checkpoints").glob("step_*"))


def test_a_grader_that_returns_text_ends_the_run_without_a_traceback(tmp_path):
    """It is quoted for the held-out answers already. The steps finished before the third one stay."""
    agents = [agent_table(tmp_path, "one", "qwen3", CHARACTERS), agent_table(tmp_path, "two", "llama", CHARACTERS)]
    config = write_config(tmp_path, agents, num_steps=9, reward={"kind": f"{GRADER}:text_for_others"})
    statuses, errors, console = play(config)
    assert statuses == [3, 3], errors
    error = "the grader returned str 'correct', expected a number in [0, 1] or None"
    warnings = [line for line in errors if re.search(r"warning: [5-8] of 8 held-out answers unjudged", line)]
    assert len(warnings) == 2 and all(error in line for line in warnings), errors
    stops = [line for line in errors if line not in warnings]
    assert stops == [
        "more than 50% of the answers (reward.max_unjudged_share) were left unjudged in 3 steps in a row; the grader's "
        f"first error: {error}"
    ]
    assert list(read_metrics(tmp_path / "run/metrics.jsonl")) == [0, 1, 2]
    assert "step 2/9" in console and "step 3/9" not in console
    statuses, errors, _ = play(write_config(tmp_path, agents, reward={"kind": f"{GRADER}:text"}))
    refusals = [line for line in errors if f"the reward cannot be used: {error}. Tried" in line]
    assert (statuses, len(refusals)) == ([2, 2], 1) and not any("Traceback" in line for line in errors), errors


def test_ctrl_c_ends_a_run_with_one_line_and_leaves_no_process(tmp_path):
    """A terminal tells the launcher alone: each of its ranks leads a process group of its own."""
    agents = [agent_table(tmp_path, "wide", "qwen3", CHARACTERS, tp=2)]
    config = write_config(tmp_path, agents, num_steps=100_000, algorithm={"method": "gspo"})
    with (tmp_path / "errors").open("w") as errors:
        job = start_command("train", config, stdout=subprocess.DEVNULL, stderr=errors)
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert job.poll() is None, (tmp_path / "errors").read_text()
        time.sleep(0.5)
    family = descendants(job.pid)
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=DEADLINE_S) == 130
    told = r"rank [01] \(agent wide, .*\) was told to end \(SIGINT\) in phase \w+ of step \d+; started again, the run "
    told += r"(begins anew: no step of it is on disk|goes on after step \d+)\n"
    assert re.fullmatch(told, (tmp_path / "errors").read_text()), (tmp_path / "errors").read_text()
    wait_until_gone(family)


def wait_until_gone(family: set[int]) -> None:
    """A grader ends when it finds that its rank is gone."""
    deadline = time.monotonic() + DEADLINE_S
    while [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_launcher_told_to_end_exits_with_75_after_a_whole_step(tmp_path):
    """The launcher tells its ranks, who agree on where to leave."""
    agents = [agent_table(tmp_path, "wide", "qwen3", CHARACTERS, tp=2)]
    config = write_config(tmp_path, agents, num_steps=100_000, algorithm={"method": "gspo"})
    with (tmp_path / "errors").open("w") as errors, (tmp_path / "console").open("w") as console:
        job = start_command("train", config, stdout=console, stderr=errors)
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert job.poll() is None, (tmp_path / "errors").read_text()
        time.sleep(0.5)
    family = descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=DEADLINE_S) == 75, (tmp_path / "errors").read_text()
    assert (tmp_path / "errors").read_text() == ""
    wait_until_gone(family)
    last = max(read_metrics(metrics))
    assert committed_steps(tmp_path / "run")[-1] == last
    said = (tmp_path / "console").read_text().splitlines()[-1]
    assert said == f"told to end (SIGTERM); started again, the run goes on after step {last}"
