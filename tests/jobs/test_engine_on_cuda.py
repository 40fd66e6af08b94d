"""vLLM's own CUDA code does what the project's arguments rely on, as far as it runs without a device."""

import importlib

import numpy as np
import pytest
from job import run_ranks
from tiny_models import make_model


def visit(folder) -> dict:
    # here, where the ranks are: the process that judges must not import vLLM
    return importlib.import_module("cuda_engine_job").visit(folder)


@pytest.fixture(scope="module")
def saw(tmp_path_factory) -> dict:
    folder = make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_heads=2, head_dim=32, tied=True)
    return run_ranks(1, visit, folder)[0]


def test_a_process_that_sees_one_gpu_cannot_ask_for_its_peers(saw):
    """Why custom all-reduce is off there: it asks for the peer's device by its number."""
    assert saw["peer's device"].startswith("IndexError")


def test_two_engines_start_on_one_gpu_when_they_share_its_half(saw):
    """vLLM's share is of each engine alone; at 0.5 each the second finds too little beside the actors."""
    full_share, half_share = saw["starts"]
    assert "is less than desired GPU memory utilization (0.5" in full_share
    assert half_share == "no error"


def test_sleeping_on_a_shared_gpu_does_not_count_what_others_take(saw):
    assert saw["alone"] == "no error"
    assert saw["shared"] == "AssertionError: Memory usage increased after sleeping."
    assert saw["shared, unmeasured"] == "no error"


def test_vllm_takes_the_decision_about_fusion(saw):
    """None would leave it to what is on PATH."""
    assert saw["fused"] is False


def test_graphs_leave_the_device_with_the_engine_asleep(saw):
    is_told, kept = saw["graphs"]
    assert is_told and "cudagraph" in kept and "weights" not in kept


def test_a_model_of_garbage_is_whole_after_publishing(saw):
    """Level-2 sleep keeps buffers alone: after publishing, log-probs and answers are those of before, bit for bit."""
    seen = saw["level 2"]
    assert seen["filled"] > 131 * 64, "at least the embedding was garbage"
    (logprobs, answers), (logprobs_after, answers_after) = seen["before"], seen["after"]
    for before, after in zip(logprobs, logprobs_after, strict=True):
        np.testing.assert_array_equal(before, after)
    assert answers == answers_after


def test_a_tied_head_is_handed_to_vllm_once(saw):
    """As the embedding, which is the output layer there; on the CPU a packed copy of it is handed on, too."""
    seen = saw["level 2"]
    assert seen["handed on"] == seen["published"]
    assert "model.embed_tokens.weight" in seen["published"] and "lm_head.weight" not in seen["published"]
