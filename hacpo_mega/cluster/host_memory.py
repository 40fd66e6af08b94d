"""Checks, before any process pins memory, that every node's memory holds what its processes will pin.

Pinned memory is never swapped: a node that has too little of it kills processes long after the start.
Not here: how many bytes that is (memory/budget.py).
"""

import json
import socket
from collections import defaultdict

from hacpo_mega.cluster.machine.machine_limits import free_memory
from hacpo_mega.cluster.place import Place


def require_host_memory(place: Place, num_bytes: int) -> None:
    """ValueError, the same on every rank, if the ranks of a node want more memory than it has. Collective over the job.

    num_bytes   what this rank is going to pin
    """
    mine = json.dumps([socket.gethostname(), num_bytes, free_memory()]).encode()
    wanted, free = defaultdict[str, int](int), {}
    for payload in place.gather_job(mine):
        node, of_rank, free_there = json.loads(payload)
        wanted[node] += of_rank
        free[node] = min(free_there, free.get(node, free_there))
    for node, size in wanted.items():
        left, limit = free[node]
        if size > left:
            asked, instead = (
                "agents.*.offload",
                "Offload fewer agents (offload = 'none'), or spread them over more nodes",
            )
            if place.rank_map.shares_devices:
                asked, instead = "placement = 'shared'", "Give agents devices of their own (placement = 'split')"
            raise ValueError(
                f"{asked} wants {size >> 20} MiB of pinned memory on {node}, where {left >> 20} MiB are free"
                f"{f' ({limit})' if limit else ''}. {instead}"
            )
