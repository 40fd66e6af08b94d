"""Queue of turns in front of one engine: any thread asks, the engine's loop answers."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from hacpo_mega.records import Completion
from hacpo_mega.rollout.vllm.engine_loop import TurnLimits, TurnRequest

WAIT_S = 0.05  # between two looks of an engine that has nothing to do


class TurnQueue:
    """A source for `Engine.serve`, safe to use from any thread."""

    def __init__(self, limits: TurnLimits, is_unwanted: Callable[[], bool] = lambda: False) -> None:
        """`limits` are those of the engine that will serve it. Once `is_unwanted` returns true, all turns are cut."""
        self.limits, self._is_unwanted = limits, is_unwanted
        self._asked: queue.SimpleQueue[TurnRequest | str | None] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Completion]] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_finished = False

    def ask(self, request: TurnRequest) -> Future[Completion]:
        """A future of the turn's completion. Cancelling it aborts the turn.

        Raises ValueError for a turn that the engine cannot answer, RuntimeError once nothing is answered any more.
        """
        self.limits.require(request)
        future: Future[Completion] = Future()
        with self._lock:
            if self._error is not None or self._is_finished:
                raise RuntimeError("the engine answers no turns any more") from self._error
            assert request.key not in self._waiting, f"turn {request.key} is under way"
            self._waiting[request.key] = future
            self._asked.put(request)
        future.add_done_callback(lambda done: self._asked.put(request.key) if done.cancelled() else None)
        return future

    def finish(self) -> None:
        """Ends the loop; turns that still run are cut. Takes no lock: a signal handler may call it."""
        self._is_finished = True
        self._asked.put(None)

    def take(self, idle: bool) -> tuple[list[TurnRequest], list[str]]:
        """Turns asked since the last call, and keys of cancelled ones."""
        entries: list[TurnRequest | str | None] = []
        try:
            entries.append(self._asked.get(timeout=WAIT_S) if idle else self._asked.get_nowait())
            while True:
                entries.append(self._asked.get_nowait())
        except queue.Empty:
            pass
        aborted = list(self._waiting) if self._is_unwanted() else [entry for entry in entries if isinstance(entry, str)]
        return [entry for entry in entries if isinstance(entry, TurnRequest)], aborted

    def give(self, key: str, completion: Completion) -> None:
        """Ends the wait for a turn."""
        with self._lock:
            future = self._waiting.pop(key)
        if future.set_running_or_notify_cancel():
            future.set_result(completion)

    def fail(self, error: BaseException) -> None:
        """Ends every wait with a RuntimeError."""
        with self._lock:
            self._error = error
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(f"the engine's loop has died: {error}"))

    @property
    def is_done(self) -> bool:
        """True once `finish` was called, or nobody wants turns any more."""
        return self._is_finished or self._is_unwanted()
