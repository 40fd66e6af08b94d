"""Engine against trainer: the gap that is measured, the weights that correct it, what they do to loss and gradient."""

import math

import numpy as np
import pytest
import torch
from method_cases import sequence_objective

from hacpo_mega.algorithm import engine_weights, scale_gradient
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.step_metrics import add_engine_gap, add_engine_weights
from hacpo_mega.records import Pool, Prompt, Rollout, Score, Stop, Trajectory, Verdict

U32, U64 = 2.0**-24, 2.0**-53
CAP = 2.0


def log_probs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def differences(trainer_T: torch.Tensor, engine_T: torch.Tensor) -> list[float]:
    return [float(p) - float(q) for p, q in zip(trainer_T, engine_T)]


def test_weights_of_tokens_are_the_probability_ratio_cut_at_the_cap():
    # twice as likely for the trainer, half as likely, equal, beyond the cap, beyond what exp can say
    trainer = log_probs(-1.0, -1.0 - math.log(2), -0.3, -0.1, -0.5, -1e-7)
    engine = log_probs(-1.5, -1.0, -0.3, -1.1, -900.0, 0.0)
    answer, tokens = engine_weights(trainer, engine, "token", CAP)
    assert answer == 1.0
    assert tokens.dtype == torch.float32
    expected = [min(math.exp(min(d, 700.0)), CAP) for d in differences(trainer, engine)]
    assert expected[3:5] == [CAP, CAP] and expected[2] == 1.0
    assert tokens.tolist() == pytest.approx(expected, rel=2 * U32)
    assert tokens.tolist()[2:5] == [1.0, CAP, CAP]


@pytest.mark.parametrize(("step", "is_cut"), [(-1, False), (1, True)])
def test_the_cap_is_where_it_is_said_to_be(step, is_cut):
    """One fp32 number below log 2 and one above it."""
    border = np.nextafter(np.float32(math.log(CAP)), np.float32(step), dtype=np.float32)
    _, tokens = engine_weights(log_probs(0.0), log_probs(-float(border)), "token", CAP)
    answer, _ = engine_weights(log_probs(0.0), log_probs(-float(border)), "sequence", CAP)
    assert (tokens.item() == CAP) == (answer == CAP) == is_cut
    assert answer == pytest.approx(CAP, rel=4 * U32)


def test_the_weight_of_an_answer_is_the_product_over_its_tokens_cut_once():
    torch.manual_seed(3)
    for scale in (1e-3, 0.1, 3.0):
        engine = -torch.rand(50) * 5
        trainer = engine + torch.randn(50) * scale
        answer, tokens = engine_weights(trainer, engine, "sequence", CAP)
        expected = min(math.exp(math.fsum(differences(trainer, engine))), CAP)
        assert answer == pytest.approx(expected, rel=2 * U32)
        assert tokens is None
    # tokens beyond the cap do not cut a product within it
    assert engine_weights(log_probs(-1.0, -4.0), log_probs(-3.0, -2.0), "sequence", CAP) == (1.0, None)
    assert engine_weights(log_probs(), log_probs(), "sequence", CAP) == (1.0, None)


def test_without_a_correction_nothing_is_weighed():
    assert engine_weights(log_probs(-1.0), log_probs(-3.0), "none", CAP) == (1.0, None)


def test_scaled_gradients_belong_to_the_same_values():
    torch.manual_seed(4)
    values = (-torch.rand(1000) * 20).requires_grad_()
    weights, above = torch.rand(1000) * CAP, torch.randn(1000)
    scaled = scale_gradient(values, weights)
    assert torch.equal(scaled, values)
    (scaled * above).sum().backward()
    assert torch.equal(values.grad, weights * above)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.7, CAP])
def test_a_weight_on_the_advantage_is_the_weight_of_loss_and_gradient(weight):
    """For own answers on both sides of their clip and for others' below, inside and above the band: linear in |A|."""
    torch.manual_seed(5)
    config, zeros = AlgorithmConfig(alpha=1.5), torch.zeros(600, dtype=torch.float64)
    is_self = torch.arange(600) % 2 == 0
    seq_logprob = torch.randn(600, dtype=torch.float64) * torch.where(is_self, 4e-4, 0.15)
    advantage = torch.randn(600, dtype=torch.float64)
    loss, grad, stats = sequence_objective(seq_logprob, zeros, advantage, is_self, 1, config)
    regimes = (stats.clipped_self, stats.cross_below, stats.cross_inside, stats.cross_above)
    assert all(0.05 < total / count < 0.95 for total, count in (regime.tolist() for regime in regimes))
    weighted_loss, weighted_grad, _ = sequence_objective(seq_logprob, zeros, advantage * weight, is_self, 1, config)
    # the same few products in another order
    torch.testing.assert_close(weighted_loss, weight * loss, rtol=8 * U64, atol=0)
    torch.testing.assert_close(weighted_grad, weight * grad, rtol=8 * U64, atol=0)


def answers(*engine: list[float]) -> list[Rollout]:
    return [
        Rollout(0, g, np.arange(len(row), dtype=np.int32), "", Stop.EOS, np.array(row, dtype=np.float32))
        for g, row in enumerate(engine)
    ]


def scores(*trainer: list[float], **weights) -> list[Score]:
    return [Score(0.0, np.array(row, dtype=np.float32), **weights) for row in trainer]


def scored(rollouts: list[Rollout], scores: list[Score]) -> list[tuple[Rollout, Score]]:
    return list(zip(rollouts, scores, strict=True))


def reduced(add, *given) -> dict[str, float]:
    metrics = Metrics("a", lambda payload: [payload])
    add(metrics, "a", *given)
    return {name.removeprefix("agent/a/"): value for name, value in metrics.reduce().values.items()}


def test_the_gap_is_over_all_trained_tokens_together():
    """The second answer's EOS is not trained, the third trains nothing; a token counts alike wherever it stands."""
    engine, trainer = [[-1.0, -2.0, -0.5], [-0.25, -3.0], [-1.0]], [[-1.5, -1.75, -0.5], [-0.75], []]
    found = reduced(add_engine_gap, scored(answers(*engine), scores(*trainer)))
    d = [-0.5, 0.25, 0.0, -0.5]
    assert found.pop("engine_gap_mean") == sum(map(abs, d)) / 4
    assert found.pop("engine_gap_max") == 0.5
    assert found.pop("engine_kl") == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 4, rel=16 * U64)
    assert found == {}


def test_k3_estimates_the_divergence_of_the_trainer_from_the_engine():
    """Every token of a small vocabulary as often as the engine draws it: the mean is KL(engine || trainer) itself."""
    engine_V, trainer_V = np.array([0.5, 0.25, 0.125, 0.125]), np.array([0.25, 0.25, 0.4, 0.1])
    drawn = np.repeat(np.arange(4), [4, 2, 1, 1])
    found = reduced(
        add_engine_gap, scored(answers(np.log(engine_V)[drawn].tolist()), scores(np.log(trainer_V)[drawn].tolist()))
    )
    exact = float((engine_V * np.log(engine_V / trainer_V)).sum())
    assert found["engine_kl"] == pytest.approx(exact, rel=64 * U32)
    assert exact != pytest.approx(float((trainer_V * np.log(trainer_V / engine_V)).sum()), rel=0.01)


def test_the_smallest_differences_are_not_lost():
    found = reduced(add_engine_gap, scored(answers([-1.0]), scores([np.nextafter(np.float32(-1), np.float32(0))])))
    assert found["engine_gap_mean"] == U32
    assert found["engine_kl"] == pytest.approx(U32**2 / 2, rel=1e-6)


def test_a_step_without_a_trained_token_has_no_gap():
    assert reduced(add_engine_gap, scored(answers([-1.0]), scores([]))) == {}
    assert reduced(add_engine_gap, []) == {}
    assert [reduced(add_engine_weights, [], kind, CAP) for kind in ("token", "sequence")] == [{}, {}]


def test_weights_are_counted_where_they_are_used():
    by_token = [
        Score(0.0, np.zeros(n, np.float32), token_weights=np.array(row, np.float32))
        for n, row in ((3, [0.5, CAP, 1.0]), (1, [CAP]), (0, []))
    ]
    found = reduced(add_engine_weights, by_token, "token", CAP)
    assert found == {
        "engine_weight_mean": 5.5 / 4,
        "engine_weight_ess": pytest.approx(5.5**2 / (4 * 9.25), rel=4 * U64),
        "engine_weight_truncated": 2 / 4,
    }
    by_answer = [*scores([-1.0], engine_weight=1.0), *scores([-1.0, -1.0], engine_weight=0.25)]
    found = reduced(add_engine_weights, by_answer, "sequence", CAP)
    assert (found["engine_weight_mean"], found["engine_weight_truncated"]) == (0.625, 0.0)
    assert reduced(add_engine_weights, by_answer, "none", CAP) == {}


@pytest.mark.parametrize("cap", [1.1, 1.3, 3.3])
def test_a_weight_at_a_cap_that_fp32_rounds_counts_as_truncated(cap):
    far = (log_probs(-1.0), log_probs(-9.0))
    answer, _ = engine_weights(*far, "sequence", cap)
    _, tokens = engine_weights(*far, "token", cap)
    assert reduced(add_engine_weights, scores([-1.0], engine_weight=answer), "sequence", cap)[
        "engine_weight_truncated"
    ] == (1.0)
    weighed = scores([-1.0], token_weights=tokens.numpy())
    assert reduced(add_engine_weights, weighed, "token", cap)["engine_weight_truncated"] == 1.0


def test_a_pool_knows_the_weight_of_every_answer():
    def answer(n: int, g: int) -> Trajectory:
        (rollout,) = answers([-1.0])
        return Trajectory(n, rollout, Verdict.WRONG, 0.0, -1.0, 1, engine_weight=1 + n + g / 8)

    pool = Pool((Prompt(0, "a", "?", "!"),), (tuple(tuple(answer(n, g) for g in range(3)) for n in range(2)),))
    assert pool.engine_weights_PNG.dtype == torch.float64
    assert pool.engine_weights_PNG.tolist() == [[[1.0, 1.125, 1.25], [2.0, 2.125, 2.25]]]
