"""One grading worker as its parent sees it: its pipes, its replies, and whether it works or sleeps.

A worker is one process of a group of its own, which ends with it. Its messages are frames (grading_worker.py); each
repeats the random token of the task that it answers, so text that a grader writes into the pipe is never taken for a
reply. Its prints are passed on; while its grader is loaded only the beginning, and a grader that prints without end
then is ended.
Elsewhere: which tasks it gets and what its end means for them (guarded_workers.py).
"""

import collections
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hacpo_grading.judgement import Asked
from hacpo_grading.workers.grading_worker import HEADER, MAX_FRAME_BYTES, TOKEN_BYTES

PROGRAM = Path(__file__).with_name("start_worker.py")
READ_BYTES = 1 << 16
# Bytes of a grader's prints while it is loaded: those that are passed on, and the most before it is ended.
SHOWN_BYTES, MOST_BYTES = 1 << 16, 1 << 24
PRINTS_END_S = 1.0
# A process that used less than this share of a span, with no thread ready to run at its end, was asleep.
SLEEPING_SHARE = 0.1
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
REPLY_TYPES: Mapping[str, Any] = {
    "reward": (float, type(None)),
    "error": (str, type(None)),
    "is_misuse": bool,
    "timed_out": bool,
    "parts": dict,
    "explanation": (dict, type(None)),
    "cpu_s": float,
}


class _NotAReply(Exception):
    """Raised for bytes in a worker's pipe that are no reply: its grader has written there."""


class Worker:
    """One process and its tasks; the first of `tasks` is the current one, to which `deadline` applies.

    has_flooded   whether its grader printed more than MOST_BYTES while it was loaded, which ended it
    """

    def __init__(self, setup: dict[str, Any], limit_s: float) -> None:
        """Starts it; it has `limit_s` of wall time to load its grader."""
        # -P: the folder of the program must not come first on the path, where its neighbours would hide packages
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # so that what a grader has left running can be ended with it
        )
        self.tasks: collections.deque[int] = collections.deque()
        self.num_finished = 0
        self.is_ready = self.is_gone = self.has_stray_output = self.has_flooded = False
        self.began = time.monotonic()
        self.deadline = self.began + limit_s
        self._printing = threading.Thread(target=self._forward_prints, name="printing", daemon=True)
        self._printing.start()
        self.sleep = SleepTime(self.process.pid)
        self._unread = bytearray()
        self._tokens = collections.deque([_token()])
        self._write(setup | {"token": self._tokens[0].hex()})

    def ask(self, tasks: Mapping[int, Asked], limit_s: float) -> bool:
        """Hands over tasks by index, the first with `limit_s` of wall time. False: the process is gone."""
        self.tasks.extend(tasks)
        self._tokens.extend(_token() for _ in tasks)
        self.begin(limit_s)
        asked = zip(map(asdict, tasks.values()), self._tokens, strict=True)
        return self._write([[fields, token.hex()] for fields, token in asked])

    def begin(self, limit_s: float) -> None:
        """Starts the limits of the next answer."""
        self.began = time.monotonic()
        self.deadline = self.began + limit_s
        self.sleep.begin()

    def _write(self, message: Any) -> bool:
        """Sends a message to a worker that is reading: it is idle, so the pipe cannot stay full."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[self.process.stdin.write(data) :]
        except BrokenPipeError:
            return False
        return True

    def read(self) -> list[dict[str, Any]] | None:
        """The replies that have arrived; None when the process is gone. Sets `has_stray_output` for other bytes."""
        data = self.process.stdout.read(READ_BYTES)
        if not data:
            return None
        self._unread += data
        replies = []
        try:
            replies.extend(self._frames())  # it keeps those before an error
        except _NotAReply:
            self.has_stray_output = True
        return replies

    def _frames(self) -> Iterator[dict[str, Any]]:
        while len(self._unread) >= HEADER.size:
            token, num_bytes = HEADER.unpack_from(self._unread)
            if not self._tokens or token != self._tokens[0] or num_bytes > MAX_FRAME_BYTES:
                raise _NotAReply
            if len(self._unread) < HEADER.size + num_bytes:
                return
            payload = bytes(self._unread[HEADER.size : HEADER.size + num_bytes])
            del self._unread[: HEADER.size + num_bytes]
            self._tokens.popleft()
            yield _reply(payload, is_first=not self.is_ready)
        if self._unread and not self._tokens:
            raise _NotAReply

    def _forward_prints(self) -> None:
        """Copies what the process and its children print to standard error, until the last of them has ended."""
        num_bytes = 0
        with self.process.stderr as printed:
            while data := printed.read(READ_BYTES):
                num_bytes += len(data)
                if self.is_ready or num_bytes <= SHOWN_BYTES:
                    with suppress(OSError):  # nobody can read it
                        os.write(2, data)
                elif num_bytes > MOST_BYTES and not self.has_flooded:
                    self.has_flooded = True
                    self.process.kill()

    def let_go(self) -> None:
        """Closes the pipes of another process's worker, which this process has by a fork."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        self.process.poll()  # else Popen would warn of a running process when it is collected

    def end(self, patience_s: float) -> int:
        """Closes the worker, waits, kills it if it stays, and reaps it with its group. Returns its exit status."""
        self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(ProcessLookupError):  # the usual case: no grader has left anything running
            os.killpg(self.process.pid, signal.SIGKILL)
        self._printing.join(PRINTS_END_S)  # a child that has left the group may hold the pipe
        self.process.stdout.close()
        return self.process.returncode


def _token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


def _reply(payload: bytes, is_first: bool) -> dict[str, Any]:
    """A reply with the fields and types that a worker sends. _NotAReply for any other."""
    try:
        reply = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise _NotAReply from error
    if is_first and isinstance(reply, dict) and reply.keys() in ({"ready"}, {"error"}):
        return reply
    if is_first or not isinstance(reply, dict) or reply.keys() != REPLY_TYPES.keys():
        raise _NotAReply
    if not all(isinstance(reply[name], kinds) for name, kinds in REPLY_TYPES.items()):
        raise _NotAReply
    return reply


@dataclass(frozen=True)
class Activity:
    """CPU seconds that a process and all it has started used so far, and whether any of their threads could run now."""

    cpu_s: float
    is_runnable: bool


class SleepTime:
    """Seconds that a process has slept since `begin`.

    Waiting for a processor does not count: then a thread is runnable. Nor does waiting for a disk, or for a child that
    works.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.begin()

    def begin(self) -> None:
        """Starts at 0 for a new answer."""
        self.seconds = 0.0
        self._last: tuple[float, Activity] | None = None

    def sample(self, span_s: float) -> None:
        """Adds the sleep since the last sample, at most twice `span_s`: this process may have been stopped, too."""
        now = time.monotonic()
        if self._last is not None and now - self._last[0] < span_s:
            return
        activity = activity_of(self._pid)
        if self._last is not None:
            then, before = self._last
            worked_s = activity.cpu_s - before.cpu_s
            if not activity.is_runnable and worked_s <= max(TICK_S, SLEEPING_SHARE * (now - then)):
                self.seconds += min(now - then, 2.0 * span_s)
        self._last = now, activity


def activity_of(pid: int) -> Activity:
    """Activity of a process and its descendants, by /proc; one that has ended is inactive."""
    ticks, is_runnable, pids = 0, False, [pid]
    while pids:
        folder = f"/proc/{pids.pop()}"
        for stat in _stats(folder):
            ticks += sum(int(number) for number in stat[11:15])  # utime, stime, and those of children it has reaped
        for task in _listed(f"{folder}/task"):
            is_runnable |= any(stat[0] in ("R", "D") for stat in _stats(f"{folder}/task/{task}"))
            pids += [int(child) for child in _text(f"{folder}/task/{task}/children").split()]
    return Activity(ticks * TICK_S, is_runnable)


def _stats(folder: str) -> list[list[str]]:
    """The fields after the name (proc(5)); none for what is no more."""
    text = _text(f"{folder}/stat")
    return [text.rpartition(")")[2].split()] if text else []


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it has ended since it was listed, or this kernel does not list children
        return ""


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # it has ended
        return []
