"""How many numbers the adapters of LoRA are on a device, and how many they keep for backward. Imports no torch.

Not here: what else an actor holds (actor_bytes.py), how factors are cut (models/lora.py).
"""

import math
from dataclasses import replace

from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.layout import Layout, stage_layers
from hacpo_mega.models.lora import Lora, adapter_slots, adapters
from hacpo_mega.models.segments import Cut, shard_shape


def num_factors(architecture: Architecture, layout: Layout, stage: int, lora: Lora) -> int:
    """Numbers in the factors of one rank of pipeline stage `stage`."""
    slots = adapter_slots(architecture, stage_layers(architecture.num_layers, layout), stage, lora)
    return sum(math.prod(shard_shape(slot, architecture, tp=layout.tp)) for slot in slots)


def kept_by_adapters(architecture: Architecture, tp: int, lora: Lora, block: str, num_tokens: int) -> int:
    """Numbers that the adapters of a layer keep for backward, of the blocks self_attention or mlp.

    Of a layer that is split along its output: all tokens at the adapters' ranks, and the ups, spread over the layer's
    rows; of one that is split along its input, a rank's share of the tokens. What the downs read is kept anyway.
    """
    kept = 0
    for adapter in adapters(replace(architecture, num_layers=1), (1,), 0, lora):
        if f".{block}." in adapter.module:
            if adapter.base.cut is Cut.COLUMNS:
                kept += num_tokens // tp * lora.rank
            else:
                rows = shard_shape(adapter.base, architecture, tp=tp)[0]
                kept += (num_tokens + rows) * lora.rank * len(adapter.up.sources)
    return kept
