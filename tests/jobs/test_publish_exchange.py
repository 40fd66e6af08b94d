"""A plan of publication, executed by real ranks from Megatron's own parameters: byte for byte what a full gather gives.

Four gloo processes run all layouts of all models; what an engine's rank holds is cut by arithmetic, which
jobs/test_publish.py holds against vLLM. unit/models/test_publish_plan.py holds a plan to the least it can move.
"""

import itertools
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from job import TIMEOUT_S, run_group
from megatron.core import parallel_state
from plan_bytes import moved_bytes
from tiny_models import make_model

from hacpo_mega.cluster.groups.spans import Spans
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.megatron.model.model import build_model
from hacpo_mega.megatron.weights.names import load_hf_weights
from hacpo_mega.megatron.weights.publish import ActorShards, Exchange
from hacpo_mega.megatron.weights.reshard import full_tensors
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import VIRTUAL, Layout
from hacpo_mega.models.sharding.publish_plan import engine_shards, publish_plan
from hacpo_mega.models.sharding.segments import stage_slots
from hacpo_mega.models.sharding.shards import Shard, stack_name

MODELS = {
    "dense tied": {"family": "qwen3", "tied": True},
    "dense untied": {"family": "llama", "tied": False, "vocab_size": 256},
    "one key/value head": {"family": "llama", "tied": False, "num_kv_heads": 1, "attention_bias": True},
    "experts": {"family": "qwen3_moe", "tied": False, "ffn_size": 32, "num_experts": 8},
}
SIZES = (1, 2, 4)
LAYOUTS = [Layout(tp=tp, pp=pp) for tp, pp in itertools.product(SIZES, repeat=2) if tp * pp <= 4]
CASES = [("dense tied", layout) for layout in LAYOUTS]
CASES += itertools.product(["dense untied", "one key/value head"], [each for each in LAYOUTS if each.cell_size == 4])
CASES += [("experts", Layout(tp=tp, pp=4 // tp, ep=ep)) for tp, ep in ((2, 2), (4, 2), (4, 4))]
CASES += [("experts", Layout(tp=2, cp=2, ep=4)), ("dense tied", Layout(tp=1, cp=2, pp=2))]
CASES += [("dense untied", Layout(tp=2, cp=2)), ("dense tied", Layout(tp=1, pp=4, vpp=2))]
CASES += [("experts", Layout(tp=2, ep=4)), ("experts", Layout(pp=2, ep=2))]  # over two cells
BUCKET_BYTES = 20_000


def publish_everywhere(folder: Path, layout: Layout) -> list[dict[str, object]]:
    """Into engines of every size that a cell can have."""
    architecture, sizes = Architecture.from_folder(folder), {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    initialize_parallel(**sizes, seed=1, ep=layout.ep if architecture.has_experts else None)
    chunks = {} if layout.vpp == 1 else {VIRTUAL: layout.vpp}
    model = build_model(architecture, **sizes, ep=layout.ep, dtype=torch.float32, max_positions=64, overrides=chunks)
    load_hf_weights(model, folder)
    full: dict[str, torch.Tensor] = {}
    for name, tensor in full_tensors(model):
        stack = stack_name(name)
        full[stack] = tensor.clone() if stack == name else torch.stack([*full.get(stack, ()), tensor])
    found = []
    for engine_tp in [size for size in SIZES if size <= layout.cell_size]:
        found.append(publish(model, architecture, full, engine_tp, layout))
    parallel_state.destroy_model_parallel()
    return found


def publish(
    model, architecture: Architecture, full: dict[str, torch.Tensor], engine_tp: int, layout: Layout
) -> dict[str, object]:
    group = block_group(layout.cell_size * layout.block_cells)
    own, spans, rank = ActorShards(model), Spans(), group.rank()
    slots = stage_slots(architecture, (architecture.num_layers,), 0)
    mine = list(engine_shards(slots, architecture, tp=engine_tp, rank=rank % engine_tp))
    cell = [None] * group.size()
    dist.all_gather_object(cell, (own.shards, mine), group=group)
    plan = publish_plan(*zip(*cell, strict=True), 4, BUCKET_BYTES, layout.cell_size)
    engine = [torch.full(shard.sizes, torch.nan) for shard in mine]
    left, came = [shard.size for shard in mine], 0

    def wrote(piece) -> None:
        nonlocal came
        came += 4 * piece.shard.size * piece.crosses
        assert not inside(engine[piece.target_shard], mine[piece.target_shard], piece.shard).isnan().any()
        left[piece.target_shard] -= piece.shard.size

    exchange = Exchange(plan, torch.float32, torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
    for _ in range(2):
        exchange.run(
            lambda piece: own.view(piece.source_shard, piece.shard),
            lambda piece: inside(engine[piece.target_shard], mine[piece.target_shard], piece.shard),
            wrote,
            spans.sent,
        )
    differing = [
        str(shard)
        for shard, tensor in zip(mine, engine, strict=True)
        if not torch.equal(tensor.view(torch.int32), inside(full[shard.name], None, shard).view(torch.int32))
    ]
    return {
        "differing": differing, "left": {n + size for n, size in zip(left, [s.size for s in mine])},
        "sent": spans.take_sent().get(("", "cell"), 0), "planned": 2 * moved_bytes(plan).sent[rank],
        "came": came, "received": 2 * moved_bytes(plan).received[rank],
        "buckets": len(plan.buckets), "tensors": len({shard.name for shard in mine}) - len(full), "digest": plan.digest,
        "other plan": other_plan_is_refused(plan, rank) if group.size() > 1 else True,
    }  # fmt: skip


def block_group(size: int) -> dist.ProcessGroup:
    """Megatron's leaves those out that share a sequence, or experts from another cell: here these are all ranks."""
    group = parallel_state.get_model_parallel_group()
    return group if group.size() == size else dist.group.WORLD


def inside(tensor: torch.Tensor, shard: Shard | None, what: Shard) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(what.offsets, what.sizes, strict=True)):
        tensor = tensor.narrow(dim, start - (shard.offsets[dim] if shard else 0), size)
    return tensor


def other_plan_is_refused(plan, rank: int) -> bool:
    """Where one rank of the cell has left a bucket out."""
    if rank == 1:
        plan = type(plan)(plan.num_ranks, plan.itemsize, plan.buckets[1:])
    try:
        Exchange(plan, torch.float32, torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
    except RuntimeError as error:
        return "different plans" in str(error)
    return False


@pytest.mark.nightly  # unit/models/test_publish_plan.py runs all plans on arrays, jobs/test_publish.py one on vLLM
@pytest.mark.parametrize("model, layout", CASES)
def test_engines_hold_what_a_full_gather_gives_and_no_byte_more_was_sent(model, layout, tmp_path):
    folder = make_model(tmp_path / "model", num_layers=4 * layout.vpp, **MODELS[model])
    ranks = run_group(4, publish_everywhere, folder, layout)
    for found in zip(*ranks, strict=True):
        assert [rank["differing"] for rank in found] == [[]] * 4
        assert [rank["left"] for rank in found] == [{0}] * 4, "each number is told of once in each publication"
        assert [rank["sent"] for rank in found] == [rank["planned"] for rank in found]
        assert [rank["came"] for rank in found] == [rank["received"] for rank in found]
        assert sum(rank["sent"] for rank in found) == sum(rank["received"] for rank in found), (
            "all that was on the wire"
        )
        assert {rank["tensors"] for rank in found} == {0}
        assert len({rank["digest"] for rank in found}) == 1
        assert all(rank["other plan"] for rank in found)
        assert all(rank["buckets"] > 5 for rank in found)
    if layout.ep > 1:
        # An engine's rank has a part of every expert, the actor's some experts.
        assert all(engine["sent"] > 0 for rank in ranks for engine in rank)
    elif layout.pp == 1:
        # Cut alike, but for key/value heads that several ranks share: Megatron cuts through them, vLLM copies them.
        num_kv_heads = MODELS[model].get("num_kv_heads", 2)
        assert all((rank[SIZES.index(layout.tp)]["sent"] > 0) == (layout.tp > num_kv_heads) for rank in ranks)
    elif layout.cp == 1:
        assert all(rank[0]["sent"] > 0 for rank in ranks)
