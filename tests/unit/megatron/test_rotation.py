"""Queries and keys are turned as by Megatron's own function, to the last bit, forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from hacpo_mega.megatron.model.rope import cosines_and_sines, rotate

LENGTHS, HEADS, SIZE = (17, 1, 46), 3, 32
WHOLE = torch.tensor([0, sum(LENGTHS)], dtype=torch.int32)
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("pairs, magnitude", [(16, 1.0), (16, 1.2079441541679836), (6, 1.0)])
def test_turned_as_by_megatron(pairs, magnitude, interleaved, dtype):
    generator = torch.Generator().manual_seed(pairs)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).float()
    frequencies = 1e4 ** -torch.linspace(0, 1, pairs)
    names = {"rotary_interleaved": interleaved, "params_dtype": dtype, "apply_rope_fusion": False}
    config = SimpleNamespace(**names, multi_latent_attention=False)
    # A part of a fused projection, as attention has it: its rows do not lie end to end.
    fused = torch.randn(len(positions), HEADS, 2 * SIZE, generator=generator).to(dtype)
    outside = torch.randn(len(positions), HEADS, SIZE, generator=generator).to(dtype)

    angles = torch.outer(positions, frequencies)
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else angles.repeat(1, 2)
    told = {"cu_seqlens": WHOLE, "mscale": magnitude, "cp_group": ALONE}
    turns = cosines_and_sines(positions, frequencies, magnitude, config)
    found = []
    for turn, by in ((apply_rotary_pos_emb, angles), (rotate, turns)):
        query = fused.clone().requires_grad_()
        turned = turn(query[..., SIZE:], by[:, None, None, :], config=config, **told)
        turned.backward(outside)
        found.append((turned.detach(), query.grad))
    (expected, expected_gradient), (turned, gradient) = found
    assert turned.shape == expected.shape and turned.is_contiguous()
    assert torch.equal(turned.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(gradient, expected_gradient)
    assert not torch.equal(turned, fused[..., SIZE:])
