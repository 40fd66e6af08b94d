"""A pool of worker processes that run somebody else's code on every answer and are killed when it hangs.

Why not a thread or process pool of the standard library: a thread cannot be killed, SIGALRM works in main threads only,
and a running task of a ProcessPoolExecutor cannot be reclaimed; in each of these a stuck comparison becomes a silent
zero. Here a worker that overruns is killed with SIGKILL and replaced, and the one answer it was at is reported as such.
Not here: what a verdict means for a reward (judge.py) and what the worker does (grading_worker.py).
"""

import collections
import json
import math
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PROGRAM = Path(__file__).with_name("grading_worker.py")
START_TIMEOUT_S = 120.0
TASKS_PER_MESSAGE = 16
MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class Task:
    """What one call of a grader sees."""

    prompt: str
    answer: str
    gold: str


@dataclass(frozen=True)
class Outcome:
    """What became of a task: a reward, or None with `error` or `timed_out`; None alone: the text has no answer."""

    reward: float | None
    error: str | None = None
    timed_out: bool = False


class _Worker:
    """One process and the tasks it holds; the first of `tasks` is the one it is at, and `deadline` is that one's."""

    def __init__(self, setup: dict[str, Any]) -> None:
        # -P: the folder of the program must not come first on the path, where its neighbours would hide packages
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.tasks: collections.deque[int] = collections.deque()
        self.is_ready = False
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.unread = b""
        self.write(setup)

    def write(self, message: Any) -> None:
        """Sends a message to a worker that is reading: it is idle, so the pipe cannot stay full."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[self.process.stdin.write(data) :]

    def read(self) -> list[dict[str, Any]] | None:
        """The replies that have arrived; None when the process is gone."""
        data = self.process.stdout.read(1 << 16)
        if not data:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self, patience_s: float) -> int:
        """Closes the worker, waits, kills it if it stays, and reaps it. Returns its exit status."""
        self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        return self.process.returncode


class GuardedWorkers:
    """`num_workers` processes that all run the grader `spec` ("module:function" or "file.py:function").

    `timeout_s` is wall time for one answer. The limit of a worker's address space is `memory_bytes`.
    """

    def __init__(self, spec: str, num_workers: int, timeout_s: float, memory_bytes: int = MEMORY_BYTES) -> None:
        """Starts the workers and waits for them. ValueError when the grader cannot be imported."""
        self.spec = spec
        self.timeout_s = timeout_s
        self.num_replaced = 0
        self._setup = {
            "grader": spec,
            "path": sys.path,
            "memory_bytes": memory_bytes,
            "cpu_seconds": math.ceil(2 * timeout_s) + 2,
        }
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        try:
            for _ in range(num_workers):
                self._start()
            while not all(worker.is_ready for worker in self._workers):
                self._turn([], {}, collections.deque())
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Grades the tasks; the outcomes come in the order of the tasks, whatever happened to the workers."""
        assert self._workers, "the workers are closed"
        waiting = collections.deque(range(len(tasks)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(tasks):
            self._turn(tasks, outcomes, waiting)
        return [outcomes[i] for i in range(len(tasks))]

    def _turn(self, tasks: Sequence[Task], outcomes: dict[int, Outcome], waiting: collections.deque[int]) -> None:
        """Hands out work, waits for the first reply or deadline, and deals with it."""
        for worker in list(self._workers):
            if worker.is_ready and not worker.tasks and waiting:
                self._hand_out(worker, tasks, waiting)
        busy = [w for w in self._workers if w.tasks or not w.is_ready]
        patience = max(0.0, min((w.deadline for w in busy), default=0.0) - time.monotonic())
        answered = [key.data for key, _ in self._selector.select(patience)]
        for worker in answered:
            self._receive(worker, outcomes, waiting)
        for worker in busy:
            if worker not in answered and worker in self._workers and time.monotonic() > worker.deadline:
                self._replace(worker, Outcome(None, timed_out=True), outcomes, waiting)

    def _hand_out(self, worker: _Worker, tasks: Sequence[Task], waiting: collections.deque[int]) -> None:
        share = math.ceil(len(waiting) / len(self._workers))
        for _ in range(min(share, TASKS_PER_MESSAGE)):
            worker.tasks.append(waiting.popleft())
        worker.deadline = time.monotonic() + self.timeout_s
        try:
            worker.write([[tasks[i].prompt, tasks[i].answer, tasks[i].gold] for i in worker.tasks])
        except BrokenPipeError:  # it died while it was idle, so none of these answers is to blame
            self._replace(worker, None, {}, waiting)

    def _receive(self, worker: _Worker, outcomes: dict[int, Outcome], waiting: collections.deque[int]) -> None:
        replies = worker.read()
        if replies is None:
            self._replace(worker, Outcome(None, error="the worker died"), outcomes, waiting)
            return
        for reply in replies:
            if worker.is_ready:
                outcomes[worker.tasks.popleft()] = Outcome(reply["reward"], reply["error"])
                if reply["error"] is not None and reply["error"].startswith("MemoryError"):
                    self._replace(worker, None, outcomes, waiting)  # its heap is as good as full
                    return
            elif "error" in reply:
                raise ValueError(f"the grader {self.spec!r} cannot be loaded: {reply['error']}")
            worker.is_ready = True
        worker.deadline = time.monotonic() + self.timeout_s

    def _start(self) -> None:
        worker = _Worker(self._setup)
        self._workers.append(worker)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

    def _replace(
        self,
        worker: _Worker,
        blame: Outcome | None,
        outcomes: dict[int, Outcome],
        waiting: collections.deque[int],
    ) -> None:
        """Kills a worker and starts another; its current task gets `blame`, the others wait again, first in line."""
        self._selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        worker.process.kill()
        status = worker.end(patience_s=10.0)
        if not worker.is_ready:
            raise RuntimeError(f"a grading worker for {self.spec!r} did not start (exit status {status})")
        if worker.tasks and blame is not None:
            said = f"{blame.error} (exit status {status})" if blame.error else None
            outcomes[worker.tasks.popleft()] = Outcome(None, said, blame.timed_out)
        waiting.extendleft(reversed(worker.tasks))
        self.num_replaced += 1
        self._start()

    def close(self) -> None:
        """Ends every worker and reaps it: no process and no zombie is left."""
        for worker in self._workers:
            worker.end(patience_s=0.0 if worker.tasks else 2.0)
        self._workers.clear()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
