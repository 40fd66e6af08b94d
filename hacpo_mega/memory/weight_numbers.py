"""How many numbers the weights of a rank are, those of experts by themselves. Imports no torch."""

import functools
import math

from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.layout import Layout, stage_layers
from hacpo_mega.models.segments import Cut, shard_shape, stage_slots


def num_weights(architecture: Architecture, layout: Layout, stage: int = 0) -> int:
    """Numbers in the weights of one rank of pipeline stage `stage`."""
    return sum(_numbers(architecture, layout, stage))


def expert_weights(architecture: Architecture, layout: Layout, stage: int = 0) -> int:
    """What of them is experts: of another distributed optimizer, whose ranks are those with the same experts."""
    return _numbers(architecture, layout, stage)[1]


@functools.cache  # advice asks again and again
def _numbers(architecture: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    layers = stage_layers(architecture.num_layers, layout)[stage]  # all alike: one is counted
    dense = experts = 0
    for slot in stage_slots(architecture, (1,) * layout.pp, stage):
        size = math.prod(shard_shape(slot, architecture, tp=layout.tp, ep=layout.ep))
        size *= layers if slot.parameter.startswith("decoder.layers.") else 1
        dense += size * (slot.cut is not Cut.EXPERTS)
        experts += size * (slot.cut is Cut.EXPERTS)
    return dense, experts
