"""Agents that share a device or a node: their number, their turns on it, the memory that they pin there.

vLLM measures free device memory while it starts, and counts memory that another process of the device allocates or
frees meanwhile as its own. So agents that share a device start their engines one after another. With `placement =
"shared"` they do everything on a device one after another. Pinned memory is never swapped: a node that has too little
of it kills processes long after the start, so it is checked before any process pins. Elsewhere: the device of a process
(device.py), the work of an agent in its turn (agent/devices.py), how many bytes are pinned (memory/budget.py).
"""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hacpo_mega.cluster.groups.job_groups import JobGroups, device_identity
from hacpo_mega.cluster.machine.machine_limits import free_memory


def agents_per_device(place: JobGroups) -> int:
    """The most agents that one device of the job has, equal on every rank; 1 on the CPU. Collective over the job.

    Raises ValueError on every rank where two processes of one agent are on one device, which NCCL refuses.
    """
    mine = f"{device_identity(place.device)} {place.coordinate.agent_name}"
    pairs = [payload.decode() for payload in place.gather_job(mine.encode())]
    counts = Counter(pair for pair in pairs if not pair.startswith(" "))
    if shared := [pair for pair, count in counts.items() if count > 1]:
        device, _, agent = shared[0].partition(" ")
        raise ValueError(
            f"{counts[shared[0]]} processes of agent {agent} are on the GPU {device}: an agent's processes "
            "need one each. Give the job more GPUs, or the agent fewer (tp x cp x pp and rollout_gpus, x cells x lanes)"
        )
    return max(Counter(pair.partition(" ")[0] for pair in counts).values(), default=1)


@contextmanager
def in_turn(
    place: JobGroups,
    takes_turns: bool,
    arrive: Callable[[], None] = lambda: None,
    leave: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Runs its body for one agent after another; if nobody `takes_turns`, for all at once.

    arrive, leave   what the agent does first and last in its turn

    Collective over the job. It begins when every process has arrived, so that nothing before it still runs. An OSError
    is raised only after all turns: joint_disk.py reports one agent's disk error to all together, and no agent may wait
    elsewhere for the others. Any other error ends the job before the next turn. `leave` runs after either.
    """
    if not takes_turns:
        yield
        return
    for _ in range(place.agent + 1):
        place.barrier()
    disk_error: OSError | None = None
    try:
        arrive()
        try:
            yield
        except OSError as error:
            disk_error = error
    finally:
        leave()
    for _ in range(len(place.rank_map.agents) - place.agent):
        place.barrier()
    if disk_error is not None:
        raise disk_error


def require_host_memory(place: JobGroups, pinned: int, copied: int = 0) -> None:
    """ValueError, the same on every rank, if the ranks of a node want more memory than it has. Collective over the job.

    pinned   bytes that this rank is going to pin
    copied   those of its copy of the state, of which a checkpoint is written while it learns on
    """
    mine = json.dumps([socket.gethostname(), pinned, copied, free_memory()]).encode()
    pins, copies, free = Counter[str](), Counter[str](), {}
    for payload in place.gather_job(mine):
        node, num_pinned, num_copied, free_and_limit = json.loads(payload)
        pins[node] += num_pinned
        copies[node] += num_copied
        free[node] = min(free_and_limit, free.get(node, free_and_limit))
    for node, (left, limit) in free.items():
        size, kind = pins[node], "pinned memory"
        key, remedy = "agents.*.offload", "Offload fewer agents (offload = 'none'), or spread them over more nodes"
        if place.rank_map.shares_devices:
            key, remedy = "placement = 'shared'", "Give agents devices of their own (placement = 'split')"
        if size <= left:
            size, left, kind = copies[node], left - size, "memory for copies"
            key, remedy = "checkpoint.asynchronous", "Set it to false, or spread the agents over more nodes"
        if size > left:
            raise ValueError(
                f"{key} wants {size >> 20} MiB of {kind} on {node}, where {left >> 20} MiB are free"
                f"{f' ({limit})' if limit else ''}. {remedy}"
            )
