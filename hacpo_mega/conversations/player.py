"""Driver of conversations: the agent's turns from its engine, the environment's between them, no barrier between both.

`Player.play` stands in for `Engine.generate`. The engine runs in the thread that calls it; the environment's calls run
on an event loop in a thread of the player. A turn that ends goes to its conversation at once, and the next turn joins
the engine's batch while others run.
Seeds are functions of the answer's seed and the turn, so the order in which an environment answers changes no draw.
Own tokens are kept as sampled. The tokens between them are rendered once, as the template's continuation.

Not here: the environment's contract (environment.py), tokens of other turns (turn_format.py), steps of the engine
(rollout/engine_loop.py).
"""

import asyncio
import functools
import hashlib
import json
import queue
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hacpo_mega.config import Config
from hacpo_mega.conversations.environment import EnvironmentClass, Episode, prompt_messages, with_observation
from hacpo_mega.conversations.turn_format import Message, TurnFormat
from hacpo_mega.records import Completion, Conversation, Prompt, Stop, Turn
from hacpo_mega.rollout.engine_loop import TurnRequest
from hacpo_mega.rollout.wire import LONE_SURROGATE
from hacpo_mega.samples.tokenizers import TextCodec


def turn_seed(seed: int, turn: int) -> int:
    """Sampling seed of a conversation's own turn, in [0, 2^63); that of the first is the answer's own."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8).digest(), "little") >> 1


class _Unreadable(Exception):
    """The agent has no token for what the environment said."""


@dataclass
class Talk:
    """A conversation as far as it has come.

    head       ids of the prompt
    ids        ids after it; `logprobs`, float32 nats, has 0 for those that were not sampled
    stop       the last own turn's; LENGTH where a limit ended the conversation
    """

    head: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stop: Stop = Stop.ABORT

    @property
    def tokens(self) -> list[int]:
        """Everything that was read and written so far."""
        return [*self.head, *self.ids]

    def add_own(self, completion: Completion, text: str) -> None:
        """Appends a sampled turn."""
        ids = completion.token_ids.tolist()
        self.ids += ids
        self.logprobs += [0.0] * len(ids) if completion.logprobs is None else completion.logprobs.tolist()
        self.turns.append(Turn("assistant", text, len(ids), completion.stop))
        self.stop = completion.stop

    def add_others(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Appends what others said; the first message has the tokens of all."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        for n, message in enumerate(messages):
            size, name = (0 if n else len(ids)), message.get("name", "")
            self.turns.append(Turn(message["role"], message["content"], size, name=name))
        self.messages += messages


class Player:
    """Plays one agent's conversations with an environment, any number at once. A TurnSource of the engine's loop."""

    def __init__(self, environment: EnvironmentClass, codec: TextCodec, config: Config) -> None:
        """`codec` is used from the player's thread alone."""
        self._environment, self._codec = environment, codec
        self._format = TurnFormat.of(codec, environment.tools, plays_user=environment.responds)
        self._max_turns = config.conversation.max_turns
        self._max_prompt, self._max_total = config.rollout.max_prompt_tokens, config.longest_answer
        self._requests: queue.SimpleQueue[TurnRequest] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._num_playing = 0
        self._error: BaseException | None = None
        self._is_unwanted: Callable[[], bool] = lambda: False
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def play(
        self,
        serve: Callable[["Player"], None],
        places: Sequence[tuple[Prompt, int]],
        seeds: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        return_logprobs: bool = False,
        on_answer: Callable[[int, Completion], None] | None = None,
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """One conversation for each place, in order, as the completion of an answer with its turns.

        `serve` is `Engine.serve`. `max_tokens` is the most of one own turn. `on_answer` is called for each conversation
        as it ends, on the player's thread. Once `is_unwanted` returns true, all are dropped. Raises the engine's error.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True)
            self._thread.start()
        how = {"max_tokens": max_tokens, "temperature": temperature, "return_logprobs": return_logprobs}
        self._is_unwanted, self._error, self._num_playing = is_unwanted, None, len(places)
        playing = asyncio.run_coroutine_threadsafe(self._play_all(places, seeds, how, on_answer), self._loop)
        try:
            serve(self)
        finally:
            if not playing.done() and (self._error is not None or is_unwanted()):
                playing.cancel()
        return [] if is_unwanted() else playing.result()

    async def _play_all(
        self,
        places: Sequence[tuple[Prompt, int]],
        seeds: Sequence[int],
        how: dict[str, Any],
        on_answer: Callable[[int, Completion], None] | None,
    ) -> list[Completion]:
        async def one(n: int) -> Completion:
            try:
                completion = await self._converse(n, places[n], seeds[n], how)
                if on_answer is not None:
                    on_answer(n, completion)
                return completion
            finally:
                self._num_playing -= 1

        return await asyncio.gather(*map(one, range(len(places))))

    async def _converse(self, n: int, place: tuple[Prompt, int], seed: int, how: dict[str, Any]) -> Completion:
        """Plays one conversation. An environment that fails ends it, counted as failed and unjudged."""
        prompt, _ = place
        episode, played, opening, reward = self._environment.episode(seed), Talk([]), "", None
        row = {"prompt": prompt.text, **(json.loads(prompt.row) if prompt.row else {})}
        try:
            opening = _writable(await episode.begin(row) or "")
            played.messages = with_observation(prompt_messages(row), opening)
            if episode.failure is None and self._opens(played, prompt.text, opening):
                await self._take_turns(n, episode, played, seed, how)
                reward = await episode.reward()
        except _Unreadable:
            played.counts.update(("unencodable", "failed"))
        finally:
            played.counts["failed"] += episode.failure is not None or not played.turns
            played.counts["timeouts"] += episode.failure == "hung"
            played.counts["environment_ms"] += round(1000 * episode.seconds)
            episode.close()
        if not played.turns:  # it ended before the agent's first turn, for which there may be no prompt
            opening = ""
            played.turns.append(Turn("assistant", "", 0, Stop.ABORT))
        return _completion(played, opening, reward, has_logprobs=how["return_logprobs"])

    def _opens(self, played: Talk, task: str, opening: str) -> bool:
        """Sets the prompt; false for one that is too long."""
        try:
            played.head = list(self._codec.encode_prompt(task, opening))
        except ValueError as error:  # a character without a token, or a control token
            raise _Unreadable from error
        fits = len(played.head) <= self._max_prompt
        played.counts["too_long"] += not fits
        return fits

    async def _take_turns(self, n: int, episode: Episode, played: Talk, seed: int, how: dict[str, Any]) -> None:
        """Own turns and the environment's, until one of both ends the conversation, or a limit does."""
        for turn in range(self._max_turns):
            if not await self._own_turn(f"{n}.{turn}", played, turn_seed(seed, turn), how):
                return
            others = await self._others(episode, played)
            if not others or episode.failure is not None:
                return
            if turn + 1 == self._max_turns or not self._continues(played, others):
                played.stop = Stop.LENGTH
                played.counts["truncated"] += 1
                return

    async def _own_turn(self, key: str, played: Talk, seed: int, how: dict[str, Any]) -> bool:
        """Adds the agent's next turn; false if it did not end by itself."""
        room = min(how["max_tokens"], self._max_total - len(played.ids))
        request = TurnRequest(key, played.tokens, seed, room, how["temperature"], how["return_logprobs"])
        future = self._waiting[key] = self._loop.create_future()
        self._requests.put(request)
        completion = await future
        ended = completion.stop is Stop.EOS
        ids = completion.token_ids[:-1] if ended else completion.token_ids
        played.add_own(completion, self._codec.decode_answer(ids))
        played.counts["truncated"] += completion.stop is Stop.LENGTH
        return ended

    async def _others(self, episode: Episode, played: Talk) -> list[Message]:
        """Messages of the environment after an own turn; none at the end of the conversation."""
        own = played.turns[-1]
        before = len(played.ids) - own.num_tokens
        parsed = self._format.parse(played.ids[before:], [*played.head, *played.ids[:before]])
        played.messages.append({"role": "assistant", "content": own.content})
        played.counts["unreadable_calls"] += parsed.error is not None
        played.counts["calls"] += len(parsed.tool_calls)
        said = await episode.react(parsed, played.messages)
        played.counts["call_errors"] += sum(message["content"].startswith("{'error': ") for message in said)
        return [{**message, "content": _writable(message["content"])} for message in said]

    def _continues(self, played: Talk, others: Sequence[Message]) -> bool:
        """Adds others' turns, if the limit of the conversation leaves room for them and one own token."""
        try:
            ids = self._format.continuation(played.tokens, others, ended=True)
        except ValueError as error:  # a character without a token
            raise _Unreadable from error
        if len(played.ids) + len(ids) >= self._max_total:
            return False
        played.add_others(others, ids)
        return True

    def close(self) -> None:
        """Ends the thread of the conversations. May be called twice."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None

    def take(self, idle: bool) -> tuple[list[TurnRequest], list[str]]:
        """New requests, and keys of unwanted ones; waits up to .05 s where the engine has nothing to do."""
        found = []
        try:
            found.append(self._requests.get(timeout=0.05) if idle else self._requests.get_nowait())
            while True:
                found.append(self._requests.get_nowait())
        except queue.Empty:
            pass
        return found, list(self._waiting) if self._is_unwanted() else []

    def give(self, key: str, completion: Completion) -> None:
        """Hands an ended turn to its conversation."""
        self._loop.call_soon_threadsafe(self._hand_over, key, completion)

    def _hand_over(self, key: str, completion: Completion) -> None:
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(completion)

    def fail(self, error: BaseException) -> None:
        """Tells every conversation that the engine's loop has died."""
        self._error = error

        def tell() -> None:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            self._waiting.clear()

        self._loop.call_soon_threadsafe(tell)

    @property
    def is_done(self) -> bool:
        """True once no conversation is left, or nobody wants them."""
        return self._num_playing == 0 or self._is_unwanted()


def environment_of(config: Config) -> EnvironmentClass | None:
    """The environment that a configuration names, loaded once in a process; None without conversations.

    ValueError, one line, for one that cannot be loaded.
    """
    conversation = config.conversation
    return None if conversation.environment is None else _loaded(conversation.environment, conversation.turn_timeout_s)


@functools.cache
def _loaded(name: str, call_s: float) -> EnvironmentClass:
    return EnvironmentClass.load(name, call_s=call_s)


def _completion(played: Talk, opening: str, reward: float | None, *, has_logprobs: bool) -> Completion:
    conversation = Conversation(tuple(played.turns), opening, reward, dict(+played.counts))
    logprobs = np.array(played.logprobs, dtype=np.float32) if has_logprobs else None
    return Completion(np.array(played.ids, dtype=np.int32), played.stop, logprobs, None, conversation)


def _writable(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return LONE_SURROGATE.sub("\ufffd", text)
