"""packed_objective, both backends, against autograd through ten lines of float64, hand numbers and counting."""

import math
from dataclasses import replace
from traceback import format_exception
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from hacpo_kernels import objective_from_mean, objective_stats, packed_objective, segment_sum
from hacpo_kernels.bounds import CrossObjective
from kernel_cases import BACKENDS, DEVICE, UNIT, assert_within
from objective_cases import BOUNDS, make_batch, oracle
from triton.errors import TritonError

# numpy warns of lanes that Triton masks away afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LENGTHS = [3, 0, 1, 511, 512, 513, 1023, 1024, 1025, 1, 1, 0, 7, 40, 2, 2, 2, 2, 2, 2, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"alpha": 0.0}, {"alpha": 3.0, "delta": 0.1, "delta_step": 0.01}, {"delta": 1.0}, {"log_ratio_clamp": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("update_index", (0, 3, 50))
def test_loss_and_gradient_match_autograd(update_index, changes, backend):
    bounds = replace(BOUNDS, **changes)
    tokens, source, advantage, is_self, cu_seqlens = make_batch(LENGTHS)
    tokens.requires_grad_()
    want = oracle(tokens, LENGTHS, source, advantage, is_self, update_index, bounds)
    loss, coefficient, terms = packed_objective(
        tokens, cu_seqlens, source, advantage, is_self, update_index=update_index, bounds=bounds, backend=backend
    )
    loss.sum().backward()
    assert_within(loss, want.loss, want.relative * want.loss.abs())
    assert_within(coefficient, want.coefficient, want.relative * want.coefficient.abs())
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    assert torch.equal(tokens.grad, coefficient[owner.to(DEVICE)])
    assert torch.equal(terms.loss_B, loss.detach())
    # The weight is what the gradient is made of: coefficient = -w A / length.
    made = -terms.weight_B * advantage / torch.tensor(LENGTHS, device=DEVICE).clamp(min=1)
    assert_within(made, want.coefficient, want.relative * want.coefficient.abs())


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_example_of_the_band(backend):
    """s = 0.9, delta 0.2, step 0.025: at update 3 the band starts at 0.875 and the weight is 0.81; at 5, at 0.925."""
    tokens = torch.full((4,), math.log(0.9) - 1.0, dtype=torch.float64, device=DEVICE)
    source = torch.full((1,), -1.0, dtype=torch.float64, device=DEVICE)
    advantage, is_self = torch.ones_like(source), torch.zeros(1, dtype=torch.bool, device=DEVICE)
    arguments = (tokens, torch.tensor([0, 4]), source, advantage, is_self)
    exactly = {"rel": 64 * UNIT[torch.float64], "abs": 0.0}
    loss, coefficient, terms = packed_objective(*arguments, update_index=3, bounds=BOUNDS, backend=backend)
    assert loss.item() == pytest.approx(-0.81, **exactly)
    assert coefficient.item() == pytest.approx(-0.81 / 4, **exactly)
    assert objective_stats(terms).weight_cross.tolist() == pytest.approx([0.81, 1.0], **exactly)
    loss, coefficient, terms = packed_objective(*arguments, update_index=5, bounds=BOUNDS, backend=backend)
    assert loss.item() == pytest.approx(-(0.925**2), **exactly)
    assert coefficient.item() == 0.0
    assert objective_stats(terms).cross_below.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("advantage", (2.0, -2.0))
def test_borders_pass_the_gradient_and_the_next_number_does_not(advantage, backend):
    """Cross band [0.8, 1], own clip [0.9, 1.2]: exactly on a border and one float64 step of s beyond it."""
    edges = [0.8 - 1e-12, 0.8 + 1e-15, 1.0, 1.0 + 1e-12, 0.9 - 1e-12, 0.9 + 1e-12, 1.2 - 1e-12, 1.2 + 1e-12]
    is_self = torch.tensor([False] * 4 + [True] * 4, device=DEVICE)
    tokens = torch.tensor(edges, dtype=torch.float64, device=DEVICE).log()
    _, coefficient, _ = packed_objective(
        tokens, torch.arange(9), torch.zeros_like(tokens), torch.full_like(tokens, advantage), is_self,
        update_index=0, bounds=replace(BOUNDS, eps_low=0.1, eps_high=0.2), backend=backend,
    )  # fmt: skip
    losing_low, losing_high = advantage < 0, advantage > 0  # an own answer is clipped only where that lowers the gain
    expected = [False, True, True, False, not losing_low, True, True, not losing_high]
    assert (coefficient != 0).tolist() == expected


def counted_by_hand(lengths, tokens, source, advantage, is_self, low):
    """The sums and counts of ObjectiveStats, one sequence after the other."""
    sums = {}

    def add(name, value):
        total, count = sums.get(name, (0.0, 0))
        sums[name] = (total + value, count + 1)

    for b, segment in enumerate(tokens.cpu().split(lengths)):
        add("nonfinite", 0.0)
        if lengths[b] == 0:
            continue
        s, A = math.exp(segment.mean().item() - source[b].item()), advantage[b].item()
        if is_self[b]:
            clipped = s * A > min(max(s, 1 - 3e-4), 1 + 4e-4) * A
            add("ratio_self", s)
            add("clipped_self", float(clipped))
            add("gradient_sq_self", 0.0 if clipped else (s * A) ** 2)
            add("gradient_abs_self", 0.0 if clipped else s * abs(A))
            add("gradient_positive_self", 0.0 if clipped or A < 0 else s * A)
        else:
            c, inside = min(max(s, low), 1.0), low <= s <= 1.0
            add("ratio_cross", s)
            add("cross_below", float(s < low))
            add("cross_inside", float(inside))
            add("cross_above", float(s > 1.0))
            add("weight_cross", inside * s * c)
            add("weight_sq_cross", inside * (s * c) ** 2)
            add("gradient_sq_cross", inside * (s * c * A) ** 2)
            add("gradient_abs_cross", inside * s * c * abs(A))
            add("gradient_positive_cross", inside * s * c * A if A > 0 else 0.0)
    return sums


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_match_counting_and_add_up_over_any_groups(backend):
    """Over the whole batch, over micro-batches of it, and over groups picked from its terms, as sources are."""
    lengths = [int(x) for x in torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(3))]
    tokens, source, advantage, is_self, cu_seqlens = make_batch(lengths, seed=4)
    want = counted_by_hand(lengths, tokens, source, advantage, is_self, low=0.85)

    def terms_of(first, last):
        start, stop = cu_seqlens[[first, last]].tolist()
        one = slice(first, last)
        return packed_objective(
            tokens[start:stop], cu_seqlens[first : last + 1] - start, source[one], advantage[one], is_self[one],
            update_index=2, bounds=BOUNDS, backend=backend,
        )[2]  # fmt: skip

    terms = terms_of(0, 300)
    whole = objective_stats(terms)
    parts = [objective_stats(terms_of(*ends)) for ends in ((0, 100), (100, 101), (101, 300))]
    group = torch.arange(300, device=DEVICE) % 3
    groups = [objective_stats(terms.of(group == g)) for g in range(3)]
    # sums of 300 numbers, each with a few dozen roundings behind it
    exactly = {"rel": 400 * UNIT[torch.float64], "abs": 0.0}
    for name, pair in want.items():
        assert getattr(whole, name).tolist() == pytest.approx(list(pair), **exactly), name
        for several in (parts, groups):
            assert sum(getattr(part, name) for part in several).tolist() == pytest.approx(list(pair), **exactly), name
    pairs = {name for name in whole._fields if not name.endswith(("_min", "_max"))}
    assert want.keys() == pairs, "every statistic is counted here"
    kept = torch.tensor(lengths) > 0
    ratios = terms.ratio_B.cpu()
    assert ratios.isnan().tolist() == (~kept).tolist()
    own, cross = ratios[kept & is_self.cpu()], ratios[kept & ~is_self.cpu()]
    extremes = [whole.ratio_self_min, whole.ratio_self_max, whole.ratio_cross_min, whole.ratio_cross_max]
    assert [x.item() for x in extremes] == [own.min(), own.max(), cross.min(), cross.max()]
    highest = max(min(max(s, 0.85), 1.0) * s for s in cross.tolist() if 0.85 <= s <= 1.0)
    assert whole.weight_cross_max.item() == pytest.approx(highest, **exactly)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unchanged_policy_has_ratio_one_to_the_last_bit(backend):
    """The source's scalar is a float32 mean; comparing in more bits would put half of the cross answers above 1."""
    lengths = [int(x) for x in torch.randint(1, 900, (64,), generator=torch.Generator().manual_seed(5))]
    tokens, _, advantage, _, cu_seqlens = make_batch(lengths, dtype=torch.float32)
    source = (segment_sum(tokens, cu_seqlens, backend=backend) / torch.tensor(lengths, device=DEVICE)).float()
    is_self = torch.arange(64, device=DEVICE) % 2 == 0
    _, _, terms = packed_objective(
        tokens, cu_seqlens, source, advantage, is_self, update_index=0, bounds=BOUNDS, backend=backend
    )
    stats = objective_stats(terms)
    assert (terms.ratio_B == 1.0).all()
    assert stats.clipped_self.tolist() == [0.0, 32.0]
    assert stats.cross_inside.tolist() == [32.0, 32.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_of_float32_tokens_is_exact(backend):
    """4,096 tokens around -12 with a mean that a running float32 sum misses by more than the clip can bear."""
    tokens = -12 + torch.randn(4096, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    want = tokens.double().sum().item()
    got = segment_sum(tokens, torch.tensor([0, 4096]), backend=backend)
    assert_within(
        got,
        torch.tensor([want], dtype=torch.float64),
        2 * 4096 * UNIT[torch.float64] * tokens.double().abs().sum().item(),
    )
    one_by_one = np.add.accumulate(tokens.cpu().numpy())[-1]  # in float32
    assert abs(one_by_one - want) / 4096 > 1e-8


@pytest.mark.parametrize("backend", BACKENDS)
def test_length_is_the_denominator(backend):
    lengths = [4, 6, 5]
    tokens, source, advantage, is_self, cu_seqlens = make_batch(lengths, spread=0.01)
    given = torch.tensor([8.0, 3.0, 5.0])
    source -= 0.3
    bounds = replace(BOUNDS, delta=1.0)
    want = oracle(tokens, lengths, source, advantage, is_self, 0, bounds, given.tolist())
    tokens.requires_grad_()
    loss, _, _ = packed_objective(
        tokens, cu_seqlens, source, advantage, is_self, update_index=0, bounds=bounds, length=given, backend=backend
    )
    loss.sum().backward()
    assert_within(loss, want.loss, want.relative * want.loss.abs())
    allowed = want.relative.repeat_interleave(torch.tensor(lengths)) * want.token_grad.abs()
    assert_within(tokens.grad, want.token_grad, allowed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_length_of_zero_is_an_empty_sequence(backend):
    """A sample whose source had no tokens left to count: it is learned nothing from, and in no mean."""
    tokens, source, advantage, is_self, cu_seqlens = make_batch([4, 6])
    loss, coefficient, terms = packed_objective(
        tokens, cu_seqlens, source, advantage, is_self, update_index=0, bounds=BOUNDS, backend=backend,
        length=torch.tensor([0.0, 6.0]),
    )  # fmt: skip
    stats = objective_stats(terms)
    assert loss[0] == coefficient[0] == 0
    assert terms.ratio_B.isnan().tolist() == [True, False]
    assert (stats.ratio_self + stats.ratio_cross)[1] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", (True, False))
def test_a_nan_is_counted_and_never_becomes_a_silent_zero(own, backend):
    tokens, source, advantage, is_self, cu_seqlens = make_batch([2, 3, 2])
    is_self[1] = own
    tokens[3] = torch.nan
    loss, coefficient, terms = packed_objective(
        tokens, cu_seqlens, source, advantage, is_self, update_index=0, bounds=BOUNDS, backend=backend
    )
    stats = objective_stats(terms)
    assert loss.isnan().tolist() == coefficient.isnan().tolist() == [False, True, False]
    assert stats.nonfinite.tolist() == [1.0, 3.0]
    assert (stats.ratio_self + stats.ratio_cross).isfinite().all()
    assert (stats.ratio_self + stats.ratio_cross)[1].item() == 2.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ratio_beyond_the_clamp_is_finite_and_has_no_gradient(backend):
    tokens = torch.tensor([-300.0, -1.0, -torch.inf], dtype=torch.float64, device=DEVICE)
    source = torch.tensor([-1.0, -300.0, -1.0], dtype=torch.float64, device=DEVICE)
    is_self = torch.tensor([True, True, False], device=DEVICE)
    loss, coefficient, terms = packed_objective(
        tokens, torch.arange(4), source, -torch.ones_like(tokens), is_self, update_index=0, bounds=BOUNDS,
        backend=backend,
    )  # fmt: skip
    assert loss.isfinite().all()
    assert loss[1].item() == pytest.approx(math.exp(20.0), rel=8 * UNIT[torch.float64])
    assert coefficient.tolist() == terms.weight_B.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch(backend):
    nothing = torch.zeros(0, device=DEVICE)
    loss, coefficient, terms = packed_objective(
        nothing, torch.zeros(1, dtype=torch.int32), nothing, nothing, nothing.bool(), update_index=0, bounds=BOUNDS,
        backend=backend,
    )  # fmt: skip
    stats = objective_stats(terms)
    assert loss.shape == coefficient.shape == (0,)
    assert stats.ratio_self.tolist() == [0.0, 0.0]
    assert [stats.ratio_cross_min.item(), stats.ratio_cross_max.item()] == [math.inf, -math.inf]


def test_sequence_level_part_is_differentiated_rightly():
    """objective_from_mean's own gradient against finite differences of its own loss, away from the kinks."""
    mean = torch.tensor([-1.0, -1.1, -1.05, -0.9], dtype=torch.float64)
    source = torch.full_like(mean, -1.0)
    advantage = torch.tensor([1.0, 2.0, -1.0, -3.0], dtype=torch.float64)
    is_self = torch.tensor([True, False, False, True])
    bounds = replace(BOUNDS, alpha=2.0)

    def at(step):
        return objective_from_mean(mean + step, source, advantage, is_self, update_index=1, bounds=bounds)

    # sg[c]^alpha is held still in the gradient: a finite difference of c^(1 + alpha) is (1 + alpha) times too large.
    slope = (at(1e-7)[0] - at(-1e-7)[0]) / 2e-7
    expected = torch.where(is_self, slope, slope / 3.0)
    # two losses of up to 3, each a few roundings off, over the step; the curvature adds 27 * step^2
    assert_within(at(0.0)[1], expected, 2 * 8 * UNIT[torch.float64] * 3 / 2e-7 + 27 * 1e-14)
    assert (expected != 0).tolist() == [True, True, True, True]


def example_of(cross, backend, **changes):
    """Loss and gradient of three answers of others with this objective: s in and below the band, A of both signs."""
    tokens = torch.tensor([-0.1, -0.6, -0.4], dtype=torch.float64, device=DEVICE)
    source, advantage = torch.zeros_like(tokens), torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64, device=DEVICE)
    bounds = replace(BOUNDS, cross=cross, ratio_cap=0.5, divergence_limit=0.2, **changes)
    is_self = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    loss, coefficient, _ = packed_objective(
        tokens, torch.arange(4), source, advantage, is_self, update_index=0, bounds=bounds, backend=backend
    )
    return (*loss.tolist(), *coefficient.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
def test_following_an_answer_has_no_ratio_to_bound(backend):
    """L = -A mean log-prob, however unlikely the learner finds a peer's answer; an own one ends at the clamp."""
    lengths, A, is_self = (3, 2, 4, 1), [1.0, 0.5, 1.0, -2.0], [False, False, True, False]
    tokens = (-torch.arange(1.0, 11.0, dtype=torch.float64)).requires_grad_()
    arguments = torch.tensor([0.0, -3.0, 0.0, 20.0], dtype=torch.float64), torch.tensor(A), torch.tensor(is_self)
    found, coefficient, terms = packed_objective(
        tokens.detach().to(DEVICE), torch.tensor([0, *lengths]).cumsum(0), *(x.to(DEVICE) for x in arguments),
        update_index=0, bounds=replace(BOUNDS, cross="likelihood", log_ratio_clamp=1.0), backend=backend,
    )  # fmt: skip
    parts = tokens.split(lengths)
    losses = [-a * part.mean() for a, part, own in zip(A, parts, is_self) if not own]
    torch.stack(losses).sum().backward()
    slopes = [part[0].item() for part in tokens.grad.split(lengths)]
    assert coefficient.tolist() == pytest.approx(slopes, rel=8 * UNIT[torch.float64])
    assert [loss for loss, own in zip(found.tolist(), is_self) if not own] == pytest.approx(
        [loss.item() for loss in losses], rel=8 * UNIT[torch.float64]
    )
    assert terms.weight_B.tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_objective_differs_from_every_other(backend):
    """A name that both backends know, but that shares another's branch, would train as that other."""
    names = get_args(CrossObjective)
    assert len({example_of(cross, backend) for cross in names}) == len(names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_objective_that_a_backend_lacks_is_an_error(backend, monkeypatch):
    """As if a new name had been given to the configuration, and its equation to nobody."""
    monkeypatch.setattr("hacpo_kernels.bounds.CrossObjective", Literal["band", "signed_band"])
    with pytest.raises((ValueError, TritonError)) as found:
        example_of("signed_band", backend)
    assert "objective that the" in "".join(format_exception(found.value))  # compiled, the assertion is a cause
