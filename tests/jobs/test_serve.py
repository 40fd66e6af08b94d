"""`hacpo-mega serve` as agent programs meet it: real ranks, OpenAI's own client, and callers that mean no good."""

import asyncio
import json
import os
import signal
import stat
import time
from pathlib import Path

import aiohttp
import pytest
from job import run_here, start_command
from openai import AsyncOpenAI, BadRequestError, OpenAI
from renderers import Qwen3RendererConfig, create_renderer
from renderers.client import generate
from tiny_models import make_model
from turn_cases import CASES, TOOLS, ByHand

from hacpo_mega.samples.tokenizers import load_tokenizer

LENGTH = 512
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chatty"
    make_model(folder, "qwen3", num_heads=2, head_dim=32, vocab_size=400, max_positions=LENGTH)
    said = (folder / "config.json").read_text()
    ByHand(folder).codec(CASES["chatml"])
    (folder / "config.json").write_text(said)
    return folder


class Served:
    """A running `hacpo-mega serve`: its address and its key, from its first lines."""

    def __init__(self, *words) -> None:
        self.process = start_command("serve", *words)
        lines = [self.process.stdout.readline() for _ in range(3)]
        assert lines[2], self.process.stderr.read()[-3000:]
        self.address = lines[0].split()[1].removesuffix("/v1")
        self.model_line, key_file = lines[2], lines[1].split()[-1]
        self.key, self.key_mode = Path(key_file).read_text(), stat.S_IMODE(os.stat(key_file).st_mode)

    def client(self, name: str, **options) -> OpenAI:
        url = f"{self.address}/conversations/{name}/v1"
        return OpenAI(base_url=url, **{"api_key": self.key, "max_retries": 0, **options})

    def call(self, path: str, body: bytes | dict, key: str | None = None, timeout_s: float = 60.0) -> tuple[int, dict]:
        """Status and answer of one POST."""

        async def post():
            given = {"Authorization": f"Bearer {self.key if key is None else key}"}
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with (
                aiohttp.ClientSession(headers=given, timeout=timeout) as session,
                session.post(self.address + path, data=data) as answer,
            ):
                return answer.status, await answer.json()

        return asyncio.run(post())

    def end(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        out, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, errors[-3000:]
        return out


@pytest.fixture(scope="module")
def served(folder):
    served = Served(folder, "tp=2", "max_prompt_tokens=300", f"max_answer_tokens={LENGTH - 300}")
    yield served
    if served.process.poll() is None:
        served.process.kill()


def sampled(answer) -> list[int]:
    return answer.choices[0].token_ids


def test_an_openai_program_converses_token_by_token(served):
    """Its history is only compared: the next prompt is what was sampled, and what others say behind it."""
    assert served.key_mode == 0o600 and "turns by template" in served.model_line
    client, tools = served.client("one"), {"tools": TOOLS}
    messages = [{"role": "user", "content": "What is six times seven?"}]
    asked = {"model": "chatty", "max_tokens": 9, **tools}
    first = client.chat.completions.create(messages=messages, **asked)
    again = client.chat.completions.create(messages=messages, **asked)
    other = served.client("two").chat.completions.create(messages=messages, **asked)
    assert sampled(again) == sampled(first) and again.id == first.id, "the same turn"
    assert sampled(other) != sampled(first), "another conversation has other seeds"
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And 7 more?"}]
    second = client.chat.completions.create(messages=messages, logprobs=True, **asked)
    head = first.prompt_token_ids + sampled(first)
    assert second.prompt_token_ids[: len(head)] == head and len(second.prompt_token_ids) > len(head)
    assert [entry.token for entry in second.choices[0].logprobs.content] == [f"token_id:{t}" for t in sampled(second)]
    messages[1]["content"] = "rewritten by the program"
    third = client.chat.completions.create(messages=messages, **asked)
    assert third.prompt_token_ids[: len(head)] != head, "a segment of its own"
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked))
    assert chunks[0].choices[0].token_ids == sampled(third) and chunks[-1].choices[0].finish_reason == "length"


def test_token_ids_go_in_and_out(served):
    """With what verifiers' client demands of an answer: log-probs of the sampled tokens, named by their ids."""
    body = {"model": "chatty", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "logprobs": 1}}
    status, answer = served.call("/conversations/ids/inference/v1/generate", body)
    choice = answer["choices"][0]
    assert status == 200 and len(choice["token_ids"]) == 8 and choice["finish_reason"] == "length"
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token}" and -99 < entry["logprob"] <= 0
    body["sampling_params"]["routed_experts_prompt_start"] = 3
    assert served.call("/conversations/ids/inference/v1/generate", body)[1]["choices"] == answer["choices"]
    longer = body | {"token_ids": [5, 6, 7, *choice["token_ids"], 9]}
    assert served.call("/conversations/ids/inference/v1/generate", longer)[0] == 200
    models = served.client("ids").models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("chatty", LENGTH)]


def test_verifiers_training_client_accepts_the_answers(served, folder):
    """renderers' client, with which verifiers trains, refuses an answer without `token_id:N` beside every log-prob."""
    url = f"{served.address}/conversations/renderers/v1"
    client = AsyncOpenAI(base_url=url, api_key=served.key, max_retries=0)
    renderer = create_renderer(load_tokenizer(folder), Qwen3RendererConfig())
    asked = {"client": client, "renderer": renderer, "model": "chatty", "sampling_params": {"max_tokens": 8}}
    answer = asyncio.run(generate(messages=[{"role": "user", "content": "What is six?"}], **asked))
    assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) == 8


def test_callers_that_mean_no_good_are_refused_with_one_line(served):
    route = "/conversations/bad/inference/v1/generate"
    good = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
    refused = [
        (served.call(route, good, key="nobody's"), 401, "key"),
        (served.call(route, b"x" * 13_000_000), 413, "body"),
        (served.call(route, b"[" * 3000 + b"]" * 3000), 400, "nesting"),
        (served.call(route, b'"\\"' * 300_000), 400, "body"),
        (served.call(route, b'{"token_ids": [NaN]}'), 400, "body"),
        (served.call(route, good | {"token_ids": [400]}), 400, "ids"),
        (served.call(route, good | {"token_ids": [-1]}), 400, "ids"),
        (served.call(route, good | {"token_ids": [True, 1.0]}), 400, "ids"),
        (served.call(route, good | {"token_ids": [5] * LENGTH}), 400, "length"),
        (served.call(route, good | {"model": "another"}), 404, "address"),
        *((served.call(route, good | {"sampling_params": wrong}), 400, "parameters") for wrong in (
            {"temperature": -1}, {"max_tokens": 0}, {"top_k": -5}, {"top_p": 0.5}, {"nonsense": 1}, {"n": 2},
            {"stop": ["\n"]}, {"stop_token_ids": [3]}, {"temperature": 10**400},
        )),
        (served.call("/conversations/bad/v1/chat/completions", {"messages": [{"role": "robot"}]}), 400, "messages"),
    ]  # fmt: skip
    for (status, answer), expected, kind in refused:
        assert (status, answer["error"]["type"]) == (expected, kind), answer
        assert "\n" not in answer["error"]["message"] and len(answer["error"]["message"]) < 600
    messages = [{"role": "user", "content": "seven " * LENGTH}]
    with pytest.raises(BadRequestError, match="maximum context length"):
        served.client("bad").chat.completions.create(model="chatty", messages=messages)
    assert served.call(route, good)[0] == 200, "the engine lives"


def test_a_caller_that_goes_away_ends_its_turn(served):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": LENGTH - 2}}
    with pytest.raises(TimeoutError):
        served.call("/conversations/gone/inference/v1/generate", body, timeout_s=0.05)
    time.sleep(0.5)
    summary = served.end()
    assert "1 gone" in summary and "1 key" in summary and "1 nesting" in summary, summary
    assert "prompt tokens were cached" in summary


def test_keys_that_an_endpoint_has_not_are_refused(folder):
    done = run_here("serve", folder, "num_answers=2")
    assert done.returncode == 2 and done.stderr.startswith("num_answers: serve takes one model and the keys chat_")
