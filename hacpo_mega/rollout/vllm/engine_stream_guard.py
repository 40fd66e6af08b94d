"""Stream guard: every access to a live vLLM, from whatever thread, runs on the engine's one CUDA stream.

vLLM's second runner keeps for life the stream on which it was first called (`main_stream`, v1/worker/gpu of 0.32). It
waits there for each step's tokens before it copies them to the host, and it leaves its caller on that stream. Called on
another stream, its copies are not ordered behind the sampling kernels, and the caller continues on a stream that is not
its own. `current_stream()` of its utilities also moves a thread without a stream to a new one.
So no other file holds the `LLM`. Inside the guard the current stream is the engine's, ordered behind all work of the
caller's stream. Outside it is the caller's again, ordered behind all work of the engine, also after an error.
On the CPU there are no streams.

Elsewhere: requests to the engine (engine.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm import LLM
from vllm.v1.worker.worker_base import WorkerBase

from hacpo_mega.rollout.vllm.host_process import collected_once, process_untouched


class EngineStreamGuard:
    """Holds a vLLM, which starts, works and shuts down on the guarded stream."""

    def __init__(self, start: Callable[[], LLM]) -> None:
        """`start` makes the LLM on this process's current device."""
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        with self._inside():
            self._llm = start()

    @contextmanager
    def open(self) -> Iterator[LLM]:
        """Context with the LLM; also for whatever else reads or writes its memory."""
        with self._inside():
            if self._stream is not None:
                # The first runner asks for the current stream in every step instead.
                remembered = getattr(worker_of(self._llm).model_runner, "main_stream", self._stream)
                assert remembered == self._stream, f"vLLM remembers {remembered}, and the engine's is {self._stream}"
            yield self._llm

    def close(self) -> None:
        """Shuts vLLM down and frees its memory."""
        with self._inside(), collected_once():
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with process_untouched():
            if self._stream is None:
                yield
                return
            with torch.cuda.device(self._stream.device):  # a thread that has set none would wait on device 0
                callers = torch.cuda.current_stream()
                self._stream.wait_stream(callers)
                torch.cuda.set_stream(self._stream)
                try:
                    yield
                finally:
                    torch.cuda.set_stream(callers)
                    callers.wait_stream(self._stream)


def worker_of(llm: LLM) -> WorkerBase:
    """The vLLM worker that drives this process's device."""
    return llm.llm_engine.model_executor.driver_worker.worker


def finish_steps(llm: LLM) -> None:
    """Runs steps until none is in flight. On CUDA vLLM begins a step ahead, even after the last answer has ended.

    Such a step would collide with what follows: a prefix cache that is dropped, routing that is read.
    """
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue:  # None where there is no step ahead
        core.step_fn()
