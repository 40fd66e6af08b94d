"""RankMap is a bijection whatever the size, and says what it was asked in its errors."""

import itertools
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacpo_mega.cluster.rank_map import AgentShape, RankMap

SMALL = st.integers(1, 4)


@st.composite
def shapes(draw, name: str) -> AgentShape:
    tp, cp, pp = draw(SMALL), draw(SMALL), draw(SMALL)
    cell = tp * cp * pp
    engine_tp = draw(st.sampled_from([size for size in range(1, cell + 1) if cell % size == 0]))
    return AgentShape(name, tp, pp, draw(SMALL), engine_tp, cp, ep=tp * cp * draw(SMALL))


@st.composite
def rank_maps(draw) -> RankMap:
    return RankMap(draw(SMALL), tuple(draw(shapes(f"agent{index}")) for index in range(draw(st.integers(1, 3)))))


@given(rank_maps())
def test_ranks_are_counted_as_nested_loops_count_them(rank_map):
    """The definition, as loops: agents, lanes, cells, pipeline stages, cp ranks, tensor ranks, the last one fastest."""
    rank = 0
    for agent, shape in enumerate(rank_map.agents):
        first_of_agent = rank
        for lane in range(rank_map.lanes):
            for cell in range(shape.cells_per_lane):
                leader = rank
                for pp_rank, cp_rank in itertools.product(range(shape.pp), range(shape.cp)):
                    for tp_rank in range(shape.tp):
                        place = rank_map.coordinate(rank)
                        assert (place.agent, place.agent_name, place.lane, place.cell_in_lane, place.pp_rank) == (
                            (agent, shape.name, lane, cell, pp_rank)
                        )
                        assert (place.cp_rank, place.tp_rank, place.agent_rank, place.cell_rank) == (
                            (cp_rank, tp_rank, rank - first_of_agent, rank - leader)
                        )
                        assert place.is_leader == (rank == leader)
                        in_block = place.cell % (shape.ep // (shape.tp * shape.cp))
                        assert place.block_rank == in_block * shape.cell_size + place.cell_rank
                        assert place.block * shape.block_size + place.block_rank == place.agent_rank
                        assert leader + place.engine * shape.engine_tp + place.engine_rank == rank
                        assert place.engine_rank < shape.engine_tp
                        assert rank_map.leader_of(agent, lane, cell) == leader
                        rank += 1
    assert rank_map.world_size == rank


@given(rank_maps(), st.integers(0, 9))
def test_shares_deal_every_item_to_one_cell(rank_map, num_items):
    items = list(range(num_items))
    for agent in range(len(rank_map.agents)):
        cells = [rank_map.coordinate(rank) for rank in range(rank_map.world_size)]
        cells = [place for place in cells if place.agent == agent and place.is_leader]
        dealt = [item for place in cells for item in items[rank_map.share_of_agent(place)]]
        assert sorted(dealt) == items
        for lane in range(rank_map.lanes):
            dealt = [item for place in cells if place.lane == lane for item in items[rank_map.share_of_lane(place)]]
            assert sorted(dealt) == items


@given(rank_maps(), st.integers(1, 3), st.booleans(), st.integers(0, 2))
def test_the_engine_with_an_answer_is_the_one_that_is_asked_for_it(rank_map, per_prompt, in_lane, apart):
    """Against the lists themselves: every engine's answers by key, for one lane's prompts or for all; `apart`: engines
    on ranks of their own."""
    agents = (replace(shape, rollout=apart * shape.engine_tp) for shape in rank_map.agents)
    rank_map = RankMap(rank_map.lanes, tuple(agents))
    prompts, holder = range(24), {}
    firsts = [c for c in map(rank_map.coordinate, range(rank_map.world_size)) if c.is_engine_leader]
    for who in firsts:
        mine = prompts[rank_map.share_of_lane(who) if in_lane else rank_map.share_of_agent(who)]
        answers = [(prompt, g) for prompt in mine for g in range(per_prompt)]
        for number, key in enumerate(answers[who.engine :: rank_map.agents[who.agent].engines_per_cell]):
            holder[who.agent, who.lane if in_lane else 0, key] = who.global_rank, number
    for (agent, lane, key), (rank, number) in holder.items():
        who = rank_map.coordinate(rank)
        for other in range(len(rank_map.agents)):
            found = rank_map.engine_with(other, who, number, per_prompt, in_lane=in_lane)
            assert found == holder[other, lane, key][0], (agent, other, key)


@given(rank_maps())
def test_leaders_of_all_lanes_are_all_leaders(rank_map):
    places = [rank_map.coordinate(rank) for rank in range(rank_map.world_size)]
    for lane in range(rank_map.lanes):
        by_agent = sorted(
            (place.agent, place.cell_in_lane, place.global_rank)
            for place in places
            if place.is_leader and place.lane == lane
        )
        assert rank_map.leaders(lane) == [rank for _, _, rank in by_agent]


HUGE = RankMap(4096, (AgentShape("small", 2, 1, 4, 2), AgentShape("large", 8, 2, 1, 8)))


def test_a_hundred_thousand_ranks_cost_nothing():
    started = time.process_time()
    assert HUGE.world_size == 4096 * (2 * 4 + 16) == 98_304
    place = HUGE.coordinate(98_303)
    assert (place.agent_name, place.lane, place.pp_rank, place.tp_rank, place.engine) == ("large", 4095, 1, 7, 1)
    assert len(HUGE.leaders(4095)) == 5
    table = HUGE.table()
    assert time.process_time() - started < 0.5  # of this process's own time; loops over all ranks take seconds
    assert max(map(len, table.splitlines())) < 200
    assert "lane 4095" in table
    assert "98288-98303" in table
    assert "32760-32767 in 4 cells" in table


def test_errors_say_what_was_asked_and_what_to_do():
    with pytest.raises(ValueError, match=r"agent A: a cell has tp 2 x pp 3 = 6 ranks.* 4 do not fill. Nearest: 3"):
        AgentShape("A", tp=2, pp=3, engine_tp=4)
    with pytest.raises(ValueError, match="rank 98304 is outside this job of 98304 ranks: small: 4096 lanes x 4 cells"):
        HUGE.coordinate(98_304)


def test_counting_processes_needs_no_torch():
    code = "import hacpo_mega.cluster.rank_map, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
