"""A whole job on this machine: torchrun's launcher, one process per rank, ended as soon as one of them fails.

What failed says so itself in one line (place.py, watchdog.py); torchrun's own account of it would bury that line.
Not here: what the processes need in their environment (environment.py).
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hacpo_mega.cluster.environment import LAUNCHER_PID
from hacpo_mega.cluster.machine_limits import num_cores
from hacpo_mega.cluster.watchdog import FAILED, SIGNALLED

DEFERRED = (signal.SIGTERM, signal.SIGUSR1)


def run_on_this_machine(arguments: list[str], world_size: int) -> int:
    """Runs `hacpo-mega ARGUMENTS` in `world_size` processes here; returns 0, or the highest exit code of its ranks.

    SIGTERM and SIGUSR1 are passed on to the ranks, which end when the run is on disk, all with 75 (docs/faults.md). A
    rank that a signal has ended counts as 128 and its number, as does Ctrl-C, after which all are gone.
    The launcher picks a free port, so that two jobs on one machine do not meet.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // world_size)))
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
        # Those it does not leave to us it passes on as well, but kills whoever needs more than 30 seconds to end.
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
    )
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        _send_to_ranks(number)

    for number in DEFERRED:
        signal.signal(number, pass_on)
    try:
        elastic_launch(launcher, sys.executable)("-m", "hacpo_mega.cli", *arguments)
    except ChildFailedError as error:
        # A rank that a signal has ended has a negative one: the launcher's, after another failed, or the one passed on.
        highest = max(failure.exitcode for failure in error.failures.values())
        return SIGNALLED + told[0] if highest < 0 and told else max(FAILED, highest)
    except SignalException as ended:
        return SIGNALLED + ended.sigval
    return 0


def _send_to_ranks(number: int) -> None:
    """Sends a signal to the ranks, the children of this process; without any there is nothing to wait for."""
    children = [int(status.parent.name) for status in Path("/proc").glob("[0-9]*/stat") if _is_child(status)]
    if not children:
        raise SystemExit(SIGNALLED + number)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_child(status: Path) -> bool:
    with suppress(OSError):  # any process may end while we read
        return int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid()
    return False
