"""Place: the position of this process in the job, and its process groups.

The default process group is the AGENT's world, so Megatron's parallel_state and vLLM's external launcher work as they
are with agents of unequal size; of an agent some of whose ranks only answer, these have a world, and those that train.
All groups come from one job-wide store under prefixes of their own:

    default group   my agent's ranks that do         gloo, and NCCL for CUDA tensors; Megatron and vLLM live here
    lane            the leaders of my lane           the exchange of answers; order of RankMap.leaders. NCCL on CUDA
    cell            the ranks of my replica          what its leader received
                    that train
    whole cell      all ranks of my replica          answers; another group than cell where some ranks only answer
    block           all ranks of the cells that      what is said of weights for engines; mostly the same as whole cell.
                    share experts with mine          Where some ranks only answer NCCL on CUDA for weights, too
    job             all ranks                        metrics, barriers; a tree (tree.py)
    row             my agent's leaders, by cell      numbers of whole steps (capability); a tree

The lane carries megabytes per step, so on CUDA it is NCCL, unless two of its leaders share a GPU, which NCCL refuses.
The others carry a few numbers from and to host memory and are gloo everywhere. All are made directly, not with
`new_group`, which stays inside the default group and needs all of its ranks for each group. docs/design/scaling.md says
what grows with the job, and how.
Not here: the arithmetic (rank_map.py) and model-parallel groups (Megatron makes its own from the default group).
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hacpo_mega.cluster.clock import ClockOffset, measure_offset
from hacpo_mega.cluster.groups.lone_groups import Gloo
from hacpo_mega.cluster.groups.spans import Spans, WatchedGroup
from hacpo_mega.cluster.groups.tree import Tree, broadcast, gather_bytes, join, share_bytes, split
from hacpo_mega.cluster.launcher_env import LauncherEnv, Unreachable, is_on_one_machine
from hacpo_mega.cluster.machine.device import device_identity, rank_device
from hacpo_mega.cluster.machine.environment import one_queue, own_caches
from hacpo_mega.cluster.patches import TORCH, apply_patches
from hacpo_mega.cluster.rank_map import Coordinate, RankMap
from hacpo_mega.cluster.rendezvous import RollCall, allow_connections, open_store
from hacpo_mega.cluster.security.private_folder import SocketFolder
from hacpo_mega.cluster.security.secret import Secret, forget_secret
from hacpo_mega.cluster.watchdog import Watchdog


class Place:
    """My coordinate and my groups. Use it as a context: an error inside ends the whole job, with a name and a phase.

    rank_map, coordinate     who I am; `lane`, `agent` and `is_leader` are short for the coordinate's
    device                   my CUDA device, or the CPU
    lane_group               None unless I am a leader
    cell_group               None unless I train
    whole_cell               on every rank; the same where nobody only answers
    block_group              on every rank; the same where no other cell shares experts with mine
    weights_group            the same ranks, for tensors of their devices; None where nobody only answers
    spans                    what this process does when, recorded while a step is traced
    """

    weights_group: WatchedGroup | None = None

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
        self.rank_map = rank_map
        self.coordinate: Coordinate = rank_map.coordinate(rank)
        self.device = device
        my, shape = self.coordinate, rank_map.agents[self.coordinate.agent]
        on_cuda = device.type == "cuda"
        apply_patches(TORCH)
        self.spans = Spans(my.agent_name, settle=torch.cuda.synchronize if on_cuda else lambda: None)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.PrefixStore(f"{'agent' if my.trains else 'engines'}/{my.agent_name}", store),
            rank=my.world_rank,
            world_size=rank_map.world_of(my),
            timeout=timedelta(seconds=timeout_s),
        )
        # Kept, since the store ends with the last reference: on rank 0 it is the server that the others still ask.
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._phase, self._waits = "start", {}
        # gloo connects two ranks when they first speak (TORCH_GLOO_LAZY_INIT), so making a group waits for nobody.
        # Where that is switched off a constructor returns when all members have come; everybody makes its groups in
        # this one order, leaders theirs first, so that even then nobody waits for a rank that waits for it.
        self.lane_group = self._row = self.cell_group = None
        if my.is_leader:
            # By RankMap.leaders, not by rank: gathered parts are then in the order of assembly.
            leaders = rank_map.leaders(my.lane)
            self.lane_group = self._lane_group(f"lane/{my.lane}", leaders.index(rank), len(leaders))
            self._row = self._tree(f"row/{my.agent}", my.cell, rank_map.lanes * shape.cells_per_lane)
        if my.trains:
            self.cell_group = self._group(f"cell/{my.agent}/{my.cell}", my.cell_rank, shape.training)
        self.whole_cell = self.cell_group
        if shape.rollout:
            self.whole_cell = self._group(f"cell/{my.agent}/{my.cell}/whole", my.cell_rank, shape.cell_size)
        self.block_group, name = self.whole_cell, f"block/{my.agent}/{my.block}"
        if shape.block_cells > 1:
            self.block_group = self._group(name, my.block_rank, shape.block_size)
        if shape.rollout:
            whole = (f"{name}/weights", my.block_rank, shape.block_size)
            self.weights_group = self._lane_group(*whole) if on_cuda else self.block_group
        self._job = self._tree("job", rank, rank_map.world_size)
        self._watchdog = Watchdog(rank_map, rank, dist.PrefixStore("ring", store), secret, timeout_s, stall_s)
        self._has_one_clock = is_on_one_machine()
        self._sockets = SocketFolder()
        self._watchdog.at_end = self._sockets.remove

    @classmethod
    def join(
        cls,
        rank_map: RankMap,
        timeout_s: float = 1800.0,
        stall_s: float = 600.0,
        store: dist.Store | None = None,
    ) -> Self:
        """Takes this process's place in the job that torchrun or srun started; a collective over the job.

        Afterwards RANK and WORLD_SIZE are those inside the agent, as vLLM's external launcher reads them. `timeout_s`
        bounds joining and every later collective; a process that gives no sign of life for `stall_s` ends the job.
        `store` is the job's, where the caller has it already.
        Raises ValueError when the job was started with another number of processes, on several nodes where agents take
        turns on one, on several without a secret, or without a launcher; Unreachable when its store is.
        """
        env = LauncherEnv.find()
        rank_map.require_world_size(env.world_size)
        rank_map.require_one_node(env.num_local)
        own_caches(rank_map.coordinate(env.rank).agent_name)
        one_queue(rank_map.agents[rank_map.coordinate(env.rank).agent].tp)
        device = rank_device(rank_map.device_number(env.rank, env.local_rank))
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
            roll_call.explain()  # else it is an error of its own
            raise
        forget_secret()
        os.environ["RANK"] = str(place.coordinate.world_rank)
        os.environ["WORLD_SIZE"] = str(rank_map.world_of(place.coordinate))
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        return place

    @property
    def agent(self) -> int:
        return self.coordinate.agent

    @property
    def lane(self) -> int:
        return self.coordinate.lane

    @property
    def is_leader(self) -> bool:
        return self.coordinate.is_leader

    @property
    def trains(self) -> bool:
        """True if this process has a part of the actor; else it only answers."""
        return self.coordinate.trains

    def enter_phase(self, phase: str, when: str) -> None:
        """Sets the current phase ("learn", "of step 3"), which is reported with a death or error."""
        self._phase = phase
        self._watchdog.enter_phase(phase, when)

    def keep_stack_in(self, folder: Path) -> None:
        """Says where this process writes its stack when the job hangs."""
        self._watchdog.keep_stack_in(folder)

    def defer_signals(self) -> None:
        """Makes SIGTERM and SIGUSR1 set `agreed_signal` from here on, and end nothing; a second one ends the job."""
        self._watchdog.defer_signals()

    def set_exit_message(self, outlook: str) -> None:
        """Sets the line about the next start that is printed if a signal ends the job."""
        self._watchdog.set_exit_message(outlook)

    def agreed_signal(self) -> int:
        """The number of the signal that asked any process of the job to end, 0 without one. Collective."""
        signal_number = self.highest_in_job(self._watchdog.signal_number)
        self._watchdog.is_leaving = signal_number > 0
        return signal_number

    def progress(self) -> None:
        """Reports progress within the current phase: an engine's step, a micro-batch, a tensor."""
        self._watchdog.progress.tick()

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

    def barrier(self) -> None:
        """Waits for every process of the job."""
        with self._waiting("a barrier of all ranks"):
            self._job.wait_for_all()

    def before_end(self, action: Callable[[], None]) -> None:
        """Runs `action` before the last message of this process, if a signal or another's death ends it."""
        self._watchdog.before_end = action

    def at_end(self, action: Callable[[], None]) -> None:
        """Has `action` done last where this process ends at once."""
        self._watchdog.at_end = lambda: (self._sockets.remove(), action())

    def on_termination(self, action: Callable[[], None]) -> None:
        """Has `action` done by rank 0 where a signal ends the job at once."""
        self._watchdog.on_termination = action

    def gather_to_first(self, payload: bytes) -> list[bytes]:
        """One payload per process of the job, in rank order, on the job's rank 0; an empty list on the others."""
        with self._waiting("what all ranks gather"):
            return self._job.gather(payload)

    def gather_job(self, payload: bytes) -> list[bytes]:
        """The same on every process: for a few bytes each, since everybody receives everybody's."""
        with self._waiting("what all ranks gather"):
            return split(self._job.share(join(self._job.gather(payload))))

    def highest_in_job(self, number: int) -> int:
        """The highest of the numbers that the processes of the job give. Collective."""
        given = self.gather_to_first(str(number).encode())
        return int(self.share_in_job(str(max(map(int, given))).encode() if given else None))

    def first_message(self, text: str | None) -> str | None:
        """The message of the lowest rank of the job that has one, on every rank; None if none has. Collective."""
        payloads = self.gather_to_first((text or "").encode())
        return self.share_in_job(next((payload for payload in payloads if payload), b"")).decode() or None

    def gather_lane(self, payload: bytes) -> list[bytes]:
        """One payload per leader of this lane, in the order of RankMap.leaders; only leaders call it."""
        with self._waiting(f"what ranks {self.rank_map.leaders(self.lane)} of lane {self.lane} gather"):
            return gather_bytes(self.lane_group, payload)

    def gather_cell(self, payload: bytes) -> list[bytes]:
        """One payload per rank of this cell, in their order, on every rank of it, also those that only answer."""
        with self._waiting(f"the ranks of cell {self.coordinate.cell} of {self.coordinate.agent_name}"):
            return gather_bytes(self.whole_cell, payload)

    def gather_block(self, payload: bytes) -> list[bytes]:
        """The same of the cells that share experts with this one."""
        with self._waiting(f"the ranks of block {self.coordinate.block} of {self.coordinate.agent_name}"):
            return gather_bytes(self.block_group, payload)

    def gather_agent(self, payload: bytes) -> list[bytes]:
        """The payloads of the leaders of this agent's cells, in the order of the cells, on every rank of the agent."""
        message = None
        with self._waiting(f"what the ranks of {self.coordinate.agent_name} gather"):
            if self._row is not None:
                message = self._row.share(join(self._row.gather(payload)))
        return split(self.share_in_cell(message))

    def share_in_cell(self, payload: bytes | None) -> bytes:
        """The leader's payload on every rank of its cell that trains; the others pass None."""
        assert (payload is not None) == self.is_leader, f"{self.coordinate}: the leader gives the payload, nobody else"
        with self._waiting(f"the leader of cell {self.coordinate.cell} of {self.coordinate.agent_name}"):
            return share_bytes(self.cell_group, payload)

    def share_in_job(self, payload: bytes | None) -> bytes:
        """The payload of the job's rank 0 on every rank of the job; the payloads of others are ignored."""
        with self._waiting("rank 0"):
            return self._job.share(payload)

    def sum_over_lanes(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over lanes of a float64 tensor that all ranks of a lane agree on, on every rank.

        It adds in lane order, not with all_reduce, whose order depends on the group: all agents get the same bits.
        """
        assert (values.dtype, values.device.type) == (torch.float64, "cpu"), (values.dtype, values.device)
        total = torch.zeros_like(values).contiguous()
        with self._waiting(f"the leaders of all lanes of {self.coordinate.agent_name}"):
            if self._row is not None:
                rows = self._row.gather(values.contiguous().numpy().tobytes())
                for row in rows[:: self.rank_map.agents[self.agent].cells_per_lane]:
                    total += torch.frombuffer(bytearray(row), dtype=torch.float64).reshape(total.shape)
                total = torch.frombuffer(bytearray(self._row.share(total.numpy().tobytes())), dtype=torch.float64)
            total = total.reshape(values.shape)
            broadcast(self.cell_group, total)
        return total

    def leave_ring(self) -> None:
        """Leaves the watchdog: this process and the others no longer learn of each other's end, which the caller then
        checks in another way."""
        self._watchdog.close()

    def close(self) -> None:
        """Leaves the job; a collective. Afterwards the process no longer affects the others."""
        self.barrier()  # the last collective: after it a closed socket of a neighbour is a farewell, not a death
        self._watchdog.close()
        self.end_groups()

    def end_groups(self) -> None:
        """Leaves without a message to the others, which have reached the same point."""
        for group in (self.lane_group, self.weights_group):
            if group is not None:
                group.shutdown()  # NCCL's destructor would complain, and abort operations that it believes are running
        self.lane_group = self.cell_group = self.whole_cell = self.block_group = self.weights_group = None
        self._row = self._job = None
        dist.destroy_process_group()
        self._sockets.remove()

    @contextmanager
    def _waiting(self, whom: str) -> Iterator[None]:
        """Around a collective: times it, and records whom it waits for in case it never ends."""
        start = time.perf_counter()
        with self._watchdog.progress.waiting_for(whom):
            yield
        self._waits[self._phase] = self._waits.get(self._phase, 0.0) + time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._watchdog.fail(error)
        self.close()

    def _lane_group(self, name: str, rank: int, size: int) -> WatchedGroup:
        if self.device.type != "cuda":
            return self._group(name, rank, size)
        # Two agents may share a GPU.
        devices = dist.PrefixStore(f"{name}/device", self._store)
        devices.set(str(rank), device_identity(self.device))
        if len({devices.get(str(leader)) for leader in range(size)}) < size:
            return self._group(name, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group = dist.ProcessGroupNCCL(dist.PrefixStore(f"{name}/nccl", self._store), rank, size, options)
        return WatchedGroup(group, name, self.spans)

    def _tree(self, name: str, rank: int, size: int) -> Tree:
        return Tree(rank, size, lambda level: self._group(f"{name}/{level.name}", level.rank, level.size))

    def _group(self, name: str, rank: int, size: int) -> WatchedGroup:
        group = Gloo(dist.PrefixStore(name, self._store), rank, size, self._timeout)
        return WatchedGroup(group, name, self.spans)
