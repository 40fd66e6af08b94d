"""Numbers of LoRA adapters on a device, and numbers they keep for backward. Imports no torch.

Elsewhere: what else an actor holds (actor_bytes.py), how factors are cut (models/sharding/lora.py).
"""

import math
from collections.abc import Iterator
from functools import cache

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout, stage_layers
from hacpo_mega.models.sharding.lora import Lora, adapter_slots, adapters, layer_adapters
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
    ranks = {Cut.EXPERTS: layout.ep, Cut.WHOLE: 1}
    return sum(
        up.shape[0] * down.shape[1] // ranks.get(each.base.cut, layout.tp)
        for each in found
        for up, down in zip(each.up.sources, each.down.sources, strict=True)
    )


@cache
def is_adapted(architecture: Architecture, lora: Lora, *layers: str) -> bool:
    """True if a matrix of any of these Megatron layers, such as "mlp.linear_fc1", has an adapter."""
    names = tuple(f".{layer}" for layer in layers)
    return any(each.module.endswith(names) for each in layer_adapters(architecture, lora))


@cache
def kept_by_adapters(
    architecture: Architecture, layout: Layout, lora: Lora, block: str, num_tokens: int, *, flash: bool
) -> int:
    """Additional numbers a layer keeps for backward, compared with training all weights; of its self_attention or mlp.

    In a layer split along its output, an adapter keeps lora.rank numbers of every token, and the up, spread over the
    layer's rows. In one split along its input, or whole on every rank, it keeps them of a rank's share of the tokens.
    For experts an adapter keeps lora.rank numbers of all rows, and spread ups; the rest: expert_bytes.py.
    """
    kept, tp = 0, layout.tp
    for adapter in layer_adapters(architecture, lora):
        if f".{block}." in adapter.module:
            each = len(adapter.up.sources)
            if adapter.base.cut is Cut.EXPERTS:
                each //= architecture.num_experts  # matrices of an expert
                kept += num_tokens // tp * architecture.experts_per_token * lora.rank * each
                spread = shard_shape(adapter.up, architecture, tp=tp, ep=layout.ep)[0] * lora.rank * each
                kept += spread if each > 1 else 0
            elif adapter.base.cut in (Cut.COLUMNS, Cut.WHOLE):
                kept += num_tokens // tp * lora.rank
            else:
                is_spread = each > 1 or adapter.up.matrices is not None
                rows = shard_shape(adapter.base, architecture, tp=tp)[0] if is_spread else 0
                kept += (num_tokens + rows) * lora.rank * each
    reads = _reads(architecture, layout, block, num_tokens, flash=flash)
    return kept - sum(n for readers, n in reads if not is_adapted(architecture, lora, *readers))


def _reads(
    a: Architecture, layout: Layout, block: str, num_tokens: int, *, flash: bool
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Numbers that a layer's matrices read, which are kept only if one of these Megatron layers has an adapter: outputs
    of norms, the feed-forward's product, attention's output where flash attention does not keep it itself."""
    own, latent = num_tokens // layout.tp, a.latent
    normed = own * a.hidden_size
    if block == "mlp":
        inside, columns = ("mlp.shared.", a.shared_ffn) if a.has_experts else ("mlp.", a.ffn_size)
        yield (f"{inside}linear_fc1",), normed
        yield (f"{inside}linear_fc2",), num_tokens * (columns // layout.tp)
    elif a.has_delta_net_in(0):
        yield ("self_attention.in_proj",), normed
        yield ("self_attention.out_proj",), num_tokens * a.delta_net.value_rows // layout.tp
    elif latent is None:
        yield ("self_attention.linear_qkv",), normed
        output = num_tokens * a.num_heads * a.heads_in(0).size // layout.tp
        yield ("self_attention.linear_proj",), output if a.gated or not flash else 0
    else:
        yield (
            ("self_attention.q_down" if latent.query_rank else "self_attention.q_up", "self_attention.kv_down"),
            normed,
        )
        yield ("self_attention.q_up",), own * latent.query_rank
        yield ("self_attention.kv_up",), own * latent.rank
        output = num_tokens * a.num_heads * latent.value_dim // layout.tp
        yield ("self_attention.linear_proj",), output if layout.cp == 1 else 0
