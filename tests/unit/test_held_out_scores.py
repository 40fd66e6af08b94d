"""A mean of rewards between 0 and 1 is no accuracy: its error is its own; an accuracy has Wilson's interval."""

import json
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from hacpo_mega.logbook.metrics import Metrics, MetricsWriter
from hacpo_mega.logbook.step_metrics import FirstRewards, add_accuracy
from hacpo_mega.records import Judgement, Prompt, Verdict
from hacpo_mega.report.run import Accuracy, accuracies, load_run


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


@pytest.mark.parametrize("rewards", [[0.9] * 20, [0.01] * 30 + [0.2], [0.99] * 30 + [0.8], [1.0] * 5, [0.0] * 5])
def test_the_interval_of_a_reward_between_0_and_1_lies_there_and_has_a_width(rewards):
    found = measured(rewards, may_be_graded=True)
    low, high = found.interval
    assert 0.0 <= low <= found.value <= high <= 1.0 and high - low > 0.02


def test_rewards_outside_0_and_1_keep_the_interval_of_their_mean():
    rewards = [-1.0, 3.0, 2.0, 0.0]
    half = 1.959963984540054 * np.std(rewards) / 2
    assert measured(rewards, may_be_graded=True).interval == pytest.approx((1.0 - half, 1.0 + half))


def test_two_evaluations_of_the_same_prompts_are_compared_prompt_by_prompt(tmp_path):
    """40 prompts, of which 6 become right, 1 wrong, 20 stay right: Agresti and Min's interval of paired proportions.

    By hand: 42 prompts with 6.5 and 1.5 that differ, gain 5 / 42, variance (8 / 42 - gain^2) / 42. One prompt more is
    unjudged later, and the first evaluation travels through a checkpoint.
    """
    rewards = [[0.0] * 6 + [1.0] * 21 + [0.0] * 13 + [1.0], [1.0] * 6 + [0.0] + [1.0] * 20 + [0.0] * 13 + [math.nan]]
    prompts = [Prompt(i, f"id-{i}", "p", "g", "add" if i < 10 else "sub") for i in range(41)]
    first = FirstRewards()
    with MetricsWriter(tmp_path) as writer:
        for step, of_step in zip((0, 8), rewards):
            verdicts = [Verdict.TIMEOUT if math.isnan(reward) else Verdict.WRONG for reward in of_step]
            judgements = [Judgement(*found) for found in zip(verdicts, of_step)]
            metrics = Metrics("a", lambda payload: [payload])
            add_accuracy(metrics, "a", prompts, judgements)
            first.compare(metrics, "a", prompts, judgements, step)
            writer.write(step, metrics.reduce())
            state, first = first.state_dict(), FirstRewards()
            first.load_state_dict(json.loads(json.dumps(state)))
    before, after = accuracies(load_run(tmp_path), "a")
    gain = 5 / 42
    half = 1.959963984540054 * math.sqrt((8 / 42 - gain**2) / 42)
    assert before.is_paired(after) and before.gain_interval(after) == pytest.approx((gain - half, gain + half))
    _, of_skill = accuracies(load_run(tmp_path), "a", "add")
    assert (of_skill.gain.num_pairs, of_skill.gain.mean, of_skill.gain.square) == (10, 0.5, 0.7)
    assert not after.is_paired(Accuracy(9, 0.5, 40)), "without pairs they are independent"
