"""Products and sums of experts on CUDA are the loop over experts, and an upload makes nobody wait."""

import pytest
import torch
from expert_products import COUNTS, compare_products
from hacpo_kernels import combine_gradients, combine_rows

from hacpo_mega.cluster.machine.device import send
from hacpo_mega.megatron.model.moe import grouped_product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("counts", COUNTS)
def test_the_grouped_product_is_the_loop(counts):
    compare_products(COUNTS[counts], torch.bfloat16, "cuda")


def test_an_expert_without_rows_has_no_gradient_of_what_was_in_the_memory():
    """Memory of the gradient's size, which torch hands out again, was all NaN."""
    counts = torch.tensor([40, 0, 24, 0], device="cuda")
    rows, weight, grad = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((64, 512), (4, 1024, 512), (64, 1024))
    )
    weight.requires_grad_()
    output = grouped_product(rows.requires_grad_(), weight.flatten(0, 1), counts)
    used = [torch.full_like(weight, float("nan")) for _ in range(4)]
    del used
    output.backward(grad)
    assert weight.grad.isfinite().all() and rows.grad.isfinite().all()
    assert not weight.grad[counts == 0].any()
    right = grad[40:].float().T @ rows[40:].float()
    torch.testing.assert_close(weight.grad[2].float(), right.detach(), rtol=2**-7, atol=0.05)


def test_sums_and_gradients_add_up_at_the_sizes_of_30b_a3b():
    """The compiled kernels beside float64: 65,536 rows of 2,048, an update's sum of two micro-batches."""
    num_tokens, per_token, hidden, width, counts = 8192, 8, 2048, 768, [40_000, 0, 25_536]
    rows = torch.randn(num_tokens * per_token, hidden, device="cuda").bfloat16()
    place = torch.randperm(len(rows), device="cuda").view(num_tokens, per_token)
    shares, grad = torch.rand(num_tokens, per_token, device="cuda"), torch.randn(num_tokens, hidden, device="cuda")
    out = combine_rows(rows, place, shares)
    grad_rows, grad_shares = combine_gradients(grad.bfloat16(), rows, place, shares)
    some = slice(-64, None)
    terms = rows[place[some]].double() * shares[some, :, None].double()
    assert ((out[some].double() - terms.sum(dim=1)).abs() <= 2.0**-8 * terms.abs().sum(dim=1)).all()
    products = rows[place[some]].double() * grad[some, None].bfloat16().double()
    torch.testing.assert_close(grad_shares[some].double(), products.sum(dim=-1), rtol=1e-5, atol=1e-3)
    expected = shares[some, :, None] * grad[some, None].bfloat16()
    torch.testing.assert_close(grad_rows[place[some]], expected.bfloat16(), rtol=2.0**-7, atol=0)

    weight = torch.randn(len(counts) * width, hidden, device="cuda").bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    of_outputs = torch.randn(len(rows), width, device="cuda").bfloat16()
    for _ in range(2):
        grouped_product(rows, weight, torch.tensor(counts, device="cuda")).backward(of_outputs)
    sums = weight.main_grad.view(len(counts), width, hidden)
    exact = 2 * of_outputs[-counts[2] :].double().T @ rows[-counts[2] :].double()
    # A tensor core adds sixteen rows at a time and cuts the sum off at a float32's last bit.
    allowed = counts[2] / 16 * 2.0**-23
    assert (sums[2].double() - exact).norm() < allowed * exact.norm() and not sums[1].any()


def test_sending_does_not_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers, none, flags = send((torch.arange(5), None, torch.tensor([True, False])), torch.device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert numbers.tolist() == [0, 1, 2, 3, 4] and none is None and flags.tolist() == [True, False]
