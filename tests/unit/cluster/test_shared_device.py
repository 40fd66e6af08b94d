"""Agents that share a GPU: who counts them and who waits for whom."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from device_table import DeviceTable

from hacpo_mega.cluster.machine.device import rank_device
from hacpo_mega.cluster.rank_map import AgentShape, RankMap
from hacpo_mega.cluster.turns import agents_per_device, in_turn

RANKS = RankMap(1, (AgentShape("a", tp=2), AgentShape("b")))


class Seats:
    """A job of threads: `seat(rank)` has what `turns` asks of a Place."""

    def __init__(self, devices: list[int]) -> None:
        self.devices = devices
        self.together = threading.Barrier(len(devices))
        self.payloads = [b""] * len(devices)

    def seat(self, rank: int) -> SimpleNamespace:
        coordinate = RANKS.coordinate(rank)
        return SimpleNamespace(
            rank_map=RANKS,
            coordinate=coordinate,
            agent=coordinate.agent,
            device=torch.device("cuda", self.devices[rank]) if self.devices[rank] >= 0 else torch.device("cpu"),
            barrier=self.together.wait,
            gather_job=lambda payload: self.gather(rank, payload),
        )

    def gather(self, rank: int, payload: bytes) -> list[bytes]:
        self.payloads[rank] = payload
        self.together.wait()
        found = list(self.payloads)
        self.together.wait()
        return found

    def play(self, act) -> list:
        """The answer of `act(seat)` on every rank, or its error."""
        answers = [None] * len(self.devices)

        def rank_main(rank: int) -> None:
            try:
                answers[rank] = act(self.seat(rank))
            except ValueError as error:
                answers[rank] = str(error)

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(self.devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


@pytest.mark.parametrize(
    "devices, agents",
    [([0, 1, 2], 1), ([0, 1, 0], 2), ([0, 1, 1], 2), ([-1, -1, -1], 1)],
    ids=["each its own", "b beside a's first", "b beside a's second", "on the CPU"],
)
def test_every_rank_knows_how_many_agents_a_device_has(monkeypatch, tmp_path, devices, agents):
    DeviceTable(("u", "v", "w")).install(monkeypatch, tmp_path)
    assert Seats(devices).play(agents_per_device) == [agents] * 3


def test_two_processes_of_an_agent_on_one_gpu_are_refused_everywhere(monkeypatch, tmp_path):
    DeviceTable(("u", "v")).install(monkeypatch, tmp_path)
    for said in Seats([1, 1, 0]).play(agents_per_device):
        assert said.startswith("2 processes of agent a are on the GPU v: an agent's processes need one each")


def test_rank_r_of_every_agent_has_device_r(monkeypatch, tmp_path):
    """Three processes on two GPUs; each its own device where agents do not take turns, and then there is none left."""
    ranks = replace(RANKS, shares_devices=True)
    chosen = DeviceTable(("u", "v")).install(monkeypatch, tmp_path)
    devices = [rank_device(ranks.device_number(rank, local_rank=rank)).index for rank in range(3)]
    assert devices == chosen == [0, 1, 0]
    assert (ranks.num_devices, RANKS.num_devices) == (2, 3)
    assert ranks.table().splitlines()[0].endswith("; agents take turns on 2 devices")
    with pytest.raises(ValueError, match=r"process 2 of this node has no GPU of its own: .* placement = 'shared'\.$"):
        rank_device(RANKS.device_number(2, local_rank=2))


def test_agents_take_turns_on_one_node_alone():
    ranks = replace(RANKS, shares_devices=True)
    ranks.require_one_node(3)
    RANKS.require_one_node(2)
    with pytest.raises(ValueError, match=r"is for the devices of one node, and 2 of the 3 processes are on this one"):
        ranks.require_one_node(2)


def test_agents_of_one_device_start_in_turn(monkeypatch, tmp_path):
    """Both ranks of an agent are inside together, as a collective start needs; never two agents."""
    DeviceTable(("u", "v")).install(monkeypatch, tmp_path)
    mates, lock = {0: threading.Barrier(2), 1: threading.Barrier(1)}, threading.Lock()
    inside, seen, overlaps = [], [], threading.Event()

    def start(seat: SimpleNamespace) -> None:
        with in_turn(seat, agents_per_device(seat) > 1):
            mates[seat.agent].wait()
            with lock:
                inside.append(seat.agent)
                seen.append(seat.agent)
                if len(set(inside)) > 1:
                    overlaps.set()
            overlaps.wait(0.3)  # time for another agent to come in, which none does
            with lock:
                inside.remove(seat.agent)
            mates[seat.agent].wait()

    Seats([0, 1, 1]).play(start)
    assert seen == [0, 0, 1]
    assert not overlaps.is_set()


def test_a_turn_that_a_disk_refuses_ends_like_another(monkeypatch, tmp_path):
    """All ranks meet behind it, whoever heard of it, and who has left the device before the next one comes."""
    DeviceTable(("u", "v")).install(monkeypatch, tmp_path)
    done, lock = [], threading.Lock()

    def note(seat: SimpleNamespace, what: str) -> None:
        with lock:
            done.append((seat.agent, what))

    def export(seat: SimpleNamespace) -> str:
        said = "written"
        try:
            with in_turn(seat, True, lambda: note(seat, "comes"), lambda: note(seat, "leaves")):
                if seat.agent == 0:
                    raise OSError("no room")
                note(seat, "writes")
        except OSError as refused:
            said = str(refused)
        seat.barrier()
        return said

    assert Seats([0, 1, 0]).play(export) == ["no room", "no room", "written"]
    assert sorted(done[:4]) == [(0, "comes")] * 2 + [(0, "leaves")] * 2
    assert done[4:] == [(1, "comes"), (1, "writes"), (1, "leaves")]


def test_agents_of_different_devices_start_together():
    everyone = threading.Barrier(3)

    def start(seat: SimpleNamespace) -> None:
        with in_turn(seat, False):
            everyone.wait()

    Seats([0, 1, 2]).play(start)
