"""The actor in bf16 on CUDA: first ratios stay exactly 1, gradients stay Hugging Face's up to bf16, nothing is lost."""

import dataclasses

import numpy as np
import pytest
import torch
from actor_cases import (
    DESCENT,
    Oracle,
    full_weights,
    gradient_by_descent,
    make_actor,
    norm,
    objective,
    one_rank,
    random_samples,
    relative_error,
    with_sources_near,
)
from tiny_models import make_model

from hacpo_mega.config import OptimizerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank("nccl"):
        yield


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request, tmp_path_factory):
    sizes = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "dtype": torch.bfloat16}
    return make_model(tmp_path_factory.mktemp("models") / request.param, request.param, **sizes)


@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_own_ratio_of_a_steps_first_update_is_exactly_one(folder, max_tokens):
    actor = make_actor(folder, optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_microbatch=max_tokens)
    for step in range(3):
        drawn = random_samples(8, seed=50 + step)
        own = [sample for sample in drawn if sample.is_self]
        scores = actor.score(own)
        scored = [dataclasses.replace(s, source_logprob=x.mean_logprob) for s, x in zip(own, scores, strict=True)]
        cross = [dataclasses.replace(s, source_logprob=-5.0) for s in drawn if not s.is_self]
        first, second = actor.learn(scored + cross, objective), actor.learn(scored + cross, objective)
        ratios = [[float(r.ratio_self_min) for r in stats.reports if r.ratio_self[1] > 0] for stats in (first, second)]
        assert ratios[0] == [1.0] * len(ratios[0])
        assert ratios[1] != ratios[0], "the policy did not move, so the test shows nothing"


@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_gradient_is_hugging_faces_up_to_bf16(folder, max_tokens):
    """Cross-entropy, whose gradient has no clip for a bf16 log-prob to fall on the other side of."""
    oracle, samples = Oracle(folder), random_samples(6, seed=60)
    loss = oracle.cross_entropy(samples)
    expected = oracle.gradient(loss)
    # Weights are bf16: a step that leaves nothing of them shows the gradient to bf16 precision.
    descent = DESCENT.model_copy(update={"lr": DESCENT.lr * 1e4})
    actor = make_actor(folder, optimizer=descent, max_tokens_per_microbatch=max_tokens)
    num_trained = sum(sample.num_trained for sample in samples)
    found, stats = gradient_by_descent(actor, lambda: actor.learn_supervised(samples, num_trained))
    assert stats.loss == pytest.approx(loss.item(), rel=5e-3)
    assert stats.grad_norm == pytest.approx(norm(expected), rel=2e-2)
    assert relative_error({name: tensor / 1e4 for name, tensor in found.items()}, expected) < 3e-2


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
