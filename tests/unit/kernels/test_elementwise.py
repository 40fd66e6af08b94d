"""A layer's kernels against float64 and Hugging Face: gated activation, rotary embedding, LoRA merge; both backends.

On a machine with a GPU the compiled kernels, elsewhere Triton's interpreter.
"""

import math
from functools import partial

import pytest
import torch
from hacpo_kernels import elementwise, gated_activation, merge_adapter, rms_norm, rotate_heads
from kernel_cases import BACKENDS, DEVICE, UNIT, assert_within
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.functional import gelu, silu
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_neighbours
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

# numpy warns of lanes that Triton masks away afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

EXACT = {"silu": silu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}
EPS = UNIT[torch.float32]
# One rounding to bf16, which the interpreter truncates. Plain torch rounds after each of its operations.
ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}
TORCH_OPERATIONS = 4


def stored(backend: str, dtype: torch.dtype) -> float:
    return ROUNDED[dtype] * (1 if backend == "triton" else TORCH_OPERATIONS)


def drawn(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


@each_backend
@each_dtype
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [(7, 1, 2), (5, 1, 38), (3, 2, 1024), (1, 8392)], ids=str)
def test_gated_activation_and_its_gradient(shape, name, dtype, backend):
    """sigmoid(k) is off by |k| roundings of its argument and a few of its own; gradients have at most three terms."""
    gate_up = drawn(*shape, seed=1, scale=4.0, dtype=dtype).requires_grad_()
    grad = drawn(*shape[:-1], shape[-1] // 2, seed=2, dtype=dtype)
    product = gated_activation(gate_up, name, backend=backend)
    product.backward(grad)

    exact = gate_up.detach().cpu().double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    expected = EXACT[name](gate) * up
    expected.backward(grad.cpu().double())
    with torch.no_grad():
        inner = gate.abs() if name == "silu" else 1.6 * gate.abs() * (1 + 0.045 * gate.square())
        slope = torch.ones_like(gate) if name == "silu" else 1.6 * (1 + 0.135 * gate.square())
        relative = EPS * (16 + 8 * inner) + stored(backend, dtype)
        scale = grad.cpu().double().abs()
        # |act'| is at most 1 + |g| s(1 - s) slope; its terms cancel, so the bound is of their sum.
        terms = 1 + gate.abs() * slope * torch.sigmoid(-inner) * 2
        assert_within(product, expected, relative * (gate * up).abs() + 1e-30)
        bound = torch.cat([relative * scale * up.abs() * terms, relative * scale * gate.abs()], dim=-1)
        assert_within(gate_up.grad, exact.grad, bound + 1e-30)


@each_dtype
def test_gpt_oss_activation_in_triton_is_the_references(dtype):
    """The reference is the one that unit/megatron/test_gated.py compares with transformers."""
    gate_up, grad = drawn(7, 600, seed=1, scale=4.0, dtype=dtype), drawn(7, 300, seed=2, dtype=dtype)
    found = []
    for backend, kind in (("triton", dtype), ("reference", torch.float64)):
        given = gate_up.to(kind, copy=True).requires_grad_()
        product = gated_activation(given, "swigluoai", backend=backend)
        product.backward(grad.to(kind))
        found.append((product.detach().cpu().double(), given.grad.cpu().double()))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}[dtype]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert (found[0][1] == 0).any()


@pytest.mark.parametrize("name", [*EXACT, "swigluoai"])
def test_what_is_no_number_stays_none(name):
    """It would train on as a number else; an update whose loss or gradient has one is skipped."""
    given = torch.tensor([[math.nan, 2.0, 1.0, 1.0, math.nan, 1.0]], device=DEVICE, requires_grad=True)  # gates, ups
    product = gated_activation(given, name, backend="triton")
    product.sum().backward()
    assert product.isnan().tolist() == [[True, True, False]]
    assert given.grad.isnan().tolist()[0][:2] == [True, True]


@pytest.mark.parametrize("name", EXACT)
def test_gates_far_from_zero_are_finite(name):
    """Where the exponential overflows, the gate is shut and has no gradient, or open and has that of up."""
    gate = torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4], device=DEVICE)
    gate_up = torch.cat([gate, torch.full_like(gate, 3.0)]).requires_grad_()
    product = gated_activation(gate_up, name, backend="triton")
    product.sum().backward()
    is_open = gate > 0
    assert_within(product, torch.where(is_open, 3.0 * gate, 0.0), 1e-30 + (gate.abs() * 1e-6).cpu())
    assert_within(gate_up.grad[:6], torch.where(is_open, 3.0, 0.0), 1e-5)


@each_backend
@each_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("heads, size, pairs", [(3, 16, 8), (5, 24, 6), (1, 80, 40), (2, 12, 1)])
def test_rotation_and_its_gradient(heads, size, pairs, interleaved, dtype, backend):
    """Packed sequences with positions of their own, a part of a fused projection, dimensions that stay.

    Against Hugging Face's function of both forms, in float64 from the same cosines.
    """
    positions = torch.cat([torch.arange(length) for length in (5, 1, 9)])
    angles = torch.outer(positions.double(), 1e3 ** -torch.linspace(0, 1, pairs, dtype=torch.float64))
    turned_twice = angles.repeat_interleave(2, dim=1) if interleaved else angles.repeat(1, 2)
    # Rows that do not lie end to end, as where layers with a window have angles of their own.
    both = torch.cat([turned_twice.cos(), turned_twice.sin(), torch.zeros(len(angles), 3)], dim=1).to(DEVICE, dtype)
    turns = both[:, : 4 * pairs]
    fused = drawn(len(positions), heads, 2 * size, seed=3, dtype=dtype).requires_grad_()
    grad = drawn(len(positions), size, heads, seed=4, dtype=dtype).transpose(1, 2)
    turned = rotate_heads(fused[..., size:], turns, interleaved=interleaved, backend=backend)
    turned.backward(grad)

    exact = fused.detach().cpu().double().requires_grad_()
    cosines, sines = turns.cpu().double().chunk(2, dim=1)
    if interleaved:  # glm takes each angle once
        cosines, sines = (torch.cat([part[:, ::2], part[:, ::2]], dim=1) for part in (cosines, sines))
    turn = rotate_neighbours if interleaved else rotate_halves
    rotary, rest = exact[..., size : size + 2 * pairs], exact[..., size + 2 * pairs :]
    expected = torch.cat([turn(rotary, rotary, cosines, sines, unsqueeze_dim=1)[0], rest], dim=-1)
    expected.backward(grad.cpu().double())
    # Two products and a sum of numbers up to |x| + |x of the partner|, which are at most sqrt(2) of their norm.
    relative = 4 * EPS + stored(backend, dtype)
    assert turned.is_contiguous()
    assert_within(turned, expected, relative * 1.5 * exact[..., size:].detach().abs().amax(dim=-1, keepdim=True))
    assert_within(fused.grad, exact.grad, relative * 1.5 * grad.cpu().double().abs().amax(dim=-1, keepdim=True))
    assert torch.equal(turned[..., 2 * pairs :], fused[..., size + 2 * pairs :])


@each_backend
@each_dtype
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 1, 3, 32), (5, 24), (1, 2, 4, 5, 96), (3, 1, 1, 4100), (48,)], ids=str)
def test_a_norm_and_its_gradients(shape, offset, dtype, backend):
    """Heads within a fused projection and a gradient that lies otherwise, against torch's in float64."""
    fused = drawn(*shape[:-1], 2 * shape[-1], seed=1, dtype=dtype).requires_grad_()
    weight = drawn(shape[-1], seed=2, dtype=dtype).requires_grad_()
    grad = drawn(*shape, seed=3, dtype=dtype)
    grad = grad.mT.contiguous().mT if len(shape) > 1 else grad
    normed = rms_norm(fused[..., shape[-1] :], weight, 1e-3, offset=offset, backend=backend)
    normed.backward(grad)

    x, w = (tensor.detach().cpu().double().requires_grad_() for tensor in (fused[..., shape[-1] :], weight))
    expected = functional.rms_norm(x, w.shape, w + offset, 1e-3)
    expected.backward(grad.cpu().double())
    with torch.no_grad():
        g, scaled = grad.cpu().double(), (w + offset).abs()
        scale = (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
        relative = (2 * shape[-1] + 32) * EPS + stored(backend, dtype)  # two sums of a row, in any order
        inner = x.abs() * scale**3 * ((g * x).abs() * scaled).sum(-1, keepdim=True) / shape[-1]
        terms = (scale * g * x).abs().reshape(-1, shape[-1])
        assert normed.is_contiguous()
        assert_within(normed, expected, relative * (x * scale).abs() * scaled + 1e-30)
        assert_within(fused.grad[..., shape[-1] :], x.grad, relative * (scale * g.abs() * scaled + inner) + 1e-30)
        assert_within(weight.grad, w.grad, (relative + len(terms) * EPS) * terms.sum(0) + 1e-30)


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_a_norms_row_has_the_same_bits_in_any_batch(rows):
    """Frozen weights have no gradient; no row is no launch."""
    x, weight, grad = drawn(90, 64, seed=1), drawn(64, seed=2), drawn(90, 64, seed=3)
    found = []
    for part in (slice(0, 90), slice(11, 11 + rows)):
        given = x[part].clone().requires_grad_()
        normed = rms_norm(given, weight, 1e-6, backend="triton")
        normed.backward(grad[part])
        found.append((normed.detach(), given.grad))
    assert all(torch.equal(whole[11 : 11 + rows], part) for whole, part in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(16,), (7, 16), (7, 1, 16), (2, 5, 1, 16)])
def test_no_norm_is_compiled_for_a_number_of_rows(shape):
    _, (num_heads, size, *_), _ = elementwise._rows_of(elementwise._as_heads(torch.empty(shape)))
    assert (num_heads, size) == (1, 16)


def test_many_rows_add_up_a_norms_weight(monkeypatch):
    """Programs that take several blocks of rows each."""
    monkeypatch.setattr(elementwise, "NUMBERS_PER_PROGRAM", 64)
    monkeypatch.setattr(elementwise, "SUMMING_PROGRAMS", 3)
    x, grad = drawn(50, 16, seed=1), drawn(50, 16, seed=3)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, 1e-6, backend="triton").backward(grad)
    exact = (grad.double() * functional.rms_norm(x.double(), (16,), None, 1e-6)).sum(0)
    assert_within(weight.grad, exact.cpu(), 200 * EPS * grad.abs().double().sum(0).cpu() * 4)


def test_a_norm_of_another_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight has shape \[3\]; expected \[4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6)


def merged_by_hand(weight, up, down, scale):
    """Rank by rank in float32, each product rounded by itself."""
    total = torch.zeros(weight.shape)
    for column, row in zip((up.float() * scale).unbind(-1), down.float().unbind(-2)):
        total = total + column[..., :, None] * row[..., None, :]
    return (total + weight.float()).to(weight.dtype)


@each_backend
@pytest.mark.parametrize("shape, rank", [((37, 130), 5), ((3, 9, 33), 8), ((64, 256), 1), ((1, 7), 4)], ids=str)
def test_a_merge_has_the_same_bits_for_any_part_and_backend(shape, rank, backend):
    up, down = drawn(*shape[:-1], rank, seed=6), drawn(*shape[:-2], rank, shape[-1], seed=7)
    weight = drawn(*shape[:-1], 2 * shape[-1], seed=5)[..., : shape[-1]]  # its rows do not lie end to end
    whole = merge_adapter(weight, up, down, 0.7, backend=backend)
    assert torch.equal(whole.cpu(), merged_by_hand(weight.cpu(), up.cpu(), down.cpu(), 0.7))
    for rows, columns in ((slice(0, 1), slice(None)), (slice(3, 30), slice(1, 6)), (slice(None), slice(5, 128))):
        part = merge_adapter(weight[..., rows, columns], up[..., rows, :], down[..., columns], 0.7, backend=backend)
        assert torch.equal(part, whole[..., rows, columns])


@each_backend
def test_a_merge_rounds_once_to_the_weights_dtype(backend):
    weight, up, down = (drawn(*shape, seed=8, dtype=torch.bfloat16) for shape in ((20, 40), (20, 6), (6, 40)))
    found = merge_adapter(weight, up, down, 2.0, backend=backend)
    parts = [part.cpu().double() for part in (weight, up, down)]
    terms = parts[0].abs() + 2 * parts[1].abs() @ parts[2].abs()
    exact = parts[0] + 2 * parts[1] @ parts[2]
    assert found.dtype is torch.bfloat16
    assert_within(found, exact, ROUNDED[torch.bfloat16] * exact.abs() + 16 * EPS * terms)


@each_backend
def test_a_layers_kernels_keep_no_more_than_they_must(backend):
    """Gate and up, not their product; a micro-batch's angles, not queries and keys."""
    gate_up, heads = drawn(4, 16, seed=9).requires_grad_(), drawn(4, 2, 8, seed=9).requires_grad_()
    turns = drawn(4, 16, seed=9)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        gated_activation(gate_up, "silu", backend=backend)
        rotate_heads(heads, turns, interleaved=False, backend=backend)
    assert kept == [gate_up.data_ptr(), turns.data_ptr()]


@each_backend
def test_nothing_to_compute(backend):
    assert gated_activation(drawn(0, 8, seed=1), "silu", backend=backend).shape == (0, 4)
    turned = rotate_heads(drawn(0, 2, 8, seed=1), drawn(0, 16, seed=1), interleaved=True, backend=backend)
    assert turned.shape == (0, 2, 8)
    matrix, up, down = (drawn(*shape, seed=1) for shape in ((0, 4), (0, 2), (2, 4)))
    assert merge_adapter(matrix, up, down, 1.0, backend=backend).shape == (0, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gated_activation(torch.ones(2, 4), "swish"), "activation is 'swish'; expected one of silu"),
        (lambda: gated_activation(torch.ones(2, 3), "silu"), "gate_up has 3 columns; expected gate and up"),
        (lambda: rotate_heads(torch.ones(2, 1, 4), torch.ones(3, 8), interleaved=False), "cos_sin has shape .3, 8."),
        (lambda: rotate_heads(torch.ones(2, 1, 4), torch.ones(2, 12), interleaved=False), "12 columns; .* at most 8"),
        (lambda: merge_adapter(torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3), 1.0), "expected .N, M., .N, R."),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
