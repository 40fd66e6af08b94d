"""A mean of rewards between 0 and 1 is no accuracy: its error is its own; an accuracy has Wilson's interval."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import Config
from hacpo_mega.logbook.files.metrics import Metrics, MetricsWriter
from hacpo_mega.logbook.step_report import StepReport
from hacpo_mega.logbook.steps.held_out import are_accuracies, held_out, held_out_skills, mean_held_out
from hacpo_mega.logbook.steps.step_metrics import FirstRewards, add_held_out
from hacpo_mega.records import Judgement, Prompt, Verdict
from hacpo_mega.report.run import Accuracy, accuracies, load_run


def measured(rewards, *, may_be_graded: bool) -> Accuracy:
    """The log of these rewards, as the report reads it; one rank alone."""
    metrics = Metrics("a", lambda payload: [payload])
    prompts = [Prompt(i, str(i), "p", "g") for i in range(len(rewards))]
    judgements = [Judgement(Verdict.WRONG, reward) for reward in rewards]
    add_held_out(metrics, "a", prompts, judgements, may_be_graded=may_be_graded)
    return Accuracy(0, *held_out(metrics.reduce().values, "a"))


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


def test_an_interval_stays_between_0_and_1():
    """Three of four answers earn all and one a half: .875 and 1.96 * .2165 / 2 = .2122 to both sides."""
    for rewards, wanted in (([1.0, 1.0, 1.0, 0.5], (0.6628, 1.0)), ([0.0, 0.0, 0.0, 0.5], (0.0, 0.3372))):
        assert measured(rewards, may_be_graded=True).interval == pytest.approx(wanted, abs=5e-5)
    for right in (0, 50):
        low, high = Accuracy(0, right / 50, 50).interval
        assert 0.0 <= low < high <= 1.0


def test_equal_parts_of_a_reward_say_no_error():
    found, later = measured([0.9] * 40, may_be_graded=True), measured([0.9, 0.7, 0.8], may_be_graded=True)
    assert found.is_graded and found.all_equal and not later.all_equal
    assert found.gain_interval(later) is None is later.gain_interval(found)
    assert not measured([1.0] * 40, may_be_graded=True).all_equal  # an accuracy, with Wilson's interval


def test_a_graded_reward_is_called_so_wherever_it_is_named():
    metrics = Metrics("a", lambda payload: [payload])
    prompts = [Prompt(i, str(i), "p", "g", skill) for i, skill in enumerate(("add", "sub"))]
    judgements = [Judgement(Verdict.CORRECT, 0.75), Judgement(Verdict.WRONG, 0.25)]
    add_held_out(metrics, "a", prompts, judgements, may_be_graded=True)
    values = metrics.reduce().values
    assert not [name for name in values if "accuracy" in name]
    assert values["agent/a/eval/reward_mean"] == 0.5 and values["agent/a/eval/reward_square"] == 0.3125
    assert values["agent/a/eval/reward_mean/add"] == 0.75 and held_out_skills(values, "a") == ["add", "sub"]
    assert held_out(values, "a", "sub") == (0.25, 1, 0.0625) and mean_held_out(values, ["a"]) == 0.5


def test_an_older_run_is_read_by_the_names_that_it_has():
    values = {"agent/a/accuracy": 0.5, "agent/a/accuracy_square": 0.3, "agent/a/num_evaluated": 8.0}
    assert held_out(values, "a") == (0.5, 8, 0.3) and not are_accuracies([held_out(values, "a")])


def test_the_interval_of_a_gain_is_newcombes():
    """Table II of Newcombe (1998), line (a): 56/70 - 48/80 = .2, method 10 gives .0524 to .3339."""
    before, after = Accuracy(0, 48 / 80, 80), Accuracy(1, 56 / 70, 70)
    assert before.gain_interval(after) == pytest.approx((0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize("rewards", [[0.9] * 20, [0.01] * 30 + [0.2], [0.99] * 30 + [0.8], [1.0] * 5, [0.0] * 5])
def test_the_interval_of_a_reward_lies_within_0_and_1_and_has_a_width(rewards):
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
            add_held_out(metrics, "a", prompts, judgements, may_be_graded=False)
            first.compare(metrics, "a", prompts, judgements, step)
            writer.write(step, metrics.reduce())
            state, first = first.state_dict(), FirstRewards()
            first.load_state_dicts([json.loads(json.dumps(state))], slice(0, None, 1))
    before, after = accuracies(load_run(tmp_path), "a")
    gain = 5 / 42
    half = 1.959963984540054 * math.sqrt((8 / 42 - gain**2) / 42)
    assert before.is_paired(after) and before.gain_interval(after) == pytest.approx((gain - half, gain + half))
    _, of_skill = accuracies(load_run(tmp_path), "a", "add")
    assert (of_skill.gain.num_pairs, of_skill.gain.mean, of_skill.gain.square) == (10, 0.5, 0.7)
    assert not after.is_paired(Accuracy(9, 0.5, 40)), "without pairs they are independent"


@pytest.mark.parametrize("numbers", [(2, 1, 3), (3, 2, 1), (1, 4, 2)])
def test_prompts_stay_paired_when_other_cells_share_them(numbers):
    """Two resumes with other numbers of cells: each still pairs all of its prompts, and no reward is kept twice."""
    prompts = [Prompt(i, f"id-{i}", "p", "g") for i in range(12)]
    config = Config.model_validate(
        {"run_dir": "r", "num_steps": 4, "data": {"generator": "arithmetic"}, "agents": [{"name": "a", "model": "x/a"}]}
    )
    states: list[dict] = []
    for step, num_cells in enumerate(numbers):
        found, metrics = [], Metrics("a", lambda payload: [payload])
        for cell in range(num_cells):
            place = SimpleNamespace(
                rank_map=RankMap(1, (AgentShape("a", cells_per_lane=num_cells),)),
                coordinate=SimpleNamespace(agent=0, cell=cell),
                device=torch.device("cpu"),
            )
            report = StepReport(metrics, None, place, config, None, None)
            if states:
                report.load_state_dicts(json.loads(json.dumps(states)))
            mine = prompts[cell::num_cells]
            judgements = [Judgement(Verdict.CORRECT, prompt.index / 12 + step) for prompt in mine]
            report.first_rewards.compare(metrics, "a", mine, judgements, step)
            found.append(report.state_dict())
        states, values = found, metrics.reduce().values
        assert sorted(key for state in states for key in state["first_rewards"]) == sorted(p.id for p in prompts)
        if step:
            assert values["agent/a/num_held_out_pairs"] == 12
            assert values["agent/a/held_out_gain"] == pytest.approx(step)
