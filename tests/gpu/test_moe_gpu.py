"""torch's grouped product on CUDA is the loop over experts."""

import pytest
import torch
from expert_products import COUNTS, compare_products

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
