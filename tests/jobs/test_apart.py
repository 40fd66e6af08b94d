"""Engines on ranks of their own give a run the same bits as engines beside the actor, one step off, in any order.

Two agents under hacpo: one of two training ranks and two engines, one of one and one. Colocated it is the run of
jobs/test_answers_ahead.py, of three ranks; apart it is six.
"""

from pathlib import Path

import pytest
import torch
from job import run_command
from run_cases import CHARACTERS, PAIRS, agent_table, train, write_config
from safetensors.torch import load_file

from hacpo_mega.checkpoint.files import folder_of, read_checkpoint
from hacpo_mega.logbook.metrics import read_metrics
from hacpo_mega.logbook.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly

NUM_STEPS = 4
APART = ("placement=apart", "agents.wide.rollout_gpus=2", "agents.small.rollout_gpus=1")


@pytest.fixture(scope="module")
def colocated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    agents = [
        agent_table(folder, "wide", "qwen3", CHARACTERS, tp=2, engine_tp=1),
        agent_table(folder, "small", "llama", CHARACTERS + PAIRS),
    ]
    rollout = {"rollouts_per_prompt": 4, "max_prompt_tokens": 8, "max_answer_tokens": 12, "one_step_off": True}
    config = write_config(
        folder,
        agents,
        num_steps=NUM_STEPS,
        rollout=rollout,
        training={"prompts_per_step": 8, "prompts_per_update": 4, "max_tokens_per_microbatch": 256}
        | {"verify_weights_every": 1},
        evaluation={"num_prompts": 8, "every_steps": 2},
        checkpoint={"every_steps": 2, "keep_last": NUM_STEPS},
    )
    train(config)
    return config


def assert_same_run(run: Path, other: Path, first: int = 1) -> None:
    """Metrics, answers and weights of two runs, of which the other began with step `first`."""
    one, two = (read_metrics(folder / "metrics.jsonl") for folder in (run, other))
    for step in range(first, NUM_STEPS + 1):
        assert two[step].values == one[step].values
        assert read_rollouts(other, step) == read_rollouts(run, step)
    for name in ("wide", "small"):
        weights, same = (load_file(folder / "agents" / name / "model.safetensors") for folder in (run, other))
        assert all(torch.equal(weights[tensor], same[tensor]) for tensor in weights), name


def test_the_run_apart_is_the_run_colocated_and_each_goes_on_from_the_other(colocated):
    run, folder = colocated.parent / "run", colocated.parent
    apart = train(colocated, f"run_dir={folder}/alone", *APART)
    assert_same_run(run, folder / "alone", first=0)
    assert all(f"agent/{name}/roll_out_hidden_s" in apart[1].timing for name in ("wide", "small"))
    one, two = (read_checkpoint(folder_of(base, 2)).files for base in (run, folder / "alone"))
    assert {path: file for path, file in one.items() if not path.endswith(".metadata")} == {
        path: file for path, file in two.items() if not path.endswith(".metadata")
    }
    for base, name, num_ranks, placed in ((run, "there", 6, APART), (folder / "alone", "back", 3, ())):
        run_dir = f"run_dir={folder}/{name}"
        run_command(num_ranks, "train", colocated, run_dir, *placed, "--from", folder_of(base, 2))
        assert_same_run(run, folder / name, first=3)
