"""The gated delta rule in chunks over packed segments, against the rule token by token in float64."""

from types import SimpleNamespace

import pytest
import torch

from hacpo_mega.megatron.model import delta_net
from hacpo_mega.megatron.model.delta_net import DeltaInputs, causal_convolution, delta_rule, fused_rule
from hacpo_mega.megatron.model.shared_prompts import packed_segments
from hacpo_mega.rollout.cpu.delta_net import delta_step

HEADS, KEY, VALUE = 3, 8, 5
# Segments of one chunk, of a part of one, of several; a token alone; more chunks than the segment before.
PACKS = [(64, 17, 200, 1, 129), (5,), (1, 1), (130, 64)]


def packed(lengths):
    return packed_segments(torch.tensor([0, *lengths]).cumsum(0).int(), None)


def inputs(lengths, dtype):
    draw, tokens = torch.Generator().manual_seed(3), sum(lengths)
    sizes = [(tokens, HEADS, KEY)] * 2 + [(tokens, HEADS, VALUE)] + [(tokens, HEADS)] * 2
    query, key, value, decay, share = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes)
    tensors = query + 0.5, key + 0.5, value, -decay.exp() / 3, share.sigmoid()
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def token_by_token(query, key, value, decay, share, lengths):
    outputs, first = [], 0
    for length in lengths:
        states = torch.zeros(1, HEADS, VALUE, KEY, dtype=torch.float64)
        for token in range(first, first + length):
            states, output = delta_step(states, *(t[token][None] for t in (query, key, value, decay, share)))
            outputs.append(output[0])
        first += length
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", PACKS)
def test_chunks_and_tokens_agree_and_so_do_their_gradients(lengths):
    ours, exact = inputs(lengths, torch.float32), inputs(lengths, torch.float64)
    output, expected = delta_rule(DeltaInputs(*ours), packed(lengths)), token_by_token(*exact, lengths)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-5)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (output * weight.float()).sum().backward()
    (expected * weight).sum().backward()
    for one, other in zip(ours, exact, strict=True):
        assert (one.grad.double() - other.grad).norm() <= 2e-6 * other.grad.norm()


def test_a_segment_has_the_same_output_alone():
    lengths = PACKS[0]
    together = delta_rule(DeltaInputs(*inputs(lengths, torch.float32)), packed(lengths))
    first = 0
    for length in lengths:
        part = [tensor[first : first + length] for tensor in inputs(lengths, torch.float32)]
        alone = delta_rule(DeltaInputs(*part), packed([length]))
        torch.testing.assert_close(alone, together[first : first + length], atol=1e-6, rtol=1e-5)
        first += length


def test_the_convolution_is_torchs_of_each_segment():
    lengths = (7, 1, 3)
    draw = torch.Generator().manual_seed(1)
    rows, weight = torch.randn(sum(lengths), 6, generator=draw), torch.randn(6, 1, 4, generator=draw)
    parts = [
        torch.nn.functional.conv1d(part.T[None], weight, padding=3, groups=6)[0, :, : len(part)].T
        for part in rows.split(lengths)
    ]
    torch.testing.assert_close(causal_convolution(rows, weight, packed(lengths)), torch.cat(parts))


def test_the_kernel_of_flash_linear_attention_gets_what_it_takes(monkeypatch):
    """Its twin on the CPU: equal arguments by their names, sequences by their starts, [1, T, N, ...]."""

    def twin(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
        assert use_qk_l2norm_in_kernel and cu_seqlens.dtype is torch.int64 and q.is_contiguous()
        segments = SimpleNamespace(lengths=cu_seqlens.diff().tolist())
        return delta_rule(DeltaInputs(*(tensor[0] for tensor in (q, k, v, g, beta))), segments)[None], None

    monkeypatch.setattr(delta_net, "DELTA_RULE", twin)
    lengths = (30, 70)
    given = DeltaInputs(*inputs(lengths, torch.float32))
    assert torch.equal(fused_rule(given, packed(lengths)), delta_rule(given, packed(lengths)))
