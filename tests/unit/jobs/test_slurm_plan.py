"""Ranks by node, and what a cluster could not run: arithmetic, held against layouts drawn by hand."""

import pytest

from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import SlurmConfig
from hacpo_mega.jobs.slurm_plan import Plan, seconds_of


def plan_of(*shapes: AgentShape, lanes: int = 1, **slurm) -> Plan:
    return Plan.of(RankMap(lanes, shapes), SlurmConfig.model_validate(slurm))


def counts(plan: Plan) -> list[tuple[str | None, tuple[int, ...]]]:
    return [(component.kind.partition, component.counts) for component in plan.components]


A4 = AgentShape("a", tp=4, engine_tp=4)
B8 = AgentShape("b", tp=8, engine_tp=8)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # 3 cells of 4 fill a node and a half; a cell of 8 needs a node of its own: 8, 4, then 3 x 8
        (plan_of(A4, B8, lanes=3), [(None, (8, 4, 8, 8, 8))]),
        # two agents share a node as long as whole cells fit
        (plan_of(A4, AgentShape("c", tp=2), lanes=1), [(None, (6,))]),
        # a cell of 16 (tp 8, two stages) is two whole nodes, and no other cell is cut by it
        (plan_of(A4, AgentShape("d", tp=8, pp=2)), [(None, (4, 8, 8))]),
        # agents on nodes of their own kind: a component each, all nodes of a component alike
        (
            plan_of(A4, B8, lanes=3, agents={"a": {"partition": "old"}}, partition="new"),
            [("old", (8,)), ("old", (4,)), ("new", (8, 8, 8))],
        ),
        # nodes without GPUs take as many processes as they are given
        (plan_of(A4, lanes=2, gpus_per_node=0, ranks_per_node=4), [(None, (4, 4))]),
    ],
)
def test_nodes_are_filled_with_whole_cells(plan, expected):
    assert counts(plan) == expected
    assert sum(node.num_ranks for node in plan.nodes) == plan.rank_map.world_size
    for first, second in zip(plan.nodes, plan.nodes[1:]):
        assert second.first == first.first + first.num_ranks


def test_agents_that_take_turns_are_started_otherwise():
    with pytest.raises(
        ValueError, match=r"^placement = 'shared'.* of one node with 4 GPUs, .* srun --ntasks=6 hacpo-mega"
    ):
        Plan.of(RankMap(1, (A4, AgentShape("c", tp=2)), shares_devices=True), SlurmConfig())


def test_no_group_of_a_layer_crosses_nodes():
    shapes = [AgentShape(f"{tp}.{pp}", tp, pp, cells) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for cells in (1, 3)]
    shapes += [AgentShape(f"{tp}.{cp}.{pp}", tp, pp, cp=cp) for tp, cp in ((1, 8), (2, 4), (4, 2)) for pp in (1, 2)]
    plan = plan_of(*shapes, lanes=2)
    node = {rank: n for n, each in enumerate(plan.nodes) for rank in range(each.first, each.first + each.num_ranks)}
    for rank in range(plan.rank_map.world_size):
        place = plan.rank_map.coordinate(rank)
        first = rank - place.tp_rank - place.cp_rank * plan.rank_map.agents[place.agent].tp
        assert node[rank] == node[first] == plan.node_of(rank)
        if plan.rank_map.agents[place.agent].cell_size <= 8:
            assert node[rank] == node[rank - place.cell_rank], "a cell that fits a node is on one"


@pytest.mark.parametrize(
    ("shapes", "slurm", "said"),
    [
        ([B8], {"gpus_per_node": 4}, "tp 8 would cross nodes of slurm.gpus_per_node 4"),
        ([AgentShape("f", 2, cp=4)], {"gpus_per_node": 4}, "tp 2 x cp 4 would cross nodes .* Choose tp x cp 1, 2 or 4"),
        ([AgentShape("e", tp=2, pp=3)], {}, r"gpus_per_node \(8\) does not divide the cells .* = 6 ranks.* Nearest: 6"),
        (
            [A4, B8],
            {"nodes": 1},
            r"slurm.nodes \(1\) is not what 12 ranks .* = 4; b: .* = 8\) fill at 8 per node.*2",
        ),
        ([A4], {"gpus_per_node": 0}, "slurm.ranks_per_node is not given"),
        ([A4], {"agents": {"z": {}}}, "slurm.agents.z: there is no agent of that name; there are: a"),
    ],
)
def test_what_nodes_cannot_take_is_refused_with_the_arithmetic(shapes, slurm, said):
    with pytest.raises(ValueError, match=said) as refusal:
        plan_of(*shapes, **slurm)
    assert "\n" not in str(refusal.value)


def test_a_tensor_group_crosses_nodes_only_when_asked():
    plan = plan_of(B8, gpus_per_node=4, tp_across_nodes=True)
    assert counts(plan) == [(None, (4, 4))]
    assert "b: a cell fills 2 nodes, the tensor ranks of a cell over 2 nodes" in plan.table()


def test_the_table_says_who_is_where_and_fits_a_screen():
    small = plan_of(A4, B8, lanes=3).table().splitlines()
    assert small[0] == "36 ranks on 5 nodes"
    assert small[2] == "node 1  ranks 8-11   a cell 2; 4 of 8 places idle"
    assert small[-1] == "lane 0: its leaders exchange over nodes 0-2"
    large = plan_of(A4, B8, lanes=1024).table().splitlines()
    assert large[0] == "12288 ranks on 1536 nodes" and len(large) < 25
    assert large[16] == "node 1535  ranks 12280-12287  b cell 1023"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("2:30", 150), ("12:00:00", 43200), ("2-12", 216000), ("1-06:30", 109800), ("1-00:00:05", 86405)],
)
def test_limits_of_time_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds
