"""The place of a flattened shard in the whole tensors: any layout takes up a checkpoint of another."""

import itertools
import random

import pytest
import torch

from hacpo_mega.megatron.weights.names import write_back
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import Slot, rectangles, shard_shape, stage_slots

# Every kind of parameter there is: biases of query, key and value and of the output, norms of query and key.
ARCHITECTURE = Architecture(
    family="llama",
    num_layers=3,
    hidden_size=24,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=40,
    vocab_size=131,
    max_positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope=None,
    tied=False,
    qkv_bias=True,
    output_bias=True,
    qk_norm=True,
)
SLOTS = [slot for stage in range(2) for slot in stage_slots(ARCHITECTURE, (1, 2), stage)]


def random_cuts(num_elements: int, rng: random.Random) -> list[tuple[int, int]]:
    """The shares of some data-parallel ranks, some of them empty or shorter than a row."""
    edges = sorted([0, num_elements, *(rng.randint(0, num_elements) for _ in range(4)), 1, 2])
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.parameter)
def test_rectangles_place_every_number_of_a_shard_as_the_exporter_does(slot: Slot, tp: int):
    """With 4 and 8 ranks, ranks share a key/value head, and some have nothing of the vocabulary but padding."""
    rng = random.Random(tp)
    expected = tuple(torch.full(source.shape, torch.nan) for source in slot.sources)
    found = {source.name: torch.full(source.shape, torch.nan) for source in slot.sources}
    visits = {source.name: torch.zeros(source.shape) for source in slot.sources}
    for tp_rank in range(tp):
        shard = torch.randn(shard_shape(slot, ARCHITECTURE, tp=tp))
        write_back(expected, shard, slot, ARCHITECTURE, tp=tp, tp_rank=tp_rank)
        for start, stop in random_cuts(shard.numel(), rng):
            for place in rectangles(slot, ARCHITECTURE, tp=tp, tp_rank=tp_rank, start=start, stop=stop):
                size = torch.Size(place.sizes).numel()
                assert start <= place.start and place.start + size <= stop and size > 0
                region = tuple(slice(low, low + n) for low, n in zip(place.offsets, place.sizes, strict=True))
                numbers = shard.flatten()[place.start : place.start + size].view(place.sizes)
                found[place.source.name][region] = numbers
                visits[place.source.name][region] += 1
    times = tp if "layernorm" in slot.parameter or slot.parameter.endswith("linear_proj.bias") else 1
    for source, whole in zip(slot.sources, expected, strict=True):
        assert torch.equal(found[source.name], whole)
        assert bool((visits[source.name] == times).all())
