"""Numbers of LoRA adapters on a device, and numbers they keep for backward. Imports no torch.

Not here: what else an actor holds (actor_bytes.py), how factors are cut (models/sharding/lora.py).
"""

import math
from collections.abc import Iterator
from functools import cache

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout, stage_layers
from hacpo_mega.models.sharding.lora import Adapter, Lora, adapter_slots, adapters, last_layer
from hacpo_mega.models.sharding.segments import Cut, shard_shape


@cache
def num_factors(architecture: Architecture, layout: Layout, stage: int, lora: Lora) -> tuple[int, int]:
    """Numbers in the factors of one rank of pipeline stage `stage`: of all but experts, and of experts."""
    slots = adapter_slots(architecture, stage_layers(architecture.num_layers, layout), layout.pp, stage, lora)
    sizes = [(math.prod(shard_shape(slot, architecture, tp=layout.tp, ep=layout.ep)), slot.cut) for slot in slots]
    experts = sum(size for size, cut in sizes if cut is Cut.EXPERTS)
    return sum(size for size, _ in sizes) - experts, experts


@cache
def num_merged(architecture: Architecture, layout: Layout, stage: int, lora: Lora) -> int:
    """Numbers of the matrices of one rank of pipeline stage `stage` that adapters are merged into."""
    found = adapters(architecture, stage_layers(architecture.num_layers, layout), layout.pp, stage, lora)
    return sum(
        up.shape[0] * down.shape[1] // (layout.ep if each.base.cut is Cut.EXPERTS else layout.tp)
        for each in found
        for up, down in zip(each.up.sources, each.down.sources, strict=True)
    )


@cache
def is_adapted(architecture: Architecture, lora: Lora, layer: str) -> bool:
    """True if a matrix of this Megatron layer, such as "mlp.linear_fc1", has an adapter."""
    return any(each.module.endswith(f".{layer}") for each in _of_a_layer(architecture, lora))


@cache
def kept_by_adapters(architecture: Architecture, layout: Layout, lora: Lora, block: str, num_tokens: int) -> int:
    """Additional numbers a layer keeps for backward, compared with training all weights; of its self_attention or mlp.

    In a layer split along its output, an adapter keeps lora.rank numbers of every token, and the up, spread over the
    layer's rows. In a layer split along its input, it keeps them of a rank's share of the tokens. A matrix without an
    adapter does not keep what it reads: a norm's output, or the feed-forward's product. (Attention keeps the input of
    linear_proj.) For experts an adapter keeps lora.rank numbers of all rows, and spread ups; the rest: expert_bytes.py.
    """
    kept, tp = 0, layout.tp
    for adapter in _of_a_layer(architecture, lora):
        if f".{block}." in adapter.module:
            if adapter.base.cut is Cut.EXPERTS:
                each = len(adapter.up.sources) // architecture.num_experts  # matrices of an expert
                kept += num_tokens // tp * architecture.experts_per_token * lora.rank * each
                spread = shard_shape(adapter.up, architecture, tp=tp, ep=layout.ep)[0] * lora.rank * each
                kept += spread if each > 1 else 0
            elif adapter.base.cut is Cut.COLUMNS:
                kept += num_tokens // tp * lora.rank
            else:
                rows = shard_shape(adapter.base, architecture, tp=tp)[0]
                kept += (num_tokens + rows) * lora.rank * len(adapter.up.sources)
    normed = num_tokens // tp * architecture.hidden_size
    reads = {
        "self_attention": {"linear_qkv": normed},
        "mlp": {"linear_fc1": normed, "linear_fc2": num_tokens * (architecture.ffn_size // tp)},
    }[block]
    return kept - sum(n for name, n in reads.items() if not is_adapted(architecture, lora, f"{block}.{name}"))


def _of_a_layer(architecture: Architecture, lora: Lora) -> Iterator[Adapter]:
    return adapters(last_layer(architecture), (1,), 1, 0, lora)
