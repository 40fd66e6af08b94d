"""Operators of learning on the CPU: products, the gradient of a norm, sums of gradients of matrices."""

import math

import pytest
import torch
from actor_cases import (
    GRADIENT_ERROR,
    gradient_by_descent,
    make_actor,
    objective,
    one_rank,
    random_samples,
    relative_error,
)
from hacpo_kernels import add_product, product, products, rms_norm
from tiny_models import make_model
from torch.nn import functional

from hacpo_mega.megatron.model import linear

EPS = 1e-6
HEAD = 96
ROWS = 40


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads that lie apart, as attention cuts them out of one projection; a weight; a gradient."""
    torch.manual_seed(1)
    cut = torch.randn(ROWS, 1, 3, 2 * HEAD)[..., :HEAD] * torch.logspace(-2, 2, ROWS)[:, None, None, None]
    return cut.to(dtype), (1 + 0.3 * torch.randn(HEAD)).to(dtype), torch.randn(ROWS, 1, 3, HEAD).to(dtype)


def differentiated(function, x, weight, grad) -> list[torch.Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_torchs_and_its_gradient_that_of_float64(dtype):
    """On the CPU the value has torch's bits. Roundings come from four factors and a sum in each of both terms."""
    x, weight, grad = inputs(dtype)
    mine = differentiated(lambda x, w: rms_norm(x, w, EPS), x, weight, grad)
    torchs = differentiated(lambda x, w: functional.rms_norm(x, w.shape, w, EPS), x, weight, grad)
    assert torch.equal(mine[0], torchs[0])
    exact = differentiated(
        lambda x, w: functional.rms_norm(x, w.shape, w, EPS), x.double(), weight.double(), grad.double()
    )
    scale = x.double().square().mean(-1, keepdim=True).add(EPS).rsqrt()
    terms = (grad * weight).double().abs() * scale
    terms = terms + (x.double() * scale**3).abs() * (grad * weight * x).double().abs().mean(-1, keepdim=True)
    roundoff = torch.finfo(dtype).eps / 2
    assert ((mine[1] - exact[1]).abs() <= (8 + math.log2(HEAD)) * HEAD**0.5 * roundoff * terms).all()
    sums = (grad.double() * x.double() * scale).abs().flatten(0, -2).sum(0)
    assert ((mine[2] - exact[2]).abs() <= 8 * (3 * ROWS) ** 0.5 * roundoff * sums).all()


def test_a_gradient_of_half_precision_is_added_in_float32():
    torch.manual_seed(1)
    given, grad = torch.randn(300, 24).bfloat16(), torch.randn(300, 16).bfloat16()
    total = torch.randn(16, 24)
    exact = total.double() + grad.double().t() @ given.double()
    terms = total.double().abs() + grad.double().abs().t() @ given.double().abs()
    linear.GradientKernel.wgrad_gemm_accum_fp32(given, grad, total)
    assert ((total - exact).abs() <= 300 * 2.0**-24 * terms).all()


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_rows_of_an_embedding_are_added_in_float32(is_tied, monkeypatch):
    """One token is half of the text: torch's sum in bf16 stops growing at 256 times its terms."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(50, 8).bfloat16())
    weight.main_grad, weight.zero_out_wgrad = torch.randn(50, 8), is_tied
    ids, grads = torch.randint(1, 50, (2, 1, 4096)), torch.rand(2, 1, 4096, 8).bfloat16()
    ids[..., ::2] = 0
    grads[:, :, 1::7] = 0  # as Megatron gives tokens of other shards
    exact = weight.main_grad.double().index_add(0, ids.flatten(), grads.double().flatten(0, 2))
    added, add = [], torch.Tensor.index_add_
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda *given: added.append(given[2]) or add(*given))
    for half, grad in zip(ids, grads, strict=True):
        with linear.EmbeddingInFloat32():
            rows = torch.nn.functional.embedding(half, weight)
        assert torch.equal(rows, weight[half])
        rows.backward(grad)
    monkeypatch.undo()
    idle = ~grads.flatten(0, 2).any(dim=1)
    assert torch.cat(added)[idle].bincount(minlength=50).max() <= 2 * idle.sum() / 50
    assert weight.grad_added_to_main_grad and (not is_tied or not weight.grad.any())
    assert ((weight.main_grad - exact).abs() <= 8192 * 2.0**-24 * exact.abs().max()).all()


@pytest.mark.nightly
def test_gradients_are_added_where_they_are_computed_unless_told_otherwise(tmp_path, monkeypatch):
    """Two micro-batches at least; each matrix of a layer is added to once for each."""
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    added, add = [], linear.add_product
    monkeypatch.setattr(linear, "add_product", lambda *given: added.append(given) or add(*given))
    samples, found = random_samples(4, seed=3), {}
    with one_rank():
        for at_once in (True, False):
            options = {} if at_once else {"overrides": {"gradient_accumulation_fusion": False}}
            actor = make_actor(folder, **options)
            found[at_once], stats = gradient_by_descent(actor, lambda actor=actor: actor.learn(samples, objective))
            assert stats.num_microbatches > 1
            assert len(added) == (4 * 2 * stats.num_microbatches if at_once else 0)
            added.clear()
    assert relative_error(found[True], found[False]) < GRADIENT_ERROR


# How the left and the right matrix of a product lie, from matrices that lie row after row.
LIES = {
    "rows": lambda rows, columns: torch.randn(rows, columns),
    "columns": lambda rows, columns: torch.randn(columns, rows).t(),
    "part of wider rows": lambda rows, columns: torch.randn(rows, columns + 3)[:, 1 : columns + 1],
}


@pytest.mark.parametrize("right_lies", LIES)
@pytest.mark.parametrize("left_lies", LIES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (37, 64, 19), (3, 5, 2000), (0, 4, 4), (4, 0, 4), (4, 4, 0)])
@pytest.mark.parametrize("is_onednn", [True, False])
def test_a_product_is_float64s_however_its_matrices_lie(sizes, left_lies, right_lies, is_onednn, monkeypatch):
    """A sum of K terms and one more: an error of K + 1 roundings at most. Sums are added in blocks of some rows."""
    monkeypatch.setattr(products, "PREFERS_ONEDNN", is_onednn)
    torch.manual_seed(1)
    rows, inner, columns = sizes
    left, right, total = LIES[left_lies](rows, inner), LIES[right_lies](inner, columns), torch.randn(rows, columns)
    exact, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    roundoff = (inner + 1) * 2.0**-24
    for found in (product(left, right), product(left[:, None], right)[:, 0]):
        assert ((found - exact).abs() <= roundoff * terms).all()
    monkeypatch.setattr(products, "ADDED_AT_ONCE", 5 * columns)
    summed = total.clone()
    add_product(summed, left, right)
    assert ((summed - total.double() - exact).abs() <= roundoff * (terms + total.double().abs())).all()


def test_products_are_torchs_without_onednn_or_with_a_gradient(monkeypatch):
    torch.manual_seed(1)
    left, right = torch.randn(300, 200), torch.randn(200, 100)
    with monkeypatch.context() as without_avx512:
        without_avx512.setattr(products, "PREFERS_ONEDNN", False)
        assert torch.equal(product(left, right), left @ right)
    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(product(left, right), left @ right)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(product(left.to(dtype), right.to(dtype)), left.to(dtype) @ right.to(dtype))
    halves = left.bfloat16(), right.bfloat16()
    assert torch.equal(product(*halves, torch.float32), product(*(half.float() for half in halves)))
    right.requires_grad_()
    product(left, right).sum().backward()
    torch.testing.assert_close(right.grad, left.sum(0)[:, None].expand(-1, 100))


@pytest.mark.nightly
def test_megatrons_layers_multiply_so_forward_and_backward(tmp_path, monkeypatch):
    """Four matrices of each of two layers in every micro-batch; torch's own products give the same gradients."""
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    samples, found, calls = random_samples(4, seed=3), {}, []
    monkeypatch.setattr(linear, "product", lambda *given: calls.append(given) or product(*given))
    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)
    with one_rank():
        for enabled in (True, False):
            actor = make_actor(folder)
            with torch.backends.mkldnn.flags(enabled=enabled):
                found[enabled], stats = gradient_by_descent(actor, lambda actor=actor: actor.learn(samples, objective))
            assert len(calls) == 2 * 4 * 2 * stats.num_microbatches
            calls.clear()
    assert relative_error(found[True], found[False]) < GRADIENT_ERROR
