"""Nodes that are named for a fault, from reports and looks written by hand; and the reading of launchers' variables."""

import dataclasses
import os
from unittest import mock

import pytest

from hacpo_mega.cluster.launcher_env import LauncherEnv, expand_nodes, tasks_of_nodes
from hacpo_mega.preflight.command import Outcome, table
from hacpo_mega.preflight.node_report import (
    NodeReport,
    ProbeReport,
    neighbours,
    probe_findings,
    report_findings,
    size_text,
    suspects,
)

SOUND = NodeReport("", 0, 1, "A", {"code": "c1"}, {"devices": "8 x H100"}, memory_bytes=100)


def reports(**changed: dict) -> list[NodeReport]:
    return [dataclasses.replace(SOUND, node=node, **changed.get(node, {})) for node in ("n0", "n1", "n2", "n3")]


def named(found) -> list[tuple[str, str]]:
    return [(finding.node, finding.text) for finding in found]


def test_equal_nodes_are_not_named():
    assert report_findings(reports()) == []


def test_the_one_that_differs_is_named_with_both_values():
    assert named(report_findings(reports(n2={"in_job": {"code": "c2"}}))) == [
        ("n2", "code: c2; on 3 other node(s): c1")
    ]
    found = report_findings(reports(n0={"in_job": {"code": "c1", "driver": "550"}}))
    assert named(found) == [("n0", "driver: 550; on 3 other node(s): absent")]


def test_of_two_halves_the_first_nodes_is_right():
    other = {"in_job": {"code": "c2"}}
    assert [node for node, _ in named(report_findings(reports(n2=other, n3=other)))] == ["n2", "n3"]
    assert [node for node, _ in named(report_findings(reports(n0=other, n3=other)))] == ["n1", "n2"]


def test_devices_are_compared_among_the_nodes_of_the_same_agents():
    old = {"in_agents": {"devices": "4 x V100"}}
    elsewhere = old | {"agents": "B"}
    assert report_findings(reports(n2=elsewhere, n3=elsewhere)) == []
    assert named(report_findings(reports(n2=elsewhere, n1=old))) == [
        ("n1", "devices: 4 x V100; on 2 other node(s): 8 x H100")
    ]


def test_a_node_without_a_configuration_is_compared_with_nobody():
    broken = {"in_job": {}, "in_agents": {}, "memory_bytes": 0, "problems": ("no config.json",)}
    assert named(report_findings(reports(n1=broken))) == [("n1", "no config.json")]


def test_less_than_half_of_the_others_memory_is_a_finding():
    assert report_findings(reports(n1={"memory_bytes": 50})) == []
    assert named(report_findings(reports(n1={"memory_bytes": 49}))) == [
        ("n1", "host memory: 49 B free, 100 B on the other nodes")
    ]


def outcome_of(found: list[NodeReport]) -> Outcome:
    return Outcome({rank: {"report": vars(report)} for rank, report in enumerate(found)}, report_findings(found))


def test_a_disk_that_is_too_small_for_all_is_no_nodes_fault():
    """Starting again without some nodes would change nothing: exit 2, as `train` ends."""
    short = {"shortage": "run_dir: 9 bytes are needed, 8 are free"}
    outcome = outcome_of(reports(n0=short, n1=short, n2=short, n3=short))
    assert (outcome.bad_nodes, outcome.exit_code, outcome.is_good) == ([], 2, False)
    assert table(outcome, 0.0).count(short["shortage"]) == 1
    one = outcome_of(reports(n2=short))
    assert (named(one.findings), one.exit_code) == ([("n2", short["shortage"])], 5)


NODES = ("n0", "n1", "n2", "n3")


def looks(unreached: dict[str, tuple[str, ...]], clocks: dict[str, float] | None = None) -> dict[str, ProbeReport]:
    """Every node asked two; `unreached` by asking node. All see one mark, and all clocks show 10 unless told."""
    return {
        node: ProbeReport(
            "one mark",
            neighbours(NODES, index),
            dict.fromkeys(unreached.get(node, ()), "timed out"),
            (clocks or {}).get(node, 10.0),
        )
        for index, node in enumerate(NODES)
    }


def ways(unreached: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return named(probe_findings(looks(unreached), 10.0, dict.fromkeys(NODES, 10.0)))


def test_whom_nobody_reaches_is_named():
    assert ways({}) == []
    assert ways({"n0": ("n1",), "n3": ("n1",)}) == [("n1", "n0 and n3 cannot connect to it (timed out)")]


def test_who_reaches_nobody_is_named_and_not_those_it_asked():
    assert ways({"n0": ("n1", "n2")}) == [("n0", "it reaches none of n1, n2 (timed out)")]


def test_two_that_nobody_reaches_are_both_named():
    found = ways({"n0": ("n1", "n2"), "n3": ("n1",), "n1": ("n2",)})
    assert [node for node, _ in found] == ["n1", "n2"]


def test_one_closed_way_is_the_asked_nodes():
    assert ways({"n0": ("n1",)}) == [("n1", "n0 cannot connect to it (timed out)")]
    pair = {"n0": ProbeReport("m", ["n1"], {"n1": "timed out"}, 0.0), "n1": ProbeReport("m", ["n0"], {}, 0.0)}
    assert [finding.node for finding in probe_findings(pair, 0.0, {"n0": 0.0, "n1": 0.0})] == ["n1"]


@pytest.mark.parametrize(("shown", "said"), [(10.0 - 2.1, "2.1 s behind"), (20.0 + 2.1, "2.1 s ahead"), (21.9, None)])
def test_a_clock_is_wrong_only_if_no_delay_explains_it(shown, said):
    """Told at 10, heard of at 20: what a sound clock shows lies between."""
    found = probe_findings(looks({}, {"n2": shown}), 10.0, dict.fromkeys(NODES, 20.0))
    assert named(found) == ([("n2", f"its clock is {said}")] if said else [])


def test_neighbours_are_others_and_each_once():
    assert neighbours(["a"], 0) == []
    assert neighbours(["a", "b"], 1) == ["a"]
    assert neighbours(["a", "b", "c"], 2) == ["a", "b"]


def test_suspects_are_in_all_failed_groups_and_in_none_that_worked():
    lanes = [frozenset(pair) for pair in ("ab", "cd", "ad")]
    assert suspects([lanes[0]], [lanes[1]]) == ["a", "b"]
    assert suspects([lanes[0], lanes[2]], [lanes[1]]) == ["a"]


def test_lists_of_nodes_are_expanded():
    assert expand_nodes("gpu[01-03,7],login") == ("gpu01", "gpu02", "gpu03", "gpu7", "login")
    assert expand_nodes("r[1-2]n[08-09]-ib") == ("r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib")
    assert expand_nodes("") == ()


@pytest.mark.nightly
@pytest.mark.parametrize("names", ["node[1-99999999]", "a[1-9999]b[1-9999]"])
def test_a_list_of_nodes_that_fills_the_memory_is_refused(names):
    with pytest.raises(ValueError, match="a list of more than 1,048,576 nodes: "):
        expand_nodes(names)
    with pytest.raises(ValueError, match="a list of more than 1,048,576 nodes: "):
        tasks_of_nodes("2(x99999999),1")


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "1,3(x2),1",
    "SLURM_STEP_NODELIST": "n[0-3]",
    "SLURM_JOB_NODELIST": "n[0-9]",
    "SLURMD_NODENAME": "n2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "1234",
}


def test_a_task_of_srun_knows_its_seat():
    with mock.patch.dict(os.environ, SLURM):
        env = LauncherEnv.find()
    assert (env.rank, env.world_size, env.local_rank, env.num_local, env.node) == (5, 8, 1, 3, "n2")
    assert (env.nodes, env.is_first_of_node) == (("n0", "n1", "n2", "n3"), False)
    with mock.patch.dict(os.environ, SLURM | {"SLURM_HET_SIZE": "2"}):
        assert len(LauncherEnv.find().nodes) == 10


def test_torchruns_variables_come_first():
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "99"}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, SLURM | told):
        env = LauncherEnv.find()
    assert (env.rank, env.world_size, env.num_local, env.port) == (0, 2, 2, 99)
    assert env.is_first_of_node and env.launcher_keeps_store


def test_sizes_are_read_by_people():
    assert [size_text(number) for number in (5, 2048, 3 << 20, 5 << 29)] == ["5 B", "2 KiB", "3 MiB", "2.5 GiB"]
