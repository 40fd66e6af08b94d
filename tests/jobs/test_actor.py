"""The actor: scores are Hugging Face's, the first ratio of a step is 1 to the last bit, updates are AdamW's."""

import dataclasses
import math
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from actor_cases import (
    DESCENT,
    GRADIENT_ERROR,
    LOGPROB_ERROR,
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
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tiny_models import make_model

from hacpo_mega.config import OptimizerConfig
from hacpo_mega.megatron.model import platform
from hacpo_mega.megatron.train.optimizer import learning_rate
from hacpo_mega.samples.packing import plan_updates

ADAM = OptimizerConfig(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_updates=2, schedule="linear")
# |g| of some elements is rounding noise; an eps above it keeps Adam from turning that noise into whole steps.
ADAM_FOR_COMPARISON = ADAM.model_copy(update={"eps": 1e-4, "clip_grad": 0.5})
NUM_PROMPTS = 6


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def samples(oracle):
    drawn = random_samples(NUM_PROMPTS, seed=21)
    return with_sources_near(drawn, oracle.mean_logprobs(drawn), seed=22)


@pytest.fixture(scope="module")
def on_four_ranks(folder, samples):
    """Observations of four ranks, layout after layout: processes are slow to start, so they start once."""
    return run_group(4, visit_layouts, folder, samples)


def visit_layouts(folder, samples):
    """(own ratios at tp 2 pp 2, updates of two cells by layout, an update that four cells skip)"""
    with no_message_waits_for_the_device():
        ratios = own_ratios_of_first_updates(folder, tp=2, pp=2)
        updates = {
            layout: three_supervised_updates(folder, *layout, supervised_batches()) for layout in [(1, 2), (2, 1)]
        }
    return ratios, updates, skip_an_update(folder, samples)


@contextmanager
def no_message_waits_for_the_device():
    """Fails where Megatron exchanges the lengths of messages or synchronises the device, on which an engine may run."""

    def refused(*_given):
        raise AssertionError("a message between stages waits for the whole device")

    replaced = [*platform._replacements(), (torch.cuda, "synchronize", refused)]
    with (
        mock.patch.object(P2PCommunicator, "_communicate_shapes", refused),
        mock.patch.object(platform, "_replacements", return_value=replaced),
    ):
        yield


def num_trained(samples) -> int:
    return sum(sample.num_trained for sample in samples)


def supervised_batches() -> list:
    return [random_samples(2, seed=40 + update) for update in range(3)]


# ---- scoring


def test_token_logprobs_and_scores_are_hugging_faces(folder, oracle, samples):
    actor = make_actor(folder)
    found = actor.token_logprobs(samples)
    for sample, logprobs, score in zip(samples, found, actor.score(samples), strict=True):
        expected = oracle.token_logprobs(sample).detach().numpy()
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=LOGPROB_ERROR)
        np.testing.assert_array_equal(score.token_logprobs, logprobs)
        assert score.mean_logprob == pytest.approx(expected.mean() if len(expected) else 0.0, abs=LOGPROB_ERROR)
        # the mean is of these very numbers: a sum in float64, rounded to float32 once
        mean = math.fsum(logprobs.tolist()) / max(len(logprobs), 1)
        assert score.mean_logprob == pytest.approx(mean, rel=2 * 2.0**-24)
    assert any(sample.num_trained == 0 for sample in samples)


def own_ratios_of_first_updates(folder, tp: int, pp: int) -> list[list[float]]:
    """Three steps of two updates each; the own ratios seen by every update, source log-probs being the actor's scores.

    Cross samples share the updates, so that the micro-batches of scoring and of learning are not trivially the same.
    """
    actor = make_actor(folder, tp=tp, pp=pp, optimizer=ADAM)
    seen = []
    for step in range(3):
        drawn = random_samples(NUM_PROMPTS, seed=30 + step)
        scored = []
        for own in plan_updates([s for s in drawn if s.is_self], range(NUM_PROMPTS), NUM_PROMPTS // 2):
            scores = actor.score(own)
            scored += [dataclasses.replace(s, source_logprob=x.mean_logprob) for s, x in zip(own, scores, strict=True)]
        cross = [dataclasses.replace(s, source_logprob=-5.0) for s in drawn if not s.is_self]
        for update in plan_updates(scored + cross, range(NUM_PROMPTS), NUM_PROMPTS // 2):
            stats = actor.learn(update, objective)
            assert stats.num_microbatches > 2
            # Packing keeps own samples apart, so a micro-batch with own answers has no cross ratio among ratio_B.
            own = [report.ratio_B for report in stats.reports if report.is_self_B.any()]
            seen.append(torch.cat(own).tolist())
    return seen


def check_first_ratios(seen: list[list[float]]) -> None:
    for step in range(3):
        first, second = seen[2 * step], seen[2 * step + 1]
        assert first == [1.0] * len(first)
        assert max(abs(ratio - 1) for ratio in second) > 1e-4, "the policy did not move, so the test shows nothing"


def test_own_ratio_of_a_steps_first_update_is_exactly_one(folder):
    check_first_ratios(own_ratios_of_first_updates(folder, tp=1, pp=1))


@pytest.mark.nightly
def test_own_ratio_is_exactly_one_at_tp2_pp2(on_four_ranks):
    for seen, _, _ in on_four_ranks:
        check_first_ratios(seen)


# ---- optimizer


def test_learning_rates_by_hand():
    def rates(schedule, warmup, floor):
        config = OptimizerConfig(lr=0.5, schedule=schedule, warmup_updates=warmup, min_lr_ratio=floor)
        return [16 * learning_rate(config, update, total_updates=6) for update in range(8)]  # as if lr were 8

    assert rates("constant", 0, 0.0) == [8.0] * 8
    assert rates("constant", 4, 0.0) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates("linear", 2, 0.0) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    assert rates("linear", 2, 0.5) == [4.0, 8.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    # half of 1 + cos(pi x), x = 0, 1/4, 1/2, 3/4, 1
    cosine = [8.0, 4.0 + 4.0 * math.sqrt(0.5), 4.0, 4.0 - 4.0 * math.sqrt(0.5), 0.0]
    assert rates("cosine", 2, 0.0) == pytest.approx([4.0, 8.0, *cosine, 0.0], abs=1e-12)
    assert rates("linear", 6, 0.0)[5:] == [8.0, 8.0, 0.0], "warm-up over the whole run"


def test_gradients_are_clipped_by_the_norm_of_the_whole_model(folder, oracle, samples):
    gradient = oracle.gradient(oracle.policy_loss(samples))
    bound = norm(gradient) / 8
    actor = make_actor(folder, optimizer=DESCENT.model_copy(update={"clip_grad": bound}))
    found, stats = gradient_by_descent(actor, lambda: actor.learn(samples, objective))
    assert stats.grad_norm == pytest.approx(8 * bound, rel=GRADIENT_ERROR)
    assert relative_error(found, {name: tensor / 8 for name, tensor in gradient.items()}) < 2 * GRADIENT_ERROR


def three_supervised_updates(folder, tp: int, pp: int, batches):
    """(weights, log-probs of the last batch, rates) after three updates, the samples of each dealt to the cells."""
    actor = make_actor(folder, tp=tp, pp=pp, optimizer=ADAM_FOR_COMPARISON)
    cell, num_cells = dist.get_rank() // (tp * pp), dist.get_world_size() // (tp * pp)
    stats = [actor.learn_supervised(batch[cell::num_cells], num_trained(batch)) for batch in batches]
    return full_weights(actor), actor.token_logprobs(batches[-1]), [s.lr for s in stats]


@pytest.fixture(scope="module")
def by_adamw(folder):
    """The same three updates by torch.optim.AdamW on Hugging Face's model in float64: (weights before, the model)."""
    oracle = Oracle(folder)
    matrices = [p for p in oracle.model.parameters() if p.ndim > 1]
    vectors = [p for p in oracle.model.parameters() if p.ndim == 1]
    decay = ADAM_FOR_COMPARISON.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=ADAM_FOR_COMPARISON.betas, eps=ADAM_FOR_COMPARISON.eps)
    before = {name: p.detach().clone() for name, p in oracle.model.named_parameters()}
    for batch, lr in zip(
        supervised_batches(), [0.5e-3, 1e-3, 1e-3], strict=True
    ):  # warm-up of 2, then the first of 8 linear ones
        for group in adam.param_groups:
            group["lr"] = lr
        oracle.gradient(oracle.cross_entropy(batch))
        total = torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), ADAM_FOR_COMPARISON.clip_grad)
        assert total > ADAM_FOR_COMPARISON.clip_grad
        adam.step()
    return before, oracle


def check_updates(found, by_adamw) -> None:
    (weights, logprobs, rates), (before, oracle) = found, by_adamw
    assert rates == [0.5e-3, 1e-3, 1e-3]
    expected = {name: parameter.detach() for name, parameter in oracle.model.named_parameters()}
    for name, tensor in expected.items():
        assert (tensor - before[name]).abs().max() > 1e-3, f"{name} hardly moved"
    # The error of a gradient, clipped to clip_grad, through lr * g / (|g| + eps), whose slope is at most lr / eps.
    gradient_error = GRADIENT_ERROR * ADAM_FOR_COMPARISON.clip_grad
    assert norm({name: tensor - weights[name] for name, tensor in expected.items()}) < (
        sum(rates) * gradient_error / ADAM_FOR_COMPARISON.eps
    )
    # The weights above come from the first stage that has them; a tied head on the last stage must have followed.
    for sample, mine in zip(supervised_batches()[-1], logprobs, strict=True):
        np.testing.assert_allclose(mine, oracle.token_logprobs(sample).detach().numpy(), rtol=0, atol=1e-4)


def test_weights_after_three_updates_are_adamws(folder, by_adamw):
    check_updates(three_supervised_updates(folder, 1, 1, supervised_batches()), by_adamw)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
def test_weights_of_two_cells_after_three_updates_are_adamws(on_four_ranks, by_adamw, layout):
    for _, updates, _ in on_four_ranks:
        check_updates(updates[layout], by_adamw)


def test_two_runs_are_equal_to_the_last_bit(folder, samples):
    def run():
        actor = make_actor(folder, optimizer=ADAM)
        return [actor.learn(samples, objective).grad_norm for _ in range(3)], full_weights(actor)

    (norms, weights), (norms_again, weights_again) = run(), run()
    assert norms == norms_again
    for name, tensor in weights.items():
        assert torch.equal(tensor, weights_again[name]), name


@pytest.mark.nightly
def test_diagnosing_every_update_changes_no_bit_of_any(folder, samples):
    """Weights, moments of Adam and the ratios that updates see, beside an actor that was never diagnosed."""

    def run(diagnoses: bool):
        actor, seen = make_actor(folder, optimizer=ADAM), []
        random_state = torch.get_rng_state()
        for update in plan_updates(samples, range(NUM_PROMPTS), NUM_PROMPTS // 3):
            if diagnoses:
                groups = [[s for s in update if s.source == source] for source in range(3)]
                assert sum(actor.gradient_products(groups, objective).squares) > 0.0
            stats = actor.learn(update, objective)
            seen += [stats.grad_norm, stats.loss, *(report.ratio_B.tolist() for report in stats.reports)]
        assert torch.equal(torch.get_rng_state(), random_state)
        return seen, full_weights(actor)

    (seen, weights), (seen_diagnosed, weights_diagnosed) = run(False), run(True)
    assert seen == seen_diagnosed
    for name, tensor in weights.items():
        assert torch.equal(tensor, weights_diagnosed[name]), name


# ---- updates without samples, updates without sense


def test_an_empty_update_changes_nothing_and_counts(folder, samples):
    actor = make_actor(folder, optimizer=ADAM)
    before = full_weights(actor)
    untrained = [dataclasses.replace(samples[0], num_trained=0)]
    stats = actor.learn([*untrained], objective)
    assert (stats.loss, stats.grad_norm, stats.num_samples, stats.skipped) == (0.0, 0.0, 0, False)
    assert stats.lr == 0.5e-3
    assert actor.learn([], objective).lr == 1e-3
    # An update is a plan that was carried out: weights decay although nothing was learnt, here at both rates.
    kept = (1 - 0.5e-3 * ADAM.weight_decay) * (1 - 1e-3 * ADAM.weight_decay)
    for name, tensor in full_weights(actor).items():
        expected = before[name] * (kept if tensor.ndim > 1 else 1.0)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


def skip_an_update(folder, samples):
    """A cell per rank; in the second of three updates cell 1 alone has a loss that is not a number."""
    actor = make_actor(folder, optimizer=ADAM)
    cell, num_cells = dist.get_rank(), dist.get_world_size()
    weights, skipped = [full_weights(actor)], []
    for update in range(3):
        poison = math.nan if (update, cell) == (1, 1) else 1.0
        stats = actor.learn(samples[cell::num_cells], lambda r, b, factor=poison: (objective(r, b)[0] * factor, None))
        weights.append(full_weights(actor))
        skipped.append(stats.skipped)
    return skipped, weights


@pytest.mark.nightly
def test_a_gradient_that_is_not_finite_in_one_cell_skips_the_update_in_all(on_four_ranks):
    for _, _, (skipped, (start, first, second, third)) in on_four_ranks:
        assert skipped == [False, True, False]
        for name in start:
            assert torch.equal(first[name], second[name]), name
            assert not torch.equal(start[name], first[name]), name
            assert not torch.equal(second[name], third[name]), name
            assert third[name].isfinite().all()


def test_a_loss_that_is_not_finite_skips_the_update_though_its_gradient_is(folder, samples):
    actor = make_actor(folder, optimizer=ADAM)
    before = full_weights(actor)

    def broken(logprob_R, batch):
        loss, report = objective(logprob_R, batch)
        return loss + math.inf, report

    stats = actor.learn(samples, broken)
    assert stats.skipped and stats.loss == math.inf and 0.0 < stats.grad_norm < math.inf
    after = full_weights(actor)
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---- reference policy and weights


def test_the_reference_is_the_policy_that_was_kept_and_leaves_no_trace(folder, samples):
    actor = make_actor(folder, optimizer=ADAM)
    at_start = np.concatenate(actor.token_logprobs(samples))
    actor.keep_reference()
    for _ in range(2):
        actor.learn(samples, objective)
    now, weights = np.concatenate(actor.token_logprobs(samples)), full_weights(actor)
    assert np.abs(now - at_start).max() > 1e-3
    np.testing.assert_array_equal(np.concatenate(actor.reference_token_logprobs(samples)), at_start)
    np.testing.assert_array_equal(np.concatenate(actor.token_logprobs(samples)), now)
    for name, tensor in full_weights(actor).items():
        assert torch.equal(tensor, weights[name]), name
    before_crash = full_weights(actor)
    with pytest.raises(ValueError, match="more than"):
        actor.reference_token_logprobs([dataclasses.replace(samples[0], prompt_ids=np.ones(200, dtype=np.int32))])
    for name, tensor in full_weights(actor).items():
        assert torch.equal(tensor, before_crash[name]), f"{name}: the present policy is lost when a forward fails"


def test_a_saved_folder_is_the_policy_that_learnt(folder, samples, tmp_path):
    actor = make_actor(folder, optimizer=ADAM)
    for _ in range(3):
        actor.learn(samples, objective)
    actor.save_hf(tmp_path / "out")
    saved = Oracle(tmp_path / "out")
    for sample, logprobs in zip(samples, actor.token_logprobs(samples), strict=True):
        np.testing.assert_allclose(logprobs, saved.token_logprobs(sample).detach().numpy(), rtol=0, atol=LOGPROB_ERROR)
