"""Models and layouts whose weight sync is planned, and both sides of it."""

import itertools
from dataclasses import replace

import pytest

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import block_cells
from hacpo_mega.models.sharding.publish_plan import (
    WeightSyncPlan,
    actor_stacks,
    engine_shards,
    publish_plan,
    stack_of,
)
from hacpo_mega.models.sharding.segments import stage_slots
from hacpo_mega.models.sharding.shards import Shard

BASE = Architecture(
    family="qwen3", num_layers=4, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=12, vocab_size=256,
    max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope=None, tied=True, qkv_bias=False, output_bias=False,
    qk_norm=True,
)  # fmt: skip
MODELS = {
    "dense tied": BASE,
    "dense untied": replace(BASE, family="llama", tied=False, qk_norm=False),
    "one key/value head": replace(BASE, num_kv_heads=1, output_bias=True),
    "odd vocabulary": replace(BASE, vocab_size=131, tied=False),
    "stored fused": replace(BASE, family="phi3", tied=False, qk_norm=False),
    "norms over all heads": replace(BASE, family="olmo2", tied=False),
    "biases": replace(BASE, family="qwen2", qkv_bias=True, qk_norm=False),
    "experts": replace(
        BASE, family="qwen3_moe", tied=False, ffn_size=0, num_experts=4, experts_per_token=2, expert_ffn=4
    ),
    "experts as wide as tokens": replace(
        BASE, family="mixtral", tied=False, qk_norm=False, ffn_size=0, num_experts=4, experts_per_token=2, expert_ffn=8
    ),
}
SIZES = (1, 2, 4)
STAGES = {1: (4,), 2: (1, 3), 4: (1, 1, 1, 1)}
# tp, cp, pp, engine_tp
LAYOUTS = [
    (tp, cp, pp, engine_tp)
    for tp, cp, pp, engine_tp in itertools.product(SIZES, repeat=4)
    if tp * cp * pp <= (4 if cp == 1 else 8) and engine_tp <= tp * cp * pp
]
# The same with ep, which divides tp x cp.
SHARES = {"experts": 2, "experts as wide as tokens": 4}
CASES = [
    (name, *layout, SHARES.get(name, 1))
    for name in MODELS
    for layout in LAYOUTS
    if layout[0] * layout[1] % SHARES.get(name, 1) == 0
]
# And over two cells, and four, whose ranks come one after the other.
CASES += [
    (name, tp, 1, pp, engine_tp, 4)
    for name, tp, pp, engine_tp in itertools.product(SHARES, (1, 2), (1, 2), SIZES)
    if engine_tp <= tp * pp
]
each_layout = pytest.mark.parametrize("tp, cp, pp, engine_tp", LAYOUTS)
each_case = pytest.mark.parametrize("model, tp, cp, pp, engine_tp, ep", CASES)


def actor_side(model: Architecture, tp: int, cp: int, pp: int, ep: int = 1) -> list[list[Shard]]:
    return [
        [
            stack_of(held)
            for _, held in actor_stacks(
                stage_slots(model, STAGES[pp], stage),
                model,
                tp=tp,
                tp_rank=place % tp,
                ep=ep,
                ep_rank=(cell * tp * cp + place) % ep,
            )
        ]
        for cell in range(block_cells(ep, tp, cp))
        for stage in range(pp)
        for place in range(tp * cp)  # ranks that share tokens have the same weights, but for experts
    ]


def engine_side(model: Architecture, num_ranks: int, engine_tp: int) -> list[list[Shard]]:
    slots = stage_slots(model, (model.num_layers,), 0)
    return [list(engine_shards(slots, model, tp=engine_tp, rank=rank % engine_tp)) for rank in range(num_ranks)]


def plan_of(model: Architecture, tp: int, cp: int, pp: int, engine_tp: int, ep: int = 1, **options) -> WeightSyncPlan:
    sources = actor_side(model, tp, cp, pp, ep)
    targets = engine_side(model, len(sources), engine_tp)
    return publish_plan(sources, targets, 4, cell_size=tp * cp * pp, **options)
