"""Process groups of this process, and the collectives over them.

The default process group is the AGENT's world, so Megatron's parallel_state and vLLM's external launcher work as they
are with agents of unequal size. Where some ranks of an agent only answer, these and those that train are two worlds.
All groups come from one job-wide store under prefixes of their own:

    default group   my agent's ranks of my role      gloo, and NCCL for CUDA tensors; Megatron and vLLM live here
    lane            the leaders of my lane           the exchange of answers; order of RankMap.leaders. NCCL on CUDA
    cell            the ranks of my replica          what its leader received
                    that train
    whole cell      all ranks of my replica          answers; another group than cell where some ranks only answer
    block           all ranks of the cells that      messages about weights for engines; mostly the same as whole cell.
                    share experts with mine          Where some ranks only answer, NCCL on CUDA for weights, too
    job             all ranks                        metrics, barriers; a tree (tree.py)
    row             my agent's leaders, by cell      numbers of whole steps (capability); a tree

The lane carries megabytes per step, so on CUDA it is NCCL, unless two of its leaders share a GPU, which NCCL refuses.
The others carry a few numbers from and to host memory and are gloo everywhere. All are made directly, not with
`new_group`, which stays inside the default group and needs all of its ranks for each group. docs/design/scaling.md says
what grows with the job, and how.
Elsewhere: the arithmetic (rank_map.py), model-parallel groups (Megatron makes its own from the default group) and how a
process joins the job and leaves it (place.py).
"""

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from hacpo_mega.cluster.groups.lone_groups import Gloo
from hacpo_mega.cluster.groups.spans import Spans, WatchedGroup
from hacpo_mega.cluster.groups.tree import Tree, broadcast, gather_bytes, join, share_bytes, split
from hacpo_mega.cluster.rank_map import Coordinate, RankMap

LONGEST_PAUSE_S = 5.0  # between two looks at the store, which may have thousands of clients


class JobGroups:
    """The groups that a coordinate is in, and their collectives.

    rank_map, coordinate     my position; `lane`, `agent` and `is_leader` are short for the coordinate's
    device                   my CUDA device, or the CPU
    lane_group               None unless I am a leader
    cell_group               None unless I train
    whole_cell               on every rank; the same where nobody only answers
    block_group              on every rank; the same where no other cell shares experts with mine
    weights_group            the same ranks, for tensors of their devices; None where nobody only answers
    spans                    trace of this process, recorded while a step is traced
    """

    weights_group: WatchedGroup | None = None

    def __init__(
        self, rank_map: RankMap, rank: int, device: torch.device, store: dist.Store, timeout: timedelta
    ) -> None:
        """Makes the groups; a collective over the job."""
        self.rank_map = rank_map
        self.coordinate: Coordinate = rank_map.coordinate(rank)
        self.device = device
        my, shape = self.coordinate, rank_map.agents[self.coordinate.agent]
        on_cuda = device.type == "cuda"
        self.spans = Spans(my.agent_name, settle=torch.cuda.synchronize if on_cuda else lambda: None)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.PrefixStore(f"{'agent' if my.trains else 'engines'}/{my.agent_name}", store),
            rank=my.world_rank,
            world_size=rank_map.role_world_size(my),
            timeout=timeout,
        )
        # Kept, since the store ends with the last reference: on rank 0 it is the server that the others still ask.
        self._store = store
        self._timeout, self._num_meetings = timeout, 0
        # gloo connects two ranks when they first speak (TORCH_GLOO_LAZY_INIT), so making a group waits for nobody.
        # Where that is switched off a constructor returns when all members have come. All ranks make their groups in
        # this one order, leaders theirs first, so that even then no two ranks wait for each other.
        self.lane_group = self._row = self.cell_group = None
        if my.is_leader:
            # By RankMap.leaders, not by rank: gathered parts are then in the order of assembly.
            leaders = rank_map.leaders(my.lane)
            self.lane_group = self._device_group(f"lane/{my.lane}", leaders.index(rank), len(leaders))
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
            of_block = (f"{name}/weights", my.block_rank, shape.block_size)
            self.weights_group = self._device_group(*of_block) if on_cuda else self.block_group
        self._job = self._tree("job", rank, rank_map.world_size)

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

    def barrier(self) -> None:
        """Waits for every process of the job."""
        with self._waiting("a barrier of all ranks"):
            self._job.wait_for_all()

    def meet(self, limit_s: float) -> None:
        """Waits, for `limit_s` at most, until every process of the job has come: a barrier without the timeout of one.

        A process that has waited in vain goes on, into a collective that times out.
        """
        self._num_meetings += 1
        key, end, pause_s = f"meet/{self._num_meetings}", time.monotonic() + limit_s, 0.001
        self._store.add(key, 1)
        with self._waiting("all ranks"):
            while self._store.add(key, 0) < self.rank_map.world_size and time.monotonic() < end:
                time.sleep(pause_s := min(LONGEST_PAUSE_S, 1.2 * pause_s))

    def gather_to_first(self, payload: bytes) -> list[bytes]:
        """One payload per process of the job, in rank order, on the job's rank 0; an empty list on the others."""
        with self._waiting("what all ranks gather"):
            return self._job.gather(payload)

    def gather_job(self, payload: bytes) -> list[bytes]:
        """One payload per process of the job, in rank order, on every process: for a few bytes each."""
        with self._waiting("what all ranks gather"):
            return split(self._job.share(join(self._job.gather(payload))))

    def highest_in_job(self, number: int) -> int:
        """The highest of the numbers that the processes of the job give. Collective."""
        payloads = self.gather_to_first(str(number).encode())
        highest = str(max(map(int, payloads))).encode() if payloads else None
        return int(self.share_in_job(highest))

    def first_message(self, text: str | None) -> str | None:
        """The message of the lowest rank of the job that has one, on every rank; None if none has. Collective."""
        payloads = self.gather_to_first((text or "").encode())
        first = next((payload for payload in payloads if payload), b"")
        return self.share_in_job(first).decode() or None

    def gather_lane(self, payload: bytes) -> list[bytes]:
        """One payload per leader of this lane, in the order of RankMap.leaders; only leaders call it."""
        with self._waiting(f"what ranks {self.rank_map.leaders(self.lane)} of lane {self.lane} gather"):
            return gather_bytes(self.lane_group, payload)

    def gather_cell(self, payload: bytes) -> list[bytes]:
        """One payload per rank of this cell, in their order, on every rank of it, also those that only answer."""
        with self._waiting(f"the ranks of cell {self.coordinate.cell} of {self.coordinate.agent_name}"):
            return gather_bytes(self.whole_cell, payload)

    def gather_block(self, payload: bytes) -> list[bytes]:
        """One payload per rank of the cells that share experts with this one, on every rank of these."""
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

    def end_groups(self) -> None:
        """Leaves without a message to the others, which have reached the same point."""
        for group in (self.lane_group, self.weights_group):
            if group is not None:
                group.shutdown()  # NCCL's destructor would complain, and abort operations that it believes are running
        self.lane_group = self.cell_group = self.whole_cell = self.block_group = self.weights_group = None
        self._row = self._job = None
        dist.destroy_process_group()

    def _waiting(self, whom: str) -> AbstractContextManager[None]:
        """Context of a collective that waits for `whom`."""
        return nullcontext()

    def _device_group(self, name: str, rank: int, size: int) -> WatchedGroup:
        """NCCL on CUDA, gloo where two members share a GPU, as two agents may, or on the CPU."""
        if self.device.type != "cuda":
            return self._group(name, rank, size)
        devices = dist.PrefixStore(f"{name}/device", self._store)
        devices.set(str(rank), device_identity(self.device))
        if len({devices.get(str(member)) for member in range(size)}) < size:
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


def device_identity(device: torch.device) -> str:
    """A GPU's identity in the whole job; empty for the CPU, which nobody counts.

    By UUID, since each task may see its own GPU as number 0.
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
