"""Metrics of an update: own answers together, others' answers by their source, counted by hand."""

import math

import numpy as np
import pytest
import torch
from hacpo_kernels import objective_from_mean

from hacpo_mega.agent.policy_loss import BatchReport, ratios_by_key
from hacpo_mega.algorithm import GradientProducts, objective_bounds
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.sharing import fates_of
from hacpo_mega.logbook.steps.step_metrics import add_answers, add_diagnosis, add_reencodings, add_update
from hacpo_mega.records import (
    Conversation,
    DroppedAnswer,
    ReencodingCounts,
    Rollout,
    Stop,
    Trajectory,
    Turn,
    UpdateStats,
    Verdict,
)

NAMES = ("a", "b", "c")
LEARNER = 1
# (source, ratio, advantage): b learns from itself, from a and from c; the band at update 2 is [0.85, 1].
SAMPLES = [
    (1, 1.0001, 1.0),
    (1, 1.01, 2.0),  # clipped
    (0, 0.5, 1.0),  # below the band
    (0, 0.9, -1.0),  # inside
    (0, 0.95, 0.0),  # inside, and there is nothing to learn from it
    (0, 1.2, 1.0),  # above
    (2, 0.99, 3.0),
    (2, math.nan, 1.0),  # a broken log-prob
]
CONFIG = AlgorithmConfig(delta=0.2, delta_step=0.025, alpha=1.0)


def update_of(samples) -> UpdateStats:
    source, ratio, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*samples))
    _, _, terms = objective_from_mean(
        ratio.log(), torch.zeros_like(ratio), advantage, source == LEARNER, update_index=2,
        bounds=objective_bounds(CONFIG),
    )  # fmt: skip
    key_B3 = torch.stack([torch.arange(len(samples)), source.long(), torch.zeros(len(samples)).long()], dim=1)
    report = BatchReport(key_B3, terms, torch.zeros(2))
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "num_tokens", "num_trained"), 1)
    return UpdateStats(reports=(report,), skipped=False, num_microbatches=1, num_samples=len(samples), **numbers)


def metrics_of(update: UpdateStats, update_index: int = 2, **how: bool) -> dict[str, float]:
    metrics = Metrics("b", lambda payload: [payload])
    add_update(metrics, update, update_index, LEARNER, NAMES, CONFIG, **how)
    return metrics.reduce().values


def test_own_answers_and_every_source_are_counted_apart():
    found = metrics_of(update_of(SAMPLES))
    weights = [0.0, 0.9**2, 0.95**2, 0.0]
    own_sq, cross_sq = 1.0001**2, (0.9**2) ** 2 + (0.99**2 * 3) ** 2
    expected = {
        "self/ratio_mean": (1.0001 + 1.01) / 2,
        "self/clipped": 1 / 2,
        "num_nonfinite": 1,
        "cross_coefficient_share": cross_sq / (own_sq + cross_sq),
        "from/a/ratio_mean": (0.5 + 0.9 + 0.95 + 1.2) / 4,
        "from/a/ratio_min": 0.5,
        "from/a/ratio_max": 1.2,
        "from/a/below": 1 / 4,
        "from/a/inside": 2 / 4,
        "from/a/above": 1 / 4,
        "from/a/weight_mean": sum(weights) / 4,
        "from/a/weight_ess": sum(weights) ** 2 / (4 * sum(w * w for w in weights)),
        "from/a/weight_max": 0.95**2,
        "from/a/positive_share": 0.0,  # what is inside makes an answer less likely, or nothing
        "from/c/positive_share": 1.0,
        "self/positive_share": 1.0,
        "num_trained_answers": 8,
        "num_updates": 3,
        "from/c/weight_max": 0.99**2,
        "from/c/ratio_mean": 0.99,
        "from/c/inside": 1.0,
        "from/c/weight_ess": 1.0,
    }
    for name, value in expected.items():
        assert found[f"agent/b/{name}"] == pytest.approx(value, rel=2**-48), name
    assert not any(name.startswith("agent/b/from/b") for name in found)
    assert "agent/b/self/first_ratio_error" not in found, "only a first update says something about scoring"


def test_a_first_update_shows_how_far_own_ratios_are_from_one():
    found = metrics_of(update_of(SAMPLES), update_index=0)
    assert found["agent/b/self/first_ratio_error"] == pytest.approx(0.01)
    assert "agent/b/self/first_outside" not in found, "0 by construction"


def test_engine_scores_show_the_share_outside_the_clip():
    """The share is that of own answers with a ratio, whatever the sign of the advantage."""
    samples = [(1, 1.0001, 1.0), (1, 1.01, 2.0), (1, 1.0003, -1.0), (1, 0.99, 1.0), (0, 0.5, 1.0), (1, math.nan, 1.0)]
    found = metrics_of(update_of(samples), update_index=0, engine_scores=True)
    assert found["agent/b/self/first_outside"] == 0.5
    assert "agent/b/self/first_ratio_error" not in found
    assert not any("first" in key for key in metrics_of(update_of(samples), engine_scores=True))


def test_a_source_without_a_usable_answer_is_absent():
    found = metrics_of(update_of([(1, 1.0, 1.0), (2, math.nan, 1.0)]))
    assert not any(name.startswith("agent/b/from/") for name in found)
    assert found["agent/b/num_nonfinite"] == 1


def test_ratios_are_found_by_their_sample():
    found = ratios_by_key(update_of(SAMPLES[:3]))
    assert found == pytest.approx({(0, 1, 0): 1.0001, (1, 1, 0): 1.01, (2, 0, 0): 0.5}, rel=2**-48)


def test_signs_are_split_over_all_updates_of_a_step():
    """Own answers pull 1 up and 3 down, then 2 up; source a pulls .81 down and .98^2 2 up; c nothing at all."""
    metrics = Metrics("b", lambda payload: [payload])
    first = [(1, 1.0, 1.0), (1, 1.0, -3.0), (0, 0.9, -1.0), (0, 0.98, 2.0), (2, 0.9, 0.0), (2, 0.1, 5.0)]
    for m, samples in enumerate((first, [(1, 1.0, 2.0)])):
        add_update(metrics, update_of(samples), m, LEARNER, NAMES, CONFIG)
    found = metrics.reduce().values
    assert found["agent/b/self/positive_share"] == pytest.approx(3 / 6, rel=2**-48)
    up = 0.98**2 * 2
    assert found["agent/b/from/a/positive_share"] == pytest.approx(up / (0.81 + up), rel=2**-48)
    assert "agent/b/from/c/positive_share" not in found
    assert (found["agent/b/num_updates"], found["agent/b/num_trained_answers"]) == (2, 7)


def test_a_turn_that_was_never_said_is_no_turn():
    """The log keeps its place, so that every conversation begins with a turn of its agent."""
    metrics = Metrics("b", lambda payload: [payload])
    for turns in ([Turn("assistant", "", 0, Stop.ABORT)], [Turn("assistant", "1", 2, Stop.EOS)]):
        ids = np.zeros(sum(turn.num_tokens for turn in turns), np.int32)
        rollout = Rollout(4, 0, ids, "", turns[0].stop, None, None, Conversation(tuple(turns)))
        add_answers(metrics, "b", [Trajectory(1, rollout, Verdict.ERROR, math.nan, math.nan, 0)])
    found = metrics.reduce().values
    assert [found[f"agent/b/conversation/turns_{what}"] for what in ("mean", "max")] == [0.5, 1]


def test_drift_of_reencoding_is_shown_per_source():
    """Source a: 8 answers read back, 2 of them changed and left out, 1 too long, 5 trained on; c has b's tokenizer."""
    metrics = Metrics("b", lambda payload: [payload])
    reencodings = (
        ReencodingCounts(num_cross=5, num_compared=8, num_changed=2, num_too_long=1, num_reencoded=5,
                         token_ratio_sum=6.0, dropped=(*[DroppedAnswer(0, g, "changed") for g in range(2)],
                                                      DroppedAnswer(0, 2, "too_long"))),
        ReencodingCounts(num_own=8, num_empty=1, dropped=(DroppedAnswer(0, 0, "zero_advantage"),)),
        ReencodingCounts(num_cross=7, num_undecodable=1),
    )  # fmt: skip
    add_reencodings(metrics, LEARNER, NAMES, reencodings)
    found = metrics.reduce().values
    pairs = {name: value for name, value in found.items() if "/from/" in name and value}
    assert pairs == {
        "agent/b/from/a/token_ratio": 6 / 5, "agent/b/from/a/changed": 2 / 8, "agent/b/from/a/view/num_answers": 8,
        "agent/b/from/a/view/num_trained": 5, "agent/b/from/a/view/num_changed": 2,
        "agent/b/from/a/view/num_too_long": 1,
        "agent/b/from/c/view/num_answers": 7, "agent/b/from/c/view/num_trained": 7,
    }  # fmt: skip
    assert str(fates_of(found | {"agent/b/from/a/inside": 0.4}, "b", "a")) == (
        "3 outside the band, 2 changed by re-encoding, 1 too long"
    )
    totals = {
        "num_own": 8, "num_cross": 12, "num_zero_advantage": 0, "num_unjudged": 0, "num_too_long": 1,
        "num_unencodable": 0, "num_control_tokens": 0, "num_empty": 1, "num_truncated": 0, "num_undecodable": 1,
        "num_compared": 8, "num_reencoded": 5, "num_changed": 2, "num_not_finite": 0, "num_no_thinking": 0,
        "token_ratio_mean": 6 / 5,
    }  # fmt: skip
    assert {name: value for name, value in found.items() if "agent/b/view/" in name} == {
        f"agent/b/view/{name}": value for name, value in totals.items()
    }


def diagnosed(*found: GradientProducts) -> dict[str, float]:
    metrics = Metrics("b", lambda payload: [payload])
    for products in found:
        add_diagnosis(metrics, products, LEARNER, NAMES)
    return {name.removeprefix("agent/b/"): value for name, value in metrics.reduce().values.items()}


def test_gradients_are_shares_of_length_and_angles():
    """Own (3, 0), source a (0, 2) and then (4, 0), source c (-5, 0) and then nothing."""
    found = diagnosed(GradientProducts((9, 4, 25), (9, 0, -15)), GradientProducts((9, 16, 0), (9, 12, 0)))
    assert found == {
        "self/grad_norm": 3,
        "from/a/grad_norm": 3,
        "from/a/grad_share": pytest.approx((2 / 10 + 4 / 7) / 2),
        "from/a/grad_cosine": 0.5,
        "from/c/grad_norm": 2.5,
        "from/c/grad_share": pytest.approx((5 / 10 + 0) / 2),
        "from/c/grad_cosine": -1,
    }


def test_without_a_gradient_there_is_no_share_and_no_angle():
    found = diagnosed(GradientProducts((0, 0, 0), (0, 0, 0)))
    assert found == {"self/grad_norm": 0, "from/a/grad_norm": 0, "from/c/grad_norm": 0}


def test_a_broken_gradient_is_shown_as_such():
    found = diagnosed(GradientProducts((4, math.nan, 1), (4, math.nan, 2)))
    assert math.isnan(found["from/a/grad_cosine"]) and math.isnan(found["from/c/grad_share"])
    assert found["from/c/grad_cosine"] == 1


def test_answers_are_counted_by_hand():
    kinds = [
        (3, 1.0, Verdict.CORRECT, Stop.EOS),
        (7, 0.0, Verdict.WRONG, Stop.LENGTH),
        (5, math.nan, Verdict.ERROR, Stop.EOS),
    ]
    answers = [
        Trajectory(0, Rollout(0, g, np.arange(length, dtype=np.int32), "", stop), verdict, reward, -0.5, length)
        for g, (length, reward, verdict, stop) in enumerate(kinds)
    ]
    metrics = Metrics("a", lambda payload: [payload])
    add_answers(metrics, "a", answers)
    found = {name.removeprefix("agent/a/"): value for name, value in metrics.reduce().values.items()}
    assert (found["num_answers"], found["num_unjudged"]) == (3, 1)
    assert (found["reward_mean"], found["truncated"]) == (0.5, pytest.approx(1 / 3))
    assert (found["answer_tokens_mean"], found["answer_tokens_max"]) == (5.0, 7.0)
