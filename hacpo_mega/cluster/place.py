"""Place: where this process stands in the job, and the process groups that follow from it.

The default process group is the AGENT's world, so Megatron's parallel_state and vLLM's external launcher work as they
are with agents of unequal size. All groups come from one job-wide store under prefixes of their own:

    default group   all ranks of my agent            gloo, and NCCL for CUDA tensors; Megatron and vLLM live here
    job             all ranks                        metrics, barriers
    lane            the leaders of my lane           the exchange of answers; order of RankMap.leaders. NCCL on CUDA
    row             my agent's leaders, lane by lane numbers of whole steps (capability)
    cell            the ranks of my replica          what its leader received

The lane carries megabytes per step, so on CUDA it is NCCL, unless two of its leaders share a GPU, which NCCL refuses.
The others carry a few numbers from and to host memory and are gloo everywhere. All are made directly, not with
`new_group`, which stays inside the default group and needs all of its ranks for each group.
Not here: the arithmetic (rank_map.py) and model-parallel groups (Megatron makes its own from the default group).
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hacpo_mega.cluster.rank_map import Coordinate, RankMap
from hacpo_mega.cluster.watchdog import Watchdog

# torchrun sets the left names; under srun every task has the right ones.
RANK_VARIABLES = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID"))


class Place:
    """My coordinate and my groups. Use it as a context: an error inside ends the whole job, with a name and a phase.

    rank_map, coordinate     who I am; `lane`, `agent` and `is_leader` are short for the coordinate's
    device                   my CUDA device, or the CPU
    lane_group, row_group    None unless I am a leader
    cell_group, job_group    on every rank
    """

    def __init__(
        self,
        rank_map: RankMap,
        rank: int,
        device: torch.device,
        store: dist.Store,
        timeout_s: float,
        stall_s: float,
    ) -> None:
        """Makes the groups; a collective over the job. Users call `Place.join`."""
        self.rank_map = rank_map
        self.coordinate: Coordinate = rank_map.coordinate(rank)
        self.device = device
        my, shape = self.coordinate, rank_map.agents[self.coordinate.agent]
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"agent/{my.agent_name}", store),
            rank=my.agent_rank,
            world_size=rank_map.agent_world_size(my.agent),
            timeout=timedelta(seconds=timeout_s),
        )
        # Kept, since the store ends with the last reference: on rank 0 it is the server that the others still ask.
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._phase, self._waits = "start", {}
        self.lane_group = self.row_group = None
        # A constructor returns when all members of its group have come. Everybody makes its groups in this one order,
        # leaders theirs first, so nobody waits for a rank that waits for it; only names, not ranks, are agreed upon.
        if my.is_leader:
            # By RankMap.leaders, not by rank: what is gathered then lies in the order in which it is assembled.
            leaders = rank_map.leaders(my.lane)
            self.lane_group = self._lane_group(f"lane/{my.lane}", leaders.index(rank), len(leaders))
            self.row_group = self._group(f"row/{my.agent}/{my.cell_in_lane}", my.lane, rank_map.lanes)
        self.cell_group = self._group(f"cell/{my.agent}/{my.cell}", my.cell_rank, shape.cell_size)
        self.job_group = self._group("job", rank, rank_map.world_size)
        self._watchdog = Watchdog(rank_map, rank, dist.PrefixStore("ring", store), timeout_s, stall_s)

    @classmethod
    def join(cls, rank_map: RankMap, timeout_s: float = 1800.0, stall_s: float = 600.0) -> Self:
        """Takes this process's place in the job that torchrun or srun started; a collective over the job.

        Afterwards RANK and WORLD_SIZE are those inside the agent, as vLLM's external launcher reads them. `timeout_s`
        bounds joining and every later collective; a process that gives no sign of life for `stall_s` ends the job.
        Raises ValueError when the job was started with another number of processes, or without a launcher.
        """
        rank, world_size, local_rank = (_from_launcher(name, slurm) for name, slurm in RANK_VARIABLES)
        rank_map.require_world_size(world_size)
        device = _device(local_rank)
        # torchrun keeps the store in its own process; elsewhere the job's rank 0 does.
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
        place = cls(rank_map, rank, device, dist.PrefixStore("hacpo_mega", store), timeout_s, stall_s)
        os.environ["RANK"] = str(place.coordinate.agent_rank)
        os.environ["WORLD_SIZE"] = str(rank_map.agent_world_size(place.agent))
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

    def enter_phase(self, phase: str, when: str) -> None:
        """Notes what this process does now ("learn", "of step 3"), so that its death or error is reported with it."""
        self._phase = phase
        self._watchdog.enter_phase(phase, when)

    def keep_stack_in(self, folder: Path) -> None:
        """Says where this process writes its stack when the job hangs."""
        self._watchdog.keep_stack_in(folder)

    def progress(self) -> None:
        """Says that the phase this process is in goes on: an engine's step, a micro-batch, a tensor."""
        self._watchdog.progress.tick()

    def take_waits(self) -> dict[str, float]:
        """Seconds that this process has waited in the collectives below since the last call, by phase."""
        waits, self._waits = self._waits, {}
        return waits

    def barrier(self) -> None:
        """Waits for every process of the job."""
        with self._waiting("a barrier of all ranks"):
            self.job_group.barrier().wait()

    def gather_job(self, payload: bytes) -> list[bytes]:
        """One payload per process of the job, in rank order, on every process."""
        with self._waiting("what all ranks gather"):
            return gather_bytes(self.job_group, payload)

    def gather_lane(self, payload: bytes) -> list[bytes]:
        """One payload per leader of this lane, in the order of RankMap.leaders; only leaders call it."""
        with self._waiting(f"what ranks {self.rank_map.leaders(self.lane)} of lane {self.lane} gather"):
            return gather_bytes(self.lane_group, payload)

    def gather_cell(self, payload: bytes) -> list[bytes]:
        """One payload per rank of this cell, in their order, on every rank of it."""
        with self._waiting(f"the ranks of cell {self.coordinate.cell} of {self.coordinate.agent_name}"):
            return gather_bytes(self.cell_group, payload)

    def gather_agent(self, payload: bytes) -> list[bytes]:
        """The payloads of the leaders of this agent's cells, in the order of the cells, on every rank of the agent."""
        with self._waiting(f"what the ranks of {self.coordinate.agent_name} gather"):
            payloads = gather_bytes(dist.group.WORLD, payload)
        return payloads[:: self.rank_map.agents[self.agent].cell_size]

    def share_in_cell(self, payload: bytes | None) -> bytes:
        """The leader's payload on every rank of its cell; the others pass None."""
        assert (payload is not None) == self.is_leader, f"{self.coordinate}: the leader gives the payload, nobody else"
        with self._waiting(f"the leader of cell {self.coordinate.cell} of {self.coordinate.agent_name}"):
            return share_bytes(self.cell_group, payload)

    def share_in_job(self, payload: bytes | None) -> bytes:
        """The payload of the job's rank 0 on every rank of the job; what the others pass is not looked at."""
        with self._waiting("rank 0"):
            return share_bytes(self.job_group, payload)

    def first_said(self, text: str | None) -> str | None:
        """What the lowest rank of the job says that says anything, on every rank; None when nobody does. Collective."""
        said = (payload.decode() for payload in self.gather_job((text or "").encode()))
        return next((text for text in said if text), None)

    def sum_over_lanes(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over lanes of a float64 tensor that all ranks of a lane agree on, on every rank.

        It adds in lane order, not with all_reduce, whose order depends on the group: all agents get the same bits.
        """
        assert (values.dtype, values.device.type) == (torch.float64, "cpu"), (values.dtype, values.device)
        total = torch.zeros_like(values).contiguous()
        with self._waiting(f"the leaders of all lanes of {self.coordinate.agent_name}"):
            if self.row_group is not None:
                rows = [torch.empty_like(total) for _ in range(self.rank_map.lanes)]
                self.row_group.allgather([rows], [values.contiguous()]).wait()
                for row in rows:
                    total += row
            _broadcast(self.cell_group, total)
        return total

    def close(self) -> None:
        """Leaves the job; a collective. What a process does after it is nobody else's concern."""
        self.barrier()  # the last collective: after it a closed socket of a neighbour is a farewell, not a death
        self._watchdog.close()
        self.lane_group = self.row_group = self.cell_group = self.job_group = None
        dist.destroy_process_group()

    @contextmanager
    def _waiting(self, whom: str) -> Iterator[None]:
        """Around a collective: times it, and says what is waited for in case it never ends."""
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

    def _lane_group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        if self.device.type != "cuda":
            return self._group(name, rank, size)
        # Two agents may share a GPU; by its UUID, since every task may call its own GPU number 0.
        devices = dist.PrefixStore(f"{name}/device", self._store)
        devices.set(str(rank), str(torch.cuda.get_device_properties(self.device).uuid))
        if len({devices.get(str(leader)) for leader in range(size)}) < size:
            return self._group(name, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore(f"{name}/nccl", self._store), rank, size, options)

    def _group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, self._timeout)


def gather_bytes(group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
    """Everyone's payload, by rank in the group, on every rank: one round for the sizes, one for the bytes."""
    # NCCL moves device memory, gloo host memory.
    device = torch.device("cuda", torch.cuda.current_device()) if group.name() == "nccl" else torch.device("cpu")
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(payload)], device=device)]).wait()
    counts = [int(size) for size in sizes]
    # An all-gather moves equal sizes only, so everyone sends as many bytes as the longest payload has.
    mine = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    mine[: len(payload)] = _as_tensor(payload).to(device)
    rows = [torch.empty_like(mine) for _ in counts]
    group.allgather([rows], [mine]).wait()
    return [row[:count].cpu().numpy().tobytes() for row, count in zip(rows, counts)]


def share_bytes(group: dist.ProcessGroup, payload: bytes | None) -> bytes:
    """The payload of the group's rank 0 on every rank; what the others pass is not looked at."""
    size = torch.tensor([len(payload) if payload is not None else 0])
    _broadcast(group, size)
    content = torch.empty(int(size), dtype=torch.uint8)
    if group.rank() == 0:
        content[:] = _as_tensor(payload)
    _broadcast(group, content)
    return content.numpy().tobytes()


def _as_tensor(payload: bytes) -> torch.Tensor:
    # torch refuses empty buffers, and warns about read-only ones
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def _from_launcher(name: str, slurm_name: str) -> int:
    value = os.environ.get(name) or os.environ.get(slurm_name)
    if value is None:
        raise ValueError(f"neither {name} nor {slurm_name} is set: start with launch/local.sh, torchrun or srun")
    return int(value)


def _device(local_rank: int) -> torch.device:
    """The device of this process: its own GPU, by its number on the node, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher that binds tasks to GPUs shows each task one of them, as number 0. (Several agents of one rank each may
    # also share a single GPU; NCCL objects only to two ranks of the same agent on it.)
    index = 0 if torch.cuda.device_count() == 1 else local_rank
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} of this node has no GPU of its own: {torch.cuda.device_count()} are visible. Start "
            "at most one process per GPU and node."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
