"""A whole job on this machine: one process per rank, which meet through a file that only their user can read.

A rank spends most of its start on imports. So the launcher imports the modules once and forks the ranks
(forked_rank.py); not with CUDA, which must not be initialized before a fork, nor in a user's own process.

The launcher opens no network port: torch's opens one to everybody, and executes what arrives there. A failed rank
reports itself in one line (place.py, watchdog.py); the launcher reports only ranks that the kernel killed when memory
ran out. Elsewhere: the environment of the processes (environment.py).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hacpo_mega.checkpoint.files import StartOptions
from hacpo_mega.cluster.launcher_env import FAILED, SIGNALLED, STORE_FILE
from hacpo_mega.cluster.machine.environment import LAUNCHER_PID
from hacpo_mega.cluster.machine.machine_limits import num_cores, num_memory_kills
from hacpo_mega.cluster.security.private_folder import FOLDER, job_folder
from hacpo_mega.cluster.security.secret import SECRET, new_secret
from hacpo_mega.jobs.forked_rank import ForkedRank
from hacpo_mega.models.files.visible import say

CHECKPOINT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the ranks save a checkpoint, and end by themselves
END_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
POLL_S = 0.1
MODULE = "hacpo_mega.cli"
# After a rank has failed, the watchdogs' ring tells the others, which then end by themselves. Ranks that still run
# after RING_S get SIGTERM, which watchdog.py obeys once the ring's time is up, and SIGKILL after another SIGTERM_S.
RING_S, SIGTERM_S = 2.0, 30.0


def train_arguments(options: StartOptions) -> list[str]:
    """The same options as arguments of `hacpo-mega train`."""
    arguments = [word for key in options.get("accept", ()) for word in ("--accept", key)]
    arguments += ["--from", str(branch)] if (branch := options.get("branch")) is not None else []
    return arguments + [f"--{name.replace('_', '-')}" for name in ("fresh", "last_whole") if options.get(name)]


def run_on_this_machine(
    arguments: list[str],
    world_size: int,
    look: Callable[[], None] = lambda: None,
    imports: Callable[[], None] | None = None,
) -> int:
    """Runs `hacpo-mega ARGUMENTS` in `world_size` processes here; returns 0, or the highest exit code of its ranks.

    `look` is called a few times a second while the ranks run; an exception of it ends them. `imports` loads their
    modules into this process, from which they are then forked; without it they are fresh interpreters. SIGTERM and
    SIGUSR1 are forwarded to the ranks, which save a checkpoint and end with 75 (docs/guide/troubleshooting.md). A rank
    ended by a signal counts as 128 + the signal's number. So does a job ended by Ctrl-C, once all ranks have ended.
    """
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // world_size)))}
    ranks = _Ranks(look, forks=imports is not None)
    with _forwarded_signals(ranks):
        if imports is not None:
            os.environ.update(threads)  # libraries read it when they are loaded
            ranks.run_imports(imports)
        return _run(ranks, arguments, world_size, threads)


def _run(ranks: "_Ranks", arguments: list[str], world_size: int, threads: Mapping[str, str]) -> int:
    with job_folder() as folder:
        try:
            secret = new_secret()
            for rank in range(world_size):
                variables = launcher_environment(rank, world_size, folder, secret) | {LAUNCHER_PID: str(os.getpid())}
                ranks.start(arguments, threads | variables)
            return ranks.wait()
        finally:
            ranks.kill()


@contextmanager
def _forwarded_signals(ranks: "_Ranks") -> Iterator[None]:
    """Signals go to the ranks until the block ends, if this is the main thread: Python lets no other handle any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Signals that this process was started to ignore, as by nohup or by `&` in a script, stay ignored.
    ends = [number for number in END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, ranks.forward) for number in (*CHECKPOINT_SIGNALS, *ends)}
    # A process that ignores SIGCHLD, as its parent may have set (trap '' CHLD), never learns a child's exit status.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def launcher_environment(rank: int, world_size: int, folder: Path, secret: str) -> dict[str, str]:
    """Environment of one rank of a job on this machine; `folder` is the job's private one."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # nobody listens
        STORE_FILE: str(folder / "store"),
        FOLDER: str(folder),
        SECRET: secret,
    }


class _Ranks:
    """The processes, each in a session of its own, so that a terminal signals the launcher alone."""

    def __init__(self, look: Callable[[], None], *, forks: bool) -> None:
        self._look, self._forks, self._is_importing = look, forks, False
        self._processes: list[subprocess.Popen | ForkedRank] = []
        self._signals: list[int] = []
        self._memory_kills = num_memory_kills()

    def run_imports(self, imports: Callable[[], None]) -> None:
        """Imports the ranks' modules. A signal meanwhile ends this process, as it would end ranks that import."""
        self._is_importing = True
        imports()
        self._is_importing = False

    def start(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Starts one more process; none after a signal."""
        if self._signals:
            return
        if self._forks:
            rank = ForkedRank(MODULE, arguments, environment, (*CHECKPOINT_SIGNALS, *END_SIGNALS))
        else:
            command = [sys.executable, "-P", "-m", MODULE, *arguments]
            rank = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        self._processes.append(rank)

    def forward(self, number: int, _: object = None) -> None:
        """Handles a signal: sends it to all ranks."""
        if self._is_importing:
            os._exit(SIGNALLED + number)
        self._signals.append(number)
        self._send(number)

    def wait(self) -> int:
        """Waits until all ranks have ended; returns the exit code of the job."""
        if self._signals:  # it may have come before the last rank was in the list of those that it is sent to
            self._send(self._signals[0])
        self._wait_until(lambda: self._has_failed or self._end_signal is not None)
        if self._end_signal is None:
            self._wait_until(lambda: self._end_signal is not None, RING_S)
            self._send(signal.SIGTERM)
        self._wait_until(lambda: False, SIGTERM_S)
        self._report_out_of_memory()
        self.kill()
        if self._end_signal is not None:
            return SIGNALLED + self._end_signal
        failures = [process.returncode for process in self._processes if process.returncode]
        # A negative code is that of a rank ended by a signal: a forwarded one, or ours after another rank had failed.
        if self._signals and (not self._processes or (failures and max(failures) < 0)):
            return SIGNALLED + self._signals[0]
        return max(FAILED, *failures) if failures else 0

    def kill(self) -> None:
        """Ends ranks that still run, and their children."""
        for process in self._running:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # forked a moment ago: not yet in its own session, and without children
                process.kill()
            process.wait()

    def _report_out_of_memory(self) -> None:
        """Prints which ranks the kernel killed when memory ran out: they could not."""
        killed = [str(rank) for rank, process in enumerate(self._processes) if process.poll() == -signal.SIGKILL]
        if killed and num_memory_kills() > self._memory_kills:
            who = f"rank {killed[0]} was" if len(killed) == 1 else f"ranks {', '.join(killed)} were"
            say(
                f"{who} killed by the kernel: out of memory (its counter oom_kill says so). Give the job more memory, "
                "or start fewer ranks on this machine",
                file=sys.stderr,
            )

    @property
    def _running(self) -> list[subprocess.Popen | ForkedRank]:
        return [process for process in self._processes if process.poll() is None]

    @property
    def _has_failed(self) -> bool:
        return any(process.poll() for process in self._processes)

    @property
    def _end_signal(self) -> int | None:
        return next((number for number in self._signals if number in END_SIGNALS), None)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _wait_until(self, is_over: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Waits until `is_over`, until all ranks have ended, or for `limit_s`."""
        end = time.monotonic() + limit_s
        while self._running and not is_over() and time.monotonic() < end:
            time.sleep(POLL_S)
            self._look()
