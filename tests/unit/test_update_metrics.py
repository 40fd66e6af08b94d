"""What an update adds to the metrics: own answers together, others' answers by their source, counted by hand."""

import math

import pytest
import torch
from hacpo_kernels import objective_from_mean

from hacpo_mega.algorithm import objective_bounds
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.metrics import Metrics
from hacpo_mega.logbook.step_metrics import add_update
from hacpo_mega.policy_loss import BatchReport, ratios_by_key
from hacpo_mega.records import UpdateStats

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
    numbers = dict.fromkeys(("loss", "grad_norm", "lr", "num_samples", "num_tokens", "num_trained"), 1)
    return UpdateStats(reports=(report,), skipped=False, num_microbatches=1, **numbers)


def metrics_of(update: UpdateStats, update_index: int = 2) -> dict[str, float]:
    metrics = Metrics("b", lambda payload: [payload])
    add_update(metrics, update, update_index, LEARNER, NAMES, CONFIG)
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
        "from/c/ratio_mean": 0.99,
        "from/c/inside": 1.0,
        "from/c/weight_ess": 1.0,
    }
    for name, value in expected.items():
        assert found[f"agent/b/{name}"] == pytest.approx(value, rel=2**-48), name
    assert not any(name.startswith("agent/b/from/b") for name in found)
    assert "agent/b/self/first_ratio_error" not in found, "only a first update says something about scoring"


def test_a_first_update_shows_how_far_own_ratios_are_from_one():
    assert metrics_of(update_of(SAMPLES), update_index=0)["agent/b/self/first_ratio_error"] == pytest.approx(0.01)


def test_a_source_without_a_usable_answer_is_absent():
    found = metrics_of(update_of([(1, 1.0, 1.0), (2, math.nan, 1.0)]))
    assert not any(name.startswith("agent/b/from/") for name in found)
    assert found["agent/b/num_nonfinite"] == 1


def test_ratios_are_found_by_their_sample():
    found = ratios_by_key(update_of(SAMPLES[:3]))
    assert found == pytest.approx({(0, 1, 0): 1.0001, (1, 1, 0): 1.01, (2, 0, 0): 0.5}, rel=2**-48)
