"""Plans of publication: executed on arrays they give every engine its slices of the full tensors, and move no more.

What is right is cut out of full tensors by NumPy; what a rank must receive is counted number by number.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from plan_bytes import moved_bytes

from hacpo_lab.planning.publication import published
from hacpo_lab.planning.publish_bytes import least_received
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.public import public_architecture
from hacpo_mega.models.sharding.layout import Layout, block_cells
from hacpo_mega.models.sharding.publish_plan import (
    WeightSyncPlan,
    actor_stacks,
    engine_shards,
    publish_plan,
    stack_of,
)
from hacpo_mega.models.sharding.segments import all_sources, stage_slots
from hacpo_mega.models.sharding.shards import Shard, stacked_shapes

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


def part(full: np.ndarray, shard: Shard) -> np.ndarray:
    return full[tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes))]


def inside(own: np.ndarray, shard: Shard, what: Shard) -> np.ndarray:
    return own[tuple(slice(a - b, a - b + n) for a, b, n in zip(what.offsets, shard.offsets, what.sizes))]


def numbers_of(shards: list[Shard], number_of: dict[str, np.ndarray]) -> Iterator[int]:
    return itertools.chain.from_iterable(part(number_of[shard.name], shard).ravel().tolist() for shard in shards)


@each_case
def test_every_engine_gets_its_slices_and_nothing_that_its_own_rank_has(model, tp, cp, pp, engine_tp, ep):
    model = MODELS[model]
    sources = actor_side(model, tp, cp, pp, ep)
    targets = engine_side(model, len(sources), engine_tp)
    plan = publish_plan(sources, targets, 4, bucket_bytes=1024, cell_size=tp * cp * pp)
    first, full = 0, {}
    for name, shape in stacked_shapes({source.name: source.shape for source in all_sources(model)}).items():
        full[name] = np.arange(first, first + np.prod(shape)).reshape(shape)
        first += full[name].size
    own = [[part(full[shard.name], shard).copy() for shard in shards] for shards in sources]
    engine = [[np.full(shard.sizes, -1) for shard in shards] for shards in targets]
    for piece in plan.pieces:
        target = inside(engine[piece.target][piece.written], targets[piece.target][piece.written], piece.what)
        assert (target == -1).all(), "a number is written twice"
        target[...] = inside(own[piece.source][piece.read], sources[piece.source][piece.read], piece.what)
    for shards, arrays in zip(targets, engine, strict=True):
        for shard, array in zip(shards, arrays, strict=True):
            np.testing.assert_array_equal(array, part(full[shard.name], shard))
    moved = moved_bytes(plan)
    for rank in range(plan.num_ranks):
        wanted, held = (list(numbers_of(side[rank], full)) for side in (targets, sources))
        assert moved.received[rank] == 4 * len(set(wanted) - set(held))
        assert moved.written[rank] == 4 * len(wanted)
    assert sum(moved.sent) == sum(moved.received)


@each_case
def test_the_planner_counts_what_the_plan_moves(model, tp, cp, pp, engine_tp, ep):
    """In closed form; and that is the least, counted without a plan."""
    model = MODELS[model]
    plan, counted = plan_of(model, tp, cp, pp, engine_tp, ep), published(model, tp, STAGES[pp], engine_tp, cp, ep)
    moved = moved_bytes(plan)
    assert [4 * n for n in counted.sent] == moved.sent
    assert [4 * n for n in counted.received] == moved.received
    ends = {"first_layers": STAGES[pp][0]} if pp == 2 else {}
    least = least_received(model, Layout(tp=tp, pp=pp, cp=cp, ep=ep, **ends), engine_tp)
    assert least == counted.received
    assert [4 * n for n in counted.written] == moved.written
    pairs = {(piece.source, piece.target) for piece in plan.pieces if piece.crosses}
    assert counted.num_receivers == max([sum(source == rank for source, _ in pairs) for rank in range(plan.num_ranks)])


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"])
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_nothing_crosses_where_actor_and_engine_are_cut_alike(name, tp):
    assert not any(published(public_architecture(name), tp, (36,), tp).received)


def test_what_crosses_of_a_public_model_by_hand():
    """Llama 3.1 8B, tp 2 into two engines of one rank: each lacks half of every matrix and has every norm."""
    hidden, ffn, kv, vocab = 4096, 14336, 1024, 128256
    matrices = 32 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn) + 2 * vocab * hidden
    moved = published(public_architecture("meta-llama/Llama-3.1-8B"), 2, (32,), 1)
    assert moved.received == moved.sent == (matrices // 2,) * 2
    assert moved.written == (matrices + (2 * 32 + 1) * hidden,) * 2


@each_layout
def test_a_bucket_is_no_larger_than_asked(tp, cp, pp, engine_tp):
    model = MODELS["odd vocabulary"]
    whole, cut = (plan_of(model, tp, cp, pp, engine_tp, bucket_bytes=size) for size in (1 << 30, 512))
    assert len(whole.buckets) == 1 and len(cut.buckets) > 10
    for bucket in cut.buckets:
        for rank in range(tp * cp * pp):
            assert sum(4 * p.what.size for p in bucket if p.target == rank) <= 512
            assert sum(4 * p.what.size for p in bucket if p.source == rank and p.crosses) <= 512
    assert (moved_bytes(whole).sent, moved_bytes(whole).written) == (moved_bytes(cut).sent, moved_bytes(cut).written)


def test_replicas_are_taken_from_the_nearest():
    """A tensor on ranks 0, 1 and 4: 1 has it, 2 asks 1, 3 asks 4; what only one has comes from there."""
    both, alone = Shard("both", (0,), (6,)), Shard("alone", (0, 0), (2, 3))
    sources = [[both], [both], [], [alone], [both]]
    plan = publish_plan(sources, [[], [both], [both], [both], [alone]], 2)
    found = {(piece.what.name, piece.target): piece.source for piece in plan.pieces}
    assert found == {("both", 1): 1, ("both", 2): 1, ("both", 3): 4, ("alone", 4): 3}


def test_what_nobody_holds_is_refused_by_name():
    held = [[Shard("a", (0,), (4,))], [Shard("a", (4,), (4,))]]
    with pytest.raises(ValueError, match=r"^a\[0:9\], which the engine of rank 1 .* has 9 numbers.* have 8 of them"):
        publish_plan(held, [[], [Shard("a", (0,), (9,))]], 4)
    with pytest.raises(ValueError, match=r"^b\[0:1\], .* have 0 of them"):
        publish_plan(held, [[Shard("b", (0,), (1,))], []], 4)
    with pytest.raises(ValueError, match=r"^a\[0:6\], which .* have 8 of them"):
        publish_plan([[Shard("a", (0,), (4,))], [Shard("a", (2,), (4,))]], [[Shard("a", (0,), (6,))]], 4)


def test_equal_plans_have_equal_digests_and_no_others():
    rng = random.Random(1)
    plans = [plan_of(MODELS["dense tied"], *layout) for layout in LAYOUTS]
    assert len({plan.digest for plan in plans}) == len(plans)
    for plan, layout in zip(plans, LAYOUTS, strict=True):
        assert plan_of(MODELS["dense tied"], *layout).digest == plan.digest
        bucket = list(plan.buckets[0])
        place = rng.randrange(len(bucket))
        bucket[place] = replace(bucket[place], read=bucket[place].read + 1)
        assert replace(plan, buckets=(tuple(bucket), *plan.buckets[1:])).digest != plan.digest
