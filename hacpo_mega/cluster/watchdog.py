"""Watchdog: every process watches its neighbour over one TCP connection and reports who died or hangs, in which phase.

The processes of a job form a ring; rank r listens to rank r + 1, which reports every phase it enters. The kernel, not a
heartbeat thread, says whether a process lives: when it ends, however it ends, its socket closes within milliseconds,
and a host that loses power is missed by TCP keep-alive after 25 seconds. A process that is busy or stopped is not dead.
But one of its threads sends a heartbeat every few seconds, in long phases too. A process that sends none for `stall_s`
seconds is stopped or stuck: its neighbour has it write its stack, resumes it if it was stopped, and ends the job, of
which every rank writes its stack (status 4). A process that runs without progress detects this itself and ends the job
likewise: its main thread may be stuck (an endless loop, or a wait before a collective) while its threads still run. So
phases of many small steps report every step (an engine's step, a micro-batch, a tensor), and a process that has
reported none for `stall_s` seconds and waits for nobody hangs.
A rank that sees a death passes the cause on around the ring, so that all print the same name before they exit, also
those that wait in a collective (the main thread cannot leave one; `os._exit` from the listening thread can).
A killed rank also breaks the collectives of its peers, whose errors are then only a consequence. So a
question goes around the ring before an error is announced: it comes back only if nobody is dead.
An error that the user has to mend (a ValueError before training starts) is printed once in the job and ends it with
status 2, a run that stops itself (RunStopped) likewise with status 3. Where signals are deferred, a first SIGTERM or
SIGUSR1 is only recorded: the job goes on to a point from which it can resume, and ends there. Before that, and at a
second signal or Ctrl-C, its rank 0 prints once that the job was told to end, and it ends with the status that shells
give to such a process: 143 after SIGTERM, 138 after SIGUSR1, 130 after SIGINT.
Elsewhere: time limits of collectives (place.py sets them; one that is exceeded is an error of that rank).
"""

import faulthandler
import hashlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from hacpo_mega.cluster.launcher_env import FAILED, REFUSED, SIGNALLED, STALLED, STOPPED, Unreachable
from hacpo_mega.cluster.machine.environment import process_start
from hacpo_mega.cluster.rank_map import Coordinate, RankMap
from hacpo_mega.cluster.rendezvous import (
    HINT,
    connect_published,
    keep_alive,
    listen,
    listening_address,
    published_address,
    report_wrong_secret,
)
from hacpo_mega.cluster.security.secret import AuthListener, Secret, WrongSecret
from hacpo_mega.models.files.visible import visible

# A ValueError in one of these is about the user's input: files, tokenizers, models. Later it is a fault of ours.
BEFORE_TRAINING = ("start", "load", "doctor")
REFUSAL_PATIENCE_S = 1.0  # others may be about to find another problem; the user wants to see all of them
# Seconds in which the ring may name a death before a rank announces its own end: after an error, longer than a lost
# host takes to be missed (below); after SIGTERM, by which a launcher that saw a death ends the others, well within the
# 30 seconds until its SIGKILL. SIGINT (Ctrl-C) comes from a person and takes effect at once.
ERROR_PATIENCE_S = 30.0
SIGNAL_PATIENCE_S = {signal.SIGTERM: 5.0, signal.SIGUSR1: 5.0, signal.SIGINT: 0.0}
ECHO_S = 1.0  # a scheduler and a launcher may both pass one signal on: what follows within this time is no second one
LONGEST_BEAT_S = 10.0  # between two signs of life; of a short stall_s a tenth
STACK_PATIENCE_S = 1.0  # for a resumed process to write its stack
STACK_SIGNAL = signal.SIGUSR2
# Phases that must report steps. Others may take long (load, checkpoint, export) or limit themselves (judge, evaluate).
MUST_PROGRESS = ("roll_out", "exchange", "score", "learn", "diagnose", "publish")
# Factor on stall_s for a process inside a collective of its agent, or whose device has work: that work may wait in a
# collective which the host has long left. A process that has not entered it is named at 1.
WAITING_GRACE = 1.3
INNERMOST_CALLS = 4
COLLECTIVE_FOLDERS = {"distributed", "tensor_parallel", "pipeline_parallel"}  # of torch, vLLM and Megatron


class RunStopped(Exception):
    """Raised by a run that ends itself, since it would train nothing. Its text is printed once in the job; status 3."""


class RankActivity(NamedTuple):
    """A process's present work.

    phase, when           "learn", "of step 3"           phase_s    seconds in it
    num_done              its small steps so far         num_before  those of the last phase of that name, None before
    waits_for, waited_s   whom it waits for in a collective of the job, None outside one, and seconds there
    """

    phase: str
    when: str
    phase_s: float
    num_done: int
    num_before: int | None
    waits_for: str | None
    waited_s: float


class Progress:
    """Activity of the main thread.

    waits_for    the ranks that it waits for in a collective of the job; None outside one
    num_done     small steps of the phase so far         num_before   those of the last phase of each name
    queue        its device's; None on the CPU
    """

    def __init__(self) -> None:
        self.waits_for: str | None = None
        self.waits_since = 0.0
        self.num_done, self.num_before = 0, dict[str, int]()
        self.queue: torch.Stream | None = None
        self._phase = ""
        self._must_progress = False
        self._num_idle_beats = 0

    def enter(self, phase: str) -> None:
        """Begins a phase, whose name decides whether it must report its steps."""
        self.num_before[self._phase] = self.num_done
        self._phase, self.num_done = phase, 0
        self._must_progress = phase in MUST_PROGRESS
        self._num_idle_beats = 0

    def tick(self) -> None:
        """Reports progress of the phase."""
        self.num_done += 1
        self._num_idle_beats = 0

    @contextmanager
    def waiting_for(self, whom: str) -> Iterator[None]:
        """Marks a collective of the job: a process that waits for others does not hang, however long they take."""
        self.waits_since = time.monotonic()
        self.waits_for = whom
        yield
        self.waits_for = None
        self._num_idle_beats = 0

    def beat(self, beat_s: float, stall_s: float) -> str | None:
        """Counts a heartbeat, every `beat_s` seconds; returns where the main thread is stuck after `stall_s`, else
        None.

        Counted in beats, not by the clock: a process that was stopped has not stood still.
        """
        self._num_idle_beats += 1
        if self.waits_for is not None or not self._must_progress:
            return None
        collective = _collective_of_main_thread()
        idle_s = self._num_idle_beats * beat_s
        if idle_s < stall_s:
            return None
        device = _device_state(self.queue)
        if idle_s < stall_s * WAITING_GRACE and (device or collective is not None):
            return None
        where = "is in no collective" if collective is None else f"is inside {collective}"
        return f"has made no progress for {idle_s:.0f} s and {where}{device}"


class Watchdog:
    """One process's link to its two neighbours in the ring. A process that ends without `close` counts as dead.

    defers_signals   whether the first SIGTERM or SIGUSR1 only sets `signal_number`; the caller checks it and leaves. A
                     death is still named, whatever signal follows it: the ring says so, and ends this process
    signal_number   the signal that tells this process to end, since signals are deferred; 0 before there is one
    exit_message   the line about the next start that a process prints if a signal ends it
    is_leaving   whether the job has agreed to end by such a signal, whichever process received it
    progress   activity of its main thread
    before_end, at_end   called before the end is reported, and last, where this process ends at once
    on_termination  called on rank 0 where the job ends at once by a signal
    """

    def __init__(
        self, rank_map: RankMap, rank: int, store: dist.Store, secret: Secret, timeout_s: float, stall_s: float
    ) -> None:
        """Joins the ring, a collective; `store` carries the addresses. Unreachable names a missing neighbour."""
        self._me = rank_map.coordinate(rank)
        self._watched = rank_map.coordinate((rank + 1) % rank_map.world_size)
        self._store = store
        self._is_before_training = True
        self._phase = "start"
        self._phase_began = time.monotonic()
        self._num_silent_beats = 0
        self.progress = Progress()
        self._stack_file: Path | None = None
        self._watched_keeps_stack = False
        self._phase_of_watched = "start"
        self.defers_signals, self.exit_message = False, ""
        self.signal_number, self.is_leaving = 0, False
        self.before_end: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None
        self.on_termination: Callable[[], None] = lambda: None
        self._announcing = threading.Lock()
        self._nobody_is_dead = threading.Event()
        self._to_watcher: socket.socket | None = None
        threading.Thread(target=self._handle_signals, args=(_signal_socket(),), name="signals", daemon=True).start()
        if rank_map.world_size == 1:
            return
        from_watched = self._join(rank_map.coordinate((rank - 1) % rank_map.world_size), secret, timeout_s)
        keep_alive(self._to_watcher)
        threading.Thread(target=self._listen, args=(from_watched,), name="watchdog", daemon=True).start()
        threading.Thread(target=self._beat, args=(stall_s,), name="heartbeat", daemon=True).start()

    def _join(self, watcher: Coordinate, secret: Secret, timeout_s: float) -> socket.socket:
        """Accepts the watching neighbour and connects to the watched one; returns the connection to the latter."""
        rank, watched, me = self._me.global_rank, self._watched.global_rank, f"{self._me} on {socket.gethostname()}"
        server = listen(listening_address(), 0)
        port = server.getsockname()[1]
        # In a thread: every process connects to its neighbour, which must accept while it connects to its own.
        auth = AuthListener(server, secret, f"{watcher.global_rank} watches {rank}", partial(report_wrong_secret, me))
        admitted = auth.expect(timeout_s)
        process = f"{os.getpid()} {process_start(os.getpid())}"
        self._store.set(f"watchdog/{rank}", f"{published_address(port)} {process}")
        missed = self._watched
        try:
            self._address_of_watched = self._store.get(f"watchdog/{watched}").decode()
            purpose = f"{rank} watches {watched}"
            try:
                from_watched = connect_published(self._address_of_watched, secret, purpose, timeout_s)
            except WrongSecret:  # a neighbour that ended at this moment would have closed the connection, too
                from_watched = connect_published(self._address_of_watched, secret, purpose, timeout_s)
            missed = watcher
            self._to_watcher = admitted.result()
        except WrongSecret as error:
            host = self._address_of_watched.split()[1]
            raise Unreachable(f"{me}: {self._watched} on {host} has another secret; {HINT}") from error
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise Unreachable(
                f"{me}: {missed} has come to the job, and is not in its ring ({reason}): it has ended or hangs, see "
                "its log"
            ) from error
        return from_watched

    def enter_phase(self, phase: str, when: str) -> None:
        """Publishes the phase of this process from now on; costs one small write."""
        self._is_before_training = phase in BEFORE_TRAINING
        self._phase, self._phase_began = f"{phase} {when}", time.monotonic()
        self.progress.enter(phase)
        self._send(f"phase {self._phase}")

    def activity(self) -> RankActivity:
        """The present work of this process. Any thread may call it; the main one is not stopped for it."""
        phase, _, when = self._phase.partition(" ")
        now, whom, progress = time.monotonic(), self.progress.waits_for, self.progress
        return RankActivity(
            *(phase, when, now - self._phase_began, progress.num_done, progress.num_before.get(phase)),
            *(whom, 0.0 if whom is None else now - progress.waits_since),
        )

    def keep_stack_in(self, folder: Path) -> None:
        """Opens a file rank_<r>.stack, to which this process writes its stack when the job hangs.

        A signal triggers that, since in a stuck process no thread may ever run.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._stack_file = folder / f"rank_{self._me.global_rank}.stack"
        self._stacks = self._stack_file.open("w")
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        self._send("stack")

    def close(self) -> None:
        """Leaves the ring without ending the job. Only after a barrier: deaths are no longer noticed from here on."""
        self._announcing.acquire()  # never released: from now on no death of another ends this process
        self._send("bye")
        for number in SIGNAL_PATIENCE_S:
            # A launcher tells the others to end when the first one has left: all must leave with their own status.
            signal.signal(number, signal.SIG_IGN if self.is_leaving else signal.SIG_DFL)
        self._remove_stack()

    def fail(self, error: BaseException) -> None:
        """Ends this process, after telling every other process why. Never returns.

        Status 2 for a ValueError before training and 3 for RunStopped, of which only the text is shown; 1 for all else.
        """
        detail = str(error).strip().split("\n")[0]
        cause = f"{self._me} failed in phase {self._phase}: {type(error).__name__}: {detail}"
        is_refusal = isinstance(error, ValueError) and self._is_before_training
        if is_refusal or isinstance(error, RunStopped):
            if self._is_first_report(str(error)):
                _write(f"{error}\n")
            time.sleep(REFUSAL_PATIENCE_S)
            self._end_job(cause, REFUSED if is_refusal else STOPPED)
        if self._to_watcher is not None:
            self._send(f"alive? {self._me.global_rank}")
            self._nobody_is_dead.wait(ERROR_PATIENCE_S)
        with suppress(OSError):
            traceback.print_exception(error)
        self._end_job(cause, FAILED)

    def _is_first_report(self, text: str) -> bool:
        """True for the first process that reports this text: all ranks of an agent find the same fault in its files."""
        with suppress(RuntimeError):  # the store ends with the process that keeps it
            return self._store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
        return True

    def _listen(self, from_watched: socket.socket) -> None:
        with suppress(OSError), from_watched.makefile(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                kind, _, text = line.rstrip("\n").partition(" ")
                self._num_silent_beats = 0
                if kind == "bye":
                    self._num_silent_beats = -math.inf
                    return
                if kind == "down":
                    status, _, cause = text.partition(" ")
                    self._end_job(cause, int(status))
                self._watched_keeps_stack |= kind == "stack"
                if kind == "phase":
                    self._phase_of_watched = text
                elif kind == "alive?" and text == str(self._me.global_rank):
                    self._nobody_is_dead.set()
                elif kind == "alive?":
                    self._send(f"alive? {text}")
        self._end_job(f"{self._watched} died in phase {self._phase_of_watched}", FAILED)

    def _beat(self, stall_s: float) -> None:
        """Sends heartbeats, and ends the job if the watched process has sent none for `stall_s` seconds.

        Silence is counted in beats of this process, not by the clock: while it was stopped itself it did not listen.
        """
        beat_s = min(LONGEST_BEAT_S, stall_s / 10)
        while self._num_silent_beats * beat_s < stall_s:
            time.sleep(beat_s)
            self._send("beat")
            self._num_silent_beats += 1
            if stuck := self.progress.beat(beat_s, stall_s):
                self._end_job(f"{self._me} {stuck}, in phase {self._phase}{self._stack_hint()}", STALLED)
        cause = f"{self._watched} has given no sign of life for {stall_s:g} s, in phase {self._phase_of_watched}"
        self._end_job(cause + self._stack_hint(), STALLED, wakes_watched=True)

    def _stack_hint(self) -> str:
        return f"; stacks of all ranks: {self._stack_file.parent}/rank_*.stack" if self._stack_file else ""

    def _wake_watched(self) -> None:
        """Makes the watched process write its stack, if it is on this machine, and resumes it so that it learns of the
        end."""
        _, hostname, _, process, start = self._address_of_watched.split()
        # The number may be another process's: containers number their own. One without a stack file would die of it.
        is_here = hostname == socket.gethostname() and start == process_start(int(process))
        if self._watched_keeps_stack and is_here:
            with suppress(ProcessLookupError):  # it may end at this moment
                os.kill(int(process), STACK_SIGNAL)
                os.kill(int(process), signal.SIGCONT)
            time.sleep(STACK_PATIENCE_S)

    def _handle_signals(self, signals: socket.socket) -> None:
        """Ends this process at the first signal that is not deferred.

        Not at once for signals that a launcher may send: it may have seen a death before the ring has named it.
        """
        number = 0
        while number not in SIGNAL_PATIENCE_S or self._defer(number):
            number = signals.recv(1)[0]
        time.sleep(SIGNAL_PATIENCE_S[number])
        cause = f"{self._me} was told to end ({signal.Signals(number).name}) in phase {self._phase}"
        self._end_job(cause, SIGNALLED + number)

    def _defer(self, number: int) -> bool:
        """Records the first signal for the caller; False for one that must end this process now."""
        if not self.defers_signals or number == signal.SIGINT:
            return False
        if not self.signal_number:
            self.signal_number, self._signalled_at = number, time.monotonic()
        return time.monotonic() - self._signalled_at < ECHO_S

    def _end_job(self, cause: str, status: int, wakes_watched: bool = False) -> NoReturn:
        self._announcing.acquire()  # never released: only the first cause is reported and ends the process
        try:
            self._send(f"down {status} {cause}")
            self._report_end(cause, status, wakes_watched)
        finally:
            os._exit(status)  # not sys.exit: the main thread may be inside a collective that will never return

    def _report_end(self, cause: str, status: int, wakes_watched: bool) -> None:
        """Prints what this rank knows of the end: its stack if the job hangs, its phase, the cause."""
        self.before_end()
        with suppress(OSError):  # nobody can read it, or the disk is full
            sys.stdout.flush()
        if status == STALLED:
            if self._stack_file is not None:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            waited_s = time.monotonic() - self._phase_began
            waits = f", waiting for {self.progress.waits_for}" if self.progress.waits_for else ""
            _write(f"{self._me}, for {waited_s:.0f} s in phase {self._phase}{waits}, stops: {cause}\n")
            if wakes_watched:  # only now that all know the cause: a rank that waits for it would go on unreported
                self._wake_watched()
        else:
            self._remove_stack()
        if status == FAILED:
            _write(f"{self._me}, in phase {self._phase}, stops: {cause}\n")
        elif status > SIGNALLED and self._me.global_rank == 0:  # one line: whoever sent the signal expects the end
            _write(f"{cause}; {self.exit_message}\n" if self.exit_message else f"{cause}\n")
            with suppress(OSError):  # the disk may be full or unreachable
                self.on_termination()
        # other statuses: the reason has been printed, and which rank found it does not matter
        self.at_end()

    def _remove_stack(self) -> None:
        if self._stack_file is not None:
            faulthandler.unregister(STACK_SIGNAL)
            with suppress(OSError):  # its disk may be gone
                self._stack_file.unlink(missing_ok=True)

    def _send(self, line: str) -> None:
        # A watcher that is gone or stuck must not take this process with it: its own watcher reports it.
        if self._to_watcher is not None:
            with suppress(OSError):
                self._to_watcher.sendall(f"{line}\n".encode())


def _device_state(queue: torch.Stream | None) -> str:
    """A clause on a device that has work or a fault; "" for neither."""
    try:
        return "" if queue is None or queue.query() else ", and its device has work"
    except RuntimeError as error:  # an access out of bounds, a GPU that has fallen off its bus
        return ", and its device has failed: " + str(error).partition("\n")[0]


def _write(text: str) -> None:
    # One write: the processes of a node share their standard error, and print's line end would be a second one.
    with suppress(OSError):  # nobody can read it
        sys.stderr.write(visible(text))
        sys.stderr.flush()


def _signal_socket() -> socket.socket:
    """A socket on which the number of every signal arrives; those of SIGNAL_PATIENCE_S no longer end this process.

    Not a handler alone: Python runs handlers in the main thread, which may be inside a collective for good.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in SIGNAL_PATIENCE_S:
        signal.signal(number, lambda *_: None)
    return reader


def _collective_of_main_thread() -> str | None:
    """The collective that the main thread is in, as far as its innermost calls show it; None outside."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    for _ in range(INNERMOST_CALLS):
        if frame is None:
            return None
        file = Path(frame.f_code.co_filename)
        if COLLECTIVE_FOLDERS & set(file.parts):
            return f"{frame.f_code.co_name} ({file.name}, line {frame.f_lineno})"
        frame = frame.f_back
    return None
