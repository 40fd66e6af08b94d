"""Packed attention of the CPU path: softmax written out, sequence by sequence, in float64."""

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from hacpo_mega.megatron.model import attention, shared_prompts
from hacpo_mega.megatron.model.attention import PackedAttention, needs_whole_heads
from hacpo_mega.megatron.model.shared_prompts import packed_segments, similar_lengths

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
# Allowed float32 error, relative to the largest value: four standard deviations of the roundings of three sums, over
# a head and twice over at most 12 keys. As many again on the way back.
ROUNDING = 4 * (8 + 12 + 12) ** 0.5 * 2.0**-24


def attention_by_hand(query_TND, key_TKD, value_TKD, lengths, scale, window, sinks_N=None):
    parts = []
    for query_LND, key_LKD, value_LKD in zip(*(t.split(lengths) for t in (query_TND, key_TKD, value_TKD)), strict=True):
        key_LND, value_LND = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key_LKD, value_LKD))
        scores_NLL = torch.einsum("qnd,knd->nqk", query_LND, key_LND) * scale
        all_LL = torch.ones(scores_NLL.shape[1:], dtype=torch.bool)
        hidden_LL = all_LL.triu(1) | (all_LL.tril(-window) if window else ~all_LL)
        scores_NLL = scores_NLL.masked_fill(hidden_LL, -torch.inf)
        if sinks_N is not None:
            scores_NLL = torch.cat([scores_NLL, sinks_N[:, None, None].expand(*scores_NLL.shape[:2], 1)], dim=-1)
        weights_NLL = scores_NLL.softmax(dim=-1)[..., : len(query_LND)]
        parts.append(torch.einsum("nqk,knd->qnd", weights_NLL, value_LND))
    return torch.cat(parts)


def attended(inputs, starts, prefixes, window, sinks_N=None):
    """This project's attention of queries, keys and values in segments."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=HEADS, attention_dropout=0.0)
    packed = packed_segments(starts, prefixes)
    alone = ProcessGroupCollection(cp=FakeProcessGroup._create_internal(0, 1))
    attention = PackedAttention(config, alone, softmax_scale=0.3, window=window)
    if sinks_N is not None:
        del attention.sinks
        attention.sinks = sinks_N
    return attention(*inputs, None, packed_seq_params=packed)


def require_close(found_TND, expected_TND, inputs, expected_inputs) -> None:
    atol = ROUNDING * float(inputs[2].abs().max())
    torch.testing.assert_close(found_TND.double(), expected_TND, rtol=0, atol=atol)
    for tensor, expected in zip(inputs, expected_inputs, strict=True):
        atol = 2 * ROUNDING * float(expected.grad.abs().max())
        torch.testing.assert_close(tensor.grad.double(), expected.grad, rtol=0, atol=atol)


# prompts, then the prompt of each answer and the answer's tokens
SHARED = [([5, 3], [(0, 4), (0, 4), (1, 4), (1, 3), (0, 1)]), ([7], [(0, 5), (0, 2)]), ([1, 2], [(1, 9), (0, 8)])]


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("prompts, answers", SHARED)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_answers_attend_to_the_prompt_they_share(prompts, answers, window, has_sinks):
    """As if each had read it by itself, whose gradients add up at the prompt; so do those of sinks."""
    lengths = [*prompts, *(length for _, length in answers)]
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, direction_TND = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs += [torch.randn(HEADS, generator=generator, dtype=torch.float64)] if has_sinks else []
    expected_inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    segments = torch.arange(sum(lengths)).split(lengths)
    wholes = [torch.cat([segments[prompt], own]) for (prompt, _), own in zip(answers, segments[len(prompts) :])]
    places, sizes = torch.cat([*segments[: len(prompts)], *wholes]), [*prompts, *map(len, wholes)]
    read = attention_by_hand(
        *(tensor[places] for tensor in expected_inputs[:3]), sizes, 0.3, window, *expected_inputs[3:]
    )
    parts = [part[-length:] for part, length in zip(read.split(sizes), lengths)]
    expected_TND = torch.cat(parts)
    (expected_TND * direction_TND).sum().backward()

    inputs = [tensor.float().requires_grad_() for tensor in inputs]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    seen = [(0, 0) for _ in prompts] + [(int(starts[prompt]), prompts[prompt]) for prompt, _ in answers]
    found_TND = attended(inputs[:3], starts, torch.tensor(seen, dtype=torch.int32), window, *inputs[3:])
    (found_TND * direction_TND).sum().backward()
    require_close(found_TND, expected_TND, inputs, expected_inputs)


class Kernel(torch.autograd.Function):
    """Keeps what flash attention keeps; its output is a sum in which every key and value counts once."""

    @staticmethod
    def forward(ctx, query_TND, key_MKD, value_MKD):
        ctx.save_for_backward(query_TND, key_MKD, value_MKD)
        return torch.zeros_like(query_TND) + key_MKD.sum() + value_MKD.sum()

    @staticmethod
    def backward(ctx, grad_TND):
        return tuple(torch.ones_like(kept) for kept in ctx.saved_tensors)


@pytest.mark.parametrize("attend", [attention._attend_in_groups, attention._attend_flash])
def test_keys_that_many_answers_meet_are_not_kept_for_each_of_them(attend, monkeypatch):
    """Backward gathers them again: of a prompt of six and nine answers of a token each."""
    gathered, gather = [], shared_prompts.gather_tokens

    def noted(tensor_TKD, places):
        found = gather(tensor_TKD, places)
        gathered.append((found.numel() // KV_HEADS // HEAD_DIM, StorageWeakRef(found.untyped_storage())))
        return found

    monkeypatch.setattr(shared_prompts, "gather_tokens", noted)
    monkeypatch.setattr(attention, "varlen_attn", lambda *given, **_how: Kernel.apply(*given[:3]))
    query, key, value = (torch.randn(15, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts, seen = torch.tensor([0, *range(6, 16)]).int(), torch.tensor([(0, 0)] + 9 * [(0, 6)]).int()
    found_TND = attend(query, key, value, packed_segments(starts, seen), None, None)
    rows = 9 * 7 + 6 * (attend is attention._attend_flash)  # which has the prompt's own as well
    assert [number for number, _ in gathered] == [rows] * 2 and all(kept.expired() for _, kept in gathered)
    found_TND.sum().backward()
    assert [number for number, _ in gathered] == [rows] * 4
    if attend is attention._attend_flash:
        assert key.grad[:, 0, 0].tolist() == value.grad[:, 0, 0].tolist() == [10.0] * 6 + [1.0] * 9


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [9, 8, 7, 3, 1], [1, 1, 12, 2, 11, 10, 4]])
def test_attention_and_its_gradient_are_those_of_a_softmax_per_sequence(lengths, window):
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, direction_TND = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    expected_inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    expected_TND = attention_by_hand(*expected_inputs, lengths, scale=0.3, window=window)
    (expected_TND * direction_TND).sum().backward()

    inputs = [tensor.float().requires_grad_() for tensor in inputs]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found_TND = attended(inputs, starts, None, window)
    (found_TND * direction_TND).sum().backward()
    require_close(found_TND, expected_TND, inputs, expected_inputs)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_what_flash_cannot_take_suits_the_memory_efficient_kernel(has_sinks, window, monkeypatch):
    """torch's rules on CUDA (sdp_utils.cpp): heads of one number, sizes of 16 bytes. The results are those of a CPU."""
    with FakeTensorMode():
        assert [needs_whole_heads(torch.empty(1, device=device)) for device in ("cuda", "cpu")] == [True, False]
    generator, asked = torch.Generator().manual_seed(4), []
    shapes = [(16, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [(HEADS,)] * has_sinks
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]

    def noted(*given, **how):
        asked.append([(tensor.shape[1], tensor.shape[3] * tensor.element_size() % 16) for tensor in given[:3]])
        return torch.nn.functional.scaled_dot_product_attention(*given, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    found = []
    for on_cuda in (False, True):
        monkeypatch.setattr(attention, "needs_whole_heads", lambda _, on_cuda=on_cuda: on_cuda)
        given = [tensor.clone().requires_grad_() for tensor in inputs]
        output = attended(given[:3], torch.tensor([0, 7, 16]).int(), None, window, *given[3:])
        output.square().sum().backward()
        found.append([output.detach(), *(tensor.grad for tensor in given)])
    assert asked[-1] == [(HEADS, 0)] * 3 != asked[0]
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=4 * ROUNDING * float(expected.abs().max()))


@pytest.mark.parametrize("window", [None, 1, 2])
def test_every_query_sees_a_key(window, monkeypatch):
    """Also one that pads a shorter answer: CUDA's memory-efficient kernel gives a row without keys a log-sum-exp of
    minus infinity, and backward, exp(-inf - -inf) is NaN for all keys, whatever the row's gradient."""
    seen = []

    def noted(query, key, value, sees, **how):
        seen.append(True if sees is None else sees.any(dim=-1).all().item())
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, sees, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    inputs = [torch.randn(22, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    prefixes = torch.tensor([(0, 0), (0, 0), (0, 8), (8, 4)]).int()  # the first answer is shorter, with more keys
    attended(inputs, torch.tensor([0, 8, 12, 16, 22]).int(), prefixes, window)
    assert len(seen) == 3 and all(seen)


class DenseKernel:
    """A twin of the flash kernel for one sequence: torch's for the CPU, with its log-sum-exp."""

    def forward(self, *tensors):
        whole = [tensor.transpose(0, 1)[None] for tensor in tensors]
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*whole, 0.0, True, scale=0.3)
        return found[0].transpose(0, 1), lse[0]

    def backward(self, grad, query, key, value, output, lse):
        whole = [tensor.transpose(0, 1)[None] for tensor in (grad, query, key, value, output)]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(found[0].transpose(0, 1) for found in backward(*whole, lse[None], 0.0, True, scale=0.3))

    as_output = staticmethod(attention._Varlen.as_output)


def test_the_gradient_of_sinks_beside_a_kernel_is_a_softmaxs():
    generator = torch.Generator().manual_seed(3)
    shapes = [(19, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [(HEADS,), (19, HEADS, HEAD_DIM)]
    *inputs, direction_TND = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    expected_inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    expected_TND = attention_by_hand(*expected_inputs[:3], [19], 0.3, None, expected_inputs[3])
    (expected_TND * direction_TND).sum().backward()
    inputs = [tensor.float().requires_grad_() for tensor in inputs]
    found_TND = attention.WithSinks.apply(*inputs, DenseKernel())
    (found_TND * direction_TND).sum().backward()
    require_close(found_TND, expected_TND, inputs, expected_inputs)


def test_a_group_pads_at_most_by_half():
    def cut(lengths, keys):
        return [[list(segment) for segment in group] for group in similar_lengths(lengths, keys)]

    def alone(lengths):
        return [[length for length, _ in group] for group in cut(lengths, lengths)]

    assert alone([30, 21, 20, 19, 9, 6, 4, 1, 1]) == [[30, 21, 20], [19], [9, 6], [4], [1, 1]]
    assert alone([4, 6, 7, 5]) == [[4, 6], [7, 5]]
    assert alone([]) == []
    assert cut([4, 4, 4, 5], [4, 4, 5, 6]) == [[[4, 4], [4, 4]], [[4, 5], [5, 6]]]  # whole ones apart from others
    assert cut([4, 4, 4], [6, 9, 10]) == [[[4, 6], [4, 9]], [[4, 10]]]


@pytest.mark.parametrize("window", [None, 4])
def test_hopper_takes_flash_attention_3_where_it_is_installed(window, monkeypatch):
    """A fake of its function, by the signature of hopper/flash_attn_interface.py; other GPUs keep torch's kernel."""
    asked, starts = [], torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = packed_segments(starts, None)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size,
        num_splits, deterministic,
    ):  # fmt: skip
        asked.append((causal, window_size, softmax_scale, num_splits, deterministic))
        assert (q.shape, k.shape, v.shape) == ((8, 4, 16), (8, 2, 16), (8, 2, 16)) and v.is_contiguous()
        assert torch.equal(cu_seqlens_q, starts) and torch.equal(cu_seqlens_k, starts)
        assert (max_seqlen_q, max_seqlen_k) == (5, 5)
        return torch.zeros_like(q)

    fused = torch.randn(8, 8, 16)
    given = fused[:, :4], fused[:, 4:6], fused[:, 6:], packed, 0.3, window
    monkeypatch.setattr(attention, "varlen_attn", lambda *_given, **_how: asked.append("torch"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for capability in ((9, 0), (10, 0)):
        for installed in (flash_attn_varlen_func, None):
            monkeypatch.setattr(attention, "FLASH3", installed)
            assert attention.has_flash3() == (installed is not None and capability == (9, 0))
            attention._attend_flash(*given)
    assert asked == [(True, (-1 if window is None else 3, 0), 0.3, 1, False), "torch", "torch", "torch"]
