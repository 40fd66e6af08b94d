"""Place's groups, Megatron's and the arithmetic of RankMap agree rank by rank, and bytes go where they are sent."""

import errno
import os
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hostile_pickles import Calls
from job import TIMEOUT_S, free_port, new_job, run_job, run_ranks, start_ranks
from megatron.core import parallel_state

import hacpo_mega.cluster.groups.job_groups
from hacpo_mega.cluster.groups.spans import WatchedGroup
from hacpo_mega.cluster.groups.tree import gather_bytes
from hacpo_mega.cluster.launcher_env import LauncherEnv, Unreachable
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.cluster.rendezvous import RollCall, open_store
from hacpo_mega.cluster.security.secret import SECRET, Secret, new_secret
from hacpo_mega.cluster.watchdog import Watchdog
from hacpo_mega.megatron.actor import initialize_parallel
from hacpo_mega.preflight.meeting import GroupTest
from hacpo_mega.trainer import joint_disk
from hacpo_mega.trainer.observers import Reports

UNEQUAL = RankMap(2, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B", cells_per_lane=2)))


def ask_groups(place: Place, rank_map: RankMap) -> None:
    my = place.coordinate
    ranks = list(range(rank_map.world_size))
    me = str(my.global_rank).encode()

    def members(group: dist.ProcessGroup) -> list[int]:
        return [int(rank) for rank in gather_bytes(group, me)]

    everyone = [rank_map.coordinate(rank) for rank in ranks]
    assert [int(rank) for rank in place.gather_job(me)] == ranks
    assert [int(rank) for rank in place.gather_to_first(me)] == (ranks if my.global_rank == 0 else [])
    leaders = [other.global_rank for other in everyone if other.agent == my.agent and other.is_leader]
    assert [int(rank) for rank in place.gather_agent(me)] == leaders
    cell = [other.global_rank for other in everyone if (other.agent, other.cell) == (my.agent, my.cell)]
    assert members(place.cell_group) == cell
    assert place.share_in_cell(me if place.is_leader else None) == str(cell[0]).encode()
    if place.is_leader:
        assert members(place.lane_group) == rank_map.leaders(my.lane)
    world = [other.global_rank for other in everyone if other.agent == my.agent]
    assert (dist.get_rank(), dist.get_world_size()) == (world.index(my.global_rank), len(world))
    assert (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) == (dist.get_rank(), dist.get_world_size())
    total = torch.tensor([my.global_rank])
    dist.all_reduce(total)
    assert int(total) == sum(world)


def test_groups_hold_who_the_map_says():
    run_job(UNEQUAL, ask_groups)


def gather_awkward(place: Place, rank_map: RankMap) -> None:
    """Empty payloads, payloads of very different sizes, and bytes that end in zeros."""
    sizes = [0, 1, 100_003, 0, 17, 2, 3, 4]
    expected = [bytes([rank]) * size + b"\0" * (rank % 2) for rank, size in enumerate(sizes)]
    is_first = place.coordinate.global_rank == 0
    mine = expected[place.coordinate.global_rank]
    assert place.gather_job(mine) == expected
    assert place.gather_to_first(mine) == (expected if is_first else [])
    assert place.gather_to_first(b"") == ([b""] * rank_map.world_size if is_first else [])
    assert place.share_in_job(b"\0it\0" if is_first else None) == b"\0it\0"
    assert place.share_in_cell(b"" if place.is_leader else None) == b""


def test_bytes_arrive_whole_whatever_their_sizes():
    run_job(UNEQUAL, gather_awkward)


def hear_objects(file: Path, place: Place, rank_map: RankMap) -> list[str]:
    """Reads objects of the agent's rank 0 on this rank, by each of torch's collectives that bring some."""
    plain = [(None, False), {"a": ["x", 2.5]}, torch.arange(3)]
    heard = [None] * dist.get_world_size()
    dist.all_gather_object(heard, plain)
    assert all(str(thing) == str(plain) for thing in heard)
    said = []
    for speak in (dist.all_gather_object, gather, dist.broadcast_object_list, scatter):
        hostile = Calls(os.system, f"touch {file}") if dist.get_rank() == 0 else None
        try:
            speak(*([heard, hostile] if speak is dist.all_gather_object else [[hostile] * dist.get_world_size()]))
        except ValueError as error:
            said.append(str(error))
        assert not file.exists()
    return said


def gather(things: list) -> None:
    dist.gather_object(things[0], list(things) if dist.get_rank() == 1 else None, dst=1)


def scatter(things: list) -> None:
    dist.scatter_object_list([None], things if dist.get_rank() == 0 else None)


def test_an_object_of_a_peer_runs_nothing(tmp_path):
    two = RankMap(1, (AgentShape("A", tp=2, engine_tp=2),))
    zero, one = run_job(two, partial(hear_objects, tmp_path / "touched"))
    # Rank 0 reads its own objects in two collectives: all-gather and scatter.
    assert (len(zero), len(one)) == (2, 4), (zero, one)
    for line in zero + one:
        assert line.startswith("a process of this job has sent an object that is not taken from a peer: it names ")


ROUNDING = RankMap(3, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B")))
# Not associative in float64: (big + 1) - big is 0, (big - big) + 1 is 1.
LANE_VALUES = ([1e16, 0.1], [1.0, 0.2], [-1e16, 0.3])


def sum_lanes(place: Place, rank_map: RankMap) -> tuple[list[float], dict[str, int]]:
    """The sum on a rank, and what it has sent for that and for ten bytes of A and thirty of B down the lane."""
    place.spans.take_sent()
    sums = place.sum_over_lanes(torch.tensor(LANE_VALUES[place.lane], dtype=torch.float64)).tolist()
    if place.is_leader:
        place.gather_lane(bytes(10 if place.agent == 0 else 30))
    return sums, {whom: num_bytes for (_, whom), num_bytes in place.spans.take_sent().items() if num_bytes}


@pytest.fixture(scope="module")
def summed() -> list:
    return run_job(ROUNDING, sum_lanes)


def test_sums_over_lanes_are_in_lane_order_on_every_rank(summed):
    by_hand = [(1e16 + 1.0) + -1e16, (0.1 + 0.2) + 0.3]
    assert by_hand != [1.0, 0.1 + (0.2 + 0.3)]  # the order matters here
    assert [sums for sums, _ in summed] == [by_hand] * ROUNDING.world_size


def test_bytes_of_a_lane_and_of_sums_over_lanes_match_their_formulas(summed):
    """docs/measurements/throughput.md has them. A lane's payload is as long as the longest; sums are two floats."""
    numbers = 8 * len(LANE_VALUES[0])
    up, down = 8 + 16 + numbers, 2 * (8 + numbers)  # what a leader sends to lane 0's, and that one to the other two
    for rank, (_, sent) in enumerate(summed):
        who = ROUNDING.coordinate(rank)
        expected = {"lane": 8 + 30, "row": down if who.lane == 0 else up} if who.is_leader else {}
        if who.is_leader and who.agent == 0:
            expected["cell"] = numbers
        assert sent == expected, who


MODEL_PARALLEL = RankMap(1, (AgentShape("A", tp=2, pp=2, engine_tp=4), AgentShape("B", cells_per_lane=2)))


def ask_megatron(place: Place, rank_map: RankMap) -> None:
    my, shape = place.coordinate, rank_map.agents[place.agent]
    initialize_parallel(shape.tp, shape.pp, seed=1)
    assert parallel_state.get_tensor_model_parallel_rank() == my.tp_rank
    assert parallel_state.get_pipeline_model_parallel_rank() == my.pp_rank
    assert parallel_state.get_data_parallel_rank() == my.cell
    # and they communicate beside another agent's: the sum of agent ranks over the model of one cell
    total = torch.tensor([my.agent_rank])
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    first = my.cell * shape.cell_size
    assert int(total) == sum(range(first, first + shape.cell_size))
    parallel_state.destroy_model_parallel()


def test_megatron_stands_where_the_map_says():
    """Two agents of unequal size and layout, each with Megatron's groups over its own default group."""
    run_job(MODEL_PARALLEL, ask_megatron)


def join_under(environments: tuple[dict[str, str], ...]) -> None:
    """Takes a place, told by a launcher that sets other variables than this process was started with."""
    rank = int(os.environ["RANK"])
    for name in new_job(1)[0]:
        del os.environ[name]
    os.environ.update(environments[rank])
    with Place.join(RankMap(1, (AgentShape("A"), AgentShape("B")))) as place:
        print(place.coordinate, place.gather_job(place.coordinate.agent_name.encode()), flush=True)


def join(folder: Path, *environments: dict[str, str]) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of a process per environment."""
    ranks = start_ranks(len(environments), folder, join_under, environments)
    for rank in ranks:
        rank.join()
    texts = [[(folder / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(len(ranks))]
    return [(rank.exitcode, *told) for rank, told in zip(ranks, texts, strict=True)]


@pytest.mark.nightly
def test_a_wrong_number_of_processes_is_refused_with_the_arithmetic(tmp_path):
    """At once and by every process alone: nobody waits for ranks that will never come."""
    ((status, _, errors),) = join(tmp_path, new_job(3)[0])
    assert status != 0
    assert "this configuration needs 2 ranks (A: 1 lanes x 1 cells x tp 1 x pp 1 = 1; B: " in errors
    assert "found WORLD_SIZE 3" in errors


def test_an_attempt_of_torchrun_needs_no_equal_counts(monkeypatch):
    """A node that is restarted because another one failed has not counted it; the keys of both attempts stay."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True)  # by torchrun
    env = LauncherEnv(0, 2, 0, 1, "node", (), "127.0.0.1", kept.port, launcher_keeps_store=True)
    rank_map, secret = RankMap(1, (AgentShape("A"), AgentShape("B"))), Secret(bytes(32))
    with ThreadPoolExecutor() as other_node:
        for restarts in ("0", "1"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
            second = other_node.submit(open_store, replace(env, rank=1), secret, 5.0)
            time.sleep(0.05)  # it has looked at its count
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
            stores = [open_store(env, secret, 5.0), second.result()]
            assert not stores[1].check(["mine"])
            stores[0].set("mine", restarts)
            assert stores[1].get("mine") == restarts.encode()
            rolls = [
                RollCall(dist.PrefixStore("hacpo_mega", store), rank_map, rank, 5.0)
                for rank, store in enumerate(stores)
            ]
            rolls[0].wait()  # whoever asks from now on waits for the next attempt


@pytest.mark.nightly
def test_no_launcher_is_said(tmp_path):
    ((status, _, errors),) = join(tmp_path, {})
    assert status != 0
    assert "RANK" in errors
    assert "launch/local.sh" in errors


def test_tasks_of_srun_find_their_place(tmp_path):
    """srun without torchrun: no RANK but SLURM_PROCID, and rank 0 keeps the store."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    tasks = join(tmp_path, *(master | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)))
    assert [status for status, _, _ in tasks] == [0, 0], tasks
    for rank, name in enumerate("AB"):
        assert tasks[rank][1] == f"rank {rank} (agent {name}, lane 0, cell 0, pp 0, tp 0) [b'A', b'B']\n"


def join_one_too_few(missing: int, shape: AgentShape) -> None:
    """One of the three ranks of two agents, of which one never comes."""
    if int(os.environ["RANK"]) != missing:
        Place.join(RankMap(1, (AgentShape("A"), shape)), timeout_s=20.0)


@pytest.mark.nightly
@pytest.mark.parametrize("missing", [1, 2])
def test_a_rank_that_never_comes_is_named_in_one_line_by_one_rank(tmp_path, missing):
    """Others of its agent wait for it in a group, or nobody but its neighbour in the ring."""
    ranks = start_ranks(3, tmp_path, join_one_too_few, missing, AgentShape("B", tp=2))
    for rank in ranks:
        rank.join()
    assert [bool(rank.exitcode) for rank in ranks] == [rank != missing for rank in range(3)]
    said = "".join((tmp_path / f"{rank}.err").read_text() for rank in range(3))
    name = f"rank {missing} (agent B, lane 0, cell 0, pp 0, tp {missing - 1}) has not come within 20 s: "
    assert said.count("has not come") == 1 and name in said, said


def join_with_another_secret(has_server: bool) -> None:
    """One of two ranks with secrets of their own, as of two nodes; without a server they share a store of no secret."""
    if has_server:
        del os.environ["HACPO_MEGA_STORE"]
    os.environ[SECRET] = new_secret()
    with pytest.raises(Unreachable) as said:
        Place.join(RankMap(1, (AgentShape("A"), AgentShape("B"))), timeout_s=10.0)
    print(said.value)


@pytest.mark.nightly
@pytest.mark.parametrize("has_server", [True, False])
def test_another_secret_is_said_on_both_sides_in_a_line(tmp_path, has_server):
    ranks = start_ranks(2, tmp_path, join_with_another_secret, has_server)
    for rank in ranks:
        rank.join()
    out, err = ([(tmp_path / f"{rank}.{kind}").read_text() for rank in range(2)] for kind in ("out", "err"))
    assert [rank.exitcode for rank in ranks] == [0, 0], err
    assert [text.count("\n") for text in out] == [1, 1] and out[1].startswith("rank 1 "), out
    said = "a process at 127.0.0.1 has another secret than this job and is turned away; give every process of the job"
    if has_server:
        assert " has another secret" in out[1]
        assert err[0].startswith("rank 0 on ") and said in err[0] and err[0].count("\n") == 1
    else:  # whoever comes first says it, and to the other one he has ended
        assert any(" has another secret; give" in text for text in out), out
        assert any(said in text for text in err), err


def come_and_go() -> None:
    """The second of two ranks comes to the job and ends before the ring stands."""
    if os.environ["RANK"] == "1":
        Watchdog._join = lambda *_: os._exit(0)
    with pytest.raises(Unreachable) as said:
        Place.join(RankMap(1, (AgentShape("A"), AgentShape("B"))), timeout_s=10.0)
    print(said.value)


@pytest.mark.nightly
def test_a_rank_that_is_gone_before_the_ring_stands_is_named_in_a_line(tmp_path):
    ranks = start_ranks(2, tmp_path, come_and_go)
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0], [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    said = (tmp_path / "0.out").read_text()
    assert re.fullmatch(r"rank 0 \(.*\) on \S+: rank 1 \(.*\) has come to the job, and is not in its ring \(.*\n", said)


def join_a_silent_port(port: int) -> None:
    """One of two tasks of srun, at whose MASTER_PORT another program listens and never answers."""
    del os.environ["HACPO_MEGA_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    with pytest.raises(Unreachable) as said:
        Place.join(RankMap(1, (AgentShape("A"), AgentShape("B"))), timeout_s=3.0)
    print(said.value)


@pytest.mark.nightly
def test_a_port_that_another_program_has_is_named_by_every_rank_in_time(tmp_path):
    """torch's own client would wait for an answer for good."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ranks = start_ranks(2, tmp_path, join_a_silent_port, port)
        for rank in ranks:
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0], [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    first, second = [(tmp_path / f"{rank}.out").read_text() for rank in range(2)]
    where = f"127.0.0.1 port {port}"
    assert first.startswith(f"rank 0 cannot listen on {where} (MASTER_PORT): Address already in use")
    assert first.endswith("set MASTER_PORT to a free port of the job's first node\n") and first.count("\n") == 1
    assert f": no store of this job at {where} for 3 s: the listener there does not answer like a process" in second
    assert second.startswith("rank 1 on ")
    assert second.endswith("MASTER_PORT a port that no other program has?\n") and second.count("\n") == 1


def wait_for_a_report(run_dir: Path, place: Place, rank_map: RankMap) -> tuple[str, bool]:
    """The line about a report that takes longer than a rank may wait; and if it was there when this rank left."""
    slow = run_dir / "slow"
    if place.coordinate.global_rank == 0:
        slow.write_text(f"#!/bin/sh\nsleep 1; echo drawn >{run_dir}/report.html\n")
        slow.chmod(0o755)
        sys.executable = str(slow)
    config = SimpleNamespace(run_dir=run_dir, num_steps=1, wait_s=0.1, logging=SimpleNamespace(report="end"))
    return Reports(config, place).finish(), (run_dir / "report.html").is_file()


@pytest.mark.nightly
def test_all_ranks_stay_while_the_last_report_is_written(tmp_path):
    """Else srun ends the one that writes it, a minute after the others have left."""
    said = run_job(UNEQUAL, partial(wait_for_a_report, tmp_path))
    assert said == [(f"the report: {tmp_path / 'report.html'}", True)] * UNEQUAL.world_size


def wait_for_a_writer(place: Place, rank_map: RankMap) -> str:
    """The line on a disk that refuses the last rank eight seconds after the first waits, for five in collectives."""
    for group in place._job._groups:
        group._group._set_default_timeout(timedelta(seconds=5))
    joint_disk.export_bytes = lambda config: 60 * joint_disk.SLOWEST_BYTES_PER_S

    def write() -> None:
        if place.coordinate.global_rank == 1:
            time.sleep(8.0)
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as said:
        joint_disk.JointDisk(place, None, None, print).attempt_write(write)
    return str(said.value)


@pytest.mark.nightly
def test_ranks_wait_for_a_writer_longer_than_for_each_other():
    both = RankMap(1, (AgentShape("A"), AgentShape("B")))
    assert run_job(both, wait_for_a_writer) == ["[Errno 28] full"] * 2


def end_a_preflight(rank_map: RankMap) -> list[str]:
    """The groups that this rank shuts down when it has timed them: NCCL's complains, and aborts, where nobody does."""
    shut = []

    class Recorder(WatchedGroup):
        def shutdown(self) -> None:
            shut.append(self._name)
            self._group.shutdown()

    hacpo_mega.cluster.groups.job_groups.WatchedGroup = Recorder
    env = LauncherEnv.find()
    test = GroupTest()
    test.run(rank_map, open_store(env, Secret.of_job(env), TIMEOUT_S), TIMEOUT_S)
    assert test.stage is None
    return shut


@pytest.mark.nightly
def test_a_preflight_ends_its_lane_as_a_run_does():
    assert run_ranks(2, end_a_preflight, RankMap(1, (AgentShape("A"), AgentShape("B")))) == [["lane/0"]] * 2
