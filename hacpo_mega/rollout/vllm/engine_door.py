"""The only door to a live vLLM: whoever comes in, from whichever thread, is on the one stream that the engine has.

vLLM's second runner remembers for life the stream on which it was first asked (`main_stream`, v1/worker/gpu of 0.32):
there each step's tokens are waited for before they are copied to the host, and there it leaves whoever called it.
Called on another stream, its copies are not ordered behind the kernels that sample, and the caller goes on on a stream
that was never his. `current_stream()` of its utilities also moves a thread that has set no stream to a new one.
So no other file holds the `LLM`: inside this door the current stream is the engine's, behind all that the caller's
stream was asked for; outside it is the caller's again, behind all that the engine was asked for, also after an error.
On the CPU there are no streams. It gets vLLM handed in; not here: what it is asked (engine.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hacpo_mega.rollout.vllm.host_process import collected_once, process_untouched


class EngineDoor:
    """Holds a vLLM, which is started, asked and shut down inside."""

    def __init__(self, start: Callable[[], Any]) -> None:
        """`start` makes the LLM on this process's current device."""
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        with self._inside():
            self._llm = start()

    @contextmanager
    def open(self) -> Iterator[Any]:
        """The LLM, for as long as it is used; also around whatever else reads or writes its memory."""
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
            with torch.cuda.device(self._stream.device):  # else a thread that has chosen none would wait on device 0
                callers = torch.cuda.current_stream()
                self._stream.wait_stream(callers)
                torch.cuda.set_stream(self._stream)
                try:
                    yield
                finally:
                    torch.cuda.set_stream(callers)
                    callers.wait_stream(self._stream)


def worker_of(llm: Any) -> Any:
    """The one that drives this process's device."""
    return llm.llm_engine.model_executor.driver_worker.worker


def finish_steps(llm: Any) -> None:
    """Runs until nothing is in flight. On CUDA vLLM begins a step ahead, also behind the end of the last answer.

    Such a step would meet what comes next: prefixes that are forgotten, a routing of the step before.
    """
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue:  # None where there is no step ahead
        core.step_fn()
