"""Engines on ranks of their own: who is who, what each device holds, how their weights are sent, on which nodes.

Whole runs are in jobs/test_answers_ahead.py and jobs/test_apart_faults.py, wrong values in bad_values.py.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from paper_models import make_paper_workplace
from repository import ROOT

from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.config import SlurmConfig, load_config
from hacpo_mega.config.checks.checks import architecture_of
from hacpo_mega.config.checks.device_memory import agent_budgets, engine_options, memory_table
from hacpo_mega.jobs.slurm_plan import Plan
from hacpo_mega.logbook.files.trace import Track, chrome_trace
from hacpo_mega.megatron.weights.publish import send_and_receive
from hacpo_mega.memory.budget import CONTEXT, GIB, PHASES

PAIR = ROOT / "configs" / "paper" / "qwen-1b7-base_qwen-4b-base.toml"
WIDE, PLAIN = AgentShape("wide", tp=2, rollout=2, engine_tp=1), AgentShape("plain", cells_per_lane=2, rollout=1)
RANKS = RankMap(2, (WIDE, PLAIN))


def test_answering_ranks_follow_training_ranks_and_are_counted_apart():
    """As loops: agents, lanes, cells, those that train, those that answer; by hand for what vLLM and Megatron see."""
    rank, trained, answered = 0, {"wide": 0, "plain": 0}, {"wide": 0, "plain": 0}
    for shape, cells in ((WIDE, 2), (PLAIN, 4)):
        for cell in range(cells):
            for cell_rank in range(shape.training + shape.rollout):
                my, trains = RANKS.coordinate(rank), cell_rank < shape.training
                counts = trained if trains else answered
                assert (my.agent_name, my.cell, my.cell_rank, my.trains, my.answers) == (
                    (shape.name, cell, cell_rank, trains, not trains)
                )
                assert my.world_rank == counts[shape.name]
                assert my.is_leader == (cell_rank == 0)
                if not trains:
                    assert (my.engine, my.engine_rank) == divmod(cell_rank - shape.training, shape.engine_tp)
                counts[shape.name] += 1
                rank += 1
    assert rank == RANKS.world_size == RANKS.num_devices == 16
    for other in range(rank):
        my = RANKS.coordinate(other)
        assert RANKS.role_world_size(my) == (trained if my.trains else answered)[my.agent_name]
    assert [str(RANKS.coordinate(leader)) for leader in RANKS.leaders(1)] == [
        "rank 4 (agent wide, lane 1, cell 0, pp 0, tp 0)",
        "rank 12 (agent plain, lane 1, cell 0, pp 0, tp 0)",
        "rank 14 (agent plain, lane 1, cell 1, pp 0, tp 0)",
    ]
    assert str(RANKS.coordinate(7)) == "rank 7 (agent wide, lane 1, cell 0, engine 1, its rank 0)"
    with pytest.raises(ValueError, match=r"needs 16 ranks \(wide: 2 lanes x 1 cells x \(tp 2 x pp 1 \+ 2 that"):
        RANKS.require_world_size(12)
    with pytest.raises(ValueError, match=r"rollout_gpus 3, which engines of engine_tp 2 do not fill. Nearest: 1"):
        AgentShape("odd", rollout=3, engine_tp=2)


def test_a_cell_and_its_engines_are_on_one_node():
    shape = AgentShape("a", tp=4, rollout=4, engine_tp=2)
    plan = Plan.of(RankMap(3, (shape,)), SlurmConfig())
    assert [(node.first, node.num_ranks) for node in plan.nodes] == [(0, 8), (8, 8), (16, 8)]
    cut = AgentShape("a", tp=4, rollout=2, engine_tp=2)
    with pytest.raises(ValueError, match=r"divide the cells of agent a \(\(tp 4 x pp 1 \+ 2 that answer\) = 6"):
        Plan.of(RankMap(1, (cut,)), SlurmConfig())


def test_a_device_that_trains_has_no_engine_and_one_that_answers_no_actor(tmp_path, monkeypatch):
    make_paper_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)
    apart = ["placement=apart", "agents.*.rollout_gpus=1", "agents.*.engine_tp=1", "device_memory_gib=80"]
    config, split = load_config(PAIR, apart), load_config(PAIR, ["agents.*.engine_tp=1", "device_memory_gib=80"])
    for agent, other in zip(config.agents, split.agents, strict=True):
        trains, answers = agent_budgets(config, agent, architecture_of(agent)).values()
        (both,) = agent_budgets(split, other, architecture_of(other)).values()
        share = engine_options(config, agent).get("gpu_memory_utilization", 0.8)
        assert answers.peak == int(share * 80 * GIB) + CONTEXT + answers.parts["buckets"]
        assert answers.fullest == "publish" and set(answers.phases) == {"generate", "publish"}
        assert set(PHASES) - set(trains.phases) <= {"generate", "diagnose"}
        # of the engine asleep a device that only trains has nothing; the rest of learning is the same
        learning = both.phases["learn"] - both.parts["engine asleep"]
        assert trains.phases["learn"] == learning and both.parts["engine asleep"] > 0
        assert not (answers.parts["weights"] or answers.parts["activations"] or trains.parts["engine awake"])
    table = memory_table(agent_budgets(config, agent, architecture_of(agent)))
    assert f"{agent.name}, engines" in table and "engine_tp 1" in table
    assert re.search(r"^= generate +\d+\.\d\d$", table, re.M) and re.search(r"^= learn +\d+\.\d\d\*?$", table, re.M)


def test_a_trace_says_which_ranks_only_answer():
    ranks = RankMap(1, (AgentShape("a", rollout=1),))
    tracks = [Track(ranks.coordinate(rank), 0.0, 0.0, ()) for rank in range(2)]
    events = chrome_trace(1, tracks)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0 lane 0 cell 0", "rank 1 lane 0 cell 0, answers"]


class Recorder(SimpleNamespace):
    """A group that writes down what it is asked for, and hands out its questions as works."""

    def __getattr__(self, name: str):
        def asked(*arguments):
            self.__dict__.setdefault("log", []).append((name, arguments))
            return name

        return asked


@pytest.mark.parametrize("coalesces", [True, False], ids=["as NCCL", "as gloo"])
def test_messages_of_a_bucket_are_one_group_where_the_library_makes_one(coalesces):
    """NCCL's calls between two ranks would wait for each other one by one; gloo has no such thing."""
    group, sent, room = Recorder(supports_coalescing=coalesces, log=[]), torch.ones(2), torch.zeros(3)
    works = send_and_receive(group, {1: sent}, {2: room})
    (to, (message, peer, _)), (come, (buffer, source, _)) = group.log[1:3] if coalesces else group.log
    assert (to, message[0] is sent, peer, come, buffer[0] is room, source) == ("send", True, 1, "recv", True, 2)
    names = [name for name, _ in group.log]
    if coalesces:
        assert names == ["_start_coalescing", "send", "recv", "_end_coalescing"] and works == ["_end_coalescing"]
    else:
        assert names == works == ["send", "recv"]
    assert send_and_receive(Recorder(supports_coalescing=coalesces, log=[]), {}, {}) == []
