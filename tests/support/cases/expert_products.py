"""The two products of rows with the matrices of their experts, side by side on any device."""

import torch

from hacpo_mega.megatron.model.moe import grouped_product, looped_product

COUNTS = {"uneven": [7, 0, 12, 1], "one has all": [0, 0, 20, 0], "none": [0, 0, 0, 0]}


def compare_products(counts: list[int], dtype: torch.dtype, device: str) -> None:
    """Outputs and both gradients, experts without rows among them."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor(counts, device=device)
    shapes = ((sum(counts), 16), (4, 24, 16), (sum(counts), 24))
    rows, weight, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    found = []
    for product in (looped_product, grouped_product):
        leaves = [rows.clone().requires_grad_(), weight.flatten(0, 1).requires_grad_()]
        output = product(*leaves, sizes)
        output.backward(grad)
        found.append((output.detach(), *(leaf.grad for leaf in leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
    assert not found[0][2].view(weight.shape)[sizes == 0].any()
