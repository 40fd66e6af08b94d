"""The objective under its public name: hand numbers, autograd of a float64 formula, the loss of an update, the KL."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from method_cases import sequence_objective
from repository import ROOT

from hacpo_mega.agent.policy_loss import PolicyLoss, scores_of_update
from hacpo_mega.algorithm import kl_penalty, mean_logprobs, objective_bounds, sample_weight
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.records import MicroBatch, Sample, UpdateStats

# Unit roundoff of float32 and float64. A tolerance is a number of roundings.
U32, U64 = 2.0**-24, 2.0**-53
OWN = f"{ROOT / 'tests' / 'support' / 'own_code.py'}:clipped"


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_worked_cross_ratio_by_hand():
    """s = .9, delta = .2, delta_step = .025, alpha = 1; A = 1 so the numbers are the weights."""
    seq_logprob, source, cross = tensor(math.log(0.9)), tensor(0.0), torch.tensor([False])
    config = AlgorithmConfig(delta=0.2, delta_step=0.025, alpha=1.0)
    loss, grad, stats = sequence_objective(seq_logprob, source, tensor(1.0), cross, 3, config)
    assert loss.item() == pytest.approx(-0.81, rel=16 * U64)
    assert grad.item() == pytest.approx(-0.81, rel=16 * U64)
    assert stats.cross_inside.tolist() == [1.0, 1.0]
    loss, grad, stats = sequence_objective(seq_logprob, source, tensor(1.0), cross, 5, config)
    assert loss.item() == pytest.approx(-(0.925**2), rel=16 * U64)
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
    # exp, pow and a handful of products, on both sides; pow multiplies the relative error of its base by alpha
    torch.testing.assert_close(loss, expected.detach(), rtol=(1 + alpha) * 16 * U64, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=(1 + alpha) * 16 * U64, atol=0)


def micro_batch(lengths, is_self, advantage, source, divisors=None) -> MicroBatch:
    """A packed micro-batch as the loss of an update reads it: no tokens, only what is known of its samples."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    samples = [
        Sample(
            prompt_ids=np.zeros(1, np.int32),
            answer_ids=np.zeros(length, np.int32),
            num_trained=length,
            source=b,
            is_self=is_self[b],
            prompt_index=b,
            rollout_index=0,
            advantage=advantage[b],
            source_logprob=source[b],
            length=float((divisors or lengths)[b]),
        )
        for b, length in enumerate(lengths)
    ]
    return MicroBatch(
        tokens_T=none,
        positions_T=none,
        cu_seqlens=starts,
        prefixes_S2=none,
        rows_R=none,
        targets_R=none,
        row_cu_seqlens_B=starts,
        sequences=tuple(samples),
        num_tokens=0,
    )


def test_every_token_gets_its_sequences_coefficient():
    """d L / d logprob_t = -(A s / L) own, -(omega A) s c^alpha / L cross."""
    token_logprob = torch.tensor([-0.2, -0.4, -0.3, -0.5, -0.7], requires_grad=True)
    batch = micro_batch([2, 3], [True, False], [1.5, -2.0], [-0.3, -0.45])
    loss, report = PolicyLoss(0, 0.25, AlgorithmConfig(alpha=2.0, delta=0.2), reference={})(token_logprob, batch)
    loss.backward()
    s = math.exp(-0.5 - -0.45)
    own, cross = -1.5 / 2 * 0.25, 2.0 * s * s**2 / 3 * 0.25
    # s is off by the roundings of the tokens, their mean and the source, s^3 by 3 times that
    torch.testing.assert_close(token_logprob.grad, torch.tensor([own, own, cross, cross, cross]), rtol=16 * U32, atol=0)
    assert report.terms.ratio_B.tolist() == pytest.approx([1.0, s], rel=8 * U32)
    assert report.key_B3.tolist() == [[0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_a_first_update_computes_the_same_with_and_without_scores(method):
    """Loss, gradient and terms to the last bit, for means that round; in a later update it would be another policy."""
    values = torch.tensor([-0.21, -0.43, -0.37, -0.59, -0.71])
    mean = [((-0.21 - 0.43) / 2), ((-0.37 - 0.59 - 0.71) / 3)]
    unscored = micro_batch([2, 3], [True, True], [1.5, -2.0], [None, None])
    means = mean_logprobs(values, unscored.row_cu_seqlens_B)
    assert means.tolist() == pytest.approx(mean, rel=4 * U32)
    scored = dataclasses.replace(unscored, sequences=tuple(
        dataclasses.replace(sample, source_logprob=value, old_logprobs=old.numpy())
        for sample, value, old in zip(unscored.sequences, means.tolist(), values.split([2, 3]))
    ))  # fmt: skip
    seen = []
    for batch in (scored, unscored):
        token_logprob = values.clone().requires_grad_()
        loss, report = PolicyLoss(0, 0.25, AlgorithmConfig(method=method), reference={})(token_logprob, batch)
        loss.backward()
        seen.append((loss, token_logprob.grad, *report.terms))
    assert seen[0][1].abs().min() > 0 and all(torch.equal(*pair) for pair in zip(*seen))
    update = UpdateStats((report,), 0.0, 1.0, 1.0, False, 1, 2, 5, 5)
    found = scores_of_update(update)
    assert {key: score.mean_logprob for key, score in found.items()} == {
        (0, 0): means[0].item(),
        (1, 0): means[1].item(),
    }
    assert found[1, 0].token_logprobs.tolist() == values[2:].tolist()
    with pytest.raises(AssertionError):
        PolicyLoss(1, 0.25, AlgorithmConfig(method=method), reference={})(values, unscored)


def token_weighted(batch: MicroBatch, weights: list[float]) -> MicroBatch:
    """The batch with the weights on the tokens of its first sample."""
    first = dataclasses.replace(batch.sequences[0], token_weights=np.array(weights, dtype=np.float32))
    return dataclasses.replace(batch, sequences=(first, *batch.sequences[1:]))


def test_a_tokens_weight_scales_its_gradient_and_leaves_the_loss():
    values = torch.tensor([-0.2, -0.4, -0.3, -0.5, -0.7])
    batch = micro_batch([2, 3], [True, False], [1.5, -2.0], [-0.3, -0.45])
    seen = []
    for part in (batch, token_weighted(batch, [0.25, 1.7])):
        token_logprob = values.clone().requires_grad_()
        loss, report = PolicyLoss(1, 0.25, AlgorithmConfig(), reference={})(token_logprob, part)
        loss.backward()
        seen.append((loss.detach(), report.terms.ratio_B, token_logprob.grad))
    (loss, ratio_B, grad), (weighted_loss, weighted_ratio_B, weighted_grad) = seen
    assert torch.equal(weighted_loss, loss) and torch.equal(weighted_ratio_B, ratio_B)
    assert grad.count_nonzero() == 5
    assert torch.equal(weighted_grad, grad * torch.tensor([0.25, 1.7, 1.0, 1.0, 1.0])), "others' tokens keep weight 1"


def test_a_tokens_weight_scales_its_gradient_where_every_token_has_a_ratio():
    values, old = torch.tensor([-0.2, -0.4]), np.float32([-0.25, -0.4])
    batch = micro_batch([2], [True], [1.5], [-0.3])
    batch = dataclasses.replace(batch, sequences=(dataclasses.replace(batch.sequences[0], old_logprobs=old),))
    seen = []
    for part in (batch, token_weighted(batch, [0.25, 1.7])):
        token_logprob = values.clone().requires_grad_()
        loss, _ = PolicyLoss(0, 0.25, AlgorithmConfig(method="grpo"), reference={})(token_logprob, part)
        loss.backward()
        seen.append((loss.detach(), token_logprob.grad))
    (loss, grad), (weighted_loss, weighted_grad) = seen
    assert torch.equal(weighted_loss, loss)
    assert grad.count_nonzero() == 2
    assert torch.equal(weighted_grad, grad * torch.tensor([0.25, 1.7]))


def test_a_tokens_weight_is_not_one_of_its_kl_to_the_initial_policy():
    batch = micro_batch([2], [True], [0.0], [-0.3])  # no advantage: what is left is the KL
    reference = {(0, 0, 0): np.float32([-0.1, -0.9])}
    config, grads = AlgorithmConfig(kl_coef=0.1), []
    for part in (batch, token_weighted(batch, [0.25, 1.7])):
        token_logprob = torch.tensor([-0.2, -0.4], requires_grad=True)
        PolicyLoss(0, 1.0, config, reference)(token_logprob, part)[0].backward()
        grads.append(token_logprob.grad)
    assert grads[0].count_nonzero() == 2
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"method": "naive", "objective": OWN}])
def test_ratio_length_source_divides_by_the_sources_count(options):
    """In the kernels' objective, and in the log ratio that a function of the user's gets."""
    token_logprob = torch.tensor([-0.2, -0.4], requires_grad=True)
    batch = micro_batch([2], [False], [1.0], [-0.1], divisors=[4.0])
    loss, report = PolicyLoss(0, 1.0, AlgorithmConfig(**options), reference={})(token_logprob, batch)
    loss.backward()
    s = math.exp(-0.6 / 4 - -0.1)
    assert report.terms.ratio_B.item() == pytest.approx(s, rel=8 * U32)
    torch.testing.assert_close(token_logprob.grad, torch.tensor([-s / 4, -s / 4]), rtol=16 * U32, atol=0)


def test_the_bounds_are_those_of_the_configuration():
    own = {"eps_low": 0.1, "eps_high": 0.2, "log_ratio_clamp": 6.0}
    band = {"delta": 0.3, "delta_step": 0.04, "alpha": 2.5}
    found = dataclasses.asdict(objective_bounds(AlgorithmConfig(**own, **band)))
    assert found == {**own, **band, "cross": "band", "high": 1.0, "ratio_cap": 2.0, "divergence_limit": 0.2}
    open_band = {"delta": 1.0, "delta_step": 0.0, "high": math.inf}
    assert (
        dataclasses.asdict(objective_bounds(AlgorithmConfig(**own, alpha=2.5, cross_clip="none"))) == found | open_band
    )
    rival = objective_bounds(AlgorithmConfig(method="f_tis", ratio_cap=3.0, divergence_limit=0.7))
    assert (rival.cross, rival.ratio_cap, rival.divergence_limit) == ("truncated", 3.0, 0.7)
    assert objective_bounds(AlgorithmConfig(method="sgt")).cross == "likelihood"
    assert objective_bounds(AlgorithmConfig(method="naive")).cross == "own"


def test_weight_of_a_sample():
    assert sample_weight(64, 8, 2, AlgorithmConfig(aggregation="sum")) == 1 / 512
    assert sample_weight(64, 8, 2, AlgorithmConfig(aggregation="mean")) == 1 / 1024
    assert sample_weight(64, 8, 2, AlgorithmConfig(method="gspo", aggregation="mean")) == 1 / 512


@pytest.mark.parametrize("kl_on, expected_count", [("own", 1), ("all", 2)])
def test_kl_to_the_initial_policy_against_its_formula(kl_on, expected_count):
    token_logprob = torch.tensor([-0.2, -0.4, -1.0], requires_grad=True)
    reference = torch.tensor([-0.25, -0.1, -0.5])
    starts, is_self = torch.tensor([0, 2, 3]), torch.tensor([True, False])
    config = AlgorithmConfig(kl_coef=0.1, kl_on=kl_on)
    penalty, pair = kl_penalty(token_logprob, reference, starts, is_self, 0.5, config)
    per_token = [math.exp(d) - d - 1 for d in (-0.05, 0.3, 0.5)]
    expected = (per_token[0] + per_token[1]) / 2 + (per_token[2] if kl_on == "all" else 0.0)
    # Numbers near 1 cancel: every token is off by a few roundings of 1, however small its KL is.
    assert penalty.item() == pytest.approx(0.1 * 0.5 * expected, abs=0.1 * 0.5 * 16 * U32)
    assert pair.tolist() == pytest.approx([expected, expected_count], abs=16 * U32)
    penalty.backward()
    # d/dlogprob of exp(r - l) - (r - l) - 1 is 1 - exp(r - l)
    slope = 0.1 * 0.5 * (1 - math.exp(-0.05)) / 2
    assert token_logprob.grad[0].item() == pytest.approx(slope, abs=0.1 * 0.5 * 8 * U32)
    assert (token_logprob.grad[2].item() == 0.0) == (kl_on == "own")
