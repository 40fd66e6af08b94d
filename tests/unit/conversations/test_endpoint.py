"""Records of foreign conversations, the queue before an engine, and the endpoint's listener.

A thread answers the queue here with tokens of its own making; tests/jobs/test_serve.py has a real engine.
"""

import asyncio
import json
import socket
import stat
import threading
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest

from hacpo_mega.conversations.endpoint import Endpoint, parsed_body
from hacpo_mega.conversations.foreign_conversation import ForeignConversation, Refusal, Terms
from hacpo_mega.conversations.seat import PlayLimits
from hacpo_mega.conversations.tool_calls import ParsedTurn
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.records import Completion, Stop
from hacpo_mega.rollout.vllm.engine_loop import TurnLimits, TurnRequest

LIMITS = TurnLimits(vocabulary=50, max_model_len=40)
TERMS = Terms(stop_ids=[7], limits=PlayLimits(4, 40, 30), max_tokens=8)


def completion(*token_ids: int, stop: Stop = Stop.EOS) -> Completion:
    return Completion(np.array(token_ids, np.int32), stop, np.full(len(token_ids), -1.0, np.float32))


class Answering:
    """Steps of a loop over a queue, by hand: every turn is answered with its prompt's length, and an end."""

    def __init__(self) -> None:
        self.queue, self.asked, self.aborted = TurnQueue(LIMITS), [], []

    def step(self) -> None:
        asked, aborted = self.queue.take(idle=False)
        self.asked += asked
        self.aborted += aborted
        for key in aborted:
            self.queue.give(key, completion(stop=Stop.CUT))
        for request in asked:
            if request.key not in aborted:
                self.queue.give(request.key, completion(len(request.prompt_ids), 7))


def ask(conversation: ForeignConversation, *prompt_ids: int):
    return conversation.ask(conversation.prompt_of_ids(prompt_ids), None, 1.0)


def test_a_conversation_is_kept_as_segments():
    engine = Answering()
    talk = ForeignConversation("talk", 3, engine.queue, TERMS)
    for prompt in ((1, 2), (1, 2, 2, 7, 30, 31), (1, 9), (1, 2, 2, 7, 40)):  # the last one goes back to the first turn
        ask(talk, *prompt)
        engine.step()
    first, second, third = talk.segments
    assert [(turn.prompt.ids, turn.completion.token_ids.tolist()) for turn in first] == [
        ((1, 2), [2, 7]),
        ((1, 2, 2, 7, 30, 31), [6, 7]),
    ]
    assert [turn.prompt.ids for turn in second] == [(1, 9)]
    assert [(turn.prompt.ids, turn.completion.token_ids.tolist()) for turn in third] == [((1, 2, 2, 7, 40), [5, 7])]
    with pytest.raises(Refusal, match="has had its 4 turns"):
        ask(talk, 3)


def test_a_seed_is_of_conversation_and_prompt_whatever_came_before():
    seeds = []
    for order in ((1, 2), (2, 1)):
        engine = Answering()
        talk = ForeignConversation("talk", 3, engine.queue, TERMS)
        for token in order:
            ask(talk, token)
        engine.step()
        seeds.append({request.prompt_ids: request.seed for request in engine.asked})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 2
    other = ForeignConversation("other", 4, engine.queue, TERMS)
    ask(other, 1)
    engine.step()
    assert engine.asked[-1].seed not in seeds[0].values()


def test_a_turn_that_was_asked_twice_is_one_turn():
    engine = Answering()
    talk = ForeignConversation("talk", 3, engine.queue, TERMS)
    first = ask(talk, 1)
    assert ask(talk, 1) is first
    first.future.cancel()
    engine.step()
    assert (len(engine.asked), engine.aborted) == (1, [first.name])
    again = ask(talk, 1)
    engine.step()
    assert again is not first and again.completion.token_ids.tolist() == [1, 7]
    assert engine.asked[0].seed == engine.asked[1].seed and len(talk.segments) == 1


def test_a_turn_that_was_cut_goes_on_for_a_larger_limit():
    """The same draw goes on; a cut turn that something has continued stays. Another temperature is another draw."""
    engine = Answering()
    talk = ForeignConversation("talk", 3, engine.queue, TERMS)

    def answered(*prompt_ids: int, most: int, temperature: float = 1.0):
        turn = talk.ask(talk.prompt_of_ids(prompt_ids), most, temperature)
        asked, _ = engine.queue.take(idle=False)
        for request in asked:
            ended = request.max_tokens > 2
            tokens = [4, 5, 6][: request.max_tokens]
            engine.queue.give(request.key, completion(*tokens, stop=Stop.EOS if ended else Stop.LENGTH))
        return turn, [request.seed for request in asked]

    cut, (seed,) = answered(1, most=2)
    assert answered(1, most=2) == answered(1, most=1) == (cut, [])
    whole, seeds = answered(1, most=3)
    assert (cut.completion.token_ids.tolist(), whole.completion.token_ids.tolist()) == ([4, 5], [4, 5, 6])
    assert seeds == [seed] and talk.segments == [[whole]]
    assert answered(1, most=2) == answered(1, most=8) == (whole, [])
    later, _ = answered(1, 4, 5, 9, most=3)  # behind the turn that was cut
    assert talk.segments == [[cut, later], [whole]]
    assert answered(1, most=8, temperature=0.5)[0] is not whole


def test_lengths_end_at_the_terms():
    engine = Answering()
    talk = ForeignConversation("talk", 3, engine.queue, TERMS)
    for size, asked, granted in ((5, None, 8), (38, None, 2), (6, 3, 3)):
        talk.ask(talk.prompt_of_ids((1,) * size), asked, 1.0)
        engine.step()
        assert engine.asked[-1].max_tokens == granted
    assert not talk.is_limited
    with pytest.raises(Refusal, match="maximum context length is 35"), talk.call():
        ask(talk, *[1] * 5, 5, 7, *[2] * 28)  # 5 tokens of its first prompt and 30 behind it
    assert talk.is_limited
    with pytest.raises(Refusal, match="maximum context length is 40"):
        ask(talk, *[2] * 40)
    with pytest.raises(Refusal, match="token id 50 is none of the model's 50"):
        ask(talk, 50)


def test_a_conversation_has_three_calls_a_turn():
    talk = ForeignConversation("talk", 3, Answering().queue, TERMS)
    for _ in range(12):
        talk.note_call()
    with pytest.raises(Refusal, match="has had its 12 calls"):
        talk.note_call()


def test_only_calls_that_ask_for_a_turn_are_waits_for_the_model(monkeypatch):
    """A program that repeats a refused call for ever does not go on for ever: its time counts."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("hacpo_mega.conversations.foreign_conversation.time", clock)
    talk = ForeignConversation("talk", 3, Answering().queue, TERMS)
    with talk.call():
        ask(talk, 1, 2)
        clock.now += 3.0
        assert talk.idle_s == 0.0
    for _ in range(5):
        clock.now += 1.0
        with pytest.raises(Refusal), talk.call():
            raise Refusal(400, "turns", "this conversation has had its turns")
        with talk.call():  # for the models
            assert talk.idle_s == 0.0
    assert (talk.idle_s, talk.busy_s, talk.is_limited) == (5.0, 3.0, True)
    with talk.call():
        ask(talk, 1, 2)
    assert talk.idle_s == 0.0


def test_a_dead_loop_ends_every_wait_and_a_finished_one_takes_no_more():
    queue = TurnQueue(LIMITS)
    waits = queue.ask(TurnRequest("one", [1], 0, 2))
    queue.take(idle=True)
    queue.fail(OSError("no device"))
    with pytest.raises(RuntimeError, match="has died: no device"):
        waits.result(timeout=5)
    with pytest.raises(RuntimeError, match="answers no turns any more"):
        queue.ask(TurnRequest("two", [1], 0, 2))
    finished = TurnQueue(LIMITS)
    finished.finish()
    assert finished.is_done
    with pytest.raises(RuntimeError, match="no turns any more"):
        finished.ask(TurnRequest("two", [1], 0, 2))


def test_a_body_is_an_object_of_bounded_depth():
    assert parsed_body(b'{"a": "[[[[ \\" [[[["}') == {"a": '[[[[ " [[[['}
    deep = json.dumps({"a": "["} | {"b": [[1]]}).encode()
    assert parsed_body(deep)["b"] == [[1]]
    for body in (b"[]", b"", b"\xff", b'{"a": Infinity}', b'{"a": ' + b"9" * 5000 + b"}", b"[" * 9, b'"' * 99_999):
        with pytest.raises(Refusal, match="body"):
            parsed_body(body)
    for body in (b'{"a":' * 3000, b"[" * 65 + b"]" * 65):
        with pytest.raises(Refusal, match="nested 64 deep"):
            parsed_body(body)


@pytest.mark.parametrize("by_file", [False, True])
def test_a_key_opens_its_own_conversation_only(tmp_path, by_file):
    engine, ends = Answering(), threading.Event()
    thread = threading.Thread(target=lambda: [engine.step() for _ in iter(lambda: ends.wait(0.005), True)], daemon=True)
    thread.start()
    endpoint = Endpoint(engine.queue, "m", "job's secret", None, TERMS)
    path = Path(tmp_path) / "socket" if by_file else None
    address = endpoint.start(path)
    if by_file:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        address = "http://localhost"
    opened = {name: endpoint.open(name, seed) for seed, name in enumerate(("one", "two"))}
    keys = {name: key for name, (_, key, _) in opened.items()}
    assert "secret" not in "".join(keys.values())

    async def calls() -> list[int]:
        connector = aiohttp.UnixConnector(str(path)) if by_file else None
        async with aiohttp.ClientSession(connector=connector) as session:
            found, shown = [], {"one": [keys["one"], keys["two"], "job's secret"], "none": [""], "two": [keys["two"]]}
            for name, key in ((name, key) for name, given in shown.items() for key in given):
                async with session.post(
                    f"{address}/conversations/{name}/inference/v1/generate",
                    json={"token_ids": [1, 2]},
                    headers={"Authorization": f"Bearer {key}"},
                ) as answer:
                    found.append(answer.status)
                if len(found) == 4:
                    endpoint.close("two")
            return found

    try:
        assert asyncio.run(calls()) == [200, 403, 401, 401, 404]
        assert endpoint.refused == {"address": 2, "key": 2}
        endpoint.close("one")
        ((turn,),) = opened["one"][2].segments
        assert turn.completion.token_ids.tolist() == [2, 7] and not opened["two"][2].segments
    finally:
        endpoint.stop()
        ends.set()
        thread.join()
    assert not by_file or not path.exists()  # the next one gets the name


def test_a_key_of_any_bytes_is_refused():
    endpoint = Endpoint(Answering().queue, "m", "key", None, TERMS, seed=0)
    connection = HTTPConnection(endpoint.start().removeprefix("http://"))
    try:
        connection.request("POST", "/inference/v1/generate", b"{}", {"Authorization": b"Bearer \xff"})
        assert (connection.getresponse().status, endpoint.refused) == (401, {"key": 1})
    finally:
        connection.close()
        endpoint.stop()


def test_a_stranger_writes_nothing_into_the_log(monkeypatch, caplog):
    """A request that is no HTTP is answered, and said nowhere; a fault of ours still is."""
    endpoint = Endpoint(Answering().queue, "m", "key", None, TERMS, seed=0)
    address = endpoint.start().removeprefix("http://")
    try:
        for wrong in (b"GET /\x1b[31m HTTP/1.1", b"GET / HTTP/1.1", b"GET / HTTP/1.1\r\nHost: a\r\n\x1b[31m: 1"):
            with socket.create_connection(address.split(":"), timeout=60.0) as stranger:
                stranger.sendall(wrong + b"\r\n\r\n")
                assert stranger.recv(64).startswith(b"HTTP/1.0 400 ")
        assert caplog.records == []
        monkeypatch.setattr(endpoint, "_key", lambda name: None)
        connection = HTTPConnection(address)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 500 and "AttributeError" in caplog.text
        connection.close()
    finally:
        endpoint.stop()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat"])
def test_a_connection_that_asks_nothing_is_closed(monkeypatch, begun):
    """Else anybody on the machine could take all descriptors of the process, whose own files need some."""
    monkeypatch.setattr("hacpo_mega.conversations.endpoint.IDLE_S", 0.1)
    endpoint = Endpoint(Answering().queue, "m", "key", None, TERMS, seed=0)
    address = endpoint.start().removeprefix("http://")
    try:
        with socket.create_connection(address.split(":"), timeout=60.0) as silent:
            silent.sendall(begun)
            assert silent.recv(1) == b""
    finally:
        endpoint.stop()


def test_log_probs_of_other_tokens_are_refused():
    """The engine has those of the sampled tokens; a program got empty lists for the others."""
    endpoint = Endpoint(Answering().queue, "m", "key", None, TERMS, seed=0)
    connection = HTTPConnection(endpoint.start().removeprefix("http://"))
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Authorization": "Bearer key"})
        said = json.loads((answer := connection.getresponse()).read())["error"]["message"]
        assert answer.status == 400 and said.startswith("'top_logprobs' may only be 0 here")
    finally:
        connection.close()
        endpoint.stop()


def test_tools_reach_the_template_as_the_program_has_written_them():
    """A template shows the keys in this order, as it does in training and in vLLM's own server."""
    tools = [{"type": "function", "function": {"name": "order", "parameters": {"type": "object", "properties": {}}}}]
    shown: list[str] = []

    def format_of(given):
        shown.append(json.dumps(given))
        raise ValueError("no format here")

    endpoint = Endpoint(Answering().queue, "m", "key", format_of, TERMS, seed=0)
    address = endpoint.start()

    async def call() -> int:
        body = {"messages": [{"role": "user", "content": "Order bolts."}], "tools": tools}
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer key"}) as session,
            session.post(f"{address}/v1/chat/completions", json=body) as answer,
        ):
            return answer.status

    try:
        assert (asyncio.run(call()), shown) == (400, [json.dumps(tools)])
    finally:
        endpoint.stop()


def test_a_client_that_hears_nothing_for_long_keeps_waiting_for_its_turn(monkeypatch):
    """Its limit is that of silence; without a sign of life the same turn would be sampled anew, and end likewise."""
    monkeypatch.setattr("hacpo_mega.conversations.endpoint.BEAT_S", 0.05)
    engine = Answering()
    endpoint = Endpoint(engine.queue, "m", "key", None, TERMS, seed=0)
    address = endpoint.start()

    async def call() -> dict:
        silence = aiohttp.ClientTimeout(sock_read=0.3)
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer key"}, timeout=silence) as session:
            asked = asyncio.ensure_future(session.post(f"{address}/inference/v1/generate", json={"token_ids": [1, 2]}))
            await asyncio.sleep(0.6)
            engine.step()
            async with await asked as answer:
                return await answer.json()

    try:
        assert asyncio.run(call())["choices"][0]["token_ids"] == [2, 7]
        assert len(engine.asked) == 1 and not endpoint.refused
    finally:
        endpoint.stop()


@pytest.mark.parametrize(("sends", "names"), [({}, ["a", "b"]), ({"parallel_tool_calls": False}, ["a"])])
def test_a_program_that_takes_one_call_at_a_time_gets_the_first(sends, names):
    """And its history, which has this call alone, is continued by the turn's own tokens."""
    engine = Answering()
    turn_format = SimpleNamespace(
        opening=lambda messages: [1, 2],
        continuation=lambda head, others, ended: [9] * len(others),
        parse=lambda ids, before: ParsedTurn("", tool_calls=(("a", {}), ("b", {}))),
    )
    endpoint = Endpoint(engine.queue, "m", "key", lambda tools: turn_format, TERMS, seed=0)
    address = endpoint.start()

    async def call(messages: list[dict]) -> dict:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer key"}) as session:
            body = {"messages": messages, **sends}
            asked = asyncio.ensure_future(session.post(f"{address}/v1/chat/completions", json=body))
            while not asked.done():
                await asyncio.sleep(0.01)
                engine.step()
            async with await asked as answer:
                return (await answer.json())["choices"][0]["message"]

    try:
        messages = [{"role": "user", "content": "?"}]
        said = asyncio.run(call(messages))
        assert [one["function"]["name"] for one in said["tool_calls"]] == names
        results = [{"role": "tool", "content": "1", "tool_call_id": one["id"]} for one in said["tool_calls"]]
        asyncio.run(call([*messages, said, *results]))
        assert engine.asked[-1].prompt_ids == (1, 2, 2, 7, *[9] * len(names))
    finally:
        endpoint.stop()
