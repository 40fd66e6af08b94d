"""Kernels of a mixture of experts against float64: rows of a token summed, their gradients, products per expert."""

import pytest
import torch
from hacpo_kernels import add_grouped_product, combine_gradients, combine_rows
from kernel_cases import BACKENDS, DEVICE

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# One rounding of a result to bf16, which the interpreter truncates; float32 rounds each of a few hundred terms.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
# (tokens, rows of a token, hidden size): a step of columns, parts of one, several of them.
SHAPES = [(7, 2, 512), (5, 3, 40), (3, 8, 1056), (2, 1, 8)]


def make_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows [n k, H], their places [n, k], shares [n, k] and a gradient [n, H]."""
    (num_tokens, per_token, hidden_size), generator = shape, torch.Generator().manual_seed(2)
    rows = torch.randn(num_tokens * per_token, hidden_size, generator=generator)
    place = torch.randperm(num_tokens * per_token, generator=generator).view(num_tokens, per_token)
    shares, grad = (torch.randn(num_tokens, size, generator=generator) for size in (per_token, hidden_size))
    return tuple(tensor.to(DEVICE) for tensor in (rows.to(dtype), place, shares, grad.to(dtype)))


def assert_near(found: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor, dtype: torch.dtype) -> None:
    """Errors are bounded by the sum of the terms' sizes."""
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= ALLOWED[dtype] * sizes + 1e-30).all()


@each_backend
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_token_are_summed(shape, dtype, backend):
    rows, place, shares, _ = make_rows(shape, dtype)
    for weights in (shares, None):
        terms = rows.double()[place] * (1.0 if weights is None else weights.double()[..., None])
        found = combine_rows(rows, place, weights, backend=backend)
        assert found.dtype is dtype
        assert_near(found, terms.sum(dim=1), terms.abs().sum(dim=1), dtype)


@each_backend
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_rows_and_shares(shape, dtype, backend):
    rows, place, shares, grad = make_rows(shape, dtype)
    exact = [tensor.double().requires_grad_() for tensor in (rows, shares)]
    (exact[0][place] * exact[1][..., None]).sum(dim=1).backward(grad.double())
    grad_rows, grad_shares = combine_gradients(grad, rows, place, shares, backend=backend)
    assert grad_rows.dtype is dtype and grad_shares.dtype is torch.float32
    assert_near(grad_rows, exact[0].grad, exact[0].grad.abs(), dtype)
    terms = (rows.double()[place] * grad.double()[:, None]).abs().sum(dim=-1)
    assert_near(grad_shares, exact[1].grad, terms, torch.float32)


@each_backend
@each_dtype
@pytest.mark.parametrize("counts", [[70, 0, 3, 130], [0, 0, 5], [0, 0]], ids=str)
@pytest.mark.parametrize("sizes", [(24, 16), (136, 72)], ids=str)
def test_products_are_added_in_float32_and_idle_experts_left_alone(counts, sizes, dtype, backend):
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(sum(counts), size, generator=generator).to(DEVICE, dtype) for size in sizes)
    total = torch.randn(len(counts), *sizes, generator=generator).to(DEVICE)
    before, ends = total.clone(), torch.tensor(counts, device=DEVICE).cumsum(0).int()
    add_grouped_product(total, left, right, ends, backend=backend)
    parts = zip(total, before.double(), left.double().split(counts), right.double().split(counts), strict=True)
    for found, start, mine, other in parts:
        if len(mine):
            terms = mine.abs().T @ other.abs() + start.abs()
            assert_near(found, start + mine.T @ other, terms, torch.float32)
        else:
            assert torch.equal(found.double(), start)


@each_backend
def test_no_token_and_no_row_is_nothing_to_do(backend):
    rows, place, shares = torch.empty(0, 16), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    rows, place, shares = (tensor.to(DEVICE) for tensor in (rows, place, shares))
    assert combine_rows(rows, place, shares, backend=backend).shape == (0, 16)
    grads = combine_gradients(rows, rows, place, shares, backend=backend)
    assert [grad.shape for grad in grads] == [(0, 16), (0, 2)]
