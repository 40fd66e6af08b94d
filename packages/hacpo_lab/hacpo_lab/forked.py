"""Jobs on this machine whose ranks are forked from one server process, which has imported the heavy libraries once.

A rank in a fresh interpreter spends most of its first twenty seconds on imports; a forked one has them done. The server
is multiprocessing's fork server: it only imports, it computes nothing and never touches CUDA, so that every child can.
The ranks get a launcher's variables and end with the process that asked for them, however that one ends.
Elsewhere: what the ranks do (the caller's function), and jobs in fresh interpreters (jobs/local.py).
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from hacpo_mega.cluster.machine.machine_limits import num_cores
from hacpo_mega.cluster.security.private_folder import job_folder
from hacpo_mega.cluster.security.secret import new_secret
from hacpo_mega.jobs.local import launcher_environment

# Variables of the server only. One thread: a pool of threads would not survive the fork. And torch must not initialise
# CUDA to find out whether there is a GPU, since no child could undo it: with NVML it asks the driver's library instead.
SERVER_ONLY = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
LAST_WORDS_S = 20.0  # after a rank has failed, for the others to write their messages about it


class JobServer:
    """Runs jobs one after the other. The server starts with the first of them and ends with this process."""

    def __init__(self, preload: str) -> None:
        """`preload` is the module that the server imports; call prepare_environment() before."""
        self._num_threads = os.environ.get("OMP_NUM_THREADS")  # of a rank, if the user has set it
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])

    def start(self) -> None:
        """Starts the server, and waits for its imports."""
        with changed_environment(SERVER_ONLY):
            forkserver.ensure_running()
        process = self._context.Process(target=int)
        process.start()
        process.join()

    def run(self, world_size: int, folder: Path, function: Callable[..., None], *arguments: Any) -> list[int | None]:
        """Calls `function(*arguments)`, which must be importable, in `world_size` ranks; their exit statuses, by rank.

        The output of rank r goes to r.out and r.err of `folder`. None: a rank that was killed because another failed.
        """
        with self.ranks(world_size, folder, function, *arguments) as processes:
            wait_for_ranks(processes)
            return [process.exitcode for process in processes]

    @contextmanager
    def ranks(
        self, world_size: int, folder: Path, function: Callable[..., None], *arguments: Any
    ) -> Iterator[list[BaseProcess]]:
        """The processes of `run`, by rank, while they run; none of them does afterwards."""
        with changed_environment(SERVER_ONLY):
            forkserver.ensure_running()
        num_threads = self._num_threads or str(max(1, num_cores() // world_size))
        secret = new_secret()
        processes: list[BaseProcess] = []
        with job_folder() as private:
            try:
                for rank in range(world_size):
                    variables = launcher_environment(rank, world_size, private, secret)
                    call = (rank, folder, variables | {"OMP_NUM_THREADS": num_threads}, function, arguments)
                    process = self._context.Process(target=_run_rank, args=call, name=f"rank {rank}")
                    process.start()
                    processes.append(process)  # after its start: a process that never started cannot be killed
                yield processes
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def _run_rank(rank: int, folder: Path, environment: dict[str, str], function: Callable, arguments: tuple) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    threading.Thread(target=_end_with_parent, name="queue", daemon=True).start()
    for name in SERVER_ONLY:
        os.environ.pop(name, None)
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    function(*arguments)


def _end_with_parent() -> None:
    """Ends this rank when the process that asked for it is gone: a process that is killed cannot end its ranks."""
    multiprocessing.parent_process().join()
    os._exit(1)


def wait_for_ranks(processes: list[BaseProcess]) -> None:
    """Waits until all have ended, or one has failed and the others have had time for their last messages."""
    running = {process.sentinel: process for process in processes}
    has_failed = False
    while running:
        ended = connection.wait(list(running), timeout=LAST_WORDS_S if has_failed else None)
        if not ended:
            return
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            has_failed = has_failed or process.exitcode != 0


@contextmanager
def changed_environment(changes: dict[str, str]) -> Iterator[None]:
    """Environment variables set inside; all are restored afterwards."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
