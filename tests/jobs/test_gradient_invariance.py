"""The scaling law of megatron/train/schedule.py: one gradient for every packing, layout and number of cells.

Every gradient is held against a Hugging Face model in float64 that never saw a micro-batch.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    GRADIENT_ERROR,
    LOGPROB_ERROR,
    WEIGHT,
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
from job import run_group
from tiny_models import make_model

MODELS = {
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen3-untied": {"family": "qwen3", "tied": False},
    "llama-tied": {"family": "llama", "tied": True},
    "llama-untied": {"family": "llama", "tied": False},
}
# (ranks, tp, cp, pp): the rest of the ranks are further cells. With four heads and two for keys and values, tp x cp = 4
# has more ranks than the latter.
FAST = [(4, 2, 1, 2), (4, 1, 2, 1)]
WITHOUT_CONTEXT = [(4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (2, 1, 1, 1), (4, 2, 1, 1), (4, 1, 1, 2)]
OTHERS = [*WITHOUT_CONTEXT, (2, 1, 2, 1), (4, 2, 2, 1), (4, 1, 2, 2), (4, 1, 4, 1), (8, 2, 2, 2), (8, 2, 2, 1)]
LAYOUTS = FAST + [pytest.param(*layout, marks=pytest.mark.nightly) for layout in OTHERS]
NUM_PROMPTS = 3  # so that with four cells the last one has nothing to train
# Models that are cut: a head that two stages share, and one that they do not; norms over a head, and none. No code asks
# for both at once (test_megatron_layout.py cuts the other two).
CUT = ("qwen3-tied", "llama-untied")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, **sizes) for name, sizes in MODELS.items()}


@pytest.fixture(scope="module")
def oracles(folders):
    return {name: Oracle(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def samples(oracles):
    """Per model, since source log-probs are put around its own."""
    drawn = random_samples(NUM_PROMPTS, seed=11)
    return {name: with_sources_near(drawn, oracle.mean_logprobs(drawn), seed=12) for name, oracle in oracles.items()}


@pytest.fixture(scope="module")
def policy_gradients(oracles, samples):
    found = {}
    for name, oracle in oracles.items():
        loss = oracle.policy_loss(samples[name])
        expected = pytest.approx(loss.item(), abs=oracle.policy_loss_error(samples[name]))
        found[name] = expected, oracle.gradient(loss)
    return found


@pytest.fixture(scope="module")
def group_gradients(oracles, samples):
    """Per model, of each source's samples alone: the gradient, and so its inner product with any other."""
    return {
        name: [oracle.gradient(oracle.policy_loss(group)) for group in by_source(samples[name])[:3]]
        for name, oracle in oracles.items()
    }


@pytest.fixture(scope="module")
def alone():
    with one_rank():
        yield


@pytest.fixture(scope="module")
def by_layout(folders, samples):
    """(ranks, tp, cp, pp) -> {model: (gradient, update stats) of every rank}. One job for all layouts of so many."""

    @functools.cache
    def visit(layouts):
        chosen = {name: folders[name] for name in CUT}
        answers = run_group(layouts[0][0], gradients_of_layouts, layouts, chosen, samples)
        return {key: [answer[key] for answer in answers] for key in answers[0]}

    def find(*layout):
        layouts = tuple(other for other in (FAST if layout in FAST else OTHERS) if other[0] == layout[0])
        return {key: answers for (of, key), answers in visit(layouts).items() if of == layout}

    return find


def gradients_of_layouts(layouts, folders, samples):
    found = {}
    for layout in layouts:
        answers = gradients_of_layout(*layout[1:], folders, samples)
        found |= {(layout, key): answer for key, answer in answers.items()}
    return found


def gradients_of_layout(tp, cp, pp, folders, samples):
    found = {}
    cell, num_cells = dist.get_rank() // (tp * cp * pp), dist.get_world_size() // (tp * cp * pp)
    for name, folder in folders.items():
        mine = [sample for sample in samples[name] if sample.prompt_index % num_cells == cell]
        actor = make_actor(folder, tp=tp, cp=cp, pp=pp)
        found[name] = gradient_by_descent(actor, lambda a=actor, m=mine: a.learn(m, objective))
        actor = make_actor(folder, tp=tp, cp=cp, pp=pp)
        products = actor.gradient_products(by_source(mine), objective)
        after, _ = gradient_by_descent(actor, lambda a=actor, m=mine: a.learn(m, objective))
        plain, _ = found[name]
        same = [tensor_name for tensor_name in plain if torch.equal(plain[tensor_name], after[tensor_name])]
        found[name, "diagnosed"] = products, len(same) == len(plain)
    return found


def by_source(samples):
    """The learner's own samples (source 0), those of the others, and those of a source that nobody has."""
    return [[sample for sample in samples if sample.source == source] for source in range(4)]


def inner(first, second) -> float:
    return sum(float((first[name] * second[name]).sum()) for name in first)


def check_products(found, gradients) -> None:
    """Lengths off by the error of a gradient; of an inner product both sides are off."""
    assert (found.squares[3], found.products[3], found.cosine(3)) == (0.0, 0.0, None)
    assert found.products[0] == found.squares[0]
    for group, gradient in enumerate(gradients):
        assert found.norms[group] == pytest.approx(norm(gradient), rel=GRADIENT_ERROR), group
        expected = inner(gradients[0], gradient) / norm(gradients[0]) / norm(gradient)
        assert found.cosine(group) == pytest.approx(expected, abs=4 * GRADIENT_ERROR), group


@pytest.mark.parametrize(
    "name, max_tokens, order, share_prompts, num_microbatches, num_tokens",
    [
        pytest.param(name, *way, marks=[] if name == "qwen3-tied" else [pytest.mark.nightly])
        for name in MODELS
        for way in (
            (28, 1, False, 7, 188),
            (28, 1, True, 8, 168),
            (60, -1, False, 4, 188),
            (60, 1, True, 4, 162),
            (60, -1, True, 4, 162),
            (10_000, 1, True, 2, 162),
        )
    ],
)
def test_packing_does_not_change_the_gradient(
    alone, folders, samples, policy_gradients, name, max_tokens, order, share_prompts, num_microbatches, num_tokens
):
    loss, expected = policy_gradients[name]
    actor = make_actor(folders[name], max_tokens_per_microbatch=max_tokens, share_prompts=share_prompts)
    found, stats = gradient_by_descent(actor, lambda: actor.learn(samples[name][::order], objective))
    assert (stats.num_microbatches, stats.num_tokens) == (num_microbatches, num_tokens)
    assert relative_error(found, expected) < GRADIENT_ERROR
    assert stats.loss == loss
    assert stats.grad_norm == pytest.approx(norm(expected), rel=GRADIENT_ERROR)


@pytest.mark.parametrize("name", MODELS)
def test_leaving_out_what_moves_no_gradient_changes_none(alone, folders, samples, name):
    """Half of the prompts have advantages of 0: trained on or left out, packed otherwise, the gradient is the same."""
    silent = [replace(s, advantage=0.0) if s.prompt_index % 2 else s for s in samples[name]]
    kept = [sample for sample in silent if sample.prompt_index % 2 == 0]
    assert 0 < len(kept) < len(silent)
    found = []
    for learned in (silent, kept):
        actor = make_actor(folders[name], max_tokens_per_microbatch=60)
        found.append(gradient_by_descent(actor, lambda a=actor, chosen=learned: a.learn(chosen, objective))[0])
    # float32 sums in another order: a few roundings of 6e-8 of the whole
    assert relative_error(found[1], found[0]) < 1e-6


def test_recomputing_activations_does_not_change_the_gradient_by_a_bit(alone, folders, samples):
    name = "qwen3-tied"
    found = []
    for recompute in ("none", "full"):
        actor = make_actor(folders[name], recompute=recompute)
        found.append(gradient_by_descent(actor, lambda a=actor: a.learn(samples[name], objective))[0])
    for tensor_name, kept in found[0].items():
        assert torch.equal(kept, found[1][tensor_name]), tensor_name


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("num_ranks, tp, cp, pp", LAYOUTS)
def test_layout_does_not_change_the_gradient(by_layout, policy_gradients, name, num_ranks, tp, cp, pp):
    loss, expected = policy_gradients[name]
    for rank, (found, stats) in enumerate(by_layout(num_ranks, tp, cp, pp)[name]):
        assert relative_error(found, expected) < GRADIENT_ERROR, f"rank {rank}"
        assert stats.loss == loss
        assert stats.grad_norm == pytest.approx(norm(expected), rel=GRADIENT_ERROR)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [28, 10_000])
def test_own_and_cross_gradients_are_hugging_faces(
    alone, folders, samples, policy_gradients, group_gradients, name, max_tokens
):
    """Own and cross gradients of random samples are nearly orthogonal; all samples together are not so to own ones."""
    actor = make_actor(folders[name], max_tokens_per_microbatch=max_tokens)
    before = full_weights(actor)
    found = actor.gradient_products([*by_source(samples[name]), samples[name]], objective)
    check_products(found, group_gradients[name])
    own, whole = group_gradients[name][0], policy_gradients[name][1]
    assert found.cosine(4) == pytest.approx(inner(own, whole) / norm(own) / norm(whole), abs=4 * GRADIENT_ERROR)
    assert 0.1 < found.cosine(4) < 0.99
    assert all(torch.equal(tensor, before[tensor_name]) for tensor_name, tensor in full_weights(actor).items())


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("num_ranks, tp, cp, pp", LAYOUTS)
def test_layout_does_not_change_own_and_cross_gradients(by_layout, group_gradients, name, num_ranks, tp, cp, pp):
    answers = by_layout(num_ranks, tp, cp, pp)[name, "diagnosed"]
    for products, leaves_no_trace in answers:
        check_products(products, group_gradients[name])
        assert leaves_no_trace, "the update that follows has other bits than without"
    assert len({products for products, _ in answers}) == 1, "every rank was told the same"


def test_own_and_cross_gradients_of_the_cases_differ(group_gradients):
    """A guard on the data above: sources differ in their angles, and what tensor ranks hold twice shows in lengths."""
    for name, (own, *others) in group_gradients.items():
        cosines = [inner(own, other) / norm(own) / norm(other) for other in others]
        assert abs(cosines[0] - cosines[1]) > 20 * 4 * GRADIENT_ERROR, (name, cosines)
        for gradient in (own, *others):
            norms = norm({tensor_name: tensor for tensor_name, tensor in gradient.items() if tensor.ndim == 1})
            assert norms**2 > 10 * 2 * GRADIENT_ERROR * norm(gradient) ** 2, name


@pytest.mark.nightly
def test_a_cell_without_samples_took_part(by_layout):
    counts = [stats.num_samples for _, stats in by_layout(4, 1, 1, 1)["qwen3-tied"]]
    assert counts[3] == 0
    assert min(counts[:3]) > 0


@pytest.mark.parametrize("num_ranks, tp, cp, pp", LAYOUTS)
def test_all_ranks_of_a_cell_hold_the_same_report(by_layout, samples, num_ranks, tp, cp, pp):
    name = "llama-untied"
    answers = by_layout(num_ranks, tp, cp, pp)[name]
    for rank, (_, stats) in enumerate(answers):
        leader = answers[rank // (tp * cp * pp) * (tp * cp * pp)][1]
        assert len(stats.reports) == stats.num_microbatches == leader.num_microbatches
        for mine, its in zip(stats.reports, leader.reports, strict=True):
            np.testing.assert_array_equal(mine.ratio_B, its.ratio_B)
    cells = [stats for _, stats in answers][:: tp * cp * pp]
    trained = sum(sample.num_trained > 0 for sample in samples[name])
    assert sum(stats.num_samples for stats in cells) == trained
    counted = sum((~report.ratio_B.isnan()).sum() for stats in cells for report in stats.reports)
    assert counted == trained


def test_cross_entropy_is_the_mean_over_trained_tokens(alone, folders, oracles, samples):
    name = "qwen3-untied"
    loss = oracles[name].cross_entropy(samples[name])
    actor = make_actor(folders[name])
    num_trained = sum(sample.num_trained for sample in samples[name])
    found, stats = gradient_by_descent(actor, lambda: actor.learn_supervised(samples[name], num_trained))
    assert relative_error(found, oracles[name].gradient(loss)) < GRADIENT_ERROR
    assert stats.loss == pytest.approx(loss.item(), abs=LOGPROB_ERROR)


def test_the_cases_reach_every_branch_of_the_objective(oracles, samples):
    """A guard on the data above: clipped and unclipped own answers, cross answers below, inside and above the band."""
    for name, oracle in oracles.items():
        trained = [sample for sample in samples[name] if sample.num_trained > 0]
        ratios = np.exp(np.array(oracle.mean_logprobs(trained)) - [sample.source_logprob for sample in trained])
        own = np.array([sample.is_self for sample in trained])
        assert (np.abs(ratios[own] - 1) < 3e-4).any()
        assert (np.abs(ratios[own] - 1) > 3e-3).any()
        assert np.unique(np.digitize(ratios[~own], [0.75, 1.0])).tolist() == [0, 1, 2]
    assert WEIGHT != 1.0
