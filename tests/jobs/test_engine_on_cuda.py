"""vLLM's own CUDA code does what the project's arguments rely on, as far as it runs without a device."""

import importlib

import numpy as np
import pytest
from job import run_ranks
from tiny_models import make_model

pytestmark = pytest.mark.nightly


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


def test_the_trainers_kernels_are_compiled_unwatched(saw):
    assert saw["watches"] is False


def test_nothing_is_in_flight_after_the_last_answer(saw):
    """vLLM returns with a step ahead, after an answer that was cut by its length and after one that ended by itself."""
    assert saw["in flight"] == [(1, 0), (1, 0)]


def test_a_model_of_garbage_is_whole_after_publishing(saw):
    """Level-2 sleep keeps buffers alone: after publishing, log-probs and answers are those of before, bit for bit."""
    seen = saw["level 2"]
    assert seen["filled"] > 131 * 64, "at least the embedding was garbage"
    (logprobs, answers), (logprobs_after, answers_after) = seen["before"], seen["after"]
    for before, after in zip(logprobs, logprobs_after, strict=True):
        np.testing.assert_array_equal(before, after)
    assert answers == answers_after
    assert seen["workspace"] == list(range(1000)), "no module names it, and vLLM does not save it"


def test_a_tied_head_is_handed_to_vllm_once(saw):
    """As the embedding, which is the output layer there; on the CPU a packed copy of it is handed on, too."""
    seen = saw["level 2"]
    assert seen["handed on"] == seen["published"]
    assert "model.embed_tokens.weight" in seen["published"] and "lm_head.weight" not in seen["published"]


def test_a_woken_cache_is_cleared(saw):
    """It was all NaN, which a weight of zero does not make zero."""
    assert set(saw["level 2"]["cleared"]) == {0.0}


def test_tokens_are_copied_when_they_exist(saw):
    """One step off: vLLM's copies of the tokens that a second thread samples, and all that reads or writes weights."""
    for name in ("with", "with, thread first"):
        found = saw["streams"][name]
        assert found["races"] == []
        assert found["learns on"] == found["main is on"] == {"trainer"}
        assert len(found["thread samples on"]) == 1
        assert found["thread samples on"].isdisjoint({"trainer"}), "learning and generating are two queues"


def test_the_checker_sees_what_goes_wrong_without_the_door(saw):
    """vLLM remembers the main thread's stream, copies behind that one, and leaves the other thread there."""
    without, unordered = saw["streams"]["before"], saw["streams"]["unordered"]
    assert any(race.startswith("copy") and "sampled tokens after sample" in race for race in without["races"])
    assert "trainer" in without["thread samples on"]
    assert {race.split()[0] for race in unordered["races"]} == {"load", "learn"}


def test_an_error_leaves_everybody_where_he_was(saw):
    found = saw["streams"]["error"]
    assert found["main"] == found["other"] == ("RuntimeError: inside", True)
    assert found["engine thread"] == "RuntimeError: inside"
    assert found["races"] == [], "what was asked before the error is waited for"


def test_vllm_that_was_called_beside_the_door_is_noticed(saw):
    assert saw["streams"]["another"].startswith("AssertionError: vLLM remembers")


def test_nobody_is_moved_to_another_stream(saw):
    """By vLLM's `current_stream()`, which gives a new one to a thread that has set none."""
    inside, after = saw["streams"]["moved"]
    assert inside == after != "trainer"
    inside, after = saw["streams"]["stayed"]
    assert inside != "trainer" and after == "trainer"


def test_every_method_of_the_engine_goes_through_the_door(saw):
    """With a live engine: what of vLLM each has called, and that it was called on the engine's stream alone."""
    runs, memory = {"execute_model"}, {"sleep", "wake_up", "reset_prefix_cache", "reload_weights"}
    expected = {
        "load": {"reload_weights", "reset_prefix_cache"}, "generate": runs, "generate beside": runs, "logprobs": runs,
        "weights": {"get_model"},
        "receiving": {"reset_prefix_cache"}, "held": {"get_model"}, "sleep and wake": memory, "close": {"shutdown"},
    }  # fmt: skip
    for name, called in expected.items():
        found = saw["level 2"]["streams"][name]
        assert found == {(function, "engine") for function in called} | {("after", "trainer")}, name


def test_actor_and_engine_are_never_left_together(saw):
    """On a device that agents share, after every error and every two of them, one of which is met while cleaning up."""
    assert {phase: both for phase, (_, both) in saw["tenants"].items()} == {phase: [] for phase in saw["tenants"]}
    assert {phase: points for phase, (points, _) in saw["tenants"].items() if points < 8} == {"publish": 0}


def test_gradients_and_state_are_off_the_device_while_the_engine_generates(saw):
    """Bytes of gradients (40) and optimizer state (80), call by call; after an error all is back for learning."""
    for (policy, offloads, _fails), noted in saw["off the device"].items():
        gone = (0, 0 if offloads else 80) if policy == "split" else (40, 80)
        assert [held for name, *held in noted if name in ("generate", "evaluate")] == [list(gone)] * 3
        assert [held for name, *held in noted if name == "learn"] == [[40, 80]]
        if policy == "split":
            wakes = [held for name, *held in noted if name == "wake"]
            assert wakes == [[40, 80], *[list(gone)] * 3], "its weights beside all, its cache in what was freed"
            assert [name for name, *_ in noted] == [
                *("publish", "generate", "sleep", "learn", "wake", "publish", "wake", "evaluate"),
                *("sleep", "export", "export", "wake", "publish", "wake", "evaluate"),
            ]
        else:
            assert [name for name, *_ in noted][-3:] == ["export", "export", "evaluate"]


def test_what_finds_no_room_to_wake_is_not_half_there(saw):
    """Weights and cache are two pieces each; vLLM would leave what it has mapped before the error, and forget it."""
    mapped = [[], [], ["w1", "w2"], ["w1", "w2"], ["c1", "c2", "w1", "w2"]]
    assert [found for _, found in saw["full"]] == mapped
    assert [said for said, _ in saw["full"]] == ["RuntimeError: out of memory"] * 4 + ["no error"]
