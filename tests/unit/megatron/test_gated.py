"""A feed-forward's activation: bits of torch's operations on the CPU, and float64's finite differences."""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, silu
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from hacpo_mega.megatron.model.linear import GatedActivation

REFERENCES = {"silu": silu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}


def inputs(name: str, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up beside each other, as a matrix puts them out, and a gradient of their product."""
    generator = torch.Generator().manual_seed(columns)
    shapes = [(7, 1, 2 * columns), (7, 1, columns)]
    gate_up, grad = (4 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return gate_up.to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize("columns", [1, 19, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_value_and_gradient_have_the_bits_of_torchs_operations(name, dtype, columns):
    gate_up, grad = inputs(name, columns, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = REFERENCES[name](gate) * up
    (expected_grad,) = torch.autograd.grad(expected, gate_up, grad)
    found = GatedActivation(name)(gate_up)
    (found_grad,) = torch.autograd.grad(found, gate_up, grad)
    assert torch.equal(found, expected)
    assert torch.equal(found_grad, expected_grad)


@pytest.mark.parametrize("name", REFERENCES)
def test_the_gradient_is_that_of_finite_differences(name):
    gate_up, _ = inputs(name, 5, torch.float64)
    assert torch.autograd.gradcheck(GatedActivation(name), gate_up)


def test_gpt_oss_has_limits_and_transformers_numbers():
    """Numbers beyond the limits count as these, and have no gradient; at them they have."""
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=300, num_local_experts=1))
    gate_up, grad = inputs("swigluoai", 300, torch.float64)
    gate_up = gate_up.detach()
    gate_up[0, 0, [0, 300]] = torch.tensor([7.0, -7.0], dtype=torch.float64)
    gate_up.requires_grad_()
    assert (gate_up > 7).any() and (gate_up[..., 300:] < -7).any()
    expected = experts._apply_gate(torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2))
    (expected_grad,) = torch.autograd.grad(expected, gate_up, grad)
    found = GatedActivation("swigluoai")(gate_up)
    (found_grad,) = torch.autograd.grad(found, gate_up, grad)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    at = gate_up.abs() == 7  # where torch's clamp has none since 2.14
    assert at.sum() == 2 and (found_grad[at] != 0).all()
    torch.testing.assert_close(found_grad[~at], expected_grad[~at], rtol=1e-13, atol=1e-13)
    assert 0 < (found_grad == 0).sum() < gate_up.numel() // 5
