"""Place: the position of this process in the job, its groups, and its session there: phases, waits, signals, the end.

Elsewhere: the arithmetic (rank_map.py), the groups (groups/job_groups.py), who died or hangs (watchdog.py).
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hacpo_mega.cluster.groups.job_groups import JobGroups
from hacpo_mega.cluster.groups.spans import ClockOffset, measure_offset
from hacpo_mega.cluster.launcher_env import LauncherEnv, Unreachable, is_on_one_machine
from hacpo_mega.cluster.machine.device import rank_device, work_queue
from hacpo_mega.cluster.machine.environment import one_queue, own_caches
from hacpo_mega.cluster.patches import TORCH, apply_patches
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.rendezvous import (
    RollCall,
    allow_connections,
    connect_published,
    listen,
    listening_address,
    open_store,
    published_address,
    report_wrong_secret,
)
from hacpo_mega.cluster.security.private_folder import SocketFolder
from hacpo_mega.cluster.security.secret import AuthListener, Secret, forget_secret
from hacpo_mega.cluster.watchdog import Watchdog


class Place(JobGroups):
    """The groups and the session of this process in the job. A context manager: an error inside ends the whole job, and
    is reported with this process and its phase.

    watchdog   reports dead and stuck processes to the others, and handles signals
    """

    def __init__(
        self,
        rank_map: RankMap,
        rank: int,
        device: torch.device,
        store: dist.Store,
        timeout_s: float,
        stall_s: float,
        secret: Secret,
    ) -> None:
        """Makes the groups; a collective over the job. Users call `Place.join`."""
        apply_patches(TORCH)
        self._phase, self._waits = "start", {}
        super().__init__(rank_map, rank, device, store, timedelta(seconds=timeout_s))
        self.watchdog = Watchdog(rank_map, rank, dist.PrefixStore("ring", store), secret, timeout_s, stall_s)
        self._has_one_clock = is_on_one_machine()
        self._sockets = SocketFolder()
        self._secret = secret
        self.watchdog.at_end = self._sockets.remove

    @classmethod
    def join(
        cls,
        rank_map: RankMap,
        timeout_s: float = 1800.0,
        stall_s: float = 600.0,
        store: dist.Store | None = None,
    ) -> Self:
        """Joins the job that torchrun or srun started; a collective over the job.

        Afterwards RANK and WORLD_SIZE are those inside the agent, as vLLM's external launcher reads them. `timeout_s`
        bounds joining and every later collective; a process that gives no sign of life for `stall_s` ends the job.
        `store` is the job's, where the caller has it already.
        Raises ValueError when the job was started with another number of processes, on several nodes where agents take
        turns on one, on several without a secret, or without a launcher; Unreachable when the store cannot be reached.
        """
        env = LauncherEnv.find()
        rank_map.require_world_size(env.world_size)
        rank_map.require_one_node(env.num_local)
        number = rank_map.device_number(env.rank, env.local_rank)
        own_caches(rank_map.coordinate(env.rank).agent_name, number)
        one_queue(rank_map.agents[rank_map.coordinate(env.rank).agent].tp)
        device = rank_device(number)
        secret = Secret.of_job(env)
        if store is None:
            allow_connections(env.world_size)
            store = open_store(env, secret, timeout_s)
        store = dist.PrefixStore("hacpo_mega", store)
        roll_call = RollCall(store, rank_map, env.rank, timeout_s)
        roll_call.wait()
        try:
            place = cls(rank_map, env.rank, device, store, timeout_s, stall_s, secret)
        except (RuntimeError, OSError, Unreachable):
            roll_call.require_all()  # the likelier cause: a rank has not arrived
            raise
        forget_secret()
        os.environ["RANK"] = str(place.coordinate.world_rank)
        os.environ["WORLD_SIZE"] = str(rank_map.role_world_size(place.coordinate))
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        return place

    def enter_phase(self, phase: str, when: str) -> None:
        """Sets the current phase ("learn", "of step 3"), which is reported with a death or error."""
        self._phase = phase
        self.watchdog.progress.queue = work_queue(self.device)
        self.watchdog.enter_phase(phase, when)

    def leave_phase(self) -> None:
        """Counts waits from here on as `other`, as the seconds outside of phases; reports keep the phase's name."""
        self._phase = "other"

    def agreed_signal(self) -> int:
        """The number of the signal that asked any process of the job to end, 0 without one. Collective."""
        signal_number = self.highest_in_job(self.watchdog.signal_number)
        self.watchdog.is_leaving = signal_number > 0
        return signal_number

    def progress(self) -> None:
        """Reports progress within the current phase: an engine's step, a micro-batch, a tensor."""
        self.watchdog.progress.tick()

    def take_waits(self) -> dict[str, float]:
        """Seconds that this process has waited in the collectives below since the last call, by phase."""
        waits, self._waits = self._waits, {}
        return waits

    def clock_offset(self) -> ClockOffset:
        """Offset of this process's clock to that of rank 0; a collective over the job."""
        if self._has_one_clock:
            return ClockOffset(0.0, 0.0)
        me, size = self.coordinate.global_rank, self.rank_map.world_size
        return measure_offset(dist.PrefixStore("clock", self._store), me, size)

    def open_listener(self, name: str) -> AuthListener:
        """A listener on a free port, which other processes of the job find by `name` and this rank."""
        rank = self.coordinate.global_rank
        server = listen(listening_address(), 0)
        listener = AuthListener(
            server, self._secret, f"{name} {rank}", partial(report_wrong_secret, str(self.coordinate))
        )
        self._store.set(f"{name}/{rank}", published_address(server.getsockname()[1]))
        return listener

    def connect(self, rank: int, name: str, timeout_s: float) -> socket.socket:
        """A connection to another rank's listener, after the handshake. Any thread may call it.

        OSError or RuntimeError, one line, where none answers in time.
        """
        address = self._store.get(f"{name}/{rank}").decode()
        return connect_published(address, self._secret, f"{name} {rank}", timeout_s)

    def at_end(self, action: Callable[[], None]) -> None:
        """Registers the last action of this process where it ends at once."""
        self.watchdog.at_end = lambda: (self._sockets.remove(), action())

    def close(self) -> None:
        """Leaves the job; a collective. Afterwards the process no longer affects the others."""
        self.barrier()  # the last collective: a neighbour that closes its socket after it has left, not died
        self.watchdog.close()
        self.end_groups()

    def end_groups(self) -> None:
        """Leaves without a message to the others, which have reached the same point."""
        super().end_groups()
        self._sockets.remove()

    @contextmanager
    def _waiting(self, whom: str) -> Iterator[None]:
        """Times a collective, and records whom it waits for in case it never ends."""
        start = time.perf_counter()
        with self.watchdog.progress.waiting_for(whom):
            yield
        self._waits[self._phase] = self._waits.get(self._phase, 0.0) + time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.watchdog.fail(error)
        self.close()
