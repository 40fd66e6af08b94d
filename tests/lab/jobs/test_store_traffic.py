"""Requests of a small real job to its store, and its connections: the formulas of docs/design/scaling.md say them."""

import os
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from job import TIMEOUT_S, run_ranks
from scale_model import CountingStore

import hacpo_mega.cluster.groups.job_groups
from hacpo_lab.planning.store_cost import cost, groups_of, peers
from hacpo_mega.cluster.groups.tree import Tree, gather_bytes
from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.preflight.meeting import Meeting

FOUR = RankMap(2, (AgentShape("A"), AgentShape("B")))
EIGHT = RankMap(2, (AgentShape("A", tp=2, engine_tp=2), AgentShape("B", cells_per_lane=2)))


def num_sockets() -> int:
    """Established TCP connections of this process."""
    inodes = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(f"socket:[{row[9]}]" in inodes for row in rows if row[3] == "01")


def count(rank_map: RankMap, fanout: int) -> dict[str, int]:
    """Joins, and uses every group in the way of a step; what this rank has asked and connected by then."""
    hacpo_mega.cluster.groups.job_groups.Tree = partial(Tree, fanout=fanout)
    rank = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = CountingStore(dist.TCPStore(address, port, None, rank == 0, timedelta(seconds=TIMEOUT_S)))
    num_before = num_sockets() if rank else 1  # rank 0 also has the other end of everybody's
    place = Place.join(rank_map, TIMEOUT_S, store=store)
    counts = {"keys": store.counts["set"], "gets at joining": store.counts["get"]}
    place.sum_over_lanes(torch.ones(2, dtype=torch.float64))
    place.share_in_cell(b"it" if place.is_leader else None)
    if place.lane_group is not None:
        gather_bytes(place.lane_group, b"answers")
    place.gather_to_first(b"metrics")
    place.barrier()
    counts |= {"gets": store.counts["get"], "keys after": store.counts["set"], "bytes": store.counts["get bytes"]}
    if rank:
        counts["sockets"] = settled(num_before, cost(rank_map, rank, fanout).sockets - 1)
    place.barrier()  # whoever leaves takes its ends of the connections with it
    place.close()
    return counts


def settled(num_before: int, expected: int) -> int:
    """New connections of this process, once they are as many as expected or a minute has passed.

    A peer's side of a connection may still be on its way when the collective that needed it is over.
    """
    deadline = time.monotonic() + 60.0
    while (found := num_sockets() - num_before) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("rank_map", "fanout"),
    [(FOUR, 32), pytest.param(EIGHT, 2, marks=pytest.mark.nightly), pytest.param(EIGHT, 3, marks=pytest.mark.nightly)],
    ids=["4", "8 deep", "8"],
)
def test_a_job_asks_what_the_formulas_say(rank_map, fanout):
    counted = run_ranks(rank_map.world_size, count, rank_map, fanout)
    for rank, found in enumerate(counted):
        expected = cost(rank_map, rank, fanout)
        assert found["keys"] == found["keys after"] == expected.keys, rank
        assert found["gets at joining"] == 1, rank  # the address of the one that it watches
        assert found["gets"] == expected.gets, (rank, groups_of(rank_map, rank, fanout))
        assert found["bytes"] < 256 * found["gets"], rank
        if rank:
            assert found["sockets"] == expected.sockets - 1, rank  # the store's was there before


def test_connections_have_two_ends():
    """A rank and its peer count the same."""
    for rank_map, fanout in ((FOUR, 32), (EIGHT, 2), (RankMap(9, EIGHT.agents), 4)):
        ends = Counter()
        for rank in range(rank_map.world_size):
            for group in groups_of(rank_map, rank, fanout):
                ends.update((group.name, *sorted((group.rank, other))) for other in peers(group))
        assert set(ends.values()) == {2}


def meet(num_ranks: int) -> dict[str, int]:
    """A meeting of one round; what this rank has asked of the store."""
    rank = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    env = LauncherEnv(rank, num_ranks, rank, num_ranks, "here", (), address, port, launcher_keeps_store=False)
    meeting = Meeting(env, TIMEOUT_S)
    meeting.store = store = CountingStore(meeting.store)
    meeting.send("round", {"rank": rank})
    if rank == 0:
        assert dict(meeting.receive("round", range(num_ranks))) == {
            other: {"rank": other} for other in range(num_ranks)
        }
        meeting.send_answer("round", {"code": 0})
    else:
        assert meeting.await_answer("round") == {"code": 0}
    counts = {name: number for name, number in store.counts.items() if name in ("set", "get", "add")}
    meeting.leave(num_ranks)
    return counts


@pytest.mark.nightly
def test_a_preflight_round_costs_the_same_on_every_rank_but_the_first():
    """And on rank 0 one read per rank."""
    assert run_ranks(5, meet, 5) == [{"set": 2, "add": 1, "get": 5}] + [{"set": 1, "add": 1, "get": 1}] * 4
