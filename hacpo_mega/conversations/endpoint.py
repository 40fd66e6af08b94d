"""HTTP endpoint of an engine: agent programs that know nothing of this project converse with the model.

POST /v1/chat/completions (OpenAI's shapes), POST /inference/v1/generate (vLLM's: token ids in and out), GET /v1/models,
each below the address of a conversation. What was sampled is kept here, and never taken from what a program sends back:
a message history that begins with what the conversation has is continued token by token, any other one starts a
segment. The same conversation with the same prompt is the same turn, so a program may repeat a call. A turn's seed is a
hash of its conversation's seed and its prompt, never of the order in which calls arrive.

Programs are not trusted: an address without its key, a body that is too large or nested too deeply, ids, lengths and
sampling parameters that the engine should not see are refused with one line and counted. A program that hangs up ends
its turn.

Not here: classes in TRL's shape, which need no HTTP (player.py).
"""

import asyncio
import hashlib
import hmac
import json
import os
import re
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from hacpo_mega.conversations.turn_format import Message, TurnFormat
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.records import Completion, Stop
from hacpo_mega.rollout.engine_loop import TurnRequest
from hacpo_mega.rollout.vllm.server_types import Json, ServedTurn, error_answer, model_list

STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # linear, also where one is never closed
MAX_DEPTH = 64  # of lists and objects in a body
MAX_AT_ONCE = 1024  # calls of all conversations under way
MAX_KEPT = 1024  # conversations of an endpoint that opens them by itself
BODY_S = 30.0  # how long a body may take to come
BYTES_OF_A_TOKEN = 32  # of a conversation as JSON, at most; what is beside it has MARGIN
MARGIN = 2**20
# Asking again: openai's client does so twice.
CALLS_OF_A_TURN = 3
ROLES = ("system", "developer", "user", "assistant", "tool")
# What a call may say. Sampling is the run's: of these the first few are read, some may only say what is so anyway.
READ = {"model", "messages", "tools", "token_ids", "sampling_params", "temperature", "max_tokens", "stop_token_ids"}
READ |= {"max_completion_tokens", "stream", "stream_options", "logprobs"}
NEUTRAL = {
    "n": (1,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "min_tokens": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "stop": ([], ""), "logit_bias": ({},),
    "ignore_eos": (False,), "response_format": ({"type": "text"},), "tool_choice": ("auto",),
}  # fmt: skip
WITHOUT_EFFECT = {"seed", "user", "metadata", "store", "request_id", "top_logprobs", "skip_special_tokens"}
WITHOUT_EFFECT |= {"spaces_between_special_tokens", "return_token_ids", "parallel_tool_calls", "cache_salt", "priority"}
WITHOUT_EFFECT |= {"routed_experts_prompt_start", "include_stop_str_in_output", "detokenize", "prompt_cache_key"}

FormatOf = Callable[[Sequence[Json]], TurnFormat]


class Refusal(Exception):
    """A call that is not answered: HTTP status, the word that it is counted under, and one line."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Terms:
    """Limits and sampling of every program, whatever it asks for.

    stop_ids             tokens that end a turn, as the engine has them
    max_turns            turns of a conversation
    max_tokens           tokens of an own turn
    max_total_tokens     tokens of a conversation
    temperature          of every turn; None: the program's own, 1 without one
    """

    stop_ids: Sequence[int]
    max_turns: int
    max_tokens: int
    max_total_tokens: int
    temperature: float | None = None


@dataclass(frozen=True)
class TokenSegment:
    """Part of a conversation whose tokens only grew: a prompt, and turns of (ids of others before it, sampled turn)."""

    prompt_ids: tuple[int, ...]
    turns: tuple[tuple[tuple[int, ...], Completion], ...]


@dataclass(eq=False)
class AskedTurn:
    """A turn that a program has asked for, and how many calls wait for it."""

    name: str
    prompt_ids: tuple[int, ...]
    parent: "AskedTurn | None"
    future: Future[Completion]
    num_waiting: int = 0

    @property
    def completion(self) -> Completion | None:
        """The sampled turn; None while it runs, and if it was cut or never answered."""
        if not self.future.done() or self.future.cancelled() or self.future.exception() is not None:
            return None
        return None if self.future.result().stop is Stop.CUT else self.future.result()

    @property
    def is_dropped(self) -> bool:
        """True if it has ended without an answer, so that asking again samples it."""
        return self.future.done() and self.completion is None

    @property
    def head(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return (*self.prompt_ids, *self.completion.token_ids.tolist())


class ForeignConversation:
    """Record of one program's conversation. The endpoint's thread alone uses it."""

    def __init__(self, name: str, seed: int, turns: TurnQueue, terms: Terms) -> None:
        self.name, self._seed, self._queue, self._terms = name, seed, turns, terms
        self._by_prompt: dict[tuple[int, ...], AskedTurn] = {}
        self._by_history: dict[bytes, AskedTurn] = {}
        self._num_calls = self._num_asked = 0
        self._is_closed = False

    def note_call(self) -> None:
        """Counts a call. Refusal once there are more than a program needs that asks for every turn again."""
        self._num_calls += 1
        if self._num_calls > (most := CALLS_OF_A_TURN * self._terms.max_turns):
            raise Refusal(400, "turns", f"this conversation has had its {most} calls")

    def prompt_of(
        self, messages: Sequence[Message], tools: Sequence[Json], turn_format: TurnFormat
    ) -> tuple[tuple[int, ...], AskedTurn | None]:
        """Ids of a message history and the turn that they continue; of a new segment, None."""
        digests = histories(messages, tools)
        for known in range(len(messages) - 1, 0, -1):
            parent, others = self._by_history.get(digests[known]), messages[known:]
            if parent is not None and all(message["role"] != "assistant" for message in others):
                ended = parent.completion.stop is Stop.EOS
                return (*parent.head, *turn_format.continuation(parent.head, others, ended=ended)), parent
        return tuple(turn_format.opening(messages)), None

    def note_answer(self, turn: AskedTurn, messages: Sequence[Message], answer: Message, tools: Sequence[Json]) -> None:
        """Remembers the history that an answered turn ends."""
        self._by_history[histories([*messages, normal_message(answer)], tools)[-1]] = turn

    def ask(
        self, prompt_ids: tuple[int, ...], parent: AskedTurn | None, max_tokens: int | None, temperature: float
    ) -> AskedTurn:
        """The turn behind a prompt: the one that was asked before, or a new one."""
        turn = self._by_prompt.get(prompt_ids)
        if turn is not None and not turn.is_dropped:
            return turn
        if self._is_closed:  # while the body of the call came
            raise Refusal(404, "address", "this conversation has ended")
        terms, limits = self._terms, self._queue.limits
        if len(self._by_prompt) - (turn is not None) >= terms.max_turns:
            raise Refusal(400, "turns", f"this conversation has had its {terms.max_turns} turns")
        longest = min(limits.max_model_len, terms.max_total_tokens)
        if (room := longest - len(prompt_ids)) < 1:
            raise Refusal(
                400, "length", f"prompt of {len(prompt_ids)} tokens: the maximum context length is {longest} tokens"
            )
        name = f"{self.name}/{self._num_asked}"
        most = min(room, terms.max_tokens, max_tokens or room)
        try:
            future = self._queue.ask(TurnRequest(name, prompt_ids, self._turn_seed(prompt_ids), most, temperature))
        except ValueError as error:
            raise Refusal(400, "ids", str(error)) from error
        except RuntimeError as error:
            raise Refusal(503, "stopped", str(error)) from error
        self._num_asked += 1
        turn = self._by_prompt[prompt_ids] = AskedTurn(name, prompt_ids, parent or self._parent(prompt_ids), future)
        return turn

    def abort(self) -> None:
        """Ends all turns that still run; further calls are refused."""
        self._is_closed = True
        for turn in list(self._by_prompt.values()):
            turn.future.cancel()

    @property
    def segments(self) -> tuple[TokenSegment, ...]:
        """Sampled turns, in the order in which they were asked."""
        ended = [turn for turn in self._by_prompt.values() if turn.completion is not None]
        chains: dict[AskedTurn, list[AskedTurn]] = {}  # by the last turn
        for turn in ended:
            chains[turn] = [*chains.pop(turn.parent, ()), turn]
        found = []
        for chain in sorted(chains.values(), key=lambda chain: ended.index(chain[0])):
            heads = [chain[0].prompt_ids, *(turn.head for turn in chain)]
            turns = [(turn.prompt_ids[len(head) :], turn.completion) for head, turn in zip(heads, chain, strict=False)]
            found.append(TokenSegment(chain[0].prompt_ids, tuple(turns)))
        return tuple(found)

    def _parent(self, prompt_ids: tuple[int, ...]) -> AskedTurn | None:
        """The longest turn that this prompt continues."""
        ended = [turn for turn in self._by_prompt.values() if turn.completion is not None]
        begins = [turn for turn in ended if prompt_ids[: len(turn.head)] == turn.head]
        return max(begins, key=lambda turn: len(turn.head), default=None)

    def _turn_seed(self, prompt_ids: tuple[int, ...]) -> int:
        content = self._seed.to_bytes(8, "little") + np.asarray(prompt_ids, "<i4").tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


class Endpoint:
    """The HTTP server, in a thread of its own, over a queue of turns.

    refused   counts of calls by reason: key, address, body, nesting, ids, length, parameters, turns, messages, stopped,
              busy, gone (the program hung up)
    """

    def __init__(
        self, turns: TurnQueue, model: str, secret: str, format_of: FormatOf, terms: Terms, *, seed: int | None = None
    ) -> None:
        """`format_of` makes the turn format for a list of tools, and is called on the endpoint's thread.

        seed   of an endpoint without a trainer: a conversation is then whatever its program calls it, and its key is
               the secret; None: conversations are opened by `open`, each with a key of its own
        """
        self._turns, self._model, self._secret, self._terms, self._seed = turns, model, secret, terms, seed
        self._format_of = lru_cache(maxsize=64)(lambda tools: format_of(json.loads(tools)))
        self._conversations: OrderedDict[str, ForeignConversation] = OrderedDict()
        self.refused: Counter[str] = Counter()
        self._num_under_way = 0
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._address = ""

    def start(self, path: Path | None = None) -> str:
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
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(listener, ready),), name="endpoint", daemon=True
        )
        self._thread.start()
        ready.result()
        return self._address

    def stop(self) -> None:
        """Refuses new calls, gives those under way a second, and ends the thread."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()
            self._thread = None

    def open(self, name: str, seed: int) -> tuple[str, str]:
        """Address and key of a new conversation; `seed` in [0, 2^63) is its place in the run."""
        self._conversations[name] = ForeignConversation(name, seed, self._turns, self._terms)
        return f"{self._address}/conversations/{name}/v1", self._key(name)

    def close(self, name: str) -> tuple[TokenSegment, ...]:
        """Ends a conversation and returns its sampled turns; those that run are aborted, further calls refused."""
        conversation = self._conversations.pop(name)
        conversation.abort()
        return conversation.segments

    def _key(self, name: str) -> str:
        if self._seed is not None:
            return self._secret
        return hmac.digest(self._secret.encode(), f"conversation\n{name}".encode(), "sha256").hex()

    async def _serve(self, listener: socket.socket, ready: Future[None]) -> None:
        longest = min(self._turns.limits.max_model_len, self._terms.max_total_tokens)
        app = web.Application(client_max_size=MARGIN + BYTES_OF_A_TOKEN * longest)
        for prefix in ("/conversations/{name}", *([""] if self._seed is not None else [])):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._guarded(self._chat))
            app.router.add_post(f"{prefix}/inference/v1/generate", self._guarded(self._generate))
            app.router.add_get(f"{prefix}/v1/models", self._guarded(self._models))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        ready.set_result(None)
        await self._stopped.wait()
        await runner.cleanup()

    def _guarded(
        self, answer: Callable[[ForeignConversation, web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._num_under_way += 1
            try:
                return await answer(self._conversation_of(request), request)
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
        """The conversation of a call, by its address and its key."""
        name = request.match_info.get("name") or request.headers.get("X-Session-ID") or "default"
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
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
            if len(self._conversations) > MAX_KEPT:
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
        turn = conversation.ask(tuple(token_ids), None, *self._sampling(sampling))
        served = await self._answered(turn)
        return web.json_response(served.generated())

    async def _chat(self, conversation: ForeignConversation, request: web.Request) -> web.StreamResponse:
        asked = await self._read(conversation, request)
        sampling = self._sampling(asked)
        tools = asked.get("tools") or []
        if not isinstance(asked.get("messages"), list) or not asked["messages"] or not isinstance(tools, list):
            raise Refusal(400, "messages", "messages must be a list that is not empty, and tools a list")
        try:
            turn_format = self._format_of(json.dumps(tools, sort_keys=True))
            messages = [normal_message(message) for message in asked["messages"]]
            prompt_ids, parent = conversation.prompt_of(messages, tools, turn_format)
        except Exception as error:  # a template, a renderer or a tokenizer may raise anything of what it is given
            reason = str(error).partition("\n")[0][:500]
            raise Refusal(400, "messages", f"these messages cannot be written: {reason}") from error
        turn = conversation.ask(prompt_ids, parent, *sampling)
        served = await self._answered(turn)
        answer = turn_format.parse(served.token_ids, turn.prompt_ids).message
        conversation.note_answer(turn, messages, answer, tools)
        shown, has_logprobs = _shown(answer), bool(asked.get("logprobs"))
        if not asked.get("stream"):
            return web.json_response(served.chatted(shown, has_logprobs=has_logprobs))
        options = asked.get("stream_options")
        has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return await self._stream(request, served.streamed(shown, has_logprobs=has_logprobs, has_usage=has_usage))

    async def _stream(self, request: web.Request, chunks: Sequence[Json]) -> web.StreamResponse:
        """Chunks as server-sent events. They come when the turn has ended: the engine holds tokens back until then."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        lines = [*map(json.dumps, chunks), "[DONE]"]
        await response.write("".join(f"data: {line}\n\n" for line in lines).encode())
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
        if asked.get("model") not in (None, self._model):
            raise Refusal(404, "address", f"the model here is {self._model}")
        return asked

    async def _answered(self, turn: AskedTurn) -> ServedTurn:
        """Waits for a turn. The last call that hangs up aborts it."""
        turn.num_waiting += 1
        ended = asyncio.Event()
        turn.future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(ended.set))
        try:
            await ended.wait()
        finally:
            turn.num_waiting -= 1
            if not turn.num_waiting:
                turn.future.cancel()
        if (completion := turn.completion) is None:
            raise Refusal(503, "stopped", "this turn was cut: the engine answers no more turns of this conversation")
        return ServedTurn(turn.name, self._model, turn.prompt_ids, completion)

    def _sampling(self, asked: Mapping[str, Any]) -> tuple[int | None, float]:
        """Tokens and temperature that a call asks for."""
        for key, value in asked.items():
            if key in READ or key in WITHOUT_EFFECT or value is None:
                continue
            if key not in NEUTRAL or value not in NEUTRAL[key]:
                known = f"may only be {NEUTRAL[key][0]!r} here" if key in NEUTRAL else "is not known here"
                raise Refusal(400, "parameters", f"{key!r:.60} {known}: turns are sampled as the run samples")
        stops = asked.get("stop_token_ids") or []
        # A renderer names all tokens that may end a turn of its family, of which the run's are some.
        if stops and (not isinstance(stops, list) or not any(stop in stops for stop in self._terms.stop_ids)):
            raise Refusal(400, "parameters", f"turns end by {list(self._terms.stop_ids)}, none of stop_token_ids")
        most = _number(asked, "max_completion_tokens", 1, 2**31) or _number(asked, "max_tokens", 1, 2**31)
        own = _number(asked, "temperature", 0.0, 100.0)
        temperature = self._terms.temperature if self._terms.temperature is not None else own
        return None if most is None else int(most), 1.0 if temperature is None else float(temperature)


def _number(asked: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
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


def normal_message(message: Any) -> Message:
    """A chat message with text content and with arguments of calls as objects. ValueError for another one."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"a message needs a role of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError("content may only have parts of text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise ValueError("content must be a text")
    texts = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    normal = {"role": message["role"], "content": content or "", **texts}
    if isinstance(thinking := message.get("reasoning_content") or message.get("reasoning"), str):
        normal["reasoning_content"] = thinking
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in calls]
    return normal


def _normal_call(call: Any) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):  # what is no JSON stays the text that the program sent
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id")),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": arguments},
    }


def _shown(answer: Message) -> Message:
    """An own turn as programs get it: arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.get("tool_calls", ())
    ]
    return {**answer, "tool_calls": calls}


def histories(messages: Sequence[Message], tools: Sequence[Json]) -> list[bytes]:
    """Digest of the first n messages for every n, without what programs do not send back: thinking, ids of calls."""
    digests = [hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()]
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = json.dumps([message["role"], message["content"], message.get("name"), calls], sort_keys=True)
        digests.append(hashlib.blake2b(digests[-1] + said.encode(), digest_size=16).digest())
    return digests
