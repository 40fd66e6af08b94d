"""Bytes from all processes to the first and back, over groups of at most FANOUT, so that no process talks to all.

A gather that gives every process everything moves world^2 payloads, and around a ring takes world rounds. Here blocks
of FANOUT neighbours hand what they have to their first member, these do the same among themselves, and so on:

    size 32,768    3 levels; 93 messages reach the root, 31 a head of a block, everybody else sends one

Elsewhere: who the members are (job_groups.py).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from hacpo_mega.cluster.groups.tree_levels import FANOUT, Level, tree_levels


class Tree:
    """The groups of one member. Every method is a collective over all members."""

    def __init__(
        self, rank: int, size: int, make_group: Callable[[Level], dist.ProcessGroup], fanout: int = FANOUT
    ) -> None:
        """`make_group` makes the gloo group of a level; it is called from the leaves up."""
        self._groups = [make_group(level) for level in tree_levels(rank, size, fanout)]

    def gather(self, payload: bytes) -> list[bytes]:
        """Everyone's payload, by rank, on the root; an empty list on the others."""
        payloads = [payload]
        for group in self._groups:
            messages = gather_at_head(group, join(payloads))
            if group.rank() != 0:
                return []
            payloads = [payload for message in messages for payload in split(message)]
        return payloads

    def share(self, payload: bytes | None) -> bytes:
        """The root's payload on every member; the payloads of others are ignored."""
        for group in reversed(self._groups):
            payload = share_bytes(group, payload)
        return payload

    def wait_for_all(self) -> None:
        """Returns when every process has arrived."""
        self.gather(b"")
        self.share(b"")


def share_bytes(group: dist.ProcessGroup, payload: bytes | None) -> bytes:
    """The payload of the group's rank 0 on every rank; the payloads of others are ignored."""
    size = torch.tensor([len(payload) if payload is not None else 0])
    broadcast(group, size)
    content = torch.empty(int(size), dtype=torch.uint8)
    if group.rank() == 0:
        content[:] = as_tensor(payload)
    if len(content):
        broadcast(group, content)
    return content.numpy().tobytes()


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Overwrites the tensor with that of the group's rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def as_tensor(payload: bytes) -> torch.Tensor:
    """A copy of the bytes as uint8."""
    # torch refuses empty buffers, and warns about read-only ones
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def join(payloads: list[bytes]) -> bytes:
    """One message of several payloads: their number, their sizes (int64, little endian), their bytes."""
    sizes = torch.tensor([len(payloads), *map(len, payloads)]).numpy().astype("<i8")
    return b"".join([sizes.tobytes(), *payloads])


def split(message: bytes) -> list[bytes]:
    """The payloads of a message of `join`."""
    num_payloads = int.from_bytes(message[:8], "little")
    payloads, start = [], 8 * (num_payloads + 1)
    for index in range(1, num_payloads + 1):
        size = int.from_bytes(message[8 * index : 8 * index + 8], "little")
        payloads.append(message[start : start + size])
        start += size
    assert start == len(message), (start, len(message))
    return payloads


def gather_at_head(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Everyone's message on rank 0 of the group; empty on the others. Messages are not padded."""
    options = dist.GatherOptions()
    options.rootRank = 0
    mine, is_head = torch.tensor([len(message)]), group.rank() == 0
    sizes = [torch.empty_like(mine) for _ in range(group.size())] if is_head else []
    group.gather([sizes] if is_head else [], [mine], options).wait()
    if not is_head:
        group.send([as_tensor(message)], 0, 0).wait()
        return []
    rows = [torch.empty(int(size), dtype=torch.uint8) for size in sizes[1:]]
    for work in [group.recv([row], rank, 0) for rank, row in enumerate(rows, start=1)]:
        work.wait()
    return [message, *(row.numpy().tobytes() for row in rows)]


def gather_bytes(group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
    """Everyone's payload, by rank in the group, on every rank: one round for the sizes, one for the bytes."""
    # NCCL moves device memory, gloo host memory.
    device = torch.device("cuda", torch.cuda.current_device()) if group.name() == "nccl" else torch.device("cpu")
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(payload)], device=device)]).wait()
    counts = [int(size) for size in sizes]
    # An all-gather moves equal sizes only, so everyone sends as many bytes as the longest payload has.
    mine = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    mine[: len(payload)] = as_tensor(payload).to(device)
    rows = [torch.empty_like(mine) for _ in counts]
    group.allgather([rows], [mine]).wait()
    return [row[:count].cpu().numpy().tobytes() for row, count in zip(rows, counts)]
