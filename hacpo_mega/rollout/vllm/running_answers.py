"""Answers of one engine call while it generates: reports each that ends, and cuts all on demand.

vLLM's objects are passed in; only engine.py and patches.py import it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from hacpo_mega.records import Completion, Stop
from hacpo_mega.rollout.vllm.routing import Routing

# (place among the prompts of the call, answer)
OnAnswer = Callable[[int, Completion], None]


class RunningAnswers:
    """Watches every step of vLLM until all requests of a call have ended. All ranks of an engine see the same steps."""

    def __init__(
        self,
        llm: Any,
        num_asked: int,
        on_answer: OnAnswer | None,
        cut_reason: Any,
        eos_id: int | None,
        is_unwanted: Callable[[], bool] = lambda: False,
        routing: Routing | None = None,
    ) -> None:
        """Watches the `num_asked` requests that `llm` is about to be given.

        on_answer    called for an answer as soon as it has ended
        cut_reason   vLLM's finish reason of a cut answer
        eos_id       ends every answer that is not cut, whatever was sampled there; None: answers end by themselves
        is_unwanted  checked after every step: whether to cut all running answers now
        routing      source of an answer's routing; None: answers have none
        """
        self._llm, self._on_answer, self._cut_reason, self._eos_id = llm, on_answer, cut_reason, eos_id
        self._is_unwanted, self._routing = is_unwanted, routing
        self._routes: dict[str, np.ndarray] = {}
        self._first = llm.request_counter.counter
        self._num_running = num_asked
        self._was_cut: frozenset[str] = frozenset()

    def after_step(self, outputs: list[Any]) -> list[Any]:
        """Answers that a step has finished, and those that are cut after it."""
        self._note_routes(outputs)
        self._num_running -= len(outputs)
        if self._num_running > 0 and self._is_unwanted():
            outputs = [*outputs, *self._cut()]
        if self._on_answer is not None:
            for output in outputs:
                self._on_answer(int(output.request_id) - self._first, self.completion(output))
        return outputs

    def _cut(self) -> list[Any]:
        """Ends the running requests, with the tokens that they have; vLLM's own abort returns no output for them."""
        engine = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        if hasattr(scheduler, "take_held"):  # decode_scheduler.py
            engine.output_processor.process_outputs(scheduler.take_held())
        states = list(engine.output_processor.request_states.values())
        outputs = [state.make_request_output([], None, self._cut_reason, None) for state in states]
        self._note_routes(outputs)  # before vLLM forgets them
        engine.abort_request([state.request_id for state in states], internal=True)
        self._num_running, self._was_cut = 0, frozenset(output.request_id for output in outputs)
        return outputs

    def _note_routes(self, outputs: list[Any]) -> None:
        if self._routing is not None:
            self._routes |= {output.request_id: self._routing.of(output) for output in outputs}

    def completion(self, output: Any) -> Completion:
        """Converts a vLLM answer to our record. Its finish_reason is "stop" exactly when an end token was sampled."""
        answer = output.outputs[0]
        stops = {"stop": Stop.EOS, "length": Stop.LENGTH}
        # vLLM's "abort" means both an answer that was cut here and one that it gave up by itself.
        stop = Stop.CUT if output.request_id in self._was_cut else stops.get(answer.finish_reason, Stop.ABORT)
        token_ids = np.asarray(answer.token_ids, dtype=np.int32)
        if self._eos_id is not None and stop is not Stop.CUT:
            stop, token_ids[-1] = Stop.EOS, self._eos_id
        logprobs = None if answer.logprobs is None else np.asarray(answer.logprobs.logprobs, dtype=np.float32)
        return Completion(token_ids, stop, logprobs, self._routes.get(output.request_id))
