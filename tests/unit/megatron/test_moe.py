"""A layer of experts by itself: its products, its gradients against a loop in float64, what it counts."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from actor_cases import one_rank
from expert_products import COUNTS, compare_products
from tiny_models import make_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model import moe, router
from hacpo_mega.megatron.model.layers import RMSNorm
from hacpo_mega.megatron.model.model import transformer_config
from hacpo_mega.megatron.model.moe import expert_layer
from hacpo_mega.megatron.model.platform import megatron_platform
from hacpo_mega.megatron.train.schedule import expert_load
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.records import ExpertLoad

CASES = {"normalised": (True, 2), "as they are": (False, 3), "one expert": (False, 1)}
AGREED = 2e-6


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with one_rank():
        initialize_parallel(1, 1, seed=1, ep=1)
        yield


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_grouped_product_is_the_loop(counts, dtype):
    """torch's kernel for CUDA has a form for the CPU."""
    compare_products(COUNTS[counts], dtype, "cpu")


@pytest.mark.parametrize("product", [moe.looped_product, moe.grouped_product], ids=["loop", "grouped"])
def test_an_update_of_many_micro_batches_is_summed_in_float32(product):
    """Rounded to bf16 per micro-batch, as autograd would hand it over, the sum of 32 is off by 1.7e-3."""
    generator, counts = torch.Generator().manual_seed(4), torch.tensor([40, 0, 24])
    weight = torch.randn(3 * 24, 16, generator=generator).bfloat16().requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    exact = torch.zeros(3, 24, 16, dtype=torch.float64)
    for _ in range(32):
        rows, grad = (torch.randn(64, size, generator=generator).bfloat16() for size in (16, 24))
        product(rows, weight, counts).backward(grad)
        if not weight.grad_added_to_main_grad:  # Megatron's hook
            weight.main_grad += weight.grad
        weight.grad = None
        for total, *parts in zip(exact, grad.double().split(counts.tolist()), rows.double().split(counts.tolist())):
            total += parts[0].T @ parts[1]
    error = (weight.main_grad.double() - exact.flatten(0, 1)).norm() / exact.norm()
    assert error < 1e-6
    assert not weight.main_grad.view(3, 24, 16)[1].any()


def make_layer(folder, case: str, family: str = "qwen3_moe", **overrides: float) -> torch.nn.Module:
    normalises, per_token = CASES[case]
    architecture = dataclasses.replace(
        Architecture.from_folder(make_model(folder, family, num_experts=6, experts_per_token=per_token)),
        normalises_experts=normalises,
    )
    config = transformer_config(architecture, Layout(), dtype=torch.float32, overrides=overrides)
    with megatron_platform():
        layer = expert_layer(architecture, RMSNorm)(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return layer


def by_hand(layer: torch.nn.Module, hidden_nH: torch.Tensor, case: str) -> torch.Tensor:
    """Token by token, expert by expert, by the formula of Qwen3-MoE and Mixtral."""
    normalises, per_token = CASES[case]
    router, gate_up, down = layer.router.weight, layer.experts.gate_up.weight, layer.experts.down.weight
    outputs = []
    for token in hidden_nH:
        shares = (router @ token).softmax(dim=0)
        best = shares.argsort(descending=True)[:per_token].tolist()
        total = sum(shares[expert] for expert in best) if normalises else 1.0
        output = torch.zeros_like(token)
        for expert in best:
            gate, up = (gate_up.chunk(6)[expert] @ token).chunk(2)
            output = output + shares[expert] / total * (down.chunk(6)[expert] @ (gate * gate.sigmoid() * up))
        outputs.append(output)
    return torch.stack(outputs)


def errors(layer: torch.nn.Module, case: str) -> dict[str, float]:
    """Distances of output and gradients from those by hand in float64, relative to their size."""
    hidden = torch.randn(23, 1, 64, generator=torch.Generator().manual_seed(6)).requires_grad_()
    output, bias = layer(hidden)
    assert bias is None
    output.square().sum().backward()
    found = {"output": output.detach()[:, 0], "hidden": hidden.grad[:, 0]}
    found |= {name: weight.grad for name, weight in layer.named_parameters()}
    layer.zero_grad()
    exact = hidden.detach()[:, 0].double().requires_grad_()
    expected = by_hand(layer.double(), exact, case)
    expected.square().sum().backward()
    wanted = {"output": expected.detach(), "hidden": exact.grad}
    wanted |= {name: weight.grad for name, weight in layer.named_parameters()}
    return {name: float((found[name] - its).norm() / its.norm()) for name, its in wanted.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_its_formula(world, tmp_path, case):
    found = errors(make_layer(tmp_path, case), case)
    # A single share that is not made to add up to 1 still has a gradient; one that is has none.
    assert found.keys() == {"output", "hidden", "router.weight", "experts.gate_up.weight", "experts.down.weight"}
    assert max(found.values()) < AGREED, found


@pytest.mark.parametrize(
    ("owner", "method", "wrong"),
    [
        (router._Logits, "backward", lambda theirs, ctx, grad: (theirs(ctx, grad)[0], 1.001 * theirs(ctx, grad)[1])),
        (moe._Combine, "backward", lambda theirs, ctx, grad: (*theirs(ctx, grad)[:2], 0.999 * theirs(ctx, grad)[2])),
        (moe._Spread, "backward", lambda theirs, ctx, grad: (1.001 * theirs(ctx, grad)[0], None, None)),
        (moe._Looped, "backward", lambda theirs, ctx, grad: (theirs(ctx, grad)[0], theirs(ctx, grad)[1].flip(0), None)),
    ],
    ids=["router", "shares", "rows", "experts"],
)
def test_that_test_sees_a_gradient_that_is_slightly_wrong(world, tmp_path, monkeypatch, owner, method, wrong):
    layer, theirs = make_layer(tmp_path, "normalised"), getattr(owner, method)
    monkeypatch.setattr(owner, method, staticmethod(lambda ctx, grad: wrong(theirs, ctx, grad)))
    assert max(errors(layer, "normalised").values()) > 100 * AGREED


def auxiliary_losses(logits_nE: torch.Tensor, experts_nk: torch.Tensor, *, sigmoid: bool) -> list[torch.Tensor]:
    """Losses of a micro-batch, token by token: E / (k T^2) sum_e f_e sum_t p_te, and logsumexp^2."""
    (num_tokens, num_experts), per_token = logits_nE.shape, experts_nk.shape[1]
    balance = z = torch.zeros((), dtype=torch.float64)
    for logits in logits_nE:
        probs = logits.sigmoid() / logits.sigmoid().sum() if sigmoid else logits.softmax(dim=0)
        load = [int((experts_nk == expert).sum()) for expert in range(num_experts)]
        balance = balance + sum(count * prob for count, prob in zip(load, probs))
        z = z + logits.exp().sum().log() ** 2
    return [balance * num_experts / (per_token * num_tokens**2), z / num_tokens]


# By (moe_aux_loss_coeff, moe_z_loss_coeff).
COEFFICIENTS = [(0.3, 0.0), (0.0, 0.02), (0.3, 0.02)]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(("aux", "z"), COEFFICIENTS)
def test_auxiliary_losses_are_their_formulas_in_the_gradient(world, tmp_path, family, aux, z):
    """23 tokens of 31 are read, of an update of 50; four of them go where they are told to."""
    layer = make_layer(tmp_path, "normalised", family, moe_aux_loss_coeff=aux, moe_z_loss_coeff=z)
    hidden_nH = torch.randn(31, 64, generator=torch.Generator().manual_seed(6)).requires_grad_()
    told_nk = torch.full((31, 2), router.UNROUTED, dtype=torch.int16)
    told_nk[:4], told_nk[23:] = torch.tensor([0, 1], dtype=torch.int16), router.PADDING
    layer.router(hidden_nH, told_nk)
    assert not layer.router.losses_2.any(), "outside of an update"
    layer.router.num_tokens = 50
    shares_nk, experts_nk = layer.router(hidden_nH, told_nk)
    (0.0 * shares_nk.sum()).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_nH, layer.router.weight)]
    losses = auxiliary_losses(exact[0][:23] @ exact[1].T, experts_nk[:23], sigmoid=family == "glm4_moe")
    (23 / 50 * (aux * losses[0] + z * losses[1])).backward()
    for found, expected in zip((hidden_nH, layer.router.weight), exact, strict=True):
        assert (found.grad - expected.grad).norm() < AGREED * expected.grad.norm()
    expected = [float(loss.detach()) * 23 if coefficient else 0.0 for loss, coefficient in zip(losses, (aux, z))]
    assert layer.router.losses_2.tolist() == pytest.approx(expected, rel=AGREED)


def test_the_balance_is_that_of_transformers(world, tmp_path):
    """transformers counts every one of a token's k experts as a whole, so that its loss is k times as large."""
    layer = make_layer(tmp_path, "as they are", moe_aux_loss_coeff=1.0)
    layer.router.num_tokens = 23
    hidden_nH = torch.randn(23, 64, generator=torch.Generator().manual_seed(6))
    layer.router(hidden_nH)
    logits = ((hidden_nH @ layer.router.weight.T).detach().double(),)
    assert 3 * float(layer.router.losses_2[0]) / 23 == pytest.approx(
        float(load_balancing_loss_func(logits, 6, 3)), rel=AGREED
    )


def test_its_load_is_counted_where_it_learns_and_nowhere_else(world, tmp_path):
    layer = make_layer(tmp_path, "as they are")
    hidden = torch.randn(23, 1, 64, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        _, experts_nk = layer.router(hidden[:, 0])
        layer(hidden)
    assert not layer.router.load_E.any()
    layer(hidden)
    assert layer.router.load_E.tolist() == [int((experts_nk == expert).sum()) for expert in range(6)]
    assert layer.router.load_E.sum() == 23 * 3


def test_load_by_hand():
    """Two layers: all to one of four, and one half, a quarter, a quarter, nothing."""
    found = expert_load(torch.tensor([[0, 8, 0, 0], [4, 2, 2, 0]]))
    assert found.fullest_share == (1.0 + 0.5) / 2
    assert found.entropy == pytest.approx((0.0 + 1.5 * math.log(2)) / math.log(4) / 2, rel=1e-12)
    assert expert_load(torch.tensor([[3, 3, 3, 3]])) == ExpertLoad(0.25, pytest.approx(1.0, rel=1e-12))
    assert expert_load(torch.zeros(2, 4, dtype=torch.int64)) is None


def test_the_rows_of_a_token_are_added_up_in_float32():
    """Rounded to half precision once: 2^-8 of the sum, beside float32's roundings of what is added."""
    generator = torch.Generator().manual_seed(7)
    rows_RH = torch.randn(16 * 6, 32, generator=generator).bfloat16()
    experts_nk = torch.rand(16, 8, generator=generator).argsort(dim=1)[:, :6]
    shares_nk, order = torch.rand(16, 6, generator=generator), moe.by_expert(experts_nk, 8)[0]
    found_nH = moe._Combine.apply(rows_RH, order, shares_nk).double()
    terms_nkH = rows_RH.double()[order.argsort()].unflatten(0, (16, 6)) * shares_nk.double()[..., None]
    error_nH = (found_nH - terms_nkH.sum(dim=1)).abs()
    assert (error_nH <= 2.0**-8 * terms_nkH.sum(dim=1).abs() + 7 * 2.0**-24 * terms_nkH.abs().sum(dim=1)).all()


def test_the_gradient_of_a_share_is_multiplied_in_float32():
    """Float32's roundings alone: half precision would leave 2^-9 of each term."""
    generator = torch.Generator().manual_seed(7)
    rows_RH = torch.randn(16 * 6, 32, generator=generator).bfloat16()
    experts_nk = torch.rand(16, 8, generator=generator).argsort(dim=1)[:, :6]
    shares_nk, order = torch.rand(16, 6, generator=generator).requires_grad_(), moe.by_expert(experts_nk, 8)[0]
    grad_nH = torch.randn(16, 32, generator=generator).bfloat16()
    moe._Combine.apply(rows_RH, order, shares_nk).backward(grad_nH)
    terms_nkH = rows_RH.double()[order.argsort()].unflatten(0, (16, 6)) * grad_nH.double()[:, None]
    error_nk = (shares_nk.grad.double() - terms_nkH.sum(dim=-1)).abs()
    assert (error_nk <= 32 * 2.0**-24 * terms_nkH.abs().sum(dim=-1)).all()
