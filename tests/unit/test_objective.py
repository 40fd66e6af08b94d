"""The objective under its public name: hand numbers, autograd of a float64 formula, the weight of a sample, the KL."""

import math

import pytest
import torch

from hacpo_mega.algorithm import PackedSequences, kl_penalty, policy_loss, sample_weight, sequence_objective
from hacpo_mega.config import AlgorithmConfig


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_worked_cross_ratio_by_hand():
    """ALGORITHM section 7: s = .9, delta = .2, delta_step = .025, alpha = 1; A = 1 so the numbers are the weights."""
    seq_logprob, source, cross = tensor(math.log(0.9)), tensor(0.0), torch.tensor([False])
    config = AlgorithmConfig(delta=0.2, delta_step=0.025, alpha=1.0)
    loss, grad, stats = sequence_objective(seq_logprob, source, tensor(1.0), cross, 3, config)
    assert loss.item() == pytest.approx(-0.81)
    assert grad.item() == pytest.approx(-0.81)
    assert stats.cross_inside.tolist() == [1.0, 1.0]
    loss, grad, stats = sequence_objective(seq_logprob, source, tensor(1.0), cross, 5, config)
    assert loss.item() == pytest.approx(-(0.925**2))
    assert grad.item() == 0.0
    assert stats.cross_below.tolist() == [1.0, 1.0]


def formula(seq_logprob, source, advantage, is_self, m, config):
    """Eq. 47 and eq. 50 with autograd doing the derivative."""
    s = (seq_logprob - source).clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()
    own = -torch.minimum(s * advantage, s.clamp(1 - config.eps_low, 1 + config.eps_high) * advantage)
    c = s.clamp(min(1.0, 1 - config.delta + m * config.delta_step), 1.0)
    cross = -c * c.detach() ** config.alpha * advantage
    return torch.where(is_self, own, cross)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("update_index", [0, 3, 40])
@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_loss_and_gradient_equal_autograd_of_the_formula(preset, update_index, alpha):
    torch.manual_seed(update_index)
    seq_logprob = (torch.randn(400, dtype=torch.float64) * 0.1).requires_grad_()
    source, advantage = torch.zeros(400, dtype=torch.float64), torch.randn(400, dtype=torch.float64)
    is_self = torch.rand(400) < 0.5
    with torch.no_grad():
        seq_logprob[is_self] *= 0.004  # own ratios live within a few clip widths of 1
        seq_logprob[:2] = tensor(30.0, -30.0)  # beyond the clamp of the log-ratio
    config = AlgorithmConfig(preset=preset, alpha=alpha)
    expected = formula(seq_logprob, source, advantage, is_self, update_index, config)
    expected_grad = torch.autograd.grad(expected.sum(), seq_logprob)[0]
    loss, grad, _ = sequence_objective(seq_logprob.detach(), source, advantage, is_self, update_index, config)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def packed(lengths, is_self, advantage, source) -> PackedSequences:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSequences(
        starts, torch.tensor(source), torch.tensor(advantage), torch.tensor(is_self), torch.tensor(lengths).float()
    )


def test_every_token_gets_its_sequences_coefficient():
    """d L / d logprob_t = -(A s / L) own, -(omega A) s c^alpha / L cross (ALGORITHM, 'Gradient facts')."""
    token_logprob = torch.tensor([-0.2, -0.4, -0.3, -0.5, -0.7], requires_grad=True)
    sequences = packed([2, 3], [True, False], [1.5, -2.0], [-0.3, -0.45])
    config = AlgorithmConfig(alpha=2.0, delta=0.2)
    loss, _ = policy_loss(token_logprob, sequences, 0, 0.25, config)
    loss.backward()
    s = math.exp(-0.5 - -0.45)
    own, cross = -1.5 / 2 * 0.25, 2.0 * s * s**2 / 3 * 0.25
    torch.testing.assert_close(token_logprob.grad, torch.tensor([own, own, cross, cross, cross]), rtol=1e-5, atol=0)


def test_ratio_length_source_divides_by_the_sources_count():
    token_logprob = torch.tensor([-0.2, -0.4], requires_grad=True)
    sequences = packed([2], [False], [1.0], [-0.15])._replace(length_B=torch.tensor([4.0]))
    loss, stats = policy_loss(token_logprob, sequences, 0, 1.0, AlgorithmConfig(alpha=0.0))
    loss.backward()
    assert stats.ratio_cross[0].item() == pytest.approx(1.0)
    torch.testing.assert_close(token_logprob.grad, torch.tensor([-0.25, -0.25]), rtol=1e-6, atol=0)


def test_weight_of_a_sample():
    assert sample_weight(64, 8, 2, AlgorithmConfig(aggregation="sum")) == 1 / 512
    assert sample_weight(64, 8, 2, AlgorithmConfig(aggregation="mean")) == 1 / 1024
    assert sample_weight(64, 8, 2, AlgorithmConfig(method="gspo", aggregation="mean")) == 1 / 512


@pytest.mark.parametrize("kl_on, expected_count", [("own", 1), ("all", 2)])
def test_kl_to_the_initial_policy_against_its_formula(kl_on, expected_count):
    token_logprob = torch.tensor([-0.2, -0.4, -1.0], requires_grad=True)
    reference = torch.tensor([-0.25, -0.1, -0.5])
    sequences = packed([2, 1], [True, False], [1.0, 1.0], [0.0, 0.0])
    config = AlgorithmConfig(kl_coef=0.1, kl_on=kl_on)
    penalty, pair = kl_penalty(token_logprob, reference, sequences, 0.5, config)
    per_token = [math.exp(d) - d - 1 for d in (-0.05, 0.3, 0.5)]
    expected = (per_token[0] + per_token[1]) / 2 + (per_token[2] if kl_on == "all" else 0.0)
    assert penalty.item() == pytest.approx(0.1 * 0.5 * expected, rel=1e-5)
    assert pair.tolist() == pytest.approx([expected, expected_count], rel=1e-5)
    penalty.backward()
    # d/dlogprob of exp(r - l) - (r - l) - 1 is 1 - exp(r - l)
    assert token_logprob.grad[0].item() == pytest.approx(0.1 * 0.5 * (1 - math.exp(-0.05)) / 2, rel=1e-4)
    assert (token_logprob.grad[2].item() == 0.0) == (kl_on == "own")
