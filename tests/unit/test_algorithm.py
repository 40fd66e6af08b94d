"""Capability and advantages against the worked example, a plain-loop float64 reference, and Theorem 4.1."""

import json
import math

import pytest
import torch

from hacpo_mega.algorithm import CapabilityTracker, hacpo_advantages, reward_tally
from hacpo_mega.config import AlgorithmConfig

# Unit roundoff of float32 and float64. A tolerance is a number of roundings.
U32, U64 = 2.0**-24, 2.0**-53

WORKED_REWARDS = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])
WORKED_CAPABILITY = torch.tensor([0.4, 0.8])


@pytest.mark.parametrize(
    "cross_baseline, learner, expected",
    [
        ("source", 0, [[1.0, -1.0], [0.0, 0.0]]),
        ("learner", 0, [[1.0, -1.0], [2.0, 2.0]]),
        ("source", 1, [[0.5, -0.5], [0.0, 0.0]]),
        ("learner", 1, [[0.0, -1.0], [0.0, 0.0]]),
    ],
)
def test_worked_example_by_hand(cross_baseline, learner, expected):
    config = AlgorithmConfig(cross_baseline=cross_baseline, advantage_eps=0.0)
    advantages = hacpo_advantages(WORKED_REWARDS, WORKED_CAPABILITY, learner, config)
    torch.testing.assert_close(advantages[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=16 * U64)


def reference_advantage(rewards, capability, k, j, g, config):
    """One advantage in plain Python: eq. 10 (or eq. 50), with the guards that the options add."""
    num_agents, num_rollouts = len(rewards), len(rewards[0])

    def omega(a, b):
        ratio = capability[a] / capability[b]
        return min(max(ratio, config.omega_clip[0]), config.omega_clip[1]) if config.omega_clip else ratio

    flat = [reward for group in rewards for reward in group]
    mean = sum(flat) / len(flat)
    sigma = math.sqrt(sum((reward - mean) ** 2 for reward in flat) / (len(flat) - 1))
    if config.uniform_group_is_zero and max(flat) == min(flat):
        return 0.0
    owner = j if config.cross_baseline == "source" else k
    baseline = sum(omega(owner, n) * reward for n in range(num_agents) for reward in rewards[n]) / len(flat)
    if config.baseline_guard and baseline > 1.0:
        baseline = sum(rewards[owner]) / num_rollouts
    advantage = (rewards[j][g] - baseline) / (sigma + config.advantage_eps)
    return advantage if j == k else omega(j, k) * advantage


@pytest.mark.parametrize("preset", ["paper", "authors"])
@pytest.mark.parametrize("num_agents", [1, 2, 3, 5])
@pytest.mark.parametrize("graded", [False, True])
def test_advantages_equal_the_specification(preset, num_agents, graded):
    torch.manual_seed(num_agents)
    rewards = torch.rand(7, num_agents, 4, dtype=torch.float64)
    rewards = rewards if graded else (rewards > 0.4).double()
    rewards[0] = 1.0  # a prompt everybody solves
    capability = torch.rand(num_agents, dtype=torch.float64) * 0.9 + 0.05
    config = AlgorithmConfig(preset=preset)
    # Sums of N G rewards times omega <= 20, and sigma^2 of as many squares: that many roundings, over sigma, twice.
    num_terms, sigma = num_agents * 4 + 16, rewards.flatten(1).std(dim=1) + config.advantage_eps
    allowed = 2 * num_terms * U64 * 20 * 20 * (1 + 1 / sigma) / sigma
    for learner in range(num_agents):
        found = hacpo_advantages(rewards, capability, learner, config)
        for p in range(7):
            for j in range(num_agents):
                for g in range(4):
                    expected = reference_advantage(rewards[p].tolist(), capability.tolist(), learner, j, g, config)
                    assert found[p, j, g].item() == pytest.approx(expected, abs=allowed[p].item()), (learner, p, j, g)


def test_an_agent_alone_under_hacpo_equals_gspo_bit_for_bit():
    rewards = torch.rand(9, 1, 8)
    capability = torch.tensor([0.37])
    hacpo = hacpo_advantages(rewards, capability, 0, AlgorithmConfig(method="hacpo"))
    gspo = hacpo_advantages(rewards, capability, 0, AlgorithmConfig(method="gspo"))
    assert torch.equal(hacpo, gspo)


def test_gspo_never_looks_at_the_answers_of_others():
    rewards = torch.rand(5, 3, 8, dtype=torch.float64)
    config = AlgorithmConfig(method="gspo")
    together = hacpo_advantages(rewards, torch.tensor([0.2, 0.9, 0.5]), 1, config)
    alone = hacpo_advantages(rewards[:, 1:2], torch.tensor([0.9]), 0, config)
    assert torch.equal(together[:, 1:2], alone)
    assert together[:, 0].abs().max() == 0.0
    assert together[:, 2].abs().max() == 0.0


def test_a_uniform_group_is_silent_unless_asked_to_speak():
    rewards = torch.ones(1, 2, 4)
    capability = torch.tensor([0.3, 0.9])
    assert hacpo_advantages(rewards, capability, 0, AlgorithmConfig()).abs().max() == 0.0
    loud = hacpo_advantages(rewards, capability, 0, AlgorithmConfig(uniform_group_is_zero=False))
    assert loud.abs().max() > 1.0


def test_an_unjudged_answer_enters_no_mean_and_gets_no_advantage():
    rewards = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, float("nan")]]], dtype=torch.float64)
    config = AlgorithmConfig(advantage_eps=0.0)
    found = hacpo_advantages(rewards, torch.tensor([0.5, 0.5]), 0, config)
    judged = [1.0, 0.0, 1.0, 0.0, 1.0]
    mean = sum(judged) / 5
    sigma = math.sqrt(sum((reward - mean) ** 2 for reward in judged) / 4)
    expected = torch.tensor([[1 - mean, -mean, 1 - mean], [-mean, 1 - mean, 0.0]], dtype=torch.float64) / sigma
    torch.testing.assert_close(found[0], expected)


def test_own_advantages_average_to_zero_when_omega_is_right():
    """Theorem 4.1 by simulation: with the true capabilities in omega, E[A_k] over own answers is 0 (here, unscaled)."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.tensor([0.25, 0.75], dtype=torch.float64)
    rewards = torch.bernoulli(truth[None, :, None].expand(200_000, 2, 2), generator=generator)
    config = AlgorithmConfig(
        uniform_group_is_zero=False, advantage_eps=1e6
    )  # eps >> sigma leaves R - mu up to a factor
    for learner in (0, 1):
        own = hacpo_advantages(rewards, truth, learner, config)[:, learner] * 1e6
        standard_error = own.mean(dim=1).std() / math.sqrt(len(own))
        assert abs(own.mean()) < 4 * standard_error


def test_capability_is_the_mean_of_the_last_k_steps():
    tracker = CapabilityTracker(2, AlgorithmConfig(capability_window=3))
    assert tracker.values().tolist() == [1.0, 1.0]
    for step in range(5):
        tracker.update(torch.tensor([0.1 * step, 0.5]), torch.zeros(2))
    torch.testing.assert_close(tracker.values(), torch.tensor([0.3, 0.5], dtype=torch.float64), rtol=0, atol=U32)


def test_capability_without_the_current_step_lags_by_one():
    tracker = CapabilityTracker(1, AlgorithmConfig(capability_window=2, capability_includes_current=False))
    tracker.update(torch.tensor([0.2]), torch.zeros(1))
    assert tracker.values().tolist() == [1.0]
    for reward in (0.4, 0.6, 0.8):
        tracker.update(torch.tensor([reward]), torch.zeros(1))
    assert tracker.values().item() == pytest.approx(0.5)


def test_capability_metric_floor_and_unknown_agents():
    authors = CapabilityTracker(2, AlgorithmConfig(preset="authors"))
    authors.update(torch.tensor([0.9, 0.9]), torch.tensor([0.0, 0.4]))
    assert authors.values().tolist() == pytest.approx([1e-8, 0.4])
    tracker = CapabilityTracker(3, AlgorithmConfig())
    tracker.update(torch.tensor([float("nan"), 0.2, 0.4]), torch.zeros(3))
    assert tracker.values().tolist() == pytest.approx([0.3, 0.2, 0.4])


def test_capability_of_the_authors_is_the_share_of_successes():
    """.8 right, .2 brevity: every answer earns something, a half and a quarter are right, one is unjudged."""
    nan = float("nan")
    rewards_PNG = torch.tensor([[[0.93, 0.11], [0.15, 0.12]], [[0.98, 0.17], [0.91, nan]]], dtype=torch.float64)
    successes_PNG = rewards_PNG > 0.8
    tracker = CapabilityTracker(2, AlgorithmConfig(preset="authors"))
    tracker.add(reward_tally(rewards_PNG, successes_PNG))
    assert tracker.values().tolist() == [2 / 4, 1 / 3]
    assert reward_tally(rewards_PNG, successes_PNG)[:, 0].tolist() == pytest.approx([2.19, 1.18], abs=1e-15)


def test_rewards_of_0_and_1_have_the_capability_that_they_had():
    """A success is then a reward above 0, to the last bit."""
    rewards_PNG = (torch.rand(16, 3, 8, generator=torch.Generator().manual_seed(5)) > 0.6).double()
    rewards_PNG[0, 1], rewards_PNG[3, :, 2] = float("nan"), float("nan")
    judged_N = (~rewards_PNG.isnan()).sum(dim=(0, 2))
    tracker = CapabilityTracker(3, AlgorithmConfig(preset="authors"))
    tracker.add(reward_tally(rewards_PNG, rewards_PNG == 1.0))
    assert torch.equal(tracker.values(), (rewards_PNG > 0).sum(dim=(0, 2)).double() / judged_N)


def test_capability_state_survives_json_exactly():
    tracker = CapabilityTracker(2, AlgorithmConfig())
    tracker.update(torch.rand(2, dtype=torch.float64), torch.zeros(2))
    other = CapabilityTracker(2, AlgorithmConfig())
    other.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert torch.equal(other.values(), tracker.values())
    with pytest.raises(ValueError, match="2 agents, this run has 3"):
        CapabilityTracker(3, AlgorithmConfig()).load_state_dict(tracker.state_dict())


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(2, 2\)"):
        hacpo_advantages(torch.ones(2, 2), torch.ones(2), 0, AlgorithmConfig())
    with pytest.raises(ValueError, match="learner 2"):
        hacpo_advantages(torch.ones(1, 2, 2), torch.ones(2), 2, AlgorithmConfig())
