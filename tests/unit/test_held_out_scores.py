"""A mean of rewards between 0 and 1 is no accuracy: its error is its own; an accuracy has Wilson's interval."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from hacpo_mega.logbook.metrics import Metrics
from hacpo_mega.logbook.step_metrics import add_accuracy
from hacpo_mega.records import Judgement, Prompt, Verdict
from hacpo_mega.report.run import Accuracy


def measured(rewards, *, may_be_graded: bool) -> Accuracy:
    """What a run logs of these rewards, as the report reads it; one rank alone."""
    metrics = Metrics("a", lambda payload: [payload])
    prompts = [Prompt(i, str(i), "p", "g") for i in range(len(rewards))]
    judgements = [Judgement(Verdict.WRONG, reward) for reward in rewards]
    add_accuracy(metrics, "a", prompts, judgements, may_be_graded=may_be_graded)
    values = metrics.reduce().values
    found = (values.get(f"agent/a/{name}") for name in ("accuracy", "num_evaluated", "accuracy_square"))
    return Accuracy(0, *found)


@pytest.mark.parametrize("num_right", [0, 1, 7, 20])
@pytest.mark.parametrize("may_be_graded", [False, True])
def test_rewards_of_0_and_1_are_an_accuracy_with_wilsons_interval(num_right, may_be_graded):
    found = measured([1.0] * num_right + [0.0] * (20 - num_right), may_be_graded=may_be_graded)
    wanted = binomtest(num_right, 20).proportion_ci(method="wilson")
    assert not found.is_graded and found.interval == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_rewards_between_have_the_standard_error_of_their_mean():
    rewards = [0.0, 0.25, 0.5, 0.5, 1.0, 1.0, 0.1]
    found = measured(rewards, may_be_graded=True)
    half = 1.959963984540054 * np.std(rewards) / math.sqrt(len(rewards))
    assert found.is_graded
    assert found.interval == pytest.approx((np.mean(rewards) - half, np.mean(rewards) + half), abs=1e-9)


def test_the_interval_of_a_gain_is_newcombes():
    """Table II of Newcombe (1998), line (a): 56/70 - 48/80 = .2, method 10 gives .0524 to .3339."""
    before, after = Accuracy(0, 48 / 80, 80), Accuracy(1, 56 / 70, 70)
    assert before.gain_interval(after) == pytest.approx((0.0524, 0.3339), abs=5e-5)
