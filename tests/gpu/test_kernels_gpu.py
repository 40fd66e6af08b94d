"""Properties of the kernels that only a GPU shows: offsets past 2^31, launches and synchronisations, memory.

The tests of values and gradients (test_linear_logprob.py, test_sequence_objective.py, test_kernel_complaints.py,
test_kernel_repeats.py, test_elementwise.py) run the compiled kernels by themselves on a machine with a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hacpo_kernels import (
    gated_activation,
    linear_logprob,
    merge_adapter,
    objective_stats,
    packed_objective,
    rms_norm,
    rotate_heads,
)
from kernel_cases import make_head
from objective_cases import BOUNDS, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 151_936


def big_head(num_tokens: int, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, device="cuda") * 3 / hidden_size**0.5
    weight = torch.randn(VOCAB, hidden_size, generator=generator, device="cuda")
    target = torch.randint(0, VOCAB, (num_tokens,), generator=generator, device="cuda")
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), target


def test_more_than_2_to_31_logits():
    """16,384 tokens of 151,936 logits: the last rows are as exact as the first, in value and gradient."""
    hidden, weight, target = big_head(16_384, 64)
    logprob = linear_logprob(hidden, weight, target)
    logprob.sum().backward()
    for rows in (slice(0, 128), slice(-128, None)):
        exact_hidden = hidden[rows].detach().double().requires_grad_()
        exact = (exact_hidden @ weight.detach().double().T).log_softmax(dim=1).gather(1, target[rows, None])[:, 0]
        exact.sum().backward()
        assert (logprob[rows].double() - exact).abs().max() < 2e-5
        error = (hidden.grad[rows].double() - exact_hidden.grad).norm(dim=1) / exact_hidden.grad.norm(dim=1)
        assert error.max() < 1e-2


def test_a_million_rows():
    hidden = torch.randn(1_100_000, 16, device="cuda", dtype=torch.bfloat16)
    head = make_head(2, 16, 300, dtype=torch.bfloat16)
    target = torch.randint(0, 300, (1_100_000,), device="cuda")
    got = linear_logprob(hidden, head.weight, target)
    for rows in (slice(0, 1000), slice(-1000, None)):
        exact = (hidden[rows].double() @ head.weight.double().T).log_softmax(dim=1).gather(1, target[rows, None])[:, 0]
        assert (got[rows].double() - exact).abs().max() < 2e-5


def test_bits_do_not_depend_on_the_batch_or_the_run():
    hidden, weight, target = big_head(8192, 256)
    with torch.no_grad():
        whole = linear_logprob(hidden, weight, target)
        assert torch.equal(linear_logprob(hidden[:128], weight, target[:128]), whole[:128])
        assert torch.equal(linear_logprob(hidden[5000:5999], weight, target[5000:5999]), whole[5000:5999])
    runs = [torch.autograd.grad(linear_logprob(hidden, weight, target).sum(), (hidden, weight)) for _ in range(20)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


def test_the_objective_takes_one_launch_and_nothing_ever_waits():
    tokens, source, advantage, is_self, cu_seqlens = make_batch([700] * 300, dtype=torch.float32)
    arguments = (tokens, cu_seqlens.cuda(), source, advantage, is_self)
    packed_objective(*arguments, update_index=0, bounds=BOUNDS)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            packed_objective(*arguments, update_index=1, bounds=BOUNDS)
        leaf = tokens.clone().requires_grad_()
        loss, _, terms = packed_objective(leaf, *arguments[1:], update_index=2, bounds=BOUNDS)
        loss.backward(torch.ones_like(loss))
        objective_stats(terms)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert launched == ["_objective_kernel"], launched


def test_borders_reach_the_compiled_kernel_in_float64():
    """1e-12 beyond the own clip and the cross band: as float32 arguments the borders would be off by 3e-8."""
    edges = [0.8 - 1e-12, 0.8 + 1e-12, 1.2 - 1e-12, 1.2 + 1e-12]
    tokens = torch.tensor(edges, dtype=torch.float64, device="cuda").log()
    is_self = torch.tensor([False, False, True, True], device="cuda")
    _, coefficient, _ = packed_objective(
        tokens, torch.arange(5), torch.zeros_like(tokens), torch.ones_like(tokens), is_self, update_index=0,
        bounds=replace(BOUNDS, eps_high=0.2), backend="triton",
    )  # fmt: skip
    assert (coefficient != 0).tolist() == [False, True, True, False]


def test_a_step_needs_less_than_3_gb():
    """T 32,768, V 151,936, one rank, gradient into main_grad: beyond inputs and main_grad, outputs included."""
    hidden, weight, target = big_head(32_768, 2560)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def step() -> None:
        linear_logprob(hidden, weight, target, fuse_main_grad=True).sum().backward()
        hidden.grad = weight.grad = None

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < 3e9


def test_labels_that_nobody_checked_are_loud():
    """On CUDA nobody looks at the values of targets: a label in the padding or beyond is a log-prob of -inf."""
    head = make_head(4, 16, 93, pads=7)
    target = torch.tensor([0, 92, 93, 500], device="cuda")
    logprob = linear_logprob(head.hidden, head.weight, target, vocab_size=93)
    assert logprob.isneginf().tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match=r"target\[2\] is 93"):
        linear_logprob(head.hidden, head.weight, target.cpu(), vocab_size=93)


def test_nonsense_segments_are_loud():
    """As are segments that leave the tokens or run backwards: NaN, and nothing else is read."""
    tokens, source, advantage, is_self, _ = make_batch([5, 5], dtype=torch.float32)
    for cu_seqlens in ([0, 5, 11], [0, 11, 10], [0, 5, 9], [1, 5, 10], [-1, 5, 10]):
        loss, _, terms = packed_objective(
            tokens, torch.tensor(cu_seqlens, device="cuda"), source, advantage, is_self, update_index=0, bounds=BOUNDS
        )
        assert loss.isnan().any(), cu_seqlens
        assert objective_stats(terms).nonfinite[0] >= 1


def launched(call) -> list[str]:
    """Kernels that a call launches, once it is compiled."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def test_a_layers_kernels_are_one_launch_each_way():
    gate_up = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    heads = torch.randn(512, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    turns = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    gated = gated_activation(gate_up, "silu")
    assert launched(lambda: gated_activation(gate_up.detach(), "silu")) == ["_gated_kernel"]
    back = partial(torch.autograd.grad, gated, gate_up, torch.ones_like(gated), retain_graph=True)
    assert launched(back) == ["_gated_gradient_kernel"]
    inner, weight = heads[:, 2:5], torch.ones(128, device="cuda", dtype=torch.bfloat16)
    assert launched(lambda: rms_norm(inner.detach(), weight, 1e-6)) == ["_norm_kernel"]
    normed = rms_norm(inner, weight, 1e-6)
    back = partial(torch.autograd.grad, normed, inner, torch.ones_like(normed), retain_graph=True)
    assert launched(back) == ["_norm_gradient_kernel"]
    turned = rotate_heads(heads, turns, interleaved=False)
    assert launched(lambda: rotate_heads(heads.detach(), turns, interleaved=False)) == ["_rotary_kernel"]
    back = partial(torch.autograd.grad, turned, heads, torch.ones_like(turned), retain_graph=True)
    assert launched(back) == ["_rotary_kernel"]


@pytest.mark.parametrize("size, heads", [(128, 40), (2048, 1), (5120, 1), (8192, 1)])
def test_norms_of_real_sizes(size, heads):
    """Keys within a projection of 8B models; the weight's gradient is a sum of many rows, torch's in float64."""
    fused = torch.randn(4099, heads + 8, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4099, heads, size, device="cuda", dtype=torch.bfloat16)
    found = rms_norm(fused[:, 3 : 3 + heads], weight, 1e-6)
    found.backward(grad)
    x, w = (t.detach().double().requires_grad_() for t in (fused[:, 3 : 3 + heads], weight))
    expected = torch.nn.functional.rms_norm(x, (size,), w, 1e-6)
    expected.backward(grad.double())
    pairs = (found, expected), (fused.grad[:, 3 : 3 + heads], x.grad), (weight.grad, w.grad)
    for mine, exact in pairs:
        torch.testing.assert_close(mine.double(), exact, rtol=2.0**-8, atol=1e-3 * exact.abs().max().item())


def test_gate_and_up_past_2_to_31_numbers():
    gate_up = torch.empty(80_000, 28_672, device="cuda", dtype=torch.bfloat16)
    gate_up[-3:] = torch.randn(3, 28_672, device="cuda")
    found = gated_activation(gate_up, "silu")[-3:].float()
    gate, up = gate_up[-3:].float().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert ((found - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_merge_of_any_part_is_one_launch_and_has_the_bits_of_the_cpu(dtype):
    """Qwen3-32B's narrower matrices at rank 32, whole and as tensor-parallel ranks and engines cut them."""
    generator = torch.Generator().manual_seed(4)
    weight, up, down = (
        torch.randn(*shape, generator=generator) * 0.02 for shape in ((1024, 5120), (1024, 32), (32, 5120))
    )
    weight, up, down = weight.to(dtype), up.to(dtype), down.to(dtype)
    expected = merge_adapter(weight, up, down, 2.0)
    there = weight.cuda(), up.cuda(), down.cuda()
    assert torch.equal(merge_adapter(*there, 2.0).cpu(), expected)
    assert launched(lambda: merge_adapter(*there, 2.0)).count("_merge_kernel") == 1
    for tp in (2, 4, 8):
        rows = zip(there[0].chunk(tp), there[1].chunk(tp), expected.chunk(tp), strict=True)
        assert all(torch.equal(merge_adapter(w, u, there[2], 2.0).cpu(), part) for w, u, part in rows)
        columns = zip(there[0].chunk(tp, 1), there[2].chunk(tp, 1), expected.chunk(tp, 1), strict=True)
        assert all(torch.equal(merge_adapter(w, there[1], d, 2.0).cpu(), part) for w, d, part in columns)
