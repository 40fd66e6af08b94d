"""Relations of the methods: which are one where their mechanisms are off, where borders lie, what they train on."""

import math
from typing import get_args

import pytest
import torch
from hacpo_kernels.bounds import CrossObjective
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import answers_of, config_of, cube, judged, sequence_objective

from hacpo_mega.algorithm import (
    advantages_of,
    capability_ratios,
    has_autograd_objective,
    objective_loss,
    objective_of,
    sample_weight,
    trained_answers,
)
from hacpo_mega.algorithm.methods import FUNCTIONS, MethodFunctions
from hacpo_mega.config.tables.methods import METHODS

U64 = 2.0**-53
SEQUENCE_METHODS = sorted(set(METHODS) - {"grpo"})


# ---- borders, exactly


@pytest.mark.parametrize("A", [1.5, -1.5])
@pytest.mark.parametrize(
    "method, log_s, weight",
    [
        ("f_tis", -0.2, {1: math.exp(-0.2), -1: math.exp(-0.2)}),  # on the limit of divergence: kept
        ("f_tis", math.nextafter(-0.2, -1), {1: math.exp(-0.2), -1: 0.0}),
        ("f_tis", 0.6931471805599453, {1: 2.0, -1: 2.0}),
        ("f_tis", 1.5, {1: 2.0, -1: 2.0}),
        ("naive", 0.0, {1: 1.0, -1: 1.0}),
        ("naive", -0.5, {1: math.exp(-0.5), -1: 0.0}),  # why naive sharing learns from successes alone
        ("naive", 0.5, {1: 0.0, -1: math.exp(0.5)}),
        ("sgt", -3.0, {1: 1.0, -1: 1.0}),
    ],
)
def test_borders_of_the_rivals(method, log_s, weight, A):
    one = torch.ones(1, dtype=torch.float64)
    is_cross = torch.tensor([False])
    _, gradient, stats = sequence_objective(log_s * one, 0 * one, A * one, is_cross, 0, config_of(method))
    assert gradient.item() == pytest.approx(-weight[1 if A > 0 else -1] * A, rel=8 * U64)
    assert stats.cross_inside[0].item() == float(gradient.item() != 0.0)


# ---- identities


@pytest.mark.parametrize("method", SEQUENCE_METHODS)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=20)
def test_an_agent_alone_is_gspo_bit_for_bit(method, seed):
    rewards = cube(seed, 1)
    ours, gspo = (
        advantages_of(judged(rewards, torch.tensor([0.37]), 0), config_of(which)) for which in (method, "gspo")
    )
    assert torch.equal(ours, gspo)
    mean = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1e-3
    own, A = torch.ones(50, dtype=torch.bool), torch.linspace(-2, 2, 50, dtype=torch.float64)
    found = [sequence_objective(mean, 0 * mean, A, own, 2, config_of(which)) for which in (method, "gspo")]
    assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[1][:2]))
    assert sample_weight(16, 8, 1, config_of(method)) == sample_weight(16, 8, 1, config_of("gspo"))


@pytest.mark.parametrize("num_agents", [2, 3])
def test_naive_is_hacpo_with_its_four_mechanisms_off(num_agents):
    """No omega in the baseline, none in the loss, no exponent, and the clip of own answers instead of the band."""
    off = config_of("hacpo", capability_baseline=False, omega_in_loss=False, alpha=0.0, cross_clip="own")
    rewards, capability = cube(5, num_agents), torch.linspace(0.2, 0.9, num_agents, dtype=torch.float64)
    for learner in range(num_agents):
        ours, naive = (advantages_of(judged(rewards, capability, learner), c) for c in (off, config_of("naive")))
        assert torch.equal(ours, naive)
    mean = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.2
    A, is_self = torch.linspace(-2, 2, 200, dtype=torch.float64), torch.arange(200) % 2 == 0
    for m in (0, 7):
        found = [sequence_objective(mean, 0 * mean, A, is_self, m, c)[:2] for c in (off, config_of("naive"))]
        assert all(torch.equal(a, b) for a, b in zip(*found))


def test_alpha_zero_inside_the_band_is_naive_where_its_clip_is_idle():
    """HACPO without omega and exponent and naive sharing agree on a peer's success that the learner finds unlikelier;
    on its failures they part: naive's min() drops them, the band does not."""
    plain = config_of("hacpo", capability_baseline=False, omega_in_loss=False, alpha=0.0, delta=0.5, delta_step=0.0)
    mean = torch.linspace(-0.6, -0.01, 40, dtype=torch.float64)
    is_cross = torch.zeros(40, dtype=torch.bool)
    for sign in (1.0, -1.0):
        A = torch.full_like(mean, sign)
        band, naive = (sequence_objective(mean, 0 * mean, A, is_cross, 0, c)[1] for c in (plain, config_of("naive")))
        assert torch.equal(band, naive) == (sign > 0)


def test_the_objectives_of_the_methods_are_those_of_the_kernels():
    assert {what.cross for what in METHODS.values()} - {None, "function"} == set(get_args(CrossObjective))
    assert FUNCTIONS.keys() == METHODS.keys()
    for name, functions in FUNCTIONS.items():
        assert (functions.objective is not None) == (METHODS[name].cross == "function"), name
        assert (functions.by_token is None) == (METHODS[name].by_token is None), name


@pytest.mark.parametrize("learner", [0, 1])
def test_what_is_trained_on_is_what_moves_a_gradient(learner):
    """By prompt for own answers, whatever others' are worth, by answer for others'; a KL is a gradient of its own."""
    advantages = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.5, 0.0], [0.0, -1.0]], [[0.0, 0.0], [0.0, 2.0]]])
    by_hand = {
        0: [[[False, False], [False, False]], [[True, True], [False, True]], [[False, False], [False, True]]],
        1: [[[False, False], [False, False]], [[True, False], [True, True]], [[False, False], [True, True]]],
    }
    trained = trained_answers(advantages, learner, config_of("hacpo"))
    assert trained.tolist() == by_hand[learner]
    with_kl = trained_answers(advantages, learner, config_of("hacpo", kl_coef=0.1))
    assert with_kl[:, learner].all() and torch.equal(with_kl[:, 1 - learner], trained[:, 1 - learner])
    assert trained_answers(advantages, learner, config_of("hacpo", kl_coef=0.1, kl_on="all")).all()


def test_capability_is_used_by_hacpo_alone():
    rewards, low, high = cube(2, 2), torch.tensor([0.1, 0.9]), torch.tensor([0.9, 0.1])
    for method in METHODS:
        same = torch.equal(
            *(advantages_of(judged(rewards, capability, 0), config_of(method)) for capability in (low, high))
        )
        assert same == (method != "hacpo"), method
        assert config_of(method).uses_capability == (method == "hacpo")
        own = config_of(method, advantages="mine.py:advantages", capability_metric="positive_rate")
        assert not own.uses_capability and own.success_readers, "the function's omega is its own, the capability ours"
    assert capability_ratios(low, None)[1, 0].item() == pytest.approx(9.0)


def test_a_method_may_bring_its_objective(monkeypatch):
    """Registered under naive's name: half of each answer's log ratio, minus what the configuration says."""

    def half(answers, config):
        factor_B = torch.where(answers.is_self_B, 1.0, 0.5)
        return -factor_B * answers.log_ratio_B * answers.advantage_B - config.eps_low * answers.update_index

    assert not has_autograd_objective(config_of("naive"))
    monkeypatch.setitem(FUNCTIONS, "naive", MethodFunctions(FUNCTIONS["naive"].advantages, half))
    tokens = torch.tensor([-1.0, -3.0, -2.0], dtype=torch.float64, requires_grad=True)
    source, length = torch.tensor([-1.5, -2.5]), torch.tensor([2.0, 1.0])
    advantage, is_self = torch.tensor([2.0, -4.0]), torch.tensor([True, False])
    config = config_of("naive", eps_low=0.25)
    assert has_autograd_objective(config)
    answers = answers_of(tokens, torch.tensor([0, 2, 3]), source, advantage, is_self, length, 2)
    loss, terms = objective_loss(answers, objective_of(config), config)
    loss.sum().backward()
    assert loss.tolist() == [1.0 - 0.5, 1.0 - 0.5] and tokens.grad.tolist() == [-1.0, -1.0, 2.0]
    assert terms.weight_B.tolist() == [1.0, 0.5]
