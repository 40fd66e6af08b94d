"""Groups of gloo with one rank on one device: they talk to nobody, and each would have a thread that keeps waking.

Megatron makes some seventeen groups of one rank for an actor of one rank. A gloo device is a socket and a thread that
polls it every 10 ms; every group has one of its own and two threads for its work. Groups with peers keep theirs: when
several that share a device connect at the same time, they can wait for each other for ever (two processes, four
threads, a group each, torch 2.13: three of four tries hung).
"""

from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


class _Gloo(ProcessGroupGloo):
    """What torch makes in place of its own class."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if size > 1:
            super().__init__(store, rank, size, timeout)
            return
        if not _DEVICES:
            _DEVICES.append(ProcessGroupGloo.create_device(interface="lo"))
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = _DEVICES, 1, timeout
        super().__init__(store, rank, size, options)


_DEVICES: list[ProcessGroupGloo.Device] = []


def one_device_for_lone_groups() -> None:
    """From here on, the groups of gloo that this process makes for itself alone share a device."""
    distributed_c10d.ProcessGroupGloo = _Gloo
