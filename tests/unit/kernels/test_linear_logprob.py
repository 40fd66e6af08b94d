"""linear_logprob, both backends, against float64 with all logits: values, gradients, shards, memory, refusals.

A tolerance here is a bound: the roundings that any order of summation may make, times the absolute terms
(kernel_cases.exact), element by element.
"""

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hacpo_kernels import linear_logprob, reference
from kernel_cases import (
    BACKENDS,
    DEVICE,
    UNIT,
    assert_within,
    exact,
    largest_error,
    make_head,
    on_ranks,
    relative_error,
)
from objective_cases import BOUNDS

# numpy warns of lanes that Triton masks away afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
linear_logprob_triton = importlib.import_module("hacpo_kernels.linear_logprob")


def test_on_hand_numbers():
    """Two tokens, three words, by hand: softmax of (ln 1, ln 2, ln 5) is (1, 2, 5) / 8."""
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log().to(DEVICE)
    logprob = linear_logprob(torch.ones(2, 1, device=DEVICE), weight, torch.tensor([2, 0]))
    # a dozen roundings of numbers up to ln 8
    assert_within(logprob, torch.tensor([5 / 8, 1 / 8], dtype=torch.float64).log(), 12 * 2.1 * UNIT[torch.float32])


CASES = [
    # tokens, hidden, vocabulary, pads, dtype, temperature, softcap
    (200, 64, 1500, 20, torch.bfloat16, 1.0, None),
    (130, 40, 300, 4, torch.float32, 0.7, None),
    (64, 13, 257, 0, torch.bfloat16, 1.3, None),  # rows of hidden that TMA cannot read
    (1, 16, 1, 0, torch.float32, 1.0, None),  # one word: certain, no gradient
    (5, 8, 1025, 63, torch.float32, 1.0, None),  # one column in the last split
    (130, 40, 300, 4, torch.float32, 0.7, 4.0),  # logits of up to twice the cap
    (64, 32, 257, 3, torch.bfloat16, 1.0, 30.0),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_match_float64(case, backend):
    num_tokens, hidden_size, vocab_size, pads, dtype, temperature, softcap = case
    head = make_head(num_tokens, hidden_size, vocab_size, pads=pads, dtype=dtype)
    head.target[-1] = -100 if num_tokens > 1 else head.target[-1]
    coefficient = torch.randn(num_tokens)
    coefficient[num_tokens // 2 :: 3] = 0.0
    want = exact(head, coefficient, temperature, softcap=softcap)
    hidden, weight = head.leaves()
    logprob = linear_logprob(
        hidden,
        weight,
        head.target,
        vocab_size=vocab_size,
        temperature=temperature,
        softcap=softcap,
        backend=backend,
    )
    (logprob * coefficient.to(DEVICE)).sum().backward()
    assert logprob.dtype == torch.float32
    assert_within(logprob, want.logprob, want.logprob_bound)
    assert (logprob <= 0).all()
    assert_within(hidden.grad, want.hidden_grad, want.hidden_bound)
    assert_within(weight.grad[:vocab_size], want.weight_grad, want.weight_bound)
    assert (weight.grad[vocab_size:] == 0).all()


def test_reference_is_exact_in_float64(monkeypatch):
    """In chunks of 7 rows, so that a chunk border is inside the batch."""
    monkeypatch.setattr(reference, "LOGIT_BUDGET", 7 * 90)
    head = make_head(60, 24, 90, pads=6, dtype=torch.float64)
    coefficient = torch.randn(60, dtype=torch.float64)
    want = exact(head, coefficient, 0.8)
    hidden, weight = head.leaves()
    logprob = linear_logprob(hidden, weight, head.target, vocab_size=90, temperature=0.8)
    (logprob.cpu() * coefficient).sum().backward()
    assert logprob.dtype == torch.float64
    # twice: the oracle is rounded in float64 too
    assert_within(logprob, want.logprob, 2 * want.logprob_bound)
    assert_within(hidden.grad, want.hidden_grad, 2 * want.hidden_bound)
    assert_within(weight.grad[:90], want.weight_grad, 2 * want.weight_bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_of_a_strided_layout(backend):
    """Hidden as Megatron has it, [S, B, H] seen as [B, S, H], and a column slice of something wider."""
    head = make_head(48, 32, 100, whole=True)
    want = linear_logprob(head.hidden, head.weight, head.target, backend=backend)
    transposed = head.hidden.view(6, 8, 32).transpose(0, 1).contiguous().transpose(0, 1).reshape(48, 32)
    wide = torch.cat([head.hidden, head.hidden], dim=1)[:, :32]
    fortran = head.hidden.t().contiguous().t()
    for hidden in (transposed, wide, fortran):
        assert torch.equal(linear_logprob(hidden, head.weight, head.target, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_side_gets_no_gradient_and_costs_none(backend):
    head = make_head(40, 16, 70)
    want = exact(head, torch.ones(40))
    hidden, weight = head.leaves()
    linear_logprob(hidden, head.weight, head.target, backend=backend).sum().backward()
    linear_logprob(head.hidden, weight, head.target, backend=backend).sum().backward()
    assert_within(hidden.grad, want.hidden_grad, want.hidden_bound)
    assert_within(weight.grad, want.weight_grad, want.weight_bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("tied", (True, False))
def test_weight_gradient_into_megatrons_buffer(backend, dtype, tied):
    """Added in float32 to what main_grad holds; a tied weight's placeholder is 0, because Megatron will add it."""
    head = make_head(90, 16, 70, pads=2, dtype=dtype)
    want = exact(head, torch.ones(90))
    hidden, weight = head.leaves()
    weight.main_grad = torch.full_like(weight, 3.0, dtype=torch.float32)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    linear_logprob(hidden, weight, head.target, vocab_size=70, fuse_main_grad=True, backend=backend).sum().backward()
    # 90 terms are added to the 3.0 that is there
    allowed = want.weight_bound + 90 * UNIT[torch.float32] * (3.0 + want.weight_grad.abs())
    assert_within(weight.main_grad[:70], 3.0 + want.weight_grad, allowed)
    assert (weight.main_grad[70:] == 3.0).all()
    assert weight.grad_added_to_main_grad
    if tied:
        assert (weight.grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequence_mean_from_bf16_inputs_is_finer_than_the_clip(backend):
    """The HACPO quantity, to a hundredth of the clip. Logits reach 20; a bf16 logit would be off by 0.06 and the mean
    by 3e-4, the clip itself. The worst case of all float32 roundings is more than is allowed here, but it would need
    all of them, in all 128 tokens, in one direction: a sum of n roundings at random grows as the root of n."""
    head = make_head(512, 64, 3000, dtype=torch.bfloat16, scale=4.5)
    logits = head.hidden.double() @ head.weight.double().T
    assert logits.abs().max() > 18
    want = exact(head, torch.ones(512)).logprob.view(4, 128).mean(dim=1)
    got = linear_logprob(head.hidden, head.weight, head.target, backend=backend)
    allowed = BOUNDS.eps_low / 100
    assert_within(got.double().view(4, 128).mean(dim=1), want, allowed)
    rounded = torch.log_softmax(logits.bfloat16().double(), dim=1).gather(1, head.target[:, None])[:, 0]
    assert largest_error(rounded.view(4, 128).mean(dim=1), want) > 3 * allowed, "this data would not tell bf16 logits"


def _shard_job(rank, group, head, coefficient):
    """One rank's log-probs and gradients from its shard, for both backends and with the sum left out."""
    rows = len(head.weight) // group.size()
    shard = head.weight[rank * rows : (rank + 1) * rows]
    results = {}
    for backend, reduces in (("reference", True), ("triton", True), ("reference", False)):
        hidden, weight = head.hidden.clone().requires_grad_(), shard.clone().requires_grad_()
        logprob = linear_logprob(
            hidden, weight, head.target, vocab_start=rank * rows, vocab_size=head.vocab_size, temperature=0.9,
            group=group, reduce_hidden_grad=reduces, backend=backend,
        )  # fmt: skip
        (logprob * coefficient).sum().backward()
        results[backend, reduces] = (logprob.detach(), hidden.grad, weight.grad)
    return results


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks, vocab_size, pads", [(2, 301, 19), (4, 190, 130)])
def test_sharded_vocabulary_equals_one_rank(num_ranks, vocab_size, pads, tmp_path):
    """Labels on both edges of every shard; pads in the last shard, and one of 4 shards that is pads alone."""
    head = make_head(60, 16, vocab_size, pads=pads)
    rows = (vocab_size + pads) // num_ranks
    edges = [edge for r in range(num_ranks) for edge in (r * rows, (r + 1) * rows - 1) if edge < vocab_size]
    head.target[: len(edges)] = torch.tensor(edges)
    head.target[-2:] = -100
    head = replace(head, hidden=head.hidden.cpu(), weight=head.weight.cpu(), target=head.target.cpu())
    coefficient = torch.randn(60)
    want = exact(head, coefficient, temperature=0.9)
    ranks = on_ranks(num_ranks, tmp_path, _shard_job, head, coefficient)
    for backend in BACKENDS:
        got = [rank[backend, True] for rank in ranks]
        for logprob, hidden_grad, _ in got:
            assert torch.equal(logprob, got[0][0]), "ranks must hold the same bits: they decide the clip alone"
            assert_within(logprob, want.logprob, want.logprob_bound)
            assert_within(hidden_grad, want.hidden_grad, want.hidden_bound)
        weight_grad = torch.cat([rank[2] for rank in got])
        assert_within(weight_grad[:vocab_size], want.weight_grad, want.weight_bound)
        assert (weight_grad[vocab_size:] == 0).all()
    # With sequence parallelism the caller's reduce-scatter adds the shards up.
    parts = [rank["reference", False][1] for rank in ranks]
    assert_within(sum(parts), want.hidden_grad, want.hidden_bound)
    assert relative_error(parts[0], want.hidden_grad) > 0.1


MEMORY_PROBE = """
import resource, sys, torch
from hacpo_kernels import linear_logprob
torch.set_num_threads(1)
T, H, V = 4096, 16, 32768
hidden, weight = torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
target = torch.randint(0, V, (T,))
linear_logprob(hidden[:8], weight, target[:8]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_logprob(hidden, weight, target).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.nightly
def test_logits_are_never_all_there():
    """All logits of this batch are 512 MiB; scoring and learning may hold a few chunks of 64 MiB."""
    grown_kib = subprocess.run([sys.executable, "-c", MEMORY_PROBE], capture_output=True, text=True, check=True).stdout
    assert int(grown_kib) < 260 * 1024, f"{int(grown_kib) / 1024:.0f} MiB"


BAD = {
    "hidden": (lambda h: {"hidden": h.hidden[0]}, r"hidden has shape \[16\]; expected \[any, any\]"),
    "hidden dtype": (lambda h: {"hidden": h.hidden.long()}, "hidden has dtype torch.int64; expected one of"),
    "hidden type": (lambda h: {"hidden": [1.0]}, "hidden is a list; expected a tensor"),
    "weight": (lambda h: {"weight": h.weight[:, :-1]}, r"weight has shape \[50, 15\]; expected \[any, 16\]"),
    "weight dtype": (
        lambda h: {"weight": h.weight.double()},
        "weight has dtype torch.float64; expected one of torch.f",
    ),
    "weight device": (lambda h: {"weight": h.weight.to("meta")}, "weight is on meta; expected"),
    "target": (lambda h: {"target": h.target[:-1]}, r"target has shape \[9\]; expected \[10\]"),
    "target dtype": (lambda h: {"target": h.target.float()}, "target has dtype torch.float32; expected one of"),
    "label": (lambda h: {"target": torch.full((10,), 50)}, r"target\[0\] is 50; expected a token id in \[0, 50\)"),
    "negative": (lambda h: {"target": torch.full((10,), -1)}, r"target\[0\] is -1; expected .* ignore_index \(-100\)"),
    "padding": (lambda h: {"target": torch.full((10,), 45), "vocab_size": 45}, r"target\[0\] is 45; .*\[0, 45\)"),
    "temperature": (lambda h: {"temperature": 0.0}, "temperature is 0.0; expected a number above 0"),
    "vocab_start": (lambda h: {"vocab_start": -1}, "vocab_start is -1; expected 0 or more"),
    "vocab_size": (lambda h: {"vocab_size": 0}, "vocab_size is 0; expected 1 or more"),
    "main_grad": (lambda h: {"fuse_main_grad": True}, "weight has no main_grad; expected"),
    "backend": (lambda h: {"backend": "cutlass"}, "backend is 'cutlass'; expected auto, triton or reference"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(change, message):
    head = make_head(10, 16, 50)
    arguments = {"hidden": head.hidden, "weight": head.weight, "target": head.target.cpu()}
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{**arguments, **change(head)})


def test_triton_refuses_float64_and_auto_takes_the_reference():
    head = make_head(10, 16, 50, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"backend is triton, tensors are torch.float64; expected one of"):
        linear_logprob(head.hidden, head.weight, head.target, backend="triton")
    assert linear_logprob(head.hidden, head.weight, head.target).dtype == torch.float64


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [90, 120])
def test_kernels_compile_without_a_gpu(request, architecture):
    """Every variant fits in a device's shared memory: wide tiles with WGMMA on Hopper, narrow ones where 99 KiB are."""
    script = request.config.rootpath / "kernels/bench/compile_report.py"
    report = subprocess.run([sys.executable, str(script), str(architecture)], capture_output=True, text=True)
    assert report.returncode == 0, report.stdout + report.stderr
    lines = {line[:28].strip(): line[28:].split() for line in report.stdout.splitlines()[2:]}
    for name in ("stats bf16", "gradient bf16"):
        registers, stack, _, wgmma = map(int, lines[name])
        assert stack == 0 and (wgmma > 0) is (architecture == 90) and registers <= 255, (name, lines[name])


def test_a_devices_shared_memory_chooses_the_tile():
    """An H100, an A100 and an RTX 4090; a split has as many columns on each."""
    wide = linear_logprob_triton.STATS_BF16
    tilings = [linear_logprob_triton.tiling_for(torch.bfloat16, wide, size) for size in (232_448, 166_912, 101_376)]
    assert tilings == [wide, linear_logprob_triton.NARROW_BF16, linear_logprob_triton.NARROW_BF16]
    assert len({tiling.block_v * tiling.tiles_per_split for tiling in tilings}) == 1
