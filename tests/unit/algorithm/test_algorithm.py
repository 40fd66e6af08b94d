"""Capability and advantages against the worked example, a plain-loop float64 reference, and Theorem 4.1."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_mega.algorithm import CapabilityTracker, hacpo_advantages, reward_tally, trained_answers
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
    """One advantage in plain Python: eq. 10 (or eq. 50), with the guards that the options add.

    Graded rewards are divided by their mean square deviation from the baseline, over sigma.
    """
    num_agents, num_rollouts = len(rewards), len(rewards[0])

    def omega(a, b):
        ratio = capability[a] / capability[b]
        return min(max(ratio, config.omega_clip[0]), config.omega_clip[1]) if config.omega_clip else ratio

    flat = [reward for group in rewards for reward in group]
    mean = sum(flat) / len(flat)
    sigma = math.sqrt(sum((reward - mean) ** 2 for reward in flat) / (len(flat) - 1))
    if config.uniform_group_is_zero and max(flat) - min(flat) <= 1e-6:
        return 0.0
    owner = j if config.cross_baseline == "source" else k
    baseline = sum(omega(owner, n) * reward for n in range(num_agents) for reward in rewards[n]) / len(flat)
    if config.baseline_guard and baseline > 1.0:
        baseline = sum(rewards[owner]) / num_rollouts
    advantage = (rewards[j][g] - baseline) / (sigma + config.advantage_eps)
    if config.uniform_group_is_zero and not set(flat) <= {0.0, 1.0}:
        about_baseline = sum((reward - baseline) ** 2 for reward in flat) / (len(flat) - 1)
        advantage *= sigma**2 / about_baseline
    return advantage if j == k else omega(j, k) * advantage


@pytest.mark.parametrize("preset", ["paper", "authors"])
@pytest.mark.parametrize("num_agents", [1, 2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 0.1, 0.001])
def test_advantages_equal_the_specification(preset, num_agents, spread):
    """Rewards of 0 and 1 (spread 0), and graded ones of which a prompt's lie within `spread`."""
    torch.manual_seed(num_agents)
    rewards = torch.rand(7, num_agents, 4, dtype=torch.float64)
    rewards = 0.7 * (1 - spread) + rewards * spread if spread else (rewards > 0.4).double()
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


NUM_ANSWERS = 4
HIGH = [[0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]]


def graded_prompts():
    """Rewards [N][G] of one prompt, as rewards that are more than a verdict make them."""
    grades = st.floats(0.0, 1.0)
    near = st.tuples(grades, st.sampled_from([0.0, 1e-16, 1e-9, 3e-7, 1e-5, 1e-4, 1e-2]))
    agents = st.integers(2, 3)

    def cube(draw_value):
        return agents.flatmap(lambda n: st.lists(st.lists(draw_value, min_size=4, max_size=4), min_size=n, max_size=n))

    near_equal = near.flatmap(
        lambda pair: cube(st.integers(-3, 3).map(lambda k: min(1.0, max(0.0, pair[0] + k * pair[1]))))
    )
    one_constant = st.tuples(grades, cube(grades)).map(lambda pair: [[pair[0]] * NUM_ANSWERS, *pair[1][1:]])
    one_low = st.tuples(grades, cube(grades)).map(
        lambda pair: [[pair[0], *HIGH[0][1:]], *([0.9] * NUM_ANSWERS for _ in pair[1][1:])]
    )
    verdict_and_brevity = cube(
        st.tuples(st.sampled_from([0.0, 0.9]), st.integers(0, 40)).map(lambda pair: pair[0] + 0.1 - pair[1] / 40_000)
    )
    return st.one_of(cube(grades), near_equal, one_constant, one_low, verdict_and_brevity)


@given(
    rewards=graded_prompts(),
    capability=st.lists(st.floats(0.02, 1.0), min_size=3, max_size=3),
    cross_baseline=st.sampled_from(["source", "learner"]),
)
@settings(max_examples=300)
def test_no_advantage_exceeds_what_rewards_of_0_and_1_can_have(rewards, capability, cross_baseline):
    """|A| <= sqrt(n - 1) for graded rewards, times omega for another agent's answer; (1 + |d|) sqrt(n) for 0 and 1.

    d is the offset of the baseline from the mean: with rewards of 0 and 1 sigma^2 >= 1 / n (float64, a rounding each).
    """
    rewards_PNG = torch.tensor([rewards], dtype=torch.float64)
    num_agents, num_rewards = len(rewards), rewards_PNG.numel()
    is_graded = bool(((rewards_PNG > 1e-6) & (rewards_PNG < 1 - 1e-6)).any())
    capability_N = torch.tensor(capability[:num_agents], dtype=torch.float64)
    config = AlgorithmConfig(cross_baseline=cross_baseline)
    mean = rewards_PNG.mean().item()
    for learner in range(num_agents):
        found = hacpo_advantages(rewards_PNG, capability_N, learner, config)[0]
        for j in range(num_agents):
            owner = j if cross_baseline == "source" else learner
            omegas = [capability[owner] / capability[n] for n in range(num_agents)]
            offset = mean - sum(omegas[n] * sum(rewards[n]) for n in range(num_agents)) / num_rewards
            weight = 1.0 if j == learner else capability[j] / capability[learner]
            bound = weight * (math.sqrt(num_rewards - 1) if is_graded else (1 + abs(offset)) * math.sqrt(num_rewards))
            assert found[j].abs().max() <= bound * (1 + 1e-9), (rewards, j)


@given(seed=st.integers(0, 2**16), num_agents=st.integers(1, 3), preset=st.sampled_from(["paper", "authors"]))
@settings(max_examples=60)
def test_rewards_of_0_and_1_have_the_advantages_of_the_paper_bit_for_bit(seed, num_agents, preset):
    """The formula as it is printed, in the same order of operations, for every number of successes."""
    generator = torch.Generator().manual_seed(seed)
    share_P11 = torch.rand(16, 1, 1, generator=generator)
    rewards = (torch.rand(16, num_agents, 8, generator=generator) < share_P11).double()
    rewards[0] = 0.0
    rewards[0, 0, 0] = 1.0
    rewards[1] = 1.0
    rewards[1, 0, 0] = 0.0
    capability = torch.rand(num_agents, generator=generator).double() + 0.05
    config = AlgorithmConfig(preset=preset)
    omega = capability[:, None] / capability[None, :]
    omega = omega if config.omega_clip is None else omega.clamp(*config.omega_clip)
    baseline = rewards.sum(dim=2) @ omega.T / (num_agents * 8)
    if config.baseline_guard:
        baseline = torch.where(baseline > 1.0, rewards.mean(dim=2), baseline)
    deviation = rewards.flatten(1) - rewards.flatten(1).sum(dim=1, keepdim=True) / (num_agents * 8)
    sigma = ((deviation**2).sum(dim=1) / max(num_agents * 8 - 1, 1)).sqrt()
    for learner in range(num_agents):
        mine = baseline if config.cross_baseline == "source" else baseline[:, learner : learner + 1]
        paper = (rewards - mine[:, :, None]) / (sigma + config.advantage_eps)[:, None, None]
        paper = omega[:, learner][None, :, None] * paper
        paper[sigma == 0.0] = 0.0
        assert torch.equal(hacpo_advantages(rewards, capability, learner, config), paper)


def test_nearly_equal_rewards_teach_nearly_nothing():
    """Sixteen rewards of .3, half of one agent's by an addition in another order, or a ten-thousandth higher."""
    capability = torch.tensor([0.55, 0.45], dtype=torch.float64)
    rounding = torch.full((1, 2, 8), 0.3, dtype=torch.float64)
    rounding[0, 0, ::2] = 0.1 + 0.2
    assert rounding.unique().numel() == 2
    assert hacpo_advantages(rounding, capability, 0, AlgorithmConfig()).abs().max() == 0.0
    close = torch.full((1, 2, 8), 0.3, dtype=torch.float64)
    close[0, 0, ::2] = 0.3001
    naive = hacpo_advantages(close, capability, 0, AlgorithmConfig(method="naive"))
    own = hacpo_advantages(close, capability, 0, AlgorithmConfig())[:, 0]
    assert own.abs().max() < 0.01 * naive.abs().max()
    # By hand: four rewards are .75e-4 above the mean of .300025, twelve .25e-4 below, and omega of the other agent is
    # 9 / 11 of the first one's: d = .300025 - (.30005 + 11 / 9 x .3) / 2 = -.0333.
    variance = (4 * 0.75**2 + 12 * 0.25**2) * 1e-8 / 15
    offset = 0.300025 - (0.30005 + 11 / 9 * 0.3) / 2
    expected = (0.75e-4 + offset) / (math.sqrt(variance) + 1e-6) * variance / (variance + offset**2 * 16 / 15)
    assert own[0, 0].item() == pytest.approx(expected, rel=1e-9)


def test_an_advantage_of_rounding_is_not_trained_on():
    """An answer that earned the mean of graded rewards: its advantage is what adding them up has rounded."""
    rewards = torch.tensor([[[0.1, 0.2, 0.7], [0.3, 0.35, 0.35]]], dtype=torch.float64)
    rewards[0, 1] = rewards.mean()
    capability = torch.ones(2, dtype=torch.float64)
    advantages = torch.tensor([[[1.0, -1.0, 0.0], [3e-16, -2e-10, 2e-9]]], dtype=torch.float64)
    trained = trained_answers(advantages, 0, AlgorithmConfig())
    assert trained[0].tolist() == [[True, True, True], [False, False, True]]
    found = hacpo_advantages(rewards, capability, 0, AlgorithmConfig())
    assert not trained_answers(found, 0, AlgorithmConfig())[0, 1].any()


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
    authors = CapabilityTracker(2, AlgorithmConfig(preset="authors", capability_metric="positive_rate"))
    authors.update(torch.tensor([0.9, 0.9]), torch.tensor([0.0, 0.4]))
    assert authors.values().tolist() == pytest.approx([1e-8, 0.4])
    tracker = CapabilityTracker(3, AlgorithmConfig())
    tracker.update(torch.tensor([float("nan"), 0.2, 0.4]), torch.zeros(3))
    assert tracker.values().tolist() == pytest.approx([0.3, 0.2, 0.4])


def test_capability_of_the_authors_is_the_mean_of_what_answers_earned():
    """.8 right, .2 brevity: every answer earns something, a half and a quarter are right, one is unjudged. Their code
    adds up the rewards above 0 and divides by the number of answers; `positive_rate` counts successes instead.
    """
    nan = float("nan")
    rewards_PNG = torch.tensor([[[0.93, 0.11], [0.15, 0.12]], [[0.98, 0.17], [0.91, nan]]], dtype=torch.float64)
    successes_PNG = rewards_PNG > 0.8
    for metric, by_hand in (({}, [2.19 / 4, 1.18 / 3]), ({"capability_metric": "positive_rate"}, [2 / 4, 1 / 3])):
        tracker = CapabilityTracker(2, AlgorithmConfig(preset="authors", **metric))
        tracker.add(reward_tally(rewards_PNG, successes_PNG))
        assert tracker.values().tolist() == pytest.approx(by_hand, rel=1e-15)
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
