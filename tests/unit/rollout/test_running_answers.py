"""Names for the ends of an engine's answers; tests/jobs/test_engine.py has them with vLLM itself."""

from types import SimpleNamespace

import pytest

from hacpo_mega.records import Stop
from hacpo_mega.rollout.engine import RunningAnswers
from hacpo_mega.rollout.vllm.engine_stream_guard import finish_steps


def ended(request_id: int, reason: str) -> SimpleNamespace:
    answer = SimpleNamespace(finish_reason=reason, token_ids=[3, 4], logprobs=None)
    return SimpleNamespace(request_id=str(request_id), outputs=[answer])


class TwoRequests:
    """Two requests that run until they are told to end, as vLLM keeps and names them."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        states = {
            str(n): SimpleNamespace(request_id=str(n), make_request_output=lambda *a, n=n: ended(n, "abort"))
            for n in (1, 2)
        }
        self.output_processor = SimpleNamespace(request_states=states)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=None))

    def abort_request(self, request_ids: list[str], internal: bool) -> None:
        self.aborted += request_ids


def test_only_what_was_cut_here_is_called_cut():
    engine = TwoRequests()
    llm = SimpleNamespace(llm_engine=engine, request_counter=SimpleNamespace(counter=0))
    seen = {}
    tell = lambda place, answer: seen.update({place: answer.stop})  # noqa: E731
    answers = RunningAnswers(llm, 4, tell, None, lambda: len(seen) == 1)
    assert len(answers.after_step([ended(0, "abort")])) == 1, "vLLM gave it up by itself"
    assert len(answers.after_step([ended(3, "length")])) == 3
    assert engine.aborted == ["1", "2"]
    assert seen == {0: Stop.ABORT, 3: Stop.LENGTH, 1: Stop.CUT, 2: Stop.CUT}


@pytest.mark.parametrize(("reason", "stop"), [("stop", Stop.EOS), ("length", Stop.LENGTH), ("error", Stop.ABORT)])
def test_how_an_answer_ended_by_itself(reason, stop):
    llm = SimpleNamespace(request_counter=SimpleNamespace(counter=0))
    answers = RunningAnswers(llm, 1, None, None)
    assert answers.completion(ended(0, reason)).stop is stop


@pytest.mark.parametrize("in_flight", [None, [], [1, 2]])
def test_steps_are_taken_until_none_is_in_flight(in_flight):
    """vLLM has no queue of steps on the CPU."""
    taken = []
    core = SimpleNamespace(batch_queue=in_flight, step_fn=lambda: taken.append(in_flight.pop()))
    finish_steps(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))))
    assert not in_flight and len(taken) in (0, 2)
