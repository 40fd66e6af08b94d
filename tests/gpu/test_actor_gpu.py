"""The actor in bf16 on CUDA: first ratios stay exactly 1, gradients stay Hugging Face's up to bf16, nothing is lost."""

import numpy as np
import pytest
import torch
from actor_cases import Oracle, full_weights, make_actor, objective, one_rank, random_samples, with_sources_near
from bf16_cases import check_gradient, check_own_ratios, frequent_token_error, gradient, make_folder, own_ratios

from hacpo_mega.config import OptimizerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank("nccl"):
        yield


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_own_ratio_of_a_steps_first_update_is_exactly_one(folder, max_tokens):
    check_own_ratios(own_ratios(folder, max_tokens))


@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_gradient_is_hugging_faces_up_to_bf16(folder, max_tokens):
    check_gradient(gradient(folder, max_tokens), folder)


@pytest.mark.parametrize("num_tokens", [2048, 8192])
def test_a_frequent_tokens_row_is_added_in_float32(folder, num_tokens):
    """Half of the micro-batch is one token. torch's own backward takes another kernel above 3,072 tokens."""
    assert frequent_token_error(folder, num_tokens) < 3e-2


def test_policy_loss_runs_through_the_kernels(folder):
    oracle, drawn = Oracle(folder), random_samples(6, seed=61)
    samples = with_sources_near(drawn, oracle.mean_logprobs(drawn), seed=62)
    actor = make_actor(folder)
    stats = actor.learn(samples, objective)
    assert stats.loss == pytest.approx(oracle.policy_loss(samples).item(), abs=0.05)
    assert all(report.ratio_B.device.type == "cpu" for report in stats.reports)


def test_the_reference_is_the_policy_that_was_kept_and_leaves_no_trace(folder):
    samples = random_samples(4, seed=63)
    actor = make_actor(folder, optimizer=OptimizerConfig(lr=1e-3))
    at_start = np.concatenate(actor.token_logprobs(samples))
    actor.keep_reference()
    actor.learn(samples, objective)
    weights = full_weights(actor)
    np.testing.assert_array_equal(np.concatenate(actor.reference_token_logprobs(samples)), at_start)
    for name, tensor in full_weights(actor).items():
        assert torch.equal(tensor, weights[name]), name
