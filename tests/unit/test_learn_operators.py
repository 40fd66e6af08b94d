"""What learning computes in its own way on the CPU: the gradient of a norm, and sums of the gradients of matrices."""

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
from tiny_models import make_model
from torch.nn.functional import rms_norm

from hacpo_mega.megatron import gradient_sum
from hacpo_mega.megatron.norms import _normed

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
    """bf16 goes torch's way, as on CUDA. What rounds: four factors and a sum in each of both terms."""
    x, weight, grad = inputs(dtype)
    mine = differentiated(lambda x, w: _normed(x, w, EPS), x, weight, grad)
    torchs = differentiated(lambda x, w: rms_norm(x, w.shape, w, EPS), x, weight, grad)
    assert torch.equal(mine[0], torchs[0])
    exact = differentiated(lambda x, w: rms_norm(x, w.shape, w, EPS), x.double(), weight.double(), grad.double())
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
    gradient_sum._Kernel.wgrad_gemm_accum_fp32(given, grad, total)
    assert ((total - exact).abs() <= 300 * 2.0**-24 * terms).all()


def test_gradients_are_added_where_they_are_computed_unless_told_otherwise(tmp_path, monkeypatch):
    """Two micro-batches at least; each matrix of a layer is added to once for each."""
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    added, add = [], gradient_sum.add_product
    monkeypatch.setattr(gradient_sum, "add_product", lambda *given: added.append(given) or add(*given))
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
