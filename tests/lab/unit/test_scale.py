"""4,096 and 32,768 ranks played in one process by the formulas that test_store_traffic.py counts in real jobs."""

import time

import pytest
from repository import ROOT

from hacpo_lab.planning.store_cost import cost
from hacpo_mega.cluster.rank_map import AgentShape, RankMap

# A small model in four cells a lane beside a large one in one: 16 ranks a lane.
AGENTS = (AgentShape("small", tp=2, cells_per_lane=4, engine_tp=2), AgentShape("large", tp=8, engine_tp=8))
SIZES = (16, 4096, 32_768)


def row(num_ranks: int) -> str:
    """A line of the table in docs/design/scaling.md."""
    rank_map = RankMap(num_ranks // 16, AGENTS)
    assert rank_map.world_size == num_ranks
    costs = [cost(rank_map, rank) for rank in range(num_ranks)]
    first, others = costs[0], costs[1:]
    cells = (
        num_ranks,
        sum(one.keys for one in costs),
        max(one.keys for one in costs),
        sum(one.gets for one in costs),
        max(one.gets for one in others),
        first.gets,
        max(one.sockets for one in others),
        num_ranks + first.sockets,  # rank 0 also has the store's end of everybody's connection
        max(one.messages for one in others),
        first.messages,
    )
    return "| " + " | ".join(f"{cell:,}" for cell in cells) + " |"


@pytest.mark.parametrize("num_ranks", SIZES)
def test_the_table_is_what_the_formulas_give(num_ranks):
    assert row(num_ranks) in (ROOT / "docs/design/scaling.md").read_text().splitlines(), row(num_ranks)


def test_nothing_grows_with_the_square():
    """Eight times the ranks: eight times the keys and gets of the job, and a rank that is no head asks no more."""
    small, large = (RankMap(lanes, AGENTS) for lanes in (256, 2048))
    total = [sum(cost(ranks, rank).gets for rank in range(ranks.world_size)) for ranks in (small, large)]
    assert total[1] / total[0] == pytest.approx(8.0, rel=0.02)
    leaves = [max(cost(ranks, rank).gets for rank in range(1, 32)) for ranks in (small, large)]
    assert leaves[0] == leaves[1]
    heads = [max(cost(ranks, rank).gets for rank in range(ranks.world_size)) for ranks in (small, large)]
    assert heads[1] < 1.5 * heads[0]  # one more level


def test_a_rank_finds_its_groups_without_looking_at_the_others():
    """Processor seconds of one rank's part, whatever the size; a loop over all ranks takes longer."""
    ranks = RankMap(1 << 20, AGENTS)
    started = time.process_time()
    for rank in (0, 1, 12_345_678, ranks.world_size - 1):
        cost(ranks, rank)
    assert time.process_time() - started < 0.5
