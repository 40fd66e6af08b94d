"""Record of one agent program's conversation: what it asked, what was sampled, and the answer that this makes.

A message history that begins with what the conversation has is continued token by token; any other one begins a
segment. The sampled tokens are those of the engine, never what a program sends back. A turn's seed is a hash of its
conversation's seed and its prompt, never of the order in which calls arrive.

Elsewhere: HTTP (endpoint.py).
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from hacpo_grading.texts.chat_messages import messages_problem, messages_text, tools_problem
from hacpo_mega.conversations.seat import PlayLimits
from hacpo_mega.conversations.tool_calls import Message, ParsedTurn
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.records import HISTORY, Completion, Conversation, History, Stop, Turn
from hacpo_mega.rollout.vllm.engine_loop import TurnRequest
from hacpo_mega.rollout.vllm.server_types import Json
from hacpo_mega.samples.tokenizers import TextCodec

# A client may repeat a call; openai's does so twice.
CALLS_OF_A_TURN = 3
ROLES = ("system", "developer", "user", "assistant", "tool")
MERGED = {"developer": "system"}


class Refusal(Exception):
    """A call that is not answered: HTTP status, the word that it is counted under, and one line."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Terms:
    """Limits and sampling of every program, whatever it asks for.

    stop_ids       tokens that end a turn, as the engine has them
    limits         of a conversation; `as_rendered`: all segments are trained, else the one with the most own tokens
    max_tokens     tokens of an own turn
    temperature    of every turn; None: the program's own, 1 without one
    """

    stop_ids: Sequence[int]
    limits: PlayLimits
    max_tokens: int
    temperature: float | None = None


@dataclass(frozen=True)
class TurnPrompt:
    """Tokens before a turn.

    parent   the turn that they continue; None: they begin a segment
    others   messages behind the parent; of a segment's first turn none
    task     the messages that begin a segment, as a prompt's text; None for token ids, or a history of other turns
    history  the prompt that begins a segment, for other agents; None for token ids, or where they cannot read it
    """

    ids: tuple[int, ...]
    parent: "AskedTurn | None" = None
    others: Sequence[Message] = ()
    task: str | None = None
    history: History | None = None


@dataclass(eq=False)
class AskedTurn:
    """A turn that a program has asked for.

    seed         of its sampling; another prompt has another one
    num_waiting  calls that wait for it
    num_before   tokens of its segment's prompt
    parsed       its words and calls, once a call for messages has been answered
    """

    name: str
    prompt: TurnPrompt
    seed: int
    future: Future[Completion]
    max_tokens: int
    temperature: float
    num_waiting: int = 0
    parsed: ParsedTurn | None = None

    def __post_init__(self) -> None:
        parent = self.prompt.parent
        self.num_before: int = len(self.prompt.ids) if parent is None else parent.num_before

    @property
    def completion(self) -> Completion | None:
        """The sampled turn; None while it runs, and if it was cut or never answered."""
        if not self.future.done() or self.future.cancelled() or self.future.exception() is not None:
            return None
        return None if self.future.result().stop is Stop.CUT else self.future.result()

    @property
    def message(self) -> Message:
        """Chat message of what it says. Ids of calls are those of no other turn: many programs find a result by its id
        in the whole conversation, and drop one whose id they have seen.
        """
        message = self.parsed.message
        for n, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"{(self.seed + n) % 16**9:09x}"
        return message

    @property
    def is_dropped(self) -> bool:
        """True if it has ended without an answer, so that asking again samples it."""
        return self.future.done() and self.completion is None

    def answers(self, max_tokens: int, temperature: float) -> bool:
        """True if it is the turn that such a call gets: not if it was cut where this one may go on."""
        is_cut = self.completion is not None and self.completion.stop is Stop.LENGTH
        return not self.is_dropped and self.temperature == temperature and not (is_cut and max_tokens > self.max_tokens)

    @property
    def head(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return (*self.prompt.ids, *self.completion.token_ids.tolist())


class ForeignConversation:
    """Record of one program's conversation. The endpoint's thread alone uses it.

    is_limited   whether a call was refused for a limit of turns or tokens
    busy_s       seconds in which calls were under way
    """

    def __init__(self, name: str, seed: int, turns: TurnQueue, terms: Terms) -> None:
        self.name, self._seed, self._queue, self._terms = name, seed, turns, terms
        self._by_prompt: dict[tuple[int, ...], AskedTurn] = {}  # the last turn of each
        self._all: list[AskedTurn] = []
        self._by_history: dict[bytes, AskedTurn] = {}
        self._num_calls = self._num_asked = self._num_under_way = 0
        self._is_closed = self.is_limited = False
        # When calls have been under way since, and when the last call that asked for a turn ended.
        self._busy_since = self._last_asked = time.monotonic()
        self.busy_s, self._has_asked = 0.0, False

    @contextmanager
    def call(self) -> Iterator[None]:
        """A context that lasts for one call, from its headers to its answer."""
        if not self._num_under_way:
            self._busy_since = time.monotonic()
        self._num_under_way += 1
        try:
            yield
        except Refusal as refusal:
            self.is_limited |= refusal.kind in ("turns", "length")
            raise
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                ended = time.monotonic()
                self.busy_s += ended - self._busy_since
                self._last_asked, self._has_asked = ended if self._has_asked else self._last_asked, False

    @property
    def idle_s(self) -> float:
        """Seconds since the last call that asked for a turn; 0 while any is under way.

        Refused calls do not count: a program may repeat them for ever.
        """
        return 0.0 if self._num_under_way else time.monotonic() - self._last_asked

    def note_call(self) -> None:
        """Counts a call. Refusal once there are more than a program needs that asks for every turn again."""
        self._num_calls += 1
        if self._num_calls > (most := CALLS_OF_A_TURN * self._terms.limits.max_turns):
            raise Refusal(400, "turns", f"this conversation has had its {most} calls")

    def prompt_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json],
        turn_format: TurnFormat,
        codec: TextCodec | None = None,
    ) -> TurnPrompt:
        """Tokens of a message history. A `codec` writes the messages that begin a segment as a run's prompt.

        ValueError for messages that cannot be written.
        """
        digests = history_digests(messages, tools)
        for known in range(len(messages) - 1, 0, -1):
            parent, others = self._by_history.get(digests[known]), messages[known:]
            if parent is not None and all(message["role"] != "assistant" for message in others):
                ended = parent.completion.stop is Stop.EOS
                ids = (*parent.head, *turn_format.continuation(parent.head, others, ended=ended))
                return TurnPrompt(ids, parent, _named(others, parent))
        history = None if codec is None else history_of(messages, tools, codec.prompting.chat_template)
        task = None if history is None or history.messages else history.task
        if task is not None:
            return TurnPrompt(tuple(codec.encode_prompt(task)), task=task, history=history)
        if history is not None:  # in the run's wording, as other agents read it
            messages = [*codec.prompting.messages(history.task), *history.messages]
        ids = turn_format.opening(messages)
        return TurnPrompt(tuple(ids), task=task, history=history)

    def note_answer(
        self, turn: AskedTurn, messages: Sequence[Message], parsed: ParsedTurn, tools: Sequence[Json]
    ) -> None:
        """Remembers what an answered turn says, and the history that it ends."""
        turn.parsed = parsed
        self._by_history[history_digests([*messages, normal_message(turn.message)], tools)[-1]] = turn

    def ask(self, prompt: TurnPrompt, max_tokens: int | None, temperature: float) -> AskedTurn:
        """The turn that follows a prompt: the one that was asked before, or a new one."""
        turn, terms, room = self._by_prompt.get(prompt.ids), self._terms, self._room(prompt)
        most = min(room, terms.max_tokens, max_tokens or room)
        if turn is not None and turn.answers(most, temperature):
            self._has_asked = True
            return turn
        if self._is_closed:  # while the body of the call came
            raise Refusal(404, "address", "this conversation has ended")
        if len(self._by_prompt) - (turn is not None) >= terms.limits.max_turns:
            raise Refusal(400, "turns", f"this conversation has had its {terms.limits.max_turns} turns")
        name, seed = f"{self.name}/{self._num_asked}", self._turn_seed(prompt.ids)
        try:
            future = self._queue.ask(TurnRequest(name, prompt.ids, seed, most, temperature))
        except ValueError as error:
            raise Refusal(400, "ids", str(error)) from error
        except RuntimeError as error:
            raise Refusal(503, "stopped", str(error)) from error
        self._num_asked, self._has_asked = self._num_asked + 1, True
        turn = self._by_prompt[prompt.ids] = AskedTurn(name, prompt, seed, future, most, temperature)
        self._all.append(turn)
        return turn

    def _room(self, prompt: TurnPrompt) -> int:
        """Tokens that may follow a prompt. Refusal without any."""
        num_ids, limits, most_ids = len(prompt.ids), self._terms.limits, self._queue.limits.max_model_len
        # max_prompt_tokens limits the prompt of the whole answer; those of further segments count in its length.
        begins = prompt.task is not None and not (limits.as_rendered and self._has_begun)
        longest = limits.max_prompt_tokens if begins else most_ids
        if prompt.parent is None and num_ids > longest:
            raise Refusal(400, "length", f"first prompt of {num_ids} tokens: its maximum context length is {longest}")
        num_before = num_ids if prompt.parent is None else prompt.parent.num_before
        longest = min(most_ids, limits.max_total_tokens + num_before)
        if (room := longest - num_ids) < 1:
            raise Refusal(400, "length", f"prompt of {num_ids} tokens: the maximum context length is {longest} tokens")
        return room

    @property
    def _has_begun(self) -> bool:
        return any(turn.prompt.task is not None for turn in self._all)

    @property
    def _ended(self) -> list[AskedTurn]:
        """Answered turns in the order in which they were asked, without those whose prompt was answered anew before
        anything continued them."""
        ended = [turn for turn in self._all if turn.completion is not None]
        last = {turn.prompt.ids: turn for turn in ended}
        kept = {*last.values(), *(turn.prompt.parent for turn in ended)}
        return [turn for turn in ended if turn in kept]

    def prompt_of_ids(self, prompt_ids: tuple[int, ...]) -> TurnPrompt:
        """Tokens that a program has made itself; they continue the longest turn that they begin with."""
        ended = [turn for turn in self._all if turn.completion is not None]
        begins = [turn for turn in ended if prompt_ids[: len(turn.head)] == turn.head]
        return TurnPrompt(prompt_ids, max(begins, key=lambda turn: len(turn.head), default=None))

    def abort(self) -> None:
        """Ends all turns that still run; further calls are refused."""
        self._is_closed = True
        for turn in list(self._all):
            turn.future.cancel()

    @property
    def segments(self) -> list[list[AskedTurn]]:
        """Turns whose tokens only grew, in the order in which the first of each was asked."""
        ended = self._ended
        chains: dict[AskedTurn, list[AskedTurn]] = {}  # by the last turn
        for turn in ended:
            before = () if turn.prompt.parent is None else chains.pop(turn.prompt.parent, ())
            chains[turn] = [*before, turn]
        return sorted(chains.values(), key=lambda chain: ended.index(chain[0]))

    def completion(self, codec: TextCodec, reward: float | None, counts: Mapping[str, int]) -> Completion:
        """The conversation as an answer: its trained segments, one behind the other.

        `counts` are the driver's; those of turns and segments are added. Without a segment whose prompt is a text it
        has failed.
        """
        segments, trained = self.segments, self._trained_segments()
        turns_trained = [turn for segment in trained for turn in segment]
        parsed = [turn.parsed for turn in turns_trained if turn.parsed is not None]
        counted = Counter(counts) + Counter(
            calls=sum(len(one.tool_calls) for one in parsed),
            unreadable_calls=sum(one.error is not None for one in parsed),
            segments=max(0, len(trained) - 1),
            untrained_segments=len(segments) - len(trained),
        )
        if not turns_trained:
            empty = Conversation((Turn("assistant", "", 0, Stop.ABORT),), counts={**counted, "failed": 1})
            return Completion(np.zeros(0, np.int32), Stop.ABORT, np.zeros(0, np.float32), None, empty)
        turns, ids, logprobs = [], list[int](), list[np.ndarray]()
        task = turns_trained[0].prompt.task or ""
        for n, turn in enumerate(turns_trained):
            before, between = turn.prompt.parent, ()
            if before is not None:
                between = turn.prompt.ids[len(before.head) :]
            elif n:
                between = turn.prompt.ids
                turns.append(Turn(HISTORY, turn.prompt.history.content, len(between)))
            sizes = (len(between), *[0] * len(turn.prompt.others))  # the first message has the tokens of all
            turns += [
                Turn(one["role"], one["content"], size, name=one.get("name", ""))
                for one, size in zip(turn.prompt.others, sizes, strict=False)
            ]
            own, ended = turn.completion.token_ids.tolist(), turn.completion.stop is Stop.EOS
            text = codec.decode_answer(own[:-1] if ended else own)
            opens = codec.opened_before(task, turn.prompt.ids)
            turns.append(Turn("assistant", text, len(own), turn.completion.stop, opened=opens))
            ids += [*between, *own]
            logprobs += [np.zeros(len(between), np.float32), turn.completion.logprobs]
        stop = Stop.LENGTH if self.is_limited else turns_trained[-1].completion.stop
        counted["truncated"] += stop is Stop.LENGTH
        conversation = Conversation(tuple(turns), "", reward, dict(+counted), task)
        return Completion(np.array(ids, np.int32), stop, np.concatenate(logprobs), None, conversation)

    def _trained_segments(self) -> list[list[AskedTurn]]:
        """Segments that are trained, the first of them one whose prompt is a text that every agent can read.

        All that others can read and that max_total_tokens has room for; or the one with the most own tokens.
        """
        segments = self.segments
        begins = [segment for segment in segments if segment[0].prompt.task is not None]
        if not self._terms.limits.as_rendered or not begins:
            return [max(begins, key=_num_own)] if begins else []
        first, room = begins[0], self._terms.limits.max_total_tokens
        room -= len(first[-1].head) - first[0].num_before
        trained = [first]
        for segment in segments:
            num_tokens = len(segment[-1].head)
            if segment is not first and segment[0].prompt.history is not None and num_tokens <= room:
                trained.append(segment)
                room -= num_tokens
        return trained

    def _turn_seed(self, prompt_ids: tuple[int, ...]) -> int:
        content = self._seed.to_bytes(8, "little") + np.asarray(prompt_ids, "<i4").tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


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
    normal = {"name": str(function["name"]), "arguments": arguments}
    return {"id": str(call.get("id")), "type": "function", "function": normal}


def _num_own(segment: Sequence[AskedTurn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in segment)


def history_of(messages: Sequence[Message], tools: Sequence[Json], in_template: bool) -> History | None:
    """The messages that begin a segment as a task and the turns behind it; None where there is no such task.

    ValueError as `task_of`.
    """
    calls = (n for n, m in enumerate(messages) if m.get("tool_calls") or m["role"] == "tool")
    split = next(calls, len(messages))
    behind = [{**message, "role": MERGED.get(message["role"], message["role"])} for message in messages[split:]]
    try:
        return History(behind, task_of(messages[:split], tools, in_template))
    except ValueError:
        if not behind:
            raise
        return None


def task_of(messages: Sequence[Message], tools: Sequence[Json], in_template: bool) -> str:
    """The messages that begin a conversation as a prompt's text, which every agent can read.

    ValueError where a model without a chat template is shown more than one message.
    """
    chat = [{"role": MERGED.get(m["role"], m["role"]), "content": m["content"]} for m in messages]
    if (problem := messages_problem(chat) or (tools_problem(list(tools)) if tools else None)) is not None:
        raise ValueError(problem)
    if in_template:
        return messages_text(chat, tools)
    if len(chat) > 1:
        raise ValueError("a model without a chat template reads one message of the user")
    return chat[0]["content"]


def _named(others: Sequence[Message], parent: AskedTurn) -> list[Message]:
    """Messages behind a turn, those of tools with the names of the tools, and a developer's as the system's."""
    calls = () if parent.parsed is None else parent.message.get("tool_calls", ())
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [
        {
            "role": MERGED.get(one["role"], one["role"]),
            "content": one["content"],
            "name": one.get("name") or names.get(one.get("tool_call_id"), ""),
        }
        for one in others
    ]


def history_digests(messages: Sequence[Message], tools: Sequence[Json]) -> list[bytes]:
    """Digest of the first n messages for every n, without what programs do not send back: thinking, ids of calls."""
    digests = [hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()]
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        content = json.dumps([message["role"], message["content"], message.get("name"), calls], sort_keys=True)
        digests.append(hashlib.blake2b(digests[-1] + content.encode(), digest_size=16).digest())
    return digests
