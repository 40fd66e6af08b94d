"""Engine call in a thread of its own, while the main thread learns (rollout.one_step_off).

The thread does nothing else: prompts are tokens before it begins and answers stay the engine's records, so no
tokenizer, group, span or metric of this process is used by two threads. An engine over several ranks is refused beside
an actor (config/checks/checks.py); one apart has groups of its own. For vLLM's effects on its process see
host_process.py.

Elsewhere: the step that the answers belong to, and the weights that wrote them (hacpo_mega/trainer/trainer.py).
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from hacpo_mega.records import Completion
from hacpo_mega.rollout.vllm.host_process import StreamBeside

# `Engine.generate` with all its requests; the caller adds `is_unwanted`.
Generate = Callable[..., list[Completion]]


class EngineThread:
    """At most one engine call at a time; until `finish` or `stop` nothing else may use the engine.

    hidden_s   seconds of the last call that `finish` did not have to wait for
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_unwanted = threading.Event()
        self._completions: list[Completion] = []
        self._error: BaseException | None = None
        self._took_s = self.hidden_s = 0.0
        self._beside = StreamBeside()

    def begin(self, generate: Generate) -> None:
        """Starts the call in the thread, with the engine's current weights."""
        assert self._thread is None, "the last call was not finished"
        self._thread = threading.Thread(
            target=self._run, args=(generate, self._beside.follow()), name="engine", daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True between `begin` and `finish`."""
        return self._thread is not None

    def finish(self) -> list[Completion]:
        """Waits for the answers of the call; raises the error that ended it."""
        start = time.monotonic()
        self._thread.join()
        self.hidden_s = max(0.0, self._took_s - (time.monotonic() - start))
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._completions

    def stop(self) -> None:
        """Blocks until no call runs; a running call's answers are cut and dropped."""
        if self._thread is not None:
            self._is_unwanted.set()
            self._thread.join()

    def _run(self, generate: Generate, stream: AbstractContextManager[None]) -> None:
        start = time.monotonic()
        try:
            with stream:
                self._completions = generate(is_unwanted=self._is_unwanted.is_set)
        except BaseException as error:  # raised again by `finish`
            self._error = error
        self._took_s = time.monotonic() - start
