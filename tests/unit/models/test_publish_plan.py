"""Plans of publication: executed on arrays they give every engine its slices of the full tensors, and move no more.

NumPy cuts the expected slices out of full tensors; the numbers that a rank must receive are counted one by one.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from plan_bytes import moved_bytes
from publish_cases import LAYOUTS, MODELS, actor_side, each_case, each_layout, engine_side, plan_of

from hacpo_mega.models.sharding.publish_plan import (
    publish_plan,
)
from hacpo_mega.models.sharding.segments import all_sources
from hacpo_mega.models.sharding.shards import Shard, stacked_shapes


def part(full: np.ndarray, shard: Shard) -> np.ndarray:
    return full[tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes))]


def inside(own: np.ndarray, shard: Shard, what: Shard) -> np.ndarray:
    return own[tuple(slice(a - b, a - b + n) for a, b, n in zip(what.offsets, shard.offsets, what.sizes))]


def numbers_of(shards: list[Shard], number_of: dict[str, np.ndarray]) -> Iterator[int]:
    return itertools.chain.from_iterable(part(number_of[shard.name], shard).ravel().tolist() for shard in shards)


@pytest.mark.nightly
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
        target = inside(
            engine[piece.target][piece.target_shard], targets[piece.target][piece.target_shard], piece.shard
        )
        assert (target == -1).all(), "a number is written twice"
        target[...] = inside(
            own[piece.source][piece.source_shard], sources[piece.source][piece.source_shard], piece.shard
        )
    for shards, arrays in zip(targets, engine, strict=True):
        for shard, array in zip(shards, arrays, strict=True):
            np.testing.assert_array_equal(array, part(full[shard.name], shard))
    moved = moved_bytes(plan)
    for rank in range(plan.num_ranks):
        wanted, held = (list(numbers_of(side[rank], full)) for side in (targets, sources))
        assert moved.received[rank] == 4 * len(set(wanted) - set(held))
        assert moved.written[rank] == 4 * len(wanted)
    assert sum(moved.sent) == sum(moved.received)


@each_layout
def test_a_bucket_is_no_larger_than_asked(tp, cp, pp, engine_tp):
    model = MODELS["odd vocabulary"]
    whole, cut = (plan_of(model, tp, cp, pp, engine_tp, bucket_bytes=size) for size in (1 << 30, 512))
    assert len(whole.buckets) == 1 and len(cut.buckets) > 10
    for bucket in cut.buckets:
        for rank in range(tp * cp * pp):
            assert sum(4 * p.shard.size for p in bucket if p.target == rank) <= 512
            assert sum(4 * p.shard.size for p in bucket if p.source == rank and p.crosses) <= 512
    assert (moved_bytes(whole).sent, moved_bytes(whole).written) == (moved_bytes(cut).sent, moved_bytes(cut).written)


def test_replicas_are_taken_from_the_nearest():
    """A tensor on ranks 0, 1 and 4: 1 has it, 2 asks 1, 3 asks 4; what only one has comes from there."""
    both, alone = Shard("both", (0,), (6,)), Shard("alone", (0, 0), (2, 3))
    sources = [[both], [both], [], [alone], [both]]
    plan = publish_plan(sources, [[], [both], [both], [both], [alone]], 2)
    found = {(piece.shard.name, piece.target): piece.source for piece in plan.pieces}
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
        bucket[place] = replace(bucket[place], source_shard=bucket[place].source_shard + 1)
        assert replace(plan, buckets=(tuple(bucket), *plan.buckets[1:])).digest != plan.digest
