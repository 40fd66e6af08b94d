"""Jobs of real processes on this machine: every rank is started as srun starts it, with nobody who looks after it.

    start_ranks     the processes; what they write and what they answer goes to files of a folder
    run_ranks       what a function answers on every rank
    run_group       the same, inside a default group of gloo
    run_job         the same, with the `Place` of a rank map
    run_script      `main` of a module of this folder, for jobs with vLLM
    run_command     a whole `hacpo-mega COMMAND`
    run_here        a command that needs no ranks, in this process
    start_command   a command as a user starts it: by the interpreter's command line, and the project's own launcher

Without a GPU a rank is forked from a server that has imported torch, Megatron and vLLM once (preloaded.py), which saves
each of them ten seconds; so are a command and the ranks that its launcher starts (forked_python.py). The process that
judges the answers imports no vLLM, which changes the process that imports it.
"""

import atexit
import functools
import importlib
import io
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import forked_python
import torch
import torch.distributed as dist

from hacpo_mega.cluster.machine.environment import library_settings
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.security.secret import new_secret
from hacpo_mega.jobs.local import launcher_environment

# A process that has counted the GPUs cannot use them after a fork: on CUDA every rank is a fresh interpreter.
ON_CUDA = torch.cuda.is_available()
PROCESSES = multiprocessing.get_context("spawn" if ON_CUDA else "forkserver")
# Threads of every process that a test starts. More than one changes how the CPU rounds, never what a test may ask.
THREADS = os.environ.get("OMP_NUM_THREADS", "1")
ENVIRONMENT = {**library_settings(on_cuda=ON_CUDA), "OMP_NUM_THREADS": THREADS}

# The time limit of a test's collectives: long, because a crowded machine is no error.
TIMEOUT_S = 900.0
# After a rank has failed, the others get this long to say what they know of it.
LAST_WORDS_S = 20.0


def start_ranks(num_ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[BaseProcess]:
    """Processes that call `function(*arguments)`, which must be importable, with the environment of a launcher.

    Rank r writes to the files r.out and r.err of `folder`, and saves its answer there as r.pt, by torch.save.
    """
    start_server()
    processes = []
    for rank, environment in enumerate(new_job(num_ranks)):
        call = (rank, folder, environment, function, arguments)
        processes.append(PROCESSES.Process(target=_play, args=call, name=f"rank {rank}"))
        with mock.patch.dict(os.environ, {**ENVIRONMENT, **environment} if ON_CUDA else {}):
            processes[-1].start()
    return processes


def new_job(num_ranks: int) -> list[dict[str, str]]:
    """Environments of the ranks of one more job, and a port for those who want a server instead of its file."""
    folder, secret, port = Path(tempfile.mkdtemp(prefix="hacpo_mega-")), new_secret(), free_port()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    told = (launcher_environment(rank, num_ranks, folder, secret) for rank in range(num_ranks))
    return [environment | {"MASTER_PORT": str(port)} for environment in told]


def free_port() -> int:
    """A port that nobody listens on; the job's rank 0 takes it a moment later.

    Below the range from which the kernel serves whoever asks for any port, so that nobody is given it in that moment.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(lowest, 20_000) // 2, lowest)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function(*arguments)` in every process of a job, by rank.

    AssertionError, with what the failing ranks wrote, if one ends with another status than 0.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _ended(start_ranks(num_ranks, Path(folder), function, *arguments)) as processes,
    ):
        wait_for_ranks(processes)
        statuses = [process.exitcode for process in processes]
        by_cause = sorted(range(num_ranks), key=lambda rank: statuses[rank])  # a signal is seldom another's fault
        told = "\n".join(f"rank {rank}: {(Path(folder) / f'{rank}.err').read_text()[-4000:]}" for rank in by_cause)
        assert statuses == [0] * num_ranks, f"exit statuses {statuses}\n{told}"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


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


def run_group(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function(*arguments)` on every rank of one default group of gloo, by rank."""
    return run_ranks(num_ranks, _in_group, function, arguments)


def run_job(rank_map: RankMap, function: Callable[[Place, RankMap], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Results of `function(place, rank_map)` on every rank of a job, by rank."""
    return run_ranks(rank_map.world_size, _in_place, function, rank_map, timeout_s)


def run_script(name: str, num_ranks: int, *arguments: int | str | Path) -> None:
    """Runs `main(*arguments)` of the module `name` on every rank; what imports vLLM is named, not imported, here."""
    run_ranks(num_ranks, _main_of, name, arguments)


def run_command(num_ranks: int, *arguments: str | Path) -> None:
    """Runs `hacpo-mega ARGUMENTS` to its end in every rank of a job; AssertionError if it fails."""
    run_ranks(num_ranks, play_command, *map(str, arguments))


def play_command(*arguments: str) -> None:
    """`hacpo-mega ARGUMENTS` in this process; SystemExit if it fails."""
    from hacpo_mega.cli.app import main

    sys.argv = ["hacpo-mega", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def run_here(*arguments: str | Path) -> subprocess.CompletedProcess:
    """`hacpo-mega ARGUMENTS` in this process, for commands that start no job: exit status and what it writes."""
    out, err, status, before = io.StringIO(), io.StringIO(), 0, sys.argv
    try:
        with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ):
            play_command(*map(str, arguments))
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def start_command(*arguments: str | Path, **options: Any) -> subprocess.Popen:
    """`hacpo-mega ARGUMENTS` as a user starts it, THREADS per rank; `options` are Popen's."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    python, environment = interpreter()
    return subprocess.Popen([python, "-m", "hacpo_mega.cli", *map(str, arguments)], env=environment, **pipes)


def interpreter() -> tuple[str, dict[str, str]]:
    """A Python for commands that start heavy processes, and its environment: this one's, with THREADS for each."""
    python, added = _interpreter()
    return python, os.environ | added


@functools.cache
def _interpreter() -> tuple[str, dict[str, str]]:
    """The Python, and what its environment has beside this one's."""
    if ON_CUDA:
        return sys.executable, {"OMP_NUM_THREADS": THREADS}
    start_server()
    door = Path(tempfile.mkdtemp(prefix="forked_python")) / "socket"
    server = PROCESSES.Process(target=_serve_commands, args=(str(door),), name="forked python")
    server.start()
    atexit.register(shutil.rmtree, door.parent)
    atexit.register(server.kill)
    while not door.exists():
        assert server.is_alive(), "the server of forked_python.py has not started"
        time.sleep(0.05)
    added = ENVIRONMENT | {"OMP_NUM_THREADS": THREADS, "FORKED_PYTHON": str(door), "PLAIN_PYTHON": sys.executable}
    return forked_python.__file__, added


def _serve_commands(door: str) -> None:
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(0)), daemon=True).start()
    forked_python.serve(door)


def start_server() -> None:
    """Starts the server, if there is none yet, in the environment that a run's processes have.

    A test that lets hacpo_lab fork ranks in this process calls it first: a process has one server, and the ranks of all
    later tests would be forked from one that has imported less.
    """
    if ON_CUDA:
        return
    PROCESSES.set_forkserver_preload(["preloaded"])
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}):
        forkserver.ensure_running()


def _play(rank: int, folder: Path, environment: dict[str, str], function: Callable, arguments: tuple) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if not ON_CUDA and "preloaded" not in sys.modules:
        importlib.import_module("preloaded")  # the server passes over an ImportError: here a test shows it
        raise AssertionError("the server is not start_server's: a test of this process has started another")
    os.environ.update(environment)
    torch.set_num_threads(int(THREADS))
    torch.save(function(*arguments), folder / f"{rank}.pt")


def _main_of(name: str, arguments: tuple) -> None:
    importlib.import_module(name).main(*arguments)


def _in_group(function: Callable, arguments: tuple) -> Any:
    dist.init_process_group("gloo")
    answer = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return answer


def _in_place(function: Callable, rank_map: RankMap, timeout_s: float) -> Any:
    with Place.join(rank_map, timeout_s) as place:
        return function(place, rank_map)


@contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[list[BaseProcess]]:
    """Afterwards none of the processes runs, whatever has happened."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
