"""HTTP endpoint of an engine: agent programs that know nothing of this project converse with the model.

POST /v1/chat/completions (OpenAI's shapes), POST /inference/v1/generate (vLLM's: token ids in and out), GET /v1/models,
each below the address of a conversation. Sampled tokens are kept here, and never taken from what a program sends back:
the record (foreign_conversation.py) continues them token by token. The same conversation with the same prompt is the
same turn, so a program may repeat a call.

Programs are not trusted: an address without its key, a body that is too large or nested too deeply, ids, lengths and
sampling parameters that the engine should not see are refused with one line and counted. A program that hangs up ends
its turn.

Elsewhere: classes in TRL's shape, which need no HTTP (player.py).
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hacpo_mega.conversations.foreign_conversation import (
    AskedTurn,
    ForeignConversation,
    Refusal,
    Terms,
    normal_message,
)
from hacpo_mega.conversations.tool_calls import Message
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.rollout.vllm.server_types import Json, ServedTurn, error_answer, model_list
from hacpo_mega.samples.tokenizers import TextCodec

STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # linear, also where one is never closed
MAX_DEPTH = 64  # of lists and objects in a body
MAX_AT_ONCE = 1024  # calls of all conversations under way
MAX_CONVERSATIONS = 1024  # of an endpoint that opens them by itself; the oldest is closed for a further one
BODY_S = 30.0  # how long a body may take to come
IDLE_S = 60.0  # until a connection that asks nothing is closed: anybody on the machine could open them without end
BEAT_S = 30.0  # between signs of life while a turn runs
JSON = "application/json; charset=utf-8"
BYTES_OF_A_TOKEN = 32  # of a conversation as JSON, at most
MARGIN = 2**20  # bytes of a body beside its conversation
# Fields that a call may have. Sampling is the run's: READ is read, NEUTRAL may only have values that change nothing.
READ = {"model", "messages", "tools", "token_ids", "sampling_params", "temperature", "max_tokens", "stop_token_ids"}
READ |= {"max_completion_tokens", "stream", "stream_options", "logprobs", "parallel_tool_calls"}
NEUTRAL = {
    "n": (1,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "min_tokens": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "stop": ([], ""), "logit_bias": ({},),
    "ignore_eos": (False,), "response_format": ({"type": "text"},), "tool_choice": ("auto",), "top_logprobs": (0,),
}  # fmt: skip
WITHOUT_EFFECT = {"seed", "user", "metadata", "store", "request_id", "skip_special_tokens"}
WITHOUT_EFFECT |= {"spaces_between_special_tokens", "return_token_ids", "cache_salt", "priority"}
WITHOUT_EFFECT |= {"routed_experts_prompt_start", "include_stop_str_in_output", "detokenize", "prompt_cache_key"}

LOG = logging.getLogger(__name__)  # the HTTP library's, for faults of this program
# A request that is no HTTP is its sender's fault: anybody on the machine could fill the log with tracebacks.
LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

FormatOf = Callable[[Sequence[Json]], TurnFormat]


class Endpoint:
    """The HTTP server over a queue of turns, on an event loop of the caller's, or in a thread of its own.

    refused   counts of calls by reason: key, address, body, nesting, ids, length, parameters, turns, messages, stopped,
              busy, gone (the program hung up)
    """

    def __init__(
        self,
        turns: TurnQueue,
        model: str,
        secret: str,
        format_of: FormatOf,
        terms: Terms,
        *,
        seed: int | None = None,
        codec: TextCodec | None = None,
    ) -> None:
        """`format_of` makes the turn format for a list of tools, and is called on the endpoint's thread.

        seed    of an endpoint without a trainer: a conversation is then whatever its program calls it, and its key is
                the secret; None: conversations are opened by `open`, each with a key of its own
        codec   of a run's agent: what begins a conversation is written as the run's prompts are, and token ids, which
                other agents cannot read, are not taken
        """
        self._turns, self._model, self._secret, self._terms, self._seed = turns, model, secret, terms, seed
        self._format_of = lru_cache(maxsize=64)(lambda tools: format_of(json.loads(tools)))
        self._codec = codec
        self._conversations: OrderedDict[str, ForeignConversation] = OrderedDict()
        self.refused: Counter[str] = Counter()
        self._num_under_way = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self._address = ""

    def start(self, path: Path | None = None) -> str:
        """`begin` in a thread of its own."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self.begin(path), self._loop).result()

    def stop(self) -> None:
        """`end`, and the end of the thread."""
        if self._thread is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None

    async def begin(self, path: Path | None = None) -> str:
        """Listens on a free port of the loopback interface, or on a new socket file of mode 600.

        Returns the address, below which conversations have theirs.
        """
        if path is None:
            listener = socket.create_server(("127.0.0.1", 0))
            self._address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        else:
            listener = socket.socket(socket.AF_UNIX)
            os.fchmod(listener.fileno(), 0o600)  # which the file gets: nobody could connect between bind and chmod
            listener.bind(str(path))
            self._address = f"http+unix://{path}"
        app = web.Application(client_max_size=MARGIN + BYTES_OF_A_TOKEN * self._turns.limits.max_model_len)
        for prefix in ("/conversations/{name}", *([""] if self._seed is not None else [])):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._guarded(self._chat))
            app.router.add_post(f"{prefix}/inference/v1/generate", self._guarded(self._generate))
            app.router.add_get(f"{prefix}/v1/models", self._guarded(self._models))
        how = {"access_log": None, "logger": LOG, "shutdown_timeout": 1.0, "keepalive_timeout": IDLE_S}
        self._runner = web.AppRunner(app, handler_cancellation=True, **how)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        return self._address

    async def end(self) -> None:
        """Refuses new calls, and gives those under way a second."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._address.startswith("http+unix://"):  # the next endpoint could not have the name
            Path(self._address.removeprefix("http+unix://")).unlink(missing_ok=True)

    def open(self, name: str, seed: int) -> tuple[str, str, ForeignConversation]:
        """Address and key of a new conversation, and its record; `seed` in [0, 2^63) is its place in the run."""
        made = self._conversations[name] = ForeignConversation(name, seed, self._turns, self._terms)
        return f"{self._address}/conversations/{name}/v1", self._key(name), made

    def close(self, name: str) -> None:
        """Ends a conversation: turns that run are aborted, further calls refused."""
        self._conversations.pop(name).abort()

    def _key(self, name: str) -> str:
        if self._seed is not None:
            return self._secret
        return hmac.digest(self._secret.encode(), f"conversation\n{name}".encode(), "sha256").hex()

    def _guarded(
        self, answer: Callable[[ForeignConversation, web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._num_under_way += 1
            try:
                conversation = self._conversation_of(request)
                with conversation.call():
                    return await answer(conversation, request)
            except Refusal as refusal:
                self.refused[refusal.kind] += 1
                return web.json_response(
                    error_answer(str(refusal), refusal.kind, refusal.status), status=refusal.status
                )
            except (asyncio.CancelledError, ConnectionError):
                self.refused["gone"] += 1
                raise
            finally:
                self._num_under_way -= 1

        return handle

    def _conversation_of(self, request: web.Request) -> ForeignConversation:
        """The conversation of a call, by its address; Refusal for a wrong key or an unknown address."""
        name = request.match_info.get("name") or request.headers.get("X-Session-ID") or "default"
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._key(name).encode()):
            others = (self._key(other).encode() for other in list(self._conversations))
            if any(hmac.compare_digest(given, key) for key in others):
                raise Refusal(403, "address", "the key is another conversation's")
            raise Refusal(401, "key", "the key of this conversation is missing or wrong")
        if self._num_under_way > MAX_AT_ONCE:
            raise Refusal(503, "busy", f"{MAX_AT_ONCE} calls are under way")
        if name not in self._conversations:
            if self._seed is None:
                raise Refusal(404, "address", "no such conversation is open")
            digest = hashlib.blake2b(name.encode(errors="replace"), key=self._seed.to_bytes(8), digest_size=8).digest()
            self.open(name, int.from_bytes(digest, "little") >> 1)
            if len(self._conversations) > MAX_CONVERSATIONS:
                self.close(next(iter(self._conversations)))
        self._conversations.move_to_end(name)
        return self._conversations[name]

    async def _models(self, conversation: ForeignConversation, request: web.Request) -> web.StreamResponse:
        return web.json_response(model_list(self._model, self._turns.limits.max_model_len))

    async def _generate(self, conversation: ForeignConversation, request: web.Request) -> web.StreamResponse:
        asked = await self._read(conversation, request)
        token_ids, sampling = asked.get("token_ids"), asked.get("sampling_params") or {}
        if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
            raise Refusal(400, "ids", "token_ids must be a list of whole numbers")
        if not isinstance(sampling, dict) or asked.get("stream"):
            raise Refusal(400, "parameters", "sampling_params must be an object, and this route does not stream")
        if self._codec is not None:
            raise Refusal(404, "ids", "a run takes messages, which other agents can read, at /chat/completions")
        turn = conversation.ask(conversation.prompt_of_ids(tuple(token_ids)), *self._sampling(sampling))
        return await self._reply(request, turn, lambda served: json.dumps(served.generate_response()))

    async def _chat(self, conversation: ForeignConversation, request: web.Request) -> web.StreamResponse:
        asked = await self._read(conversation, request)
        sampling = self._sampling(asked)
        tools = asked.get("tools") or []
        if not isinstance(asked.get("messages"), list) or not asked["messages"] or not isinstance(tools, list):
            raise Refusal(400, "messages", "messages must be a list that is not empty, and tools a list")
        try:
            turn_format = self._format_of(json.dumps(tools))  # keys in the program's order, as templates show them
            messages = [normal_message(message) for message in asked["messages"]]
            prompt = conversation.prompt_of(messages, tools, turn_format, self._codec)
        except Exception as error:  # a template, a renderer or a tokenizer may raise anything of what it is given
            reason = str(error).partition("\n")[0][:500]
            raise Refusal(400, "messages", f"these messages cannot be written: {reason}") from error
        turn = conversation.ask(prompt, *sampling)
        has_logprobs, options = bool(asked.get("logprobs")), asked.get("stream_options")
        has_usage = isinstance(options, dict) and bool(options.get("include_usage"))

        def body_of(served: ServedTurn) -> str:
            parsed = turn_format.parse(served.token_ids, turn.prompt.ids)
            if asked.get("parallel_tool_calls") is False:  # as vLLM's server has it
                parsed = replace(parsed, tool_calls=parsed.tool_calls[:1])
            conversation.note_answer(turn, messages, parsed, tools)
            shown = _as_sent(turn.message)
            if not asked.get("stream"):
                return json.dumps(served.chat_response(shown, has_logprobs=has_logprobs))
            chunks = served.chat_chunks(shown, has_logprobs=has_logprobs, has_usage=has_usage)
            return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, chunks), "[DONE]"))

        return await self._reply(request, turn, body_of, "text/event-stream" if asked.get("stream") else JSON)

    async def _reply(
        self, request: web.Request, turn: AskedTurn, body_of: Callable[[ServedTurn], str], kind: str = JSON
    ) -> web.StreamResponse:
        """Answer to a call once its turn has ended: the engine holds the tokens back until then.

        Until then newlines are sent, which JSON and event streams ignore: a client hangs up on a server that is silent
        for long (openai's after 600 s), and would have the same turn sampled anew.
        """
        headers = {"Content-Type": kind, "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)

        async def beat() -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"\n")

        try:
            text = body_of(await self._answered(turn, beat))
        except Refusal as refusal:
            if response.prepared:  # the status of a good answer is sent already
                raise ConnectionAbortedError(str(refusal)) from refusal
            raise
        if not response.prepared:
            return web.Response(text=text, headers=headers)
        await response.write(text.encode())
        await response.write_eof()
        return response

    async def _read(self, conversation: ForeignConversation, request: web.Request) -> Json:
        """The body of a call, as JSON of bounded size and depth."""
        conversation.note_call()
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise Refusal(413, "body", "the body is larger than a conversation can be") from error
        except TimeoutError as error:
            raise Refusal(408, "body", f"the body has not come within {BODY_S:.0f} s") from error
        asked = parsed_body(body)
        if self._codec is None and asked.get("model") not in (None, self._model):
            raise Refusal(404, "address", f"the model here is {self._model}")
        return asked

    async def _answered(self, turn: AskedTurn, beat: Callable[[], Awaitable[None]]) -> ServedTurn:
        """Waits for a turn, and calls `beat` every BEAT_S. The last call that hangs up aborts it."""
        turn.num_waiting += 1
        ended = asyncio.wrap_future(turn.future)
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # read: asyncio would report it
        try:
            while not (await asyncio.wait({ended}, timeout=BEAT_S))[0]:
                await beat()
        finally:
            turn.num_waiting -= 1
            if not turn.num_waiting:
                turn.future.cancel()
        if (completion := turn.completion) is None:
            raise Refusal(503, "stopped", "this turn was cut: the engine answers no more turns of this conversation")
        return ServedTurn(turn.name, self._model, turn.prompt.ids, completion)

    def _sampling(self, asked: Mapping[str, Any]) -> tuple[int | None, float]:
        """Tokens and temperature that a call asks for."""
        for key, value in asked.items():
            if key in READ or key in WITHOUT_EFFECT or value is None:
                continue
            if key not in NEUTRAL or value not in NEUTRAL[key]:
                known = f"may only be {NEUTRAL[key][0]!r} here" if key in NEUTRAL else "is not known here"
                raise Refusal(400, "parameters", f"{key!r:.60} {known}: turns are sampled as the run samples")
        stops = asked.get("stop_token_ids") or []
        # A renderer names all tokens that may end a turn of its family; the run ends turns by some of them.
        if stops and (not isinstance(stops, list) or not any(stop in stops for stop in self._terms.stop_ids)):
            raise Refusal(400, "parameters", f"turns end by {list(self._terms.stop_ids)}, none of stop_token_ids")
        most = _number(asked, "max_completion_tokens", 1, 2**31) or _number(asked, "max_tokens", 1, 2**31)
        own = _number(asked, "temperature", 0.0, 100.0)
        temperature = self._terms.temperature if self._terms.temperature is not None else own
        return None if most is None else int(most), 1.0 if temperature is None else float(temperature)


def _number(asked: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    """The number of a field; a whole one where `low` is an int. Refusal for another value, None for an absent field."""
    value = asked.get(key)
    if value is None:
        return None
    kinds = (int,) if isinstance(low, int) else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        raise Refusal(400, "parameters", f"{key} must be a number from {low} to {high}")
    return value


def parsed_body(body: bytes) -> Json:
    """The JSON object of a body. Refusal for anything else, and for one that is nested too deeply for a parser."""
    codes = np.frombuffer(STRINGS.sub(b"", body), np.uint8)
    steps = np.isin(codes, list(b"[{")).astype(np.int64) - np.isin(codes, list(b"]}"))
    if len(steps) and steps.cumsum().max() > MAX_DEPTH:
        raise Refusal(400, "nesting", f"lists and objects may be nested {MAX_DEPTH} deep")
    try:
        asked = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "body", "the body is no JSON text") from error
    if not isinstance(asked, dict):
        raise Refusal(400, "body", "the body must be a JSON object")
    return asked


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _as_sent(answer: Message) -> Message:
    """An own turn as programs get it: arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.get("tool_calls", ())
    ]
    return {**answer, "tool_calls": calls}
