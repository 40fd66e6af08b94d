"""The answers of one call of the engine while it generates: who is told that one has ended, and when all are cut.

What it needs of vLLM is handed in; only engine.py imports vllm.
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
        """Of `num_asked` requests that `llm` is about to be given.

        on_answer    told of an answer as soon as it has ended
        cut_reason   how vLLM says that an answer was cut
        eos_id       ends every answer that is not cut, whatever was drawn there; None: it ended by itself
        is_unwanted  asked after every step whether all that run are cut now
        routing      asked where the tokens of an answer have gone; None: answers do not say
        """
        self._llm, self._on_answer, self._cut_reason, self._eos_id = llm, on_answer, cut_reason, eos_id
        self._is_unwanted, self._routing = is_unwanted, routing
        self._routes: dict[str, np.ndarray] = {}
        self._first = llm.request_counter.counter
        self._num_running = num_asked
        self._was_cut: frozenset[str] = frozenset()

    def after_step(self, outputs: list[Any]) -> list[Any]:
        """What a step has finished, and with it what is cut after it."""
        self._note_routes(outputs)
        self._num_running -= len(outputs)
        if self._num_running > 0 and self._is_unwanted():
            outputs = [*outputs, *self._cut()]
        if self._on_answer is not None:
            for output in outputs:
                self._on_answer(int(output.request_id) - self._first, self.completion(output))
        return outputs

    def _cut(self) -> list[Any]:
        """Ends what is running, with the tokens that it has; vLLM's own abort says nothing more of it."""
        engine = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        if hasattr(scheduler, "take_held"):  # not vLLM's own
            engine.output_processor.process_outputs(scheduler.take_held())
        states = list(engine.output_processor.request_states.values())
        outputs = [state.make_request_output([], None, self._cut_reason, None) for state in states]
        self._note_routes(outputs)  # while vLLM knows them
        engine.abort_request([state.request_id for state in states], internal=True)
        self._num_running, self._was_cut = 0, frozenset(output.request_id for output in outputs)
        return outputs

    def _note_routes(self, outputs: list[Any]) -> None:
        if self._routing is not None:
            self._routes |= {output.request_id: self._routing.of(output) for output in outputs}

    def completion(self, output: Any) -> Completion:
        """A vLLM answer as our record. Its finish_reason is "stop" exactly when a token that ends it was sampled."""
        answer = output.outputs[0]
        stops = {"stop": Stop.EOS, "length": Stop.LENGTH}
        # vLLM says "abort" of what was cut here and of what it gave up by itself.
        stop = Stop.CUT if output.request_id in self._was_cut else stops.get(answer.finish_reason, Stop.ABORT)
        token_ids = np.asarray(answer.token_ids, dtype=np.int32)
        if self._eos_id is not None and stop is not Stop.CUT:
            stop, token_ids[-1] = Stop.EOS, self._eos_id
        logprobs = None if answer.logprobs is None else np.asarray(answer.logprobs.logprobs, dtype=np.float32)
        return Completion(token_ids, stop, logprobs, self._routes.get(output.request_id))
