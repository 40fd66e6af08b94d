"""The kernels again and again: equal bits in any batch, order, thread and call, and training as the unfused ones train.

Numbers 9 to 14 of what users of published fused-loss kernels complain about; test_kernel_complaints.py has the others.
"""

import contextvars
import itertools
import threading

import pytest
import torch
import triton
from hacpo_kernels import linear_logprob, objective_stats, packed_objective
from kernel_cases import BACKENDS, DEVICE, UNIT, assert_within, exact, make_head
from objective_cases import BOUNDS, make_batch, oracle
from torch import nn

# numpy warns of lanes that Triton masks away afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_backend
def test_09_a_row_has_the_same_bits_in_any_batch(backend):
    """verl #6280, RL-Kernel #336: old and new log-probs differ by how the batch was packed, and the clip acts on it."""
    head = make_head(300, 32, 700, dtype=torch.bfloat16, whole=DEVICE != "cuda")
    whole = linear_logprob(head.hidden, head.weight, head.target, backend=backend)
    if backend == "triton":  # plain torch leaves the order of its sums to torch, which promises nothing
        for rows in (slice(0, 1), slice(7, 100), slice(150, 300)):
            part = linear_logprob(head.hidden[rows], head.weight, head.target[rows], backend=backend)
            assert torch.equal(part, whole[rows])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = linear_logprob(head.hidden[order], head.weight, head.target[order], backend=backend)
    assert torch.equal(shuffled, whole[order])


@each_backend
def test_09_sequences_have_the_same_bits_in_any_order(backend):
    lengths = [int(x) for x in torch.randint(0, 700, (40,), generator=torch.Generator().manual_seed(2))]
    tokens, source, advantage, is_self, cu_seqlens = make_batch(lengths, dtype=torch.float32)
    rest = {"update_index": 1, "bounds": BOUNDS, "backend": backend}
    loss, coefficient, _ = packed_objective(tokens, cu_seqlens, source, advantage, is_self, **rest)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    pieces = tokens.split(lengths)
    moved = packed_objective(
        torch.cat([pieces[b] for b in order]), torch.tensor([0, *(lengths[b] for b in order)]).cumsum(0),
        source[order], advantage[order], is_self[order], **rest,
    )  # fmt: skip
    assert torch.equal(moved[0], loss[order])
    assert torch.equal(moved[1], coefficient[order])


@each_backend
def test_09_twenty_runs_have_the_same_bits(backend):
    """On a CPU the gradients' last products are the host's BLAS, so only their bound is asked for there."""
    head = make_head(150, 16, 300, dtype=torch.bfloat16, whole=DEVICE != "cuda")
    coefficient = torch.linspace(-1, 1, 150)
    want = exact(head, coefficient)
    runs = []
    for _ in range(20 if backend == "reference" or DEVICE == "cuda" else 3):
        hidden, weight = head.leaves()
        logprob = linear_logprob(hidden, weight, head.target, backend=backend)
        (logprob * coefficient.to(DEVICE)).sum().backward()
        runs.append((logprob.detach(), hidden.grad, weight.grad))
        assert_within(hidden.grad, want.hidden_grad, want.hidden_bound)
        assert_within(weight.grad, want.weight_grad, want.weight_bound)
    compared = 3 if DEVICE == "cuda" else 1
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run[:compared], runs[0]))


@each_backend
def test_10_nothing_to_train_on(backend):
    """Liger #177: an all-masked batch and an empty sequence divide by 0 elsewhere."""
    head = make_head(12, 16, 40)
    hidden, weight = head.leaves()
    logprob = linear_logprob(hidden, weight, torch.full((12,), -100), backend=backend)
    logprob.sum().backward()
    assert (logprob == 0).all()
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()
    tokens, source, advantage, is_self, cu_seqlens = make_batch([3, 0, 2])
    loss, coefficient, terms = packed_objective(
        tokens, cu_seqlens, source, advantage, is_self, update_index=0, bounds=BOUNDS, backend=backend
    )
    stats = objective_stats(terms)
    assert loss.isfinite().all() and loss[1] == 0 and coefficient[1] == 0
    assert stats.nonfinite.tolist() == [0.0, 3.0]
    assert stats.ratio_self[1] + stats.ratio_cross[1] == 2
    none = head.hidden[:0]
    assert linear_logprob(none, head.weight, head.target[:0], backend=backend).shape == (0,)


def test_11_launches_from_any_thread_and_leaves_the_allocator_alone():
    """verl #4676: Triton's allocator belongs to a thread's context, and autograd runs backward in another thread."""
    head = make_head(40, 16, 70)
    want = exact(head, torch.ones(40))
    hidden, weight = head.leaves()
    mine = triton.runtime._allocation._allocator.get()
    logprob = linear_logprob(hidden, weight, head.target, backend="triton")
    thread = threading.Thread(target=lambda: contextvars.Context().run(logprob.sum().backward))
    thread.start()
    thread.join()
    assert_within(weight.grad, want.weight_grad, want.weight_bound)
    assert triton.runtime._allocation._allocator.get() is mine


@each_backend
def test_12_first_call_equals_second_and_inputs_stay(backend):
    """SkyRL #2141: autotuning ran an in-place kernel several times. Here nothing is tuned at run time or in place."""
    head = make_head(70, 24, 130, pads=2, dtype=torch.bfloat16, whole=DEVICE != "cuda")
    want = exact(head, torch.ones(70))
    hidden, weight = head.leaves()
    before = [x.detach().clone() for x in (hidden, weight, head.target)]
    logprobs = []
    for _ in range(2):
        weight.grad = None
        logprobs.append(linear_logprob(hidden, weight, head.target, vocab_size=130, backend=backend))
        logprobs[-1].sum().backward()
        assert_within(weight.grad[:130], want.weight_grad, want.weight_bound)
    assert torch.equal(*logprobs)
    after = (hidden.detach(), weight.detach(), head.target)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after))
    tokens, source, advantage, is_self, cu_seqlens = make_batch([3, 4])
    kept = tokens.clone()
    packed_objective(tokens, cu_seqlens, source, advantage, is_self, update_index=0, bounds=BOUNDS, backend=backend)
    assert torch.equal(tokens, kept)


@each_backend
@pytest.mark.parametrize("tied", (True, False))
def test_13_tied_and_untied_weights_follow_the_unfused_trajectory(tied, backend):
    """verl #3730, Megatron #2739: three optimizer steps of embedding -> layer -> head, fused and with all logits.

    Through pipeline and tensor parallel ranks: tests of the actor."""

    def train(fused: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        embedding, layer, head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        if tied:
            head.weight = embedding.weight
        parameters = [embedding.weight, *layer.parameters(), *([] if tied else [head.weight])]
        for parameter in parameters:
            parameter.data = parameter.data.to(DEVICE, dtype)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        tokens = torch.randint(0, 50, (3, 41), device=DEVICE)
        for step in tokens:
            hidden = torch.tanh(layer(embedding(step[:-1])))
            if fused:
                logprob = linear_logprob(hidden, head.weight, step[1:], backend=backend)
            else:
                logprob = head(hidden).log_softmax(dim=1).gather(1, step[1:, None])[:, 0]
            optimizer.zero_grad()
            (-logprob.mean()).backward()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    wanted = train(False, torch.float64)
    # |hidden| < 1, so a logit is at most the sum of a row of the head. Per step a gradient is off by the relative
    # error of p (kernel_cases.exact) times lr times sums of at most 4; the next step at most doubles what is there.
    largest = wanted[0 if tied else -1].abs().sum(dim=1).max().item()
    relative = UNIT[torch.float32] * (2 * (16 + 12) * largest + 50 + 48)
    for found, want in zip(train(True, torch.float32), wanted):
        assert_within(found, want, (1 + 2 + 4) * 0.5 * 4 * relative)


@each_backend
def test_14_the_gradient_does_not_depend_on_micro_batches(backend):
    """Liger #1082, TRL #3823: lengths 1 to 60, weight 1 / L each; packed as 1, 2 and 4 micro-batches; end to end."""
    lengths = [1, 60, 7, 30, 2, 45, 13, 22]
    num_tokens = sum(lengths)
    head = make_head(num_tokens, 16, 90)
    _, _, advantage, is_self, _ = make_batch(lengths, dtype=torch.float32)
    scored = exact(head, torch.ones(num_tokens))
    mean = torch.stack([x.mean() for x in scored.logprob.split(lengths)])
    # Learner over source: inside and outside the own clip, below, inside and above the cross band.
    log_ratio = torch.where(is_self.cpu(), OWN_LOG_RATIOS, CROSS_LOG_RATIOS)
    source = (mean - log_ratio).float().to(DEVICE)
    # The error of a mean by the head's rounding must not carry a ratio over a border, where its gradient jumps.
    error = scored.logprob_bound.max().item()
    borders = torch.where(is_self.cpu()[:, None], torch.tensor([1 - 3e-4, 1 + 4e-4]), torch.tensor([0.8, 1.0]))
    assert (log_ratio[:, None] - borders.log()).abs().min() > 2 * error

    def gradient(ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = head.leaves()
        for first, last in itertools.pairwise(ends):
            rows = slice(sum(lengths[:first]), sum(lengths[:last]))
            logprob = linear_logprob(hidden[rows], weight, head.target[rows], backend=backend)
            cu_seqlens = torch.tensor([0, *lengths[first:last]]).cumsum(0)
            one = slice(first, last)
            loss, _, _ = packed_objective(
                logprob, cu_seqlens, source[one], advantage[one], is_self[one], update_index=0, bounds=BOUNDS,
                backend=backend,
            )  # fmt: skip
            (loss.sum() / len(lengths)).backward()
        return hidden.grad, weight.grad

    coefficient = oracle(scored.logprob, lengths, source, advantage, is_self, 0, BOUNDS).token_grad / len(lengths)
    assert 0 < (coefficient == 0).sum() < num_tokens, "some sequences are clipped, some are not"
    # s^(1 + alpha) is off by (1 + alpha) times the error of the mean, and a few roundings.
    want = exact(head, coefficient, coefficient_error=2 * error + 16 * UNIT[torch.float32])
    for ends in ([0, 8], [0, 3, 8], [0, 1, 4, 6, 8]):
        hidden_grad, weight_grad = gradient(ends)
        assert_within(hidden_grad, want.hidden_grad, want.hidden_bound)
        assert_within(weight_grad, want.weight_grad, want.weight_bound)


# log s of the eight sequences of test_14, by whether they are own answers.
OWN_LOG_RATIOS = torch.tensor([1e-4, -1e-4, 2e-3, -2e-3, 1.5e-4, 0.01, -0.01, -1e-4], dtype=torch.float64)
CROSS_LOG_RATIOS = torch.tensor([-0.05, -0.02, 0.03, -0.1, -0.4, -0.02, 0.1, -0.15], dtype=torch.float64)
