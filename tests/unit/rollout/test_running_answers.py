"""Names for the ends of an engine's answers; tests/jobs/test_engine.py has them with vLLM itself."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from repository import ROOT

from hacpo_mega.agent import rollout_client
from hacpo_mega.agent.rollout_client import RolloutClient
from hacpo_mega.agent.sampler import Requests, Sampler
from hacpo_mega.config import load_config
from hacpo_mega.records import Completion, Prompt, Stop
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
        self.flushed: list[bool] = []
        process = SimpleNamespace(flush=lambda: self.flushed.append(not self.aborted))
        self.output_processor = SimpleNamespace(request_states=states, process_outputs=process)
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
    assert engine.aborted == ["1", "2"] and engine.flushed == [True], "their tokens are complete before"
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


def test_no_two_answers_of_a_run_share_a_seed():
    """Not those of agents with the same weights either; an engine's share changes none of them."""
    config = load_config(ROOT / "configs/quickstart.toml", ["rollout.rollouts_per_prompt=2"])
    codec = SimpleNamespace(encode_prompt=lambda text: [len(text)])
    prompts = [Prompt(index, "", "1+1=", "2") for index in (4, 9)]
    whole, second = slice(None), slice(1, None, 2)
    samplers = [Sampler(codec, agent, whole, config) for agent in range(2)]
    seeds = [s.rollout_requests(prompts, step).seeds for s in samplers for step in (1, 2)]
    seeds += [s.single_requests(prompts, 8, 1.0).seeds for s in samplers]
    assert len({seed for of_batch in seeds for seed in of_batch}) == 2 * 2 * 4 + 2 * 2
    assert Sampler(codec, 1, second, config).rollout_requests(prompts, 2).seeds == seeds[3][1::2]
    assert samplers[0].single_requests(prompts, 8, 0.0).seeds == [0, 0], "greedy"


def test_an_answer_is_decoded_once(monkeypatch):
    """As it ends, for the judge, and not again for the records; answers of other engines of the cell are, once."""
    decoded: list[list[int]] = []
    codec = SimpleNamespace(decode_answer=lambda ids: decoded.append(ids.tolist()) or str(ids.tolist()))
    places = tuple((Prompt(index, "", "", ""), g) for index in (4, 9) for g in range(2))
    answers = [Completion(np.array([number, 7], np.int32), Stop.EOS) for number in range(4)]
    sampler, client = object.__new__(Sampler), object.__new__(RolloutClient)
    sampler._codec, sampler._replays = codec, False
    sampler.rollout_requests = lambda prompts, step: Requests(places, places[::2], [], [], {})

    def generate(_ids, _seeds, on_answer):
        for place in (1, 0):
            on_answer(place, answers[2 * place])
        return answers[::2]

    client.sampler, client.engine, client.place = sampler, SimpleNamespace(generate=generate), None
    client.player, client._has_conversations = None, False
    client.devices = SimpleNamespace(answering=lambda then_learns: nullcontext())
    client.weight_sync = SimpleNamespace(require_step=lambda step: None)
    monkeypatch.setattr(rollout_client, "share_completions", lambda *_, **__: answers)
    seen = []
    rollouts = client.roll_out([], 0, lambda prompt, rollout: seen.append((prompt.index, rollout.text)))
    assert seen == [(9, "[2]"), (4, "[0]")]
    assert [rollout.text for rollout in rollouts] == ["[0]", "[1]", "[2]", "[3]"]
    assert sorted(decoded) == [[0], [1], [2], [3]]
