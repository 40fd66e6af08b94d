"""Agents on one device: their number, and the turns in which they use it.

vLLM measures free device memory while it starts, and counts memory that another process of the device allocates or
frees meanwhile as its own. So agents that share a device start their engines one after another. With `placement =
"shared"` they do everything on a device one after another. Not here: the device of a process (device.py), the work of
an agent in its turn (agent/devices.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hacpo_mega.cluster.machine.device import device_identity
from hacpo_mega.cluster.place import Place


def agents_per_device(place: Place) -> int:
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
    place: Place,
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
