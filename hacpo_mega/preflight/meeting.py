"""The meeting of a job's processes before anything is loaded: presence, reachability, and speed of the groups.

All messages go through the store of rank 0. Every wait has a limit, so that the processes present can name one that
never comes. A round:

    every rank    sets its message and adds one to a counter
    rank 0        reads all messages, once no new one has come for `patience_s`, and sets the answer
    every rank    reads the answer

A round costs each rank 3 operations and 1 key, whatever the number of ranks: only rank 0 reads the messages of others.
Elsewhere: a node's report and the comparison of reports (node_report.py), the order of the rounds and the output
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
PROBE_S = 5.0  # limit of one connection between two nodes
KEYS_AT_ONCE = 512
NUM_TIMED = 3
CPU_BYTES, CUDA_BYTES = 4 << 20, 64 << 20  # of a measured collective
LOST = (Unreachable, dist.DistError)  # raised where rank 0, or its store, does not answer

Message = dict[str, Any]


class Meeting:
    """The meeting, as one process takes part in it.

    store    of the job, hosted by rank 0 or by the launcher
    secret   of the job
    """

    def __init__(self, env: LauncherEnv, patience_s: float) -> None:
        """Joins the meeting; Unreachable if rank 0 has not opened it within `patience_s`."""
        self._env, self._patience_s = env, patience_s
        allow_connections(env.world_size)
        self.secret = Secret.of_job(env)
        self.store: dist.Store = dist.PrefixStore("preflight", open_store(env, self.secret, patience_s))

    def send(self, round_name: str, message: Message) -> None:
        """Sends this rank's message of a round."""
        self.store.set(f"{round_name}/{self._env.rank}", json.dumps(message))
        self.store.add(f"{round_name}/count", 1)

    def receive(self, round_name: str, ranks: Sequence[int]) -> Iterator[tuple[int, Message]]:
        """Messages of `ranks`, on rank 0; it waits for all, but no longer than `patience_s` for the next one."""
        num_come, last = -1, time.monotonic()
        while num_come < len(ranks) and time.monotonic() - last < self._patience_s:
            count = self.store.add(f"{round_name}/count", 0)
            if count > num_come:
                num_come, last = count, time.monotonic()
            else:
                time.sleep(POLL_S)
        keys = {rank: f"{round_name}/{rank}" for rank in ranks}
        come = list(ranks) if num_come >= len(ranks) else [rank for rank in ranks if self.store.check([keys[rank]])]
        for start in range(0, len(come), KEYS_AT_ONCE):
            some = come[start : start + KEYS_AT_ONCE]
            texts = self.store.multi_get([keys[rank] for rank in some])
            yield from ((rank, json.loads(text)) for rank, text in zip(some, texts))

    def send_answer(self, round_name: str, answer: Message) -> None:
        """Sends rank 0's answer to a round."""
        self.store.set(f"{round_name}/answer", json.dumps(answer))

    def await_answer(self, round_name: str) -> Message:
        """Waits for rank 0's answer; Unreachable after the longest time that rank 0 may wait for the others."""
        limit_s = 3 * self._patience_s + PROBE_S
        try:
            self.store.wait([f"{round_name}/answer"], timedelta(seconds=limit_s))
            return json.loads(self.store.get(f"{round_name}/answer"))
        except RuntimeError as error:
            raise Unreachable(f"no answer from rank 0 within {limit_s:.0f} s: {_first_line(error)}") from error

    def token(self) -> str:
        """A random name, the same on all ranks, that no other meeting has."""
        if self._env.rank == 0:
            self.store.set("token", os.urandom(8).hex())
        try:
            self.store.wait(["token"], timedelta(seconds=self._patience_s))
            return self.store.get("token").decode()
        except RuntimeError as error:
            raise Unreachable(f"rank 0 has opened no meeting: {_first_line(error)}") from error

    def leave(self, num_come: int) -> None:
        """Leaves; rank 0, whose process may host the store, after all `num_come` ranks or after `patience_s`."""
        with suppress(RuntimeError):
            self.store.add("left", 1)
            end = time.monotonic() + self._patience_s
            while self._env.rank == 0 and self.store.add("left", 0) < num_come and time.monotonic() < end:
                time.sleep(POLL_S)

    def clone(self) -> "Meeting":
        """The same meeting over a connection of its own, for use while another thread waits on the first."""
        other = object.__new__(Meeting)
        other._env, other._patience_s, other.secret = self._env, self._patience_s, self.secret
        other.store = self.store.clone()
        return other


class ProbeListener(AbstractContextManager["ProbeListener"]):
    """A port of this node to which neighbours try to connect; open until the block ends."""

    def __init__(self, node: str, secret: Secret) -> None:
        server = listen(listening_address(), 0)
        self.port: int = server.getsockname()[1]
        self._listener = AuthListener(server, secret, f"probe of {node}")
        threading.Thread(target=self._answer, name="probe", daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError, ValueError):  # the listener is closed meanwhile
            while True:
                self._listener.admit().close()

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def probe(node: str, secret: Secret, addresses: Sequence[str], port: int) -> str | None:
    """Connects to a node's ProbeListener, which proves that it knows the secret; None, or the error of each address."""
    errors = []
    for address in dict.fromkeys(addresses):
        try:
            with socket.create_connection((address, port), timeout=PROBE_S / len(addresses)) as connection:
                authenticate(connection, secret, f"probe of {node}", PROBE_S)
            return None
        except OSError as error:
            errors.append(f"{address} port {port}: {error}")
    return "; ".join(errors)


def write_mark(folder: Path, token: str, node: str) -> str | None:
    """Writes this node's name to a file in the run's `folder`, unless another node was first; None, or the error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), (folder / f"preflight.{token}").open("x", encoding="utf-8") as file:
            file.write(node)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot write into {folder}: {error.strerror}"
    return None


def read_mark(folder: Path, token: str) -> str:
    """The text on the node whose mark is in `folder`, equal on all nodes that share the folder."""
    try:
        return f"seen from here is what {(folder / f'preflight.{token}').read_text(encoding='utf-8')} wrote"
    except OSError as error:
        return f"nothing is seen from here ({error.strerror})"


@dataclass(frozen=True)
class GroupTiming:
    """One collective over one group, of `num_bytes` of every member.

    seconds    median of NUM_TIMED calls; 0 before it is timed
    GB_per_s   bus bandwidth as nccl-tests define it: the load of each link; 0 for a barrier
    """

    kind: str
    group: str
    num_ranks: int
    num_bytes: int
    seconds: float = 0.0
    GB_per_s: float = 0.0

    def timed(self, seconds: float) -> Self:
        """With its time: an all-gather sends (n - 1), an all-reduce 2 (n - 1) / n times num_bytes over each link."""
        others = self.num_ranks - 1
        factor = others if "all-gather" in self.kind else 2.0 * others / self.num_ranks
        return replace(self, seconds=seconds, GB_per_s=factor * self.num_bytes / seconds / 1e9)


class GroupTest:
    """Makes the groups that training makes and times collectives in them.

    stage     (kind, group) of the collective that this rank is in; None when all are done
    passed    stages that this rank has completed
    timings   of the groups whose first member this rank is
    """

    def __init__(self) -> None:
        self.stage: tuple[str, str] | None = ("job, making groups", "job")
        self.passed: list[tuple[str, str]] = []
        self.timings: list[GroupTiming] = []

    def run(self, rank_map: RankMap, store: dist.Store, timeout_s: float) -> None:
        """Fills `timings`. Collective over the job."""
        place = Place.join(rank_map, timeout_s, store=store)
        place.watchdog.close()  # a dead process is found by its missing message
        my, shape, lane = place.coordinate, rank_map.agents[place.agent], place.lane_group
        num_bytes = CUDA_BYTES if place.device.type == "cuda" else CPU_BYTES
        if shape.cell_size > 1:
            host = torch.zeros(num_bytes // 4)
            name = f"cell {my.cell} of {my.agent_name}"
            self._time(
                GroupTiming("cell, all-reduce", name, shape.cell_size, num_bytes),
                my.is_leader,
                lambda: place.whole_cell.allreduce([host]).wait(),
            )
        self._time_gather("lane", f"lane {my.lane}", lane, place.device, num_bytes)
        self._time_gather("weights", f"cell {my.cell} of {my.agent_name}", place.weights_group, place.device, num_bytes)
        if dist.get_world_size() > 1:
            numbers = torch.zeros(num_bytes // 4, device=place.device)
            self._time(
                GroupTiming("agent, all-reduce", my.agent_name, dist.get_world_size(), num_bytes),
                dist.get_rank() == 0,
                lambda: dist.all_reduce(numbers),
            )
        if rank_map.world_size > 1:
            self._time(GroupTiming("job, barrier", "job", rank_map.world_size, 0), my.global_rank == 0, place.barrier)
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
            GroupTiming(f"{kind}, all-gather", name, group.size(), num_bytes),
            group.rank() == 0,
            lambda: group.allgather([rows], [mine]).wait(),
        )

    def _time(self, timing: GroupTiming, is_recorded: bool, collective: Callable[[], object]) -> None:
        """Times a collective; `is_recorded` on one member of the group."""
        self.stage = (timing.kind, timing.group)
        seconds = []
        for _ in range(1 + NUM_TIMED):  # the first one connects
            start = time.perf_counter()
            collective()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        self.passed.append(self.stage)
        if is_recorded:
            self.timings.append(timing.timed(statistics.median(seconds[1:])))

    def message(self, error: str = "") -> Message:
        """This rank's message of the round."""
        return {
            "passed": self.passed,
            "stage": self.stage,
            "error": error,
            "timings": [asdict(timing) for timing in self.timings],
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
    """Ranks that have not registered with the job's store; if all have, those without an address in the watchdogs'
    ring, the last step of making groups."""
    for key in ("here", "ring/watchdog"):
        if absent := [rank for rank in range(world_size) if not store.check([f"hacpo_mega/{key}/{rank}"])]:
            return absent
    return []


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
