"""Agents on one device: how many there are, and who starts an engine while the others hold still.

vLLM measures the device while it starts, to see how much of it is left, and takes what another process of the same
device allocates or frees meanwhile for its own. So agents that share a device start their engines one after another.
Not here: which device a process has (device.py).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hacpo_mega.cluster.device import device_identity
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
            "need one each. Give the job more GPUs, or the agent fewer (tp x pp x cells x lanes)"
        )
    return max(Counter(seat.partition(" ")[0] for seat in on_devices).values(), default=1)


@contextmanager
def in_turn(place: Place, agents_on_device: int) -> Iterator[None]:
    """Around what measures the device: one agent after another where agents share one, at once where none do.

    Collective over the job. It begins when every process has come, so nothing that stands before it goes on meanwhile.
    """
    turns = len(place.rank_map.agents) if agents_on_device > 1 else 0
    for _ in range(min(turns, place.agent + 1)):
        place.barrier()
    yield
    for _ in range(turns - place.agent):
        place.barrier()
