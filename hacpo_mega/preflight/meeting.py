"""The meeting of a job's processes before anything is loaded: presence, reachability, and speed of the groups.

All messages go through the store of rank 0, and every wait has an end, so that those present name a process that never
comes. A round:

    every rank    sets its word and adds one to a counter
    rank 0        reads them all, waiting until nobody new has come for `patience_s`, and sets the answer
    every rank    reads the answer

which is 3 operations a rank and 1 key, whatever the number of ranks. Nobody reads everybody's words but rank 0.
Elsewhere: what a node says of itself and what differs (node_report.py), the order of the rounds and what is printed
(preflight/command.py).
"""

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from hacpo_mega.cluster.launcher_env import LauncherEnv, Unreachable
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.rendezvous import allow_connections, listen, listening_address, open_store
from hacpo_mega.cluster.security.secret import AuthListener, Secret, authenticate

POLL_S = 0.05
PROBE_S = 5.0  # for one connection between two nodes
KEYS_AT_ONCE = 512
NUM_TIMED = 3
CPU_BYTES, CUDA_BYTES = 4 << 20, 64 << 20  # of a measured collective
LOST = (Unreachable, dist.DistError)  # raised where rank 0, or its store, does not answer

Word = dict[str, Any]


class Meeting:
    """One process's part in the meeting.

    store    of the job; rank 0 keeps it, unless the launcher does
    secret   of the job
    """

    def __init__(self, env: LauncherEnv, patience_s: float) -> None:
        """Comes to the meeting; Unreachable when rank 0 has not opened it in time."""
        self._env, self._patience_s = env, patience_s
        allow_connections(env.world_size)
        self.secret = Secret.of_job(env)
        self.store: dist.Store = dist.PrefixStore("preflight", open_store(env, self.secret, patience_s))

    def tell(self, round_name: str, word: Word) -> None:
        """Sends this rank's message of a round."""
        self.store.set(f"{round_name}/{self._env.rank}", json.dumps(word))
        self.store.add(f"{round_name}/count", 1)

    def hear(self, round_name: str, ranks: Sequence[int]) -> Iterator[tuple[int, Word]]:
        """Messages of those `ranks` that arrive before no new one has for `patience_s`; on rank 0."""
        heard, last = -1, time.monotonic()
        while heard < len(ranks) and time.monotonic() - last < self._patience_s:
            count = self.store.add(f"{round_name}/count", 0)
            if count > heard:
                heard, last = count, time.monotonic()
            else:
                time.sleep(POLL_S)
        keys = {rank: f"{round_name}/{rank}" for rank in ranks}
        come = list(ranks) if heard >= len(ranks) else [rank for rank in ranks if self.store.check([keys[rank]])]
        for start in range(0, len(come), KEYS_AT_ONCE):
            some = come[start : start + KEYS_AT_ONCE]
            words = self.store.multi_get([keys[rank] for rank in some])
            yield from ((rank, json.loads(word)) for rank, word in zip(some, words))

    def answer(self, round_name: str, word: Word) -> None:
        """Rank 0's answer to a round."""
        self.store.set(f"{round_name}/answer", json.dumps(word))

    def await_answer(self, round_name: str) -> Word:
        """Waits for rank 0's answer; Unreachable after the time that rank 0 may wait for the others."""
        limit_s = 3 * self._patience_s + PROBE_S
        try:
            self.store.wait([f"{round_name}/answer"], timedelta(seconds=limit_s))
            return json.loads(self.store.get(f"{round_name}/answer"))
        except RuntimeError as error:
            raise Unreachable(f"no answer from rank 0 within {limit_s:.0f} s: {_first_line(error)}") from error

    def token(self) -> str:
        """A name that no other meeting has."""
        if self._env.rank == 0:
            self.store.set("token", os.urandom(8).hex())
        try:
            self.store.wait(["token"], timedelta(seconds=self._patience_s))
            return self.store.get("token").decode()
        except RuntimeError as error:
            raise Unreachable(f"rank 0 has opened no meeting: {_first_line(error)}") from error

    def leave(self, num_come: int) -> None:
        """Rank 0, whose process may keep the store, leaves after all that arrived, or after `patience_s`."""
        with suppress(RuntimeError):
            self.store.add("left", 1)
            end = time.monotonic() + self._patience_s
            while self._env.rank == 0 and self.store.add("left", 0) < num_come and time.monotonic() < end:
                time.sleep(POLL_S)

    def second(self) -> "Meeting":
        """The same meeting over a connection of its own, while another thread waits on the first."""
        other = object.__new__(Meeting)
        other._env, other._patience_s, other.secret = self._env, self._patience_s, self.secret
        other.store = self.store.clone()
        return other


class Door(AbstractContextManager["Door"]):
    """A port of this node on which neighbours ask whether they reach it; open while the context lasts."""

    def __init__(self, node: str, secret: Secret) -> None:
        server = listen(listening_address(), 0)
        self.port: int = server.getsockname()[1]
        self._listener = AuthListener(server, secret, f"door of {node}")
        threading.Thread(target=self._answer, name="door", daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError, ValueError):  # the listener is closed below it
            while True:
                self._listener.admit().close()

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def knock(node: str, secret: Secret, addresses: Sequence[str], port: int) -> str | None:
    """Connects to a node's door, which shows the secret as that node's; why not, or None."""
    errors = []
    for address in dict.fromkeys(addresses):
        try:
            with socket.create_connection((address, port), timeout=PROBE_S / len(addresses)) as connection:
                authenticate(connection, secret, f"door of {node}", PROBE_S)
            return None
        except OSError as error:
            errors.append(f"{address} port {port}: {error}")
    return "; ".join(errors)


def leave_mark(folder: Path, token: str, node: str) -> str | None:
    """Writes this node's name into the folder that all nodes of the run look at, unless another was first; why not, or
    None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), (folder / f"preflight.{token}").open("x", encoding="utf-8") as file:
            file.write(node)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
    return None


def see_mark(folder: Path, token: str) -> str:
    """The node whose mark is seen from here, in words. Nodes that see the same one share the folder."""
    try:
        return f"seen from here is what {(folder / f'preflight.{token}').read_text(encoding='utf-8')} wrote"
    except OSError as error:
        return f"nothing is seen from here ({error.strerror})"


@dataclass(frozen=True)
class Measured:
    """One collective over one group, of `num_bytes` of every member.

    seconds    the median of NUM_TIMED; 0 before it is timed
    GB_per_s   bus bandwidth as nccl-tests define it: what each link carries; 0 for a barrier
    """

    kind: str
    group: str
    num_ranks: int
    num_bytes: int
    seconds: float = 0.0
    GB_per_s: float = 0.0

    def took(self, seconds: float) -> Self:
        """An all-gather carries all others' bytes over each link, an all-reduce 2 (n - 1) / n times its own."""
        others = self.num_ranks - 1
        times = others if "all-gather" in self.kind else 2.0 * others / self.num_ranks
        return replace(self, seconds=seconds, GB_per_s=times * self.num_bytes / seconds / 1e9)


class GroupTest:
    """Makes the groups that training makes and times collectives in them.

    stage      (kind, group) of the collective that this rank is in; None when all are done
    passed     those that it has been through
    measured   of those whose first member this rank is
    """

    def __init__(self) -> None:
        self.stage: tuple[str, str] | None = ("job, making groups", "job")
        self.passed: list[tuple[str, str]] = []
        self.measured: list[Measured] = []

    def run(self, rank_map: RankMap, store: dist.Store, timeout_s: float) -> None:
        """Collective over the job."""
        place = Place.join(rank_map, timeout_s, store=store)
        place.watchdog.close()  # the meeting is over; from here on a dead process shows by its missing message
        my, shape, lane = place.coordinate, rank_map.agents[place.agent], place.lane_group
        num_bytes = CUDA_BYTES if place.device.type == "cuda" else CPU_BYTES
        if shape.cell_size > 1:
            host = torch.zeros(num_bytes // 4)
            name = f"cell {my.cell} of {my.agent_name}"
            self._time(
                Measured("cell, all-reduce", name, shape.cell_size, num_bytes),
                my.is_leader,
                lambda: place.whole_cell.allreduce([host]).wait(),
            )
        self._time_gather("lane", f"lane {my.lane}", lane, place.device, num_bytes)
        self._time_gather("weights", f"cell {my.cell} of {my.agent_name}", place.weights_group, place.device, num_bytes)
        if dist.get_world_size() > 1:
            numbers = torch.zeros(num_bytes // 4, device=place.device)
            self._time(
                Measured("agent, all-reduce", my.agent_name, dist.get_world_size(), num_bytes),
                dist.get_rank() == 0,
                lambda: dist.all_reduce(numbers),
            )
        if rank_map.world_size > 1:
            self._time(Measured("job, barrier", "job", rank_map.world_size, 0), my.global_rank == 0, place.barrier)
        self.stage = None
        place.end_groups()

    def _time_gather(
        self, kind: str, name: str, group: dist.ProcessGroup | None, device: torch.device, num_bytes: int
    ) -> None:
        if group is None or group.size() == 1:
            return
        mine = torch.zeros(num_bytes, dtype=torch.uint8, device=device if group.name() == "nccl" else "cpu")
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        self._time(
            Measured(f"{kind}, all-gather", name, group.size(), num_bytes),
            group.rank() == 0,
            lambda: group.allgather([rows], [mine]).wait(),
        )

    def _time(self, link: Measured, tells: bool, collective: Callable[[], object]) -> None:
        """Times a collective; one member `tells`."""
        self.stage = (link.kind, link.group)
        seconds = []
        for _ in range(1 + NUM_TIMED):  # the first one connects
            start = time.perf_counter()
            collective()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        self.passed.append(self.stage)
        if tells:
            self.measured.append(link.took(statistics.median(seconds[1:])))

    def word(self, error: str = "") -> Word:
        """This rank's report of the group."""
        return {
            "passed": self.passed,
            "stage": self.stage,
            "error": error,
            "measured": [asdict(measured) for measured in self.measured],
        }


def group_nodes(rank_map: RankMap, node_of: Mapping[int, str], kind: str, rank: int) -> frozenset[str]:
    """The nodes of the group of `kind` that a rank is in."""
    my = rank_map.coordinate(rank)
    shape = rank_map.agents[my.agent]
    first = rank_map.first_ranks[my.agent]
    if kind.startswith("lane"):
        ranks: Sequence[int] = rank_map.leaders(my.lane)
    elif kind.startswith(("cell", "weights")):
        ranks = range(first + my.cell * shape.cell_size, first + (my.cell + 1) * shape.cell_size)
    elif kind.startswith("agent"):
        agents = range(first, first + rank_map.agent_world_size(my.agent))
        ranks = [other for other in agents if rank_map.coordinate(other).trains == my.trains]
    else:
        ranks = range(rank_map.world_size)
    return frozenset(node_of[other] for other in ranks)


def not_in_ring(store: dist.Store, world_size: int) -> list[int]:
    """Ranks missing at the roll call; if none is, those without an address in the ring, the last part of making
    groups."""
    for key in ("here", "ring/watchdog"):
        if absent := [rank for rank in range(world_size) if not store.check([f"hacpo_mega/{key}/{rank}"])]:
            return absent
    return []


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
