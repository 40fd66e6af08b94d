"""Numbers of a rank's weights, those of experts by themselves. Imports no torch."""

import functools
import math
from dataclasses import replace
from itertools import chain

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout, chunk_ranges
from hacpo_mega.models.sharding.segments import Cut, shard_shape, stage_slots


def num_weights(architecture: Architecture, layout: Layout, stage: int = 0) -> int:
    """Numbers in the weights of one rank of pipeline stage `stage`."""
    return sum(_numbers(architecture, layout, stage))


def expert_weights(architecture: Architecture, layout: Layout, stage: int = 0) -> int:
    """Number of a rank's expert weights; their distributed optimizer spans the ranks with the same experts."""
    return _numbers(architecture, layout, stage)[1]


@functools.cache  # advice asks again and again
def _numbers(architecture: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    layers = tuple(chain(*chunk_ranges(architecture.num_layers, layout, stage)))
    dense = experts = 0
    is_beside = True  # parameters outside layers are counted once
    for model, count in architecture.kinds(layers).items():  # one of a kind is counted, as if each stage had one
        model = replace(model, delta_layers=model.delta_layers * layout.pp, windows=model.windows * layout.pp)
        for slot in stage_slots(model, (1,) * layout.pp, stage):
            is_of_layer = slot.parameter.startswith("decoder.layers.")
            size = math.prod(shard_shape(slot, model, tp=layout.tp, ep=layout.ep))
            size *= count if is_of_layer else is_beside
            dense += size * (slot.cut is not Cut.EXPERTS)
            experts += size * (slot.cut is Cut.EXPERTS)
        is_beside = False
    return dense, experts
