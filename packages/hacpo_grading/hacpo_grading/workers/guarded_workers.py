"""A pool of worker processes that run somebody else's code on every answer and are killed when it hangs.

Why not a thread or process pool of the standard library: a thread cannot be killed, SIGALRM works in main threads only,
and a running task of a ProcessPoolExecutor cannot be reclaimed; in each of these a stuck comparison becomes a silent
zero. Here a worker that overruns its CPU seconds is killed by the kernel (grading_worker.py) and replaced; only its
current answer is reported as timed out. Tasks go out several in a message and their replies come back one by one, so a
worker that dies loses no other task. Elsewhere: what a verdict means for a reward (judge.py).
"""

import collections
import math
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from hacpo_grading.judgement import Asked, Outcome
from hacpo_grading.workers.grader_calls import UNIT
from hacpo_grading.workers.grader_signature import Signature
from hacpo_grading.workers.worker_process import Worker

MAX_FAILED_STARTS = 3
DIED = "the worker died"
NOT_A_REPLY = "the grader wrote into the pipe of its worker's replies"
HUNG = "the grader slept instead of coming to a verdict, for {:g} s (2 x reward.timeout_s)"
GIVEN_UP = "not tried: the grader slept on the answers before"
START_TIMEOUT_S = 120.0
NOTICE_S = 15.0  # after so long a start is reported as slow
TASKS_PER_MESSAGE, MANY_PER_MESSAGE = 16, 64  # the second for a grader that takes many at once
MEMORY_BYTES = 2 << 30
# The wall time of an answer depends on the machine's load; this much ends a grader that sleeps and works by turns.
WALL_FACTOR = 20.0
WALL_GRACE_S = 30.0
# A grader of the user's own may sleep so many timeouts over an answer; its activity is sampled so often in each.
SLEEP_FACTOR = 2.0
SAMPLES_PER_TIMEOUT = 4
# After so many answers in a row that it slept over, the rest of a judging is given up.
MAX_HUNG = 3


@dataclass(frozen=True)
class GraderSpec:
    """The grader that a worker runs: "module:name" or "file.py:name", its options, and what explains its verdicts.

    `limits_sleep` is for graders of the user's own; built-in ones limit their waits themselves, to `wall_s` seconds for
    a gold.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    explainer: str | None = None
    limits_sleep: bool = False
    reward_range: tuple[float, float] = UNIT
    wall_s: Callable[[str], float] = lambda gold: 0.0


class _CannotStart(Exception):
    """Workers die before they are ready, again and again, or one hangs."""


class _Batch:
    """The tasks of one `run`: those that wait, those that have an outcome, those that had a second try."""

    def __init__(self, tasks: Sequence[Asked]) -> None:
        self.tasks = tasks
        self.waiting = collections.deque(range(len(tasks)))
        self.outcomes: dict[int, Outcome] = {}
        self.has_hung = False
        self.alone: set[int] = set()  # to be asked alone: a worker died in a call of many with them
        self._tried_twice: set[int] = set()

    def take_back(self, indices: Iterable[int]) -> None:
        """Puts tasks of an ended worker at the front of the queue again."""
        self.waiting.extendleft(reversed([*indices]))

    def may_try_again(self, index: int, num_finished: int) -> bool:
        """Tells whether the worker's state may be the cause: earlier answers can fill its memory. Once per task."""
        if num_finished == 0 or index in self._tried_twice:
            return False
        self._tried_twice.add(index)
        return True


class GuardedWorkers(AbstractContextManager["GuardedWorkers"]):
    """`num_workers` processes that all run one grader.

    `timeout_s` is CPU time of the worker for one answer; wall time is limited loosely, to WALL_FACTOR times that and
    WALL_GRACE_S, sleep (worker_process.py) to SLEEP_FACTOR times that where the grader's is limited. A worker's address
    space may grow by `memory_bytes`, once it has loaded its grader, for which it has `start_timeout_s` of wall time.
    """

    def __init__(
        self,
        grader: GraderSpec,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Starts the workers and waits for them.

        ValueError when the grader cannot be loaded, RuntimeError for a built-in one.
        """
        self.num_replaced = 0
        self._grader = grader
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._num_workers = num_workers
        self._setup = vars(grader) | {
            "options": dict(grader.options),
            "patience_s": SLEEP_FACTOR * timeout_s if grader.limits_sleep else None,
            "path": sys.path,
            "memory_bytes": memory_bytes,
            "cpu_s": timeout_s,
            "wall_s": None,  # a function, not sent: its limit is kept here
        }
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._num_failed_starts = 0
        self.signature: Signature | None = None  # of the grader, as its first worker has read it
        self._is_closed, self._is_starting = False, True
        self._hang_is_reported = self._slow_start_is_reported = False
        self._num_hung, self._last_reply = 0, -math.inf  # answers in a row that it slept over; time of the last reply
        try:
            self._fill_up()
            while not all(worker.is_ready for worker in self._workers):
                self._step(_Batch([]))
        except _CannotStart as error:
            self.close()
            raise (ValueError if grader.limits_sleep else RuntimeError)(str(error)) from None
        except BaseException:
            self.close()
            raise
        self._is_starting = False

    def run(self, tasks: Sequence[Asked]) -> list[Outcome]:
        """Grades the tasks; the outcomes come in the order of the tasks, whatever happened to the workers."""
        assert not self._is_closed, "the workers are closed"
        batch = _Batch(tasks)
        try:
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._end(worker, is_dead=False)  # an exception ended the last run: its replies are not to these tasks
            self._fill_up()
            while len(batch.outcomes) < len(tasks):
                self._step(batch)
            self._hang_is_reported &= batch.has_hung
        except _CannotStart as error:
            return [batch.outcomes.get(i, Outcome(None, str(error), is_misuse=True)) for i in range(len(tasks))]
        return [batch.outcomes[i] for i in range(len(tasks))]

    def _step(self, batch: _Batch) -> None:
        """Hands out tasks, waits for the first reply or deadline, and handles it."""
        for worker in list(self._workers):
            if worker.is_ready and not worker.tasks and batch.waiting:
                self._hand_out(worker, batch)
        busy = [w for w in self._workers if w.tasks or not w.is_ready]
        times = [w.deadline for w in busy]
        if not self._slow_start_is_reported:
            times += [w.began + NOTICE_S for w in busy if not w.is_ready]
        wait_s = max(0.0, min(times, default=0.0) - time.monotonic())
        if self._grader.limits_sleep and any(w.tasks for w in busy):
            wait_s = min(wait_s, self._sample_s)
        answered = [key.data for key, _ in self._selector.select(wait_s)]
        for worker in answered:
            self._receive(worker, batch)
        for worker in busy:
            if worker not in answered and worker in self._workers:
                self._watch(worker, batch)

    def _watch(self, worker: Worker, batch: _Batch) -> None:
        """Ends a silent worker that is over a limit of wall time or sleep, or has died."""
        if time.monotonic() > worker.deadline:
            self._replace(worker, Outcome(None, timed_out=True), batch)
        elif not worker.is_ready:
            self._report_slow_start(worker)
        elif worker.tasks and self._grader.limits_sleep:
            worker.sleep.sample(self._sample_s)
            if worker.is_gone:  # without an event of select: a child of it holds the pipe open
                self._replace(worker, Outcome(None, error=DIED), batch)
            elif worker.sleep.seconds >= self._sleep_limit_s(worker):
                self._end_hung(worker, batch)
            worker.is_gone = worker.process.poll() is not None

    def _report_slow_start(self, worker: Worker) -> None:
        if self._slow_start_is_reported or time.monotonic() < worker.began + NOTICE_S:
            return
        self._slow_start_is_reported = True
        _print_line(
            f"the grader {self._grader.name!r} is not loaded after {NOTICE_S:g} s: {self._loading}, goes on; "
            f"it is given up after {self._start_timeout_s:g} s (reward.start_timeout_s)"
        )

    def _end_hung(self, worker: Worker, batch: _Batch) -> None:
        if worker.began >= self._last_reply:  # else others reply, and the cause is this answer
            self._num_hung += 1
        slept_s = SLEEP_FACTOR * self._timeout_s
        if not self._hang_is_reported:
            _print_line(
                f"the grader {self._grader.name!r} hangs: it slept {slept_s:g} s (reward.timeout_s x {SLEEP_FACTOR:g}) "
                f"over 1 of the {len(batch.tasks)} answers it was given; the others are tried, and after {MAX_HUNG} "
                "such answers in a row the rest stays unjudged"
            )
        self._hang_is_reported = batch.has_hung = True
        self._replace(worker, Outcome(None, HUNG.format(slept_s), timed_out=True), batch)
        if self._num_hung >= MAX_HUNG:
            self._give_up(batch)

    def _give_up(self, batch: _Batch) -> None:
        for worker in [worker for worker in self._workers if worker.tasks]:
            self._replace(worker, None, batch)
        batch.outcomes |= dict.fromkeys(batch.waiting, Outcome(None, GIVEN_UP, is_misuse=True))
        batch.waiting.clear()

    def _sleep_limit_s(self, worker: Worker) -> float:
        # twice for an async grader, which ends longer calls itself (a batch first as a whole), unless it blocks
        is_each_awaited = self.signature.is_async and not self.signature.takes_lists
        times = 1 if is_each_awaited else self._num_at_once(worker)
        return SLEEP_FACTOR * self._timeout_s * times * (2.0 if self.signature.is_async else 1.0)

    @property
    def _sample_s(self) -> float:
        return self._timeout_s / SAMPLES_PER_TIMEOUT

    def _hand_out(self, worker: Worker, batch: _Batch) -> None:
        most = MANY_PER_MESSAGE if self._takes_many else TASKS_PER_MESSAGE
        share = min(most, math.ceil(len(batch.waiting) / len(self._workers)))
        indices = [batch.waiting.popleft()]
        while len(indices) < share and not batch.alone & {indices[0], batch.waiting[0]}:
            indices.append(batch.waiting.popleft())
        tasks = {i: batch.tasks[i] for i in indices}
        if not worker.ask(tasks, self._wall_limit_s([*tasks.values()])):
            self._replace(worker, None, batch)  # it died while idle: none of these answers is the cause

    @property
    def _takes_many(self) -> bool:
        return self.signature is not None and self.signature.takes_many

    def _num_at_once(self, worker: Worker) -> int:
        """Number of answers in the current call of a worker; its limits are as many times those of one."""
        return max(1, len(worker.tasks)) if self._takes_many else 1

    def _wall_limit_s(self, waiting: Sequence[Asked]) -> float:
        """Wall time for the current call of a worker, of the answers that wait there."""
        at_once = waiting if self._takes_many else waiting[:1]
        return sum(WALL_FACTOR * self._timeout_s + self._grader.wall_s(one.gold) for one in at_once) + WALL_GRACE_S

    def _receive(self, worker: Worker, batch: _Batch) -> None:
        replies = worker.read()
        if replies is None:
            self._replace(worker, Outcome(None, error=DIED), batch)
            return
        for reply in replies:
            if not worker.is_ready and "error" in reply:
                error = reply["error"]
                problem = self._ends(error) if error.startswith("SystemExit") else f"cannot be loaded: {error}"
                raise ValueError(f"the grader {self._grader.name!r} {problem}")
            if not worker.is_ready:
                worker.is_ready, self._num_failed_starts = True, 0
                self.signature = self.signature or Signature(**reply["ready"])
                continue
            outcome = Outcome(**reply)
            if outcome.error is not None and outcome.error.startswith("MemoryError"):
                self._replace(worker, outcome, batch)  # its memory may be nearly full
                return
            batch.outcomes[worker.tasks.popleft()] = outcome
            worker.num_finished += 1
            self._num_hung, self._last_reply = 0, time.monotonic()
        if worker.has_stray_output:
            self._replace(worker, Outcome(None, error=NOT_A_REPLY), batch)
        elif replies:
            worker.begin(self._wall_limit_s([batch.tasks[i] for i in worker.tasks]))

    def _fill_up(self) -> None:
        while len(self._workers) < self._num_workers:
            worker = Worker(self._setup, self._start_timeout_s)
            self._workers.append(worker)
            self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

    def _replace(self, worker: Worker, failure: Outcome | None, batch: _Batch) -> None:
        """Ends a worker and starts another; its current task gets `failure` or a second try, the others wait again."""
        status = self._end(worker, is_dead=failure is not None and failure.error == DIED)
        if not worker.is_ready:
            self._note_failed_start(worker, failure, status)
        elif len(worker.tasks) > 1 and failure is not None and self._takes_many:
            batch.alone.update(worker.tasks)  # the cause shows when each is tried alone
        elif worker.tasks and failure is not None:
            if failure.error == DIED:
                was_out_of_time = status == -signal.SIGPROF
                error = None if was_out_of_time else f"{DIED} (exit status {status})"
                cpu_s = self._timeout_s if was_out_of_time else 0.0
                failure = Outcome(None, error, timed_out=was_out_of_time, cpu_s=cpu_s)
            if failure.timed_out or not batch.may_try_again(worker.tasks[0], worker.num_finished):
                batch.outcomes[worker.tasks.popleft()] = failure
        batch.take_back(worker.tasks)
        self.num_replaced += 1
        self._fill_up()

    def _end(self, worker: Worker, *, is_dead: bool) -> int:
        """Ends a worker and takes it out of the pool. Returns its exit status."""
        with suppress(KeyError):  # as where an exception came in between
            self._selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        if not is_dead:
            worker.process.kill()
        return worker.end(patience_s=10.0)

    def _note_failed_start(self, worker: Worker, failure: Outcome | None, status: int) -> None:
        """_CannotStart where a first start fails, or one hangs while no other worker runs. A later failure may pass: a
        worker is started up to MAX_FAILED_STARTS times."""
        has_hung = failure is not None and failure.timed_out
        self._num_failed_starts += 1
        is_over = self._is_starting or (has_hung and not any(other.is_ready for other in self._workers))
        if not is_over and self._num_failed_starts < MAX_FAILED_STARTS:
            return
        if worker.has_flooded:
            fault = f"prints without end while it is loaded: {self._loading}, must print less and come to its end"
        elif worker.has_stray_output:
            fault = f"cannot be loaded: {self._loading}, wrote into the pipe of its worker's replies; leave that alone"
        elif has_hung:
            limit = f"{self._start_timeout_s:g} s (reward.start_timeout_s)"
            fault = f"is not loaded after {limit}: {self._loading}, waits or loops; mend that, or raise the limit"
        else:
            fault = self._ends(_status_text(status))
        raise _CannotStart(f"the grader {self._grader.name!r} {fault}")

    def _ends(self, how: str) -> str:
        return f"ends its process ({how}) while it is loaded: {self._loading}, must end without an exit or a crash"

    @property
    def _loading(self) -> str:
        """The user's code that runs before the first answer."""
        return f"the import of {self._grader.name.rpartition(':')[0]}, or the constructor of a class"

    def leave_to_parent(self) -> None:
        """Drops the workers in a process that has just been forked: they stay the parent's. `run` starts others."""
        for worker in self._workers:
            worker.let_go()
        self._workers.clear()
        self._selector.close()
        if not self._is_closed:
            self._selector = selectors.DefaultSelector()  # a forked one would share the parent's epoll

    def close(self) -> None:
        """Ends every worker and reaps it: no process and no zombie is left."""
        for worker in self._workers:
            worker.end(patience_s=0.0 if worker.tasks else 2.0)
        self._workers.clear()
        self._selector.close()
        self._is_closed = True

    def __exit__(self, *exception: object) -> None:
        self.close()


def _print_line(line: str) -> None:
    """Prints a line to standard error, with control characters escaped."""
    with suppress(OSError):  # nobody can read it
        print(line if line.isprintable() else ascii(line)[1:-1], file=sys.stderr, flush=True)


def _status_text(status: int) -> str:
    """An exit status, or the signal that it stands for."""
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
