"""Recomputation changes no gradient: loss, log-probs and the whole gradient buffer of every rank, bit for bit."""

import pytest
import torch
from actor_cases import make_actor, objective, random_samples
from job import run_group
from tiny_models import make_model

pytestmark = pytest.mark.nightly

LAYOUTS = [(2, 1), (1, 2)]
CHOICES = ("none", "mlp", "full")


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """By rank, (tp, pp, choice) -> (score, loss, gradient buffers, tensors kept for backward)."""
    folder = make_model(tmp_path_factory.mktemp("recompute"), family="qwen3", tied=True)
    return run_group(2, learn_in_every_way, folder)


def learn_in_every_way(folder):
    return {(tp, pp, choice): learn(folder, tp, pp, choice) for tp, pp in LAYOUTS for choice in CHOICES}


def learn(folder, tp, pp, choice):
    samples, kept = random_samples(3, seed=5), []
    actor = make_actor(folder, tp=tp, pp=pp, recompute=choice)
    scores = [score.mean_logprob for score in actor.score(samples)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        stats = actor.learn(samples, objective)
    return scores, stats.loss, [buffer.grad_data.clone() for buffer in actor.model.buffers], len(kept)


@pytest.mark.parametrize("choice", ["mlp", "full"])
@pytest.mark.parametrize("tp, pp", LAYOUTS)
def test_recompute_changes_no_bit(by_rank, tp, pp, choice):
    for answers in by_rank:
        scores, loss, gradients, _ = answers[tp, pp, choice]
        plain_scores, plain_loss, plain_gradients, _ = answers[tp, pp, "none"]
        assert (scores, loss) == (plain_scores, plain_loss)
        assert all(torch.equal(some, other) for some, other in zip(gradients, plain_gradients, strict=True))
        assert all(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("tp, pp", LAYOUTS)
def test_every_choice_keeps_other_tensors(by_rank, tp, pp):
    """Else the test above would compare three times the same."""
    for answers in by_rank:
        assert len({answers[tp, pp, choice][3] for choice in CHOICES}) == len(CHOICES)
