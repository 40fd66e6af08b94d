"""Agents that share a device or a node: their number, the turns in which they use it, the memory that they pin there.

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
    seats = [payload.decode() for payload in place.gather_job(mine.encode())]
    on_devices = [seat for seat in seats if not seat.startswith(" ")]
    if twice := [seat for seat, count in Counter(on_devices).items() if count > 1]:
        device, _, agent = twice[0].partition(" ")
        raise ValueError(
            f"{Counter(on_devices)[twice[0]]} processes of agent {agent} are on the GPU {device}: an agent's processes "
            "need one each. Give the job more GPUs, or the agent fewer (tp x cp x pp and rollout_gpus, x cells x lanes)"
        )
    return max(Counter(seat.partition(" ")[0] for seat in on_devices).values(), default=1)


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
    is raised when all have had their turns: a disk's refusal to one agent is reported to all together (joint_disk.py),
    and they must not wait for each other in different places. Any other error ends the job before the next turn. The
    agent leaves after each of them.
    """
    if not takes_turns:
        yield
        return
    for _ in range(place.agent + 1):
        place.barrier()
    refused: OSError | None = None
    try:
        arrive()
        try:
            yield
        except OSError as error:
            refused = error
    finally:
        leave()
    for _ in range(len(place.rank_map.agents) - place.agent):
        place.barrier()
    if refused is not None:
        raise refused


def require_host_memory(place: JobGroups, pinned: int, copied: int = 0) -> None:
    """ValueError, the same on every rank, if the ranks of a node want more memory than it has. Collective over the job.

    pinned   bytes that this rank is going to pin
    copied   those of its copy of the state, of which a checkpoint is written while it learns on
    """
    mine = json.dumps([socket.gethostname(), pinned, copied, free_memory()]).encode()
    pins, copies, free = Counter[str](), Counter[str](), {}
    for payload in place.gather_job(mine):
        node, of_pins, of_copies, free_there = json.loads(payload)
        pins[node] += of_pins
        copies[node] += of_copies
        free[node] = min(free_there, free.get(node, free_there))
    for node, (left, limit) in free.items():
        size, kind = pins[node], "pinned memory"
        asked, instead = "agents.*.offload", "Offload fewer agents (offload = 'none'), or spread them over more nodes"
        if place.rank_map.shares_devices:
            asked, instead = "placement = 'shared'", "Give agents devices of their own (placement = 'split')"
        if size <= left:
            size, left, kind = copies[node], left - size, "memory for copies"
            asked, instead = "checkpoint.asynchronous", "Set it to false, or spread the agents over more nodes"
        if size > left:
            raise ValueError(
                f"{asked} wants {size >> 20} MiB of {kind} on {node}, where {left >> 20} MiB are free"
                f"{f' ({limit})' if limit else ''}. {instead}"
            )
