"""Experts' matrices as one shard: only where they lie at equal distances, and as what a folder has them."""

import numpy as np

from hacpo_mega.models.sharding.publish_plan import publish_plan
from hacpo_mega.models.sharding.shards import Shard, runs, stack_name, stacked, stacked_shapes

GATE = "model.layers.3.mlp.experts.{}.gate_proj.weight"


def gate(expert: int, rows: int = 4) -> Shard:
    return Shard(GATE.format(expert), (2, 0), (rows, 8))


def test_neighbouring_experts_at_equal_distances_are_one_shard():
    norm = Shard("model.norm.weight", (0,), (8,))
    held = [(gate(e), "w13", 64 * e) for e in (5, 6, 7)] + [(norm, "norm", 0), (norm, "norm", 0)]
    assert runs(held) == [[0, 1, 2], [3], [4]]
    whole = stacked([shard for shard, *_ in held[:3]])
    assert whole == Shard(GATE.format("*"), (5, 2, 0), (3, 4, 8))
    assert [whole.member(number) for number in range(whole.num_members)] == [gate(e) for e in (5, 6, 7)]
    assert stacked([norm]) == norm.member(0) == norm and norm.num_members == 1
    assert stacked([gate(9)]).member(0) == gate(9)


def test_other_experts_memories_rectangles_and_distances_begin_another():
    found = {
        "an expert is elsewhere": [(gate(0), "a", 0), (gate(1), "a", 64), (gate(3), "a", 128)],
        "in another memory": [(gate(0), "a", 0), (gate(1), "a", 64), (gate(2), "b", 128)],
        "other rows": [(gate(0), "a", 0), (gate(1), "a", 64), (gate(2, rows=3), "a", 128)],
        "farther": [(gate(0), "a", 0), (gate(1), "a", 64), (gate(2), "a", 129)],
        "backwards": [(gate(0), "a", 64), (gate(1), "a", 128), (gate(2), "a", 0)],
    }
    for reason, held in found.items():
        assert runs(held) == [[0, 1], [2]], reason


def test_only_what_is_an_experts_counts_as_another_tensor():
    for name in (
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.shared_experts.up_proj.weight",
        "lm_head.weight",
    ):
        assert stack_name(name) == name
    mixtral = [f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight" for e in range(12)]
    shapes = dict.fromkeys(mixtral, (6, 4)) | {"model.norm.weight": (4,)}
    assert stacked_shapes(shapes) == {
        "model.layers.0.block_sparse_moe.experts.*.w1.weight": (12, 6, 4), "model.norm.weight": (4,),
    }  # fmt: skip


def test_a_large_stack_is_cut_by_experts_then_by_rows_and_columns():
    whole = Shard(GATE.format("*"), (4, 0, 0), (6, 3, 8))
    full = np.arange(10 * 3 * 8).reshape(10, 3, 8)
    for limit, num_pieces in ((144, 1), (143, 2), (50, 3), (47, 6), (16, 12), (8, 18), (5, 36)):
        pieces = list(publish_plan([[whole], []], [[], [whole]], 2, bucket_bytes=2 * limit).pieces)
        assert len(pieces) == num_pieces and all(piece.shard.size <= limit for piece in pieces)
        moved = [
            full[tuple(slice(start, start + size) for start, size in zip(p.shard.offsets, p.shard.sizes))]
            for p in pieces
        ]
        assert sorted(np.concatenate([block.ravel() for block in moved])) == list(full[4:].ravel())
