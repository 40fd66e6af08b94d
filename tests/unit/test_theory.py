"""`hacpo-mega theory` against closed forms, enumeration of every outcome, and automatic differentiation."""

import itertools
import json
import math
from dataclasses import asdict

import pytest
import torch

from hacpo_lab.theory.figure import draw_theory
from hacpo_lab.theory.gradients import (
    GradientSize,
    Objective,
    Pair,
    Policy,
    Tables,
    agreement,
    draw_pair,
    expected_gradients,
    objectives,
    sampled_gradients,
)
from hacpo_lab.theory.rewards import (
    ESTIMATED,
    ONE,
    ORACLE,
    Omega,
    learner_answers,
    measure_omegas,
    measure_prompts,
    measure_ratios,
    replicated_advantages,
    track_capability,
)
from hacpo_lab.theory.theory import Scale, check_theory, with_error
from hacpo_lab.theory.world import Estimate, Size, World, draw_history
from hacpo_mega.config import AlgorithmConfig

U64 = 2.0**-53
# An estimate is compared with its expectation at five standard errors: one in two million misses, and seeds are fixed.
ERRORS = 5

IDENTICAL = World(("weak", "strong"), abilities=(-0.4, 0.9), speeds=(0.03, 0.0), difficulties=(0.0,))
MIXED = World(("weak", "strong"), abilities=(-0.4, 0.9), speeds=(0.03, 0.0), difficulties=(-1.0, 1.5))
EQUAL = World(("a", "b", "c"), abilities=(0.2,) * 3, speeds=(0.0,) * 3, difficulties=(-1.0, 1.0))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def is_close(estimate: Estimate, expected: float) -> bool:
    return abs(estimate.mean - expected) <= ERRORS * estimate.error + 64 * U64


def every_outcome(num_prompts, num_rollouts, success_N):
    """All 0/1 rewards of a step [R, P, N, G] and their probabilities [R], when every prompt is alike."""
    shape = (num_prompts, len(success_N), num_rollouts)
    outcomes = list(itertools.product((0.0, 1.0), repeat=math.prod(shape)))
    rewards_RPNG = torch.tensor(outcomes, dtype=torch.float64).reshape(-1, *shape)
    chance_N1 = torch.tensor(success_N, dtype=torch.float64)[:, None]
    chance_R = torch.where(rewards_RPNG == 1, chance_N1, 1 - chance_N1).prod(3).prod(2).prod(1)
    return rewards_RPNG, chance_R


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_current_step_alone_is_biased_only_by_the_chance_that_a_source_earns_nothing(num_prompts):
    """K = 1 with the current step: mu_k averages to P_hat_k, except where P_hat_j = 0, which takes j's half away:
    E[R_k - mu_k] = p_k (1 - p_j)^(P G) / 2. Every outcome is enumerated through the code of the simulation."""
    success, num_rollouts = (0.3, 0.8), 2
    rewards_RPNG, chance_R = every_outcome(num_prompts, num_rollouts, success)
    config = AlgorithmConfig(capability_window=1)
    capability_RN = track_capability([rewards_RPNG.mean(dim=(1, 3))], config)
    for (learner, source), answers in learner_answers(rewards_RPNG, capability_RN, config):
        if learner == source:
            nothing = (1 - success[1 - learner]) ** (num_prompts * num_rollouts)
            expected = success[learner] * nothing / 2
            # An agent that earned nothing itself counts as 1e-8 of the other: at most 0.5e-8 of its rewards.
            assert (chance_R * answers.numerator_R).sum().item() == pytest.approx(expected, abs=1e-8)


def test_simulated_current_step_has_the_enumerated_bias():
    rows = measure_omegas(IDENTICAL, Size(4000, 1, 2), [Omega("window", 1, True)], generator())
    weak, strong = IDENTICAL.capability_N().tolist()
    for row in rows:
        if row.preset == "paper" and row.learner == row.source:
            own, other = (weak, strong) if row.learner == "weak" else (strong, weak)
            assert is_close(row.numerator, own * (1 - other) ** 2 / 2), row


def test_an_estimated_ratio_has_the_bias_of_its_binomials():
    """E of clip(P_hat_strong / P_hat_weak, 0.1, 10) for one step of 2 prompts and 2 answers, summed by hand."""
    weak, strong = IDENTICAL.capability_N().tolist()

    def chance(hits, p):
        return math.comb(4, hits) * p**hits * (1 - p) ** (4 - hits)

    mean = sum(
        chance(above, strong) * chance(below, weak) * min(max(max(above / 4, 1e-8) / max(below / 4, 1e-8), 0.1), 10.0)
        for above in range(5)
        for below in range(5)
    )
    (row,) = measure_ratios(IDENTICAL, Size(20_000, 2, 2), [2], [1], generator())
    assert is_close(row.authors, mean / (strong / weak) - 1)
    assert is_close(row.unrewarded, (1 - weak) ** 4)
    # To second order, with independent agents: Var(P_hat) / P^2 = (1 - p) / (p P G).
    assert row.predicted == pytest.approx((1 - weak) / (4 * weak))


@pytest.mark.parametrize("world", [IDENTICAL, MIXED])
def test_theorem_4_1_holds_under_the_oracle(world):
    rows = measure_omegas(world, Size(1000, 8, 4), [ORACLE], generator())
    # Own answers, and others' against their source's baseline; the authors' guard and learner's baseline break it.
    assert all(is_close(row.numerator, 0.0) for row in rows if row.preset == "paper")
    learner_based = {(row.learner, row.source): row.numerator for row in rows if row.preset == "authors"}
    weak, strong = world.capability_N().tolist()
    # mu_weak never exceeds 1 here, so no guard: others' answers are off by omega(strong, weak) (p_strong - p_weak).
    assert is_close(learner_based["weak", "weak"], 0.0)
    assert is_close(learner_based["weak", "strong"], strong / weak * (strong - weak))


@pytest.mark.parametrize("window", [1, 5])
def test_a_stationary_window_with_the_current_step_is_unbiased(window):
    """Steps of a window are exchangeable, so E[P_hat_k / P_hat_j R_j] = E[P_hat_k]: exact while no P_hat_j is 0."""
    rows = measure_omegas(MIXED, Size(2000, 16, 4), [Omega("window", window, True)], generator())
    own = [row for row in rows if row.preset == "paper" and row.learner == row.source]
    assert all(is_close(row.numerator, 0.0) for row in own if row.agents == "stationary")
    improving = [row.numerator for row in own if row.agents == "improving" and row.window > 1]
    assert all(abs(numerator.mean) > ERRORS * numerator.error for numerator in improving)


def test_a_window_without_the_current_step_is_too_low_for_the_strong():
    """E[1 / P_hat] > 1 / E[P_hat]: omega over the weak is too large, and with it the strong agent's baseline."""
    rows = measure_omegas(MIXED, Size(4000, 16, 4), [Omega("window", 1, False)], generator())
    wanted = ("paper", "stationary", "strong", "strong")
    (strong,) = (r.numerator for r in rows if (r.preset, r.agents, r.learner, r.source) == wanted)
    assert strong.mean < -ERRORS * strong.error


def test_an_agent_alone_is_centred_in_every_step():
    alone = World(("one",), (0.3,), (0.01,), (-1.0, 1.0))
    for row in measure_omegas(alone, Size(50, 4, 4), [ORACLE, ONE, *ESTIMATED], generator()):
        assert abs(row.numerator.mean) <= 16 * U64
        # Sums of G = 4 rewards over sigma >= sqrt(1 / 4): a few roundings each.
        assert abs(row.advantage.mean) <= 64 * U64
        assert row.variance.mean == pytest.approx(1.0, abs=64 * U64)


def test_equal_agents_need_no_omega():
    rows = measure_omegas(EQUAL, Size(500, 8, 4), [ORACLE, ONE], generator())
    for row in rows:
        assert is_close(row.numerator, 0.0)
        assert row.variance.mean == pytest.approx(1.0, abs=64 * U64)
        assert row.added_error.mean <= 64 * U64


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_a_numerator_is_the_advantage_times_its_scale(preset):
    config = AlgorithmConfig(preset=preset, uniform_group_is_zero=False)
    rewards_RPNG = torch.rand(20, 3, 3, 4, generator=generator(), dtype=torch.float64)
    capability_RN = 0.1 + torch.rand(20, 3, generator=generator(1), dtype=torch.float64)
    scale_RP11 = rewards_RPNG.flatten(2).std(dim=2)[:, :, None, None] + config.advantage_eps
    for (learner, source), answers in learner_answers(rewards_RPNG, capability_RN, config):
        advantages_RPNG = replicated_advantages(rewards_RPNG, capability_RN, learner, config)
        scaled_R = (advantages_RPNG * scale_RP11)[:, :, source].mean(dim=(1, 2))
        # 12 answers, each times two omegas of at most 11: about 1500, and as many roundings as there are terms.
        torch.testing.assert_close(answers.numerator_R, scaled_R, rtol=0, atol=1500 * 12 * U64)
        assert torch.equal(answers.advantage_RM, advantages_RPNG[:, :, source].flatten(1))


def test_the_bias_by_difficulty_is_the_exact_one_and_cancels_over_prompts():
    rows = measure_prompts(MIXED, Size(500, 8, 4), generator())
    assert all(is_close(row.numerator, row.expected) for row in rows)
    assert max(abs(row.expected) for row in rows) > 0.02
    for agent in MIXED.names:
        assert abs(sum(row.expected for row in rows if row.agent == agent)) <= 16 * U64


def test_history_is_oldest_first_and_improves_when_asked():
    world, size = MIXED, Size(4000, 4, 4)
    oldest, *_, newest = draw_history(world, size, 40, True, generator())
    for mean_RN, age in ((oldest, 40), (newest, 1)):
        expected_N = world.success_LN(age).mean(dim=0)
        assert all(is_close(Estimate.of(mean_RN[:, n]), expected_N[n].item()) for n in range(2))


def test_the_own_gradient_is_that_of_the_expected_reward():
    """At s = 1 the baseline drops out: the exact own gradient is d E[R] / d theta / (T sigma)."""
    tables = Tables()
    logits_PTV = tables.draw_logits(5, generator()).requires_grad_()
    reward_P = Policy(tables, logits_PTV).prob_PA @ tables.reward_A
    (slope_PTV,) = torch.autograd.grad(reward_P.sum(), logits_PTV)
    learner = Policy(tables, logits_PTV.detach())
    source = Policy(tables, tables.draw_logits(5, generator(1)))
    pair = Pair(tables, learner, source, torch.zeros(5, 2, 1, dtype=torch.int64))
    mixed_P1 = pair.expected_rewards_P2.mean(dim=1, keepdim=True)
    expected_PD = slope_PTV.flatten(1) / tables.num_tokens / ((mixed_P1 * (1 - mixed_P1)).sqrt() + 1e-6)
    own_PD, _ = expected_gradients(pair, objectives("source")[0])
    # Sums over 243 answers of terms below 10.
    torch.testing.assert_close(own_PD, expected_PD, rtol=0, atol=243 * 10 * 4 * U64)


def test_of_single_tokens_the_ratio_alone_corrects_everything():
    """With T = 1, s is the true importance weight: without clip and alpha the cross gradient is omega times the own."""
    tables = Tables(num_tokens=1, vocabulary=6, needed=1)
    pair = draw_pair(tables, 50, 2, distance=1.5, bonus=0.5, seed=1)
    learner, source = pair.expected_rewards_P2.mean(dim=0).tolist()
    for baseline in ("source", "learner"):
        own_PD, cross_PD = expected_gradients(pair, objectives(baseline)[-1])
        torch.testing.assert_close(cross_PD, source / learner * own_PD, rtol=1e-9, atol=1e-12)


def test_a_source_equal_to_the_learner_gives_the_own_gradient():
    pair = draw_pair(Tables(), 20, 2, distance=0.0, bonus=0.0, seed=2)
    for objective in (*objectives("source"), *objectives("learner")):
        own_PD, cross_PD = expected_gradients(pair, objective)
        torch.testing.assert_close(cross_PD, own_PD, rtol=0, atol=243 * 10 * 4 * U64)
        cosine, opposed = agreement(own_PD, cross_PD)
        assert cosine.mean == pytest.approx(1.0)
        assert opposed.mean == 0.0


@pytest.mark.parametrize("objective", objectives("source") + objectives("learner"), ids=lambda o: o.name)
def test_sampled_gradients_have_the_exact_ones_as_limit(objective: Objective):
    """64 independent draws of 4096 answers on one prompt, against the sum over all answers."""
    num_draws, num_rollouts = 64, 4096
    tables = Tables()
    one = draw_pair(tables, 1, 1, distance=0.7, bonus=0.5, seed=3)
    answers_P2G = torch.stack(
        [
            torch.multinomial(
                policy.prob_PA.expand(num_draws, -1), num_rollouts, replacement=True, generator=generator()
            )
            for policy in (one.learner, one.source)
        ],
        dim=1,
    )
    many = Pair(tables, repeated(one.learner, num_draws), repeated(one.source, num_draws), answers_P2G)
    for exact_PD, sampled_PD in zip(expected_gradients(one, objective), sampled_gradients(many, objective)):
        error_D = sampled_PD.std(dim=0) / math.sqrt(num_draws)
        # A group of G answers has its own reward in its baseline and its sigma: relative terms of order 1 / G.
        allowed_D = ERRORS * error_D + 4 / num_rollouts * exact_PD.abs().max()
        assert ((sampled_PD.mean(dim=0) - exact_PD[0]).abs() <= allowed_D).all()
        assert exact_PD.abs().max() > 10 * allowed_D.max()


def repeated(policy: Policy, num_prompts: int) -> Policy:
    logits_PTV = policy.token_prob_PD.log().reshape(1, Tables().num_tokens, -1)
    return Policy(Tables(), logits_PTV.expand(num_prompts, -1, -1))


TINY = Scale(
    omegas=Size(20, 3, 2),
    ratios=Size(20, 3, 2),
    ratio_prompts=(3,),
    gradients=GradientSize(num_exact=8, num_updates=2, num_rollouts=2, distances=(0.5, 1.0)),
)


def test_the_same_seed_gives_the_same_numbers_and_the_tables_are_those_of_the_json(tmp_path, capsys):
    path = check_theory(tmp_path / "a", 7, TINY)
    printed = capsys.readouterr().out
    result, again, other = (
        json.loads(file.read_text())
        for file in (path, check_theory(tmp_path / "b", 7, TINY), check_theory(tmp_path / "c", 8, TINY))
    )
    kept = ("omegas", "ratios", "prompts", "gradients")
    assert repr([result[key] for key in kept]) == repr([again[key] for key in kept])  # NaN equals itself as text
    assert repr(result["omegas"]) != repr(other["omegas"])
    assert result["scale"] == json.loads(json.dumps(asdict(TINY)))

    numbers = printed.split()
    for row in (row for key in kept for row in result[key]):
        for value in row.values():
            if isinstance(value, dict):
                shown = with_error(Estimate(**value))
                assert shown in numbers, (shown, row)
    assert draw_theory(path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "mean, error, shown",
    [
        (0.02764, 0.0036, "0.0276(36)"),
        (-0.00001, 0.0, "0.0000(0)"),
        (60269.4, 15862.0, "6.0e+04(1.6e+04)"),
        (0.0508, 0.00998, "0.051(10)"),
        (0.5, math.nan, "-"),
    ],
)
def test_a_number_carries_its_error(mean, error, shown):
    assert with_error(Estimate(mean, error)) == shown
