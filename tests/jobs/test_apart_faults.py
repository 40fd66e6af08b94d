"""A run whose engine is on a rank of its own, and refuses a weight, is killed, or is stopped a while.

One run meets all three, one after the other. It begins at a step of an undisturbed one, whose engine is colocated, and
ends with the bits of that one.
"""

import os
import signal
import time
from pathlib import Path

import apart_job
import pytest
import torch
from job import start_ranks, wait_for_ranks
from run_cases import CHARACTERS, agent_table, train, write_config
from safetensors.torch import load_file

from hacpo_mega.checkpoint.files import committed_steps, folder_of
from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.run.provenance import read_starts

pytestmark = pytest.mark.nightly

NUM_STEPS = 5
TRAINS, ANSWERS = (
    "rank 0 (agent one, lane 0, cell 0, pp 0, tp 0)",
    "rank 1 (agent one, lane 0, cell 0, engine 0, its rank 0)",
)
STOPPED_S = 3.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    config = write_config(
        folder,
        [agent_table(folder, "one", "qwen3", CHARACTERS)],
        num_steps=NUM_STEPS,
        algorithm={"method": "gspo"},
        rollout={"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12, "one_step_off": True},
        checkpoint={"every_steps": 1, "keep_last": NUM_STEPS, "asynchronous": False},
    )
    train(config)
    return config


def meet(fate: str, step: int, config: Path) -> tuple[list[int], list[str]]:
    """Starts the run apart, or goes on with it: exit statuses, and what the ranks wrote to stderr."""
    folder = config.parent / fate
    folder.mkdir()
    overrides = (f"run_dir={config.parent}/disturbed", "placement=apart", "agents.one.rollout_gpus=1")
    if fate == "refuses":
        overrides = (*overrides, "--from", str(folder_of(config.parent / "run", 1)))
    ranks = start_ranks(2, folder, apart_job.fated, fate, step, folder, "train", str(config), *overrides)
    if fate == "stopped":
        while not (folder / "stopped").exists():
            assert all(rank.is_alive() for rank in ranks), [log.read_text() for log in folder.glob("*.err")]
            time.sleep(0.02)
        time.sleep(STOPPED_S)
        assert all(rank.is_alive() for rank in ranks)
        os.kill(ranks[1].pid, signal.SIGCONT)
    wait_for_ranks(ranks)
    return [rank.exitcode for rank in ranks], [(folder / f"{rank}.err").read_text() for rank in range(2)]


def test_an_engine_that_refuses_dies_or_hangs_is_named_and_costs_no_bit(undisturbed):
    folder, run = undisturbed.parent, undisturbed.parent / "disturbed"

    statuses, (trains, answers) = meet("refuses", 3, undisturbed)
    why = f"{ANSWERS} failed in phase publish of step 3: RuntimeError: this engine takes no such weight"
    assert 0 not in statuses and f"stops: {why}" in trains and f"stops: {why}" in answers, (trains, answers)
    assert committed_steps(run) == [2], "what was done before is kept, and nothing of step 3"
    asked, generated = (folder / "refuses/after.txt").read_text().splitlines()
    assert asked == "answers of the weights after step 3 are asked for, and the engine has none that are whole"
    assert "needs weights, which are not there" in generated

    statuses, (trains, _) = meet("killed", 4, undisturbed)
    assert statuses[1] == -signal.SIGKILL and statuses[0] not in (0, None)
    assert f"{TRAINS}, in phase publish of step 4, stops: {ANSWERS} died in phase publish of step 4" in trains, trains
    assert committed_steps(run) == [2, 3]

    statuses, errors = meet("stopped", 3, undisturbed)
    assert statuses == [0, 0], errors
    assert (
        "2 tensors are published whole to every rank: model.layers.*.mlp.gate" in (folder / "stopped/0.out").read_text()
    )
    assert [start["steps_done"] for start in read_starts(run)] == [1, 2, 3]
    one, other = (read_metrics(base / "metrics.jsonl") for base in (folder / "run", run))
    assert [other[step].values for step in other] == [one[step].values for step in other] and max(other) == NUM_STEPS
    weights, same = (load_file(base / "agents/one/model.safetensors") for base in (folder / "run", run))
    assert all(torch.equal(weights[tensor], same[tensor]) for tensor in weights)
