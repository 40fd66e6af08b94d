"""A whole job on this machine: one process per rank, which meet through a file that only their user can read.

A rank spends most of its start on imports. So ranks are forked from a launcher that may import the same
(forked_rank.py): not on CUDA, which must be untouched before a fork, nor from a user's own process.

It opens no network port: torch's own launcher would, for everybody, and runs what it is sent. A failed rank reports
itself in one line (place.py, watchdog.py); the launcher reports only ranks that the kernel has killed for want of
memory. Elsewhere: the environment of the processes (environment.py).
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

DEFERRED = (signal.SIGTERM, signal.SIGUSR1)  # the ranks end by themselves when the run is on disk
AT_ONCE = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
POLL_S = 0.1
MODULE = "hacpo_mega.cli"
# After a rank has failed, the ring tells the others, who end by themselves. Then SIGTERM, which watchdog.py heeds when
# the ring has had its time; and the end of whoever needs longer than that.
LAST_WORDS_S, PATIENCE_S = 2.0, 30.0


def words_of(how: StartOptions) -> list[str]:
    """The options of `hacpo-mega train` that say the same."""
    words = [word for key in how.get("accept", ()) for word in ("--accept", key)]
    words += ["--from", str(branch)] if (branch := how.get("branch")) is not None else []
    return words + [f"--{name.replace('_', '-')}" for name in ("fresh", "last_whole") if how.get(name)]


def run_on_this_machine(
    arguments: list[str],
    world_size: int,
    look: Callable[[], None] = lambda: None,
    imports: Callable[[], None] | None = None,
) -> int:
    """Runs `hacpo-mega ARGUMENTS` in `world_size` processes here; returns 0, or the highest exit code of its ranks.

    `look` is called a few times a second while they run; an exception of it ends them. `imports` loads their modules
    into this process, from which they are then forked; without it they are fresh interpreters. SIGTERM and SIGUSR1 are
    passed on to the ranks, which end when the run is on disk, all with 75 (docs/guide/troubleshooting.md). A rank that
    a signal has ended counts as 128 and its number, as does Ctrl-C, after which all are gone.
    """
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // world_size)))}
    ranks = _Ranks(look, forks=imports is not None)
    with _passing_on(ranks):
        if imports is not None:
            os.environ.update(threads)  # libraries read it when they are loaded
            ranks.after(imports)
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
def _passing_on(ranks: "_Ranks") -> Iterator[None]:
    """Forwards signals to the ranks meanwhile, and restores their handlers afterwards. Only a main thread can handle
    any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Signals of a terminal stay ignored where they were, as by nohup, or by `&` in a script.
    heeded = [number for number in AT_ONCE if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, ranks.pass_on) for number in (*DEFERRED, *heeded)}
    # A process that ignores it, as its parent may have asked (trap '' CHLD), is never told how a child has ended.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def launcher_environment(rank: int, world_size: int, folder: Path, secret: str) -> dict[str, str]:
    """Environment of a process started by a launcher on one machine; `folder` is the job's private one."""
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

    def after(self, imports: Callable[[], None]) -> None:
        """Imports their modules. A signal ends this process meanwhile, as it would end ranks that import."""
        self._is_importing = True
        imports()
        self._is_importing = False

    def start(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Starts one more process; none if the job was told to end meanwhile."""
        if self._signals:
            return
        if self._forks:
            rank = ForkedRank(MODULE, arguments, environment, (*DEFERRED, *AT_ONCE))
        else:
            command = [sys.executable, "-P", "-m", MODULE, *arguments]
            rank = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        self._processes.append(rank)

    def pass_on(self, number: int, _: object = None) -> None:
        """Tells all of them."""
        if self._is_importing:
            os._exit(SIGNALLED + number)
        self._signals.append(number)
        self._send(number)

    def wait(self) -> int:
        """Until all have ended, with the exit code of the job."""
        if self._signals:  # the last one started may not have heard it
            self._send(self._signals[0])
        self._until(lambda: self._has_failed or self._ends_at_once is not None)
        if self._ends_at_once is None:
            self._until(lambda: self._ends_at_once is not None, LAST_WORDS_S)
            self._send(signal.SIGTERM)
        self._until(lambda: False, PATIENCE_S)
        self._name_those_without_memory()
        self.kill()
        if self._ends_at_once is not None:
            return SIGNALLED + self._ends_at_once
        failures = [process.returncode for process in self._processes if process.returncode]
        if not failures:
            return SIGNALLED + self._signals[0] if self._signals and not self._processes else 0
        # One that a signal has ended has a negative code: ours, after another failed, or the one passed on.
        return SIGNALLED + self._signals[0] if max(failures) < 0 and self._signals else max(FAILED, *failures)

    def kill(self) -> None:
        """Ends ranks that still run, and their children."""
        for process in self._running:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # forked a moment ago, it is in no session of its own and has started nothing
                process.kill()
            process.wait()

    def _name_those_without_memory(self) -> None:
        """Says which ranks the kernel has killed because memory was short: they could not."""
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
    def _ends_at_once(self) -> int | None:
        return next((number for number in self._signals if number in AT_ONCE), None)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _until(self, is_over: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Waits until it is over, all have ended, or the time is up."""
        end = time.monotonic() + limit_s
        while self._running and not is_over() and time.monotonic() < end:
            time.sleep(POLL_S)
            self._look()
