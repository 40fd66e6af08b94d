"""The project's scheduler against vLLM's own, step by step: one process, the same requests by both."""

import numpy as np
import pytest
import torch
from job import run_script
from tiny_models import make_model

from hacpo_mega.records import Stop
from hacpo_mega.rollout.vllm.engine_spec import CPU_BLOCK_SIZE

CASES = ["preempted", "own ends", "cut", "greedy", "ended within a step", "waves", "long"]
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedulers")
    make_model(folder / "qwen3", "qwen3", num_heads=2, head_dim=32)
    run_script("scheduler_job", 1, folder, folder)
    return torch.load(folder / "seen.pt", weights_only=False)


def plain(answers) -> list:
    return [(ids.tolist(), stop, None if logprobs is None else logprobs.tobytes()) for ids, stop, logprobs in answers]


@pytest.mark.parametrize("case", CASES)
def test_answers_and_the_order_of_their_ends_match_vllms_scheduler(seen, case):
    theirs, ours = seen["vllm"][case], seen["ours"][case]
    assert plain(ours["answers"]) == plain(theirs["answers"])
    assert ours["told"] == theirs["told"] and ours["told"]


@pytest.mark.parametrize("case", CASES)
def test_every_step_gives_the_model_the_same_and_leaves_the_same_blocks(seen, case):
    """Waves, preemption, blocks and their hashes, the order of free ones; requests by their number."""
    theirs, ours = seen["vllm"][case]["steps"], seen["ours"][case]["steps"]
    assert len(ours) == len(theirs)
    for number, (own, step) in enumerate(zip(ours, theirs, strict=True)):
        assert own == step, f"step {number}: {[name for name in step if own[name] != step[name]]}"


def test_the_cases_are_what_they_are_called(seen):
    theirs = seen["vllm"]
    assert sum(len(step["preempted"]) for step in theirs["preempted"]["steps"]) > 10
    assert any(step["resumed"] for step in theirs["preempted"]["steps"])
    assert any(Stop(stop) is Stop.EOS for _, stop, _ in theirs["own ends"]["answers"])
    assert sum(Stop(stop) is Stop.CUT for _, stop, _ in theirs["cut"]["answers"]) > 10
    assert len(theirs["ended within a step"]["answers"]) == 24 - 3
    assert max(len(step["running"]) for step in theirs["waves"]["steps"]) == 12
    assert max(len(ids) for ids, _, _ in theirs["long"]["answers"]) > 64


def test_answers_read_the_whole_blocks_of_their_prompt_once(seen):
    first, *others = seen["ours"]["waves"]["steps"][0]["new"][:8]
    *_, num_read_before, length = first
    assert num_read_before == 0 and length > 2 * CPU_BLOCK_SIZE
    assert {new[2:] for new in others} == {((length - 1) // CPU_BLOCK_SIZE * CPU_BLOCK_SIZE, length)}


def test_the_short_way_was_taken(seen):
    """By vLLM's scheduler every token of every request is passed on by itself."""
    assert (seen["vllm"]["class"], seen["ours"]["class"]) == ("Scheduler", "DecodeScheduler")
    for case in CASES:
        tokens = sum(len(ids) for ids, _, _ in seen["ours"][case]["answers"])
        assert sum(seen["ours"][case]["passed on"]) < 0.75 * sum(seen["vllm"][case]["passed on"]), case
        assert np.isclose(sum(seen["vllm"][case]["passed on"]), tokens, rtol=0.1), case


def test_the_record_of_many_logprobs_is_that_of_one_after_the_other(seen):
    ours, vllms = seen["written"]
    assert ours == vllms and len(ours[0]["logprobs"]) == 9
