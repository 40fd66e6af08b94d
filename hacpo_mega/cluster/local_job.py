"""A whole job on this machine: torchrun's launcher, one process per rank, ended as soon as one of them fails.

What failed says so itself in one line (place.py, watchdog.py); torchrun's own account of it would bury that line.
Not here: what the processes need in their environment (environment.py).
"""

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hacpo_mega.cluster.environment import LAUNCHER_PID
from hacpo_mega.cluster.watchdog import SIGNALLED


def run_on_this_machine(arguments: list[str], world_size: int) -> int:
    """Runs `hacpo-mega ARGUMENTS` in `world_size` processes here; returns 0, or the highest exit code of its ranks.

    After a signal (Ctrl-C, SIGTERM) the ranks have been sent it too, have said so and are gone: 128 and its number.
    The launcher picks a free port, so that two jobs on one machine do not meet.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="hacpo-mega",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # The launcher ends the others by SIGTERM, which watchdog.py heeds after the ring has named who failed.
        monitor_interval=2.0,
    )
    try:
        elastic_launch(launcher, sys.executable)("-m", "hacpo_mega.cli", *arguments)
    except ChildFailedError as error:
        # A rank that the launcher ended has a negative one: the number of the signal.
        return max(1, *(failure.exitcode for failure in error.failures.values()))
    except SignalException as told:
        return SIGNALLED + told.sigval
    return 0
