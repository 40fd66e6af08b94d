"""Stages of several chunks, without a process: which layouts there are, who has what, what is kept, what is told."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from memory_cases import LLAMA, plan_of

from hacpo_mega.memory.actor_bytes import actor_memory, num_weights
from hacpo_mega.models.sharding.layout import VIRTUAL, Layout, chunk_layers, chunks_in_flight, layout_problems
from hacpo_mega.models.sharding.segments import all_sources, rank_slots, shard_shape
from hacpo_mega.samples.packing import empty_microbatch

MODEL = replace(LLAMA, num_layers=12, tied=False)


@pytest.mark.parametrize(
    "layout, said",
    [
        (Layout(pp=2, vpp=2), "needs pp >= 3, found 2: of two stages each is before and after the other, and Megatron"),
        (Layout(pp=1, vpp=2), "needs pp >= 3, found 1. Nearest"),
        (
            Layout(pp=3, vpp=3),
            "(3) must divide the 4 layers of a stage. Nearest: virtual_pipeline_model_parallel_size = 2",
        ),
        (
            Layout(pp=3, vpp=0),
            "(0) must divide the 4 layers of a stage. Nearest: virtual_pipeline_model_parallel_size = 1",
        ),
        (
            Layout(pp=3, vpp=2, first_layers=2),
            "deals equal chunks to equal stages: remove num_layers_in_first_pipeline_",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_with_the_nearest_that_can(layout, said):
    (line,) = layout_problems(MODEL, layout)
    assert line.startswith(f"megatron.{VIRTUAL} ({layout.vpp}) ") and said in line
    if nearest := re.search(rf"Nearest: {VIRTUAL} = (\d+)$", line):
        assert layout_problems(MODEL, replace(layout, vpp=int(nearest[1]))) == []


def test_chunks_are_dealt_in_rounds():
    layout = Layout(pp=3, vpp=2)
    assert layout_problems(MODEL, layout) == []
    chunks = chunk_layers(12, layout)
    assert chunks == (2,) * 6
    owner = {}
    for rank in range(3):
        for slot in rank_slots(MODEL, chunks, 3, rank):
            for source in slot.sources:
                assert owner.setdefault(source, rank) == rank
    assert set(owner) == set(all_sources(MODEL))
    of_layer = [owner[next(s for s in owner if s.name == f"model.layers.{n}.mlp.down_proj.weight")] for n in range(12)]
    assert of_layer == [0, 0, 1, 1, 2, 2] * 2
    names = [slot.parameter for slot in rank_slots(MODEL, chunks, 3, 2)]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in names and "later.0.output_layer.weight" in names
    assert len(names) == len(set(names))
    for rank in range(3):
        held = sum(math.prod(shard_shape(slot, MODEL, tp=1)) for slot in rank_slots(MODEL, chunks, 3, rank))
        assert held == num_weights(MODEL, layout, rank)


@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize("pp", [3, 4, 7])
def test_what_is_in_flight_is_what_megatron_forwards_first(pp, vpp):
    for rank in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda rank=rank: rank)
        told = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=None if vpp == 1 else vpp)
        _, _, warm_up, _ = get_pp_rank_microbatches(100 * pp, vpp, pp, p2p_communicator=told)
        assert chunks_in_flight(Layout(pp=pp, vpp=vpp), rank) == warm_up + 1


def test_a_first_stage_keeps_more_and_no_stage_holds_more():
    """By hand, of four stages with three layers each: 4 micro-batches of 3 layers, or 2 x 3 + 2 x 4 + 1 = 15 of one."""
    plan = plan_of(replace(LLAMA, num_layers=12), pp=4)
    plain, chunked = (actor_memory(replace(plan, layout=Layout(tp=plan.layout.tp, pp=4, vpp=v))) for v in (1, 3))
    assert (plain.weights, plain.gradients, plain.moments) == (chunked.weights, chunked.gradients, chunked.moments)
    three, one = plain.kept / 4, chunked.kept / 15
    whole = actor_memory(replace(plan, layout=Layout(tp=plan.layout.tp, pp=6))).kept / 6  # of two layers
    assert three - whole == pytest.approx(whole - one)
    assert chunked.kept > plain.kept


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_micro_batch_has_a_token_for_every_rank_and_trains_none(multiple):
    batch = empty_microbatch(multiple)
    assert len(batch.tokens_T) == len(batch.positions_T) == int(batch.cu_seqlens[-1]) == multiple
    assert len(batch.rows_R) == len(batch.targets_R) == len(batch.sequences) == int(batch.row_cu_seqlens_B[-1]) == 0
