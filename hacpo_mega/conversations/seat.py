"""One agent's side of a conversation: what it has read and said, in its own tokens.

The driver of the conversation (player.py) passes texts to a seat and gets texts back; tokens stay here. Own tokens are
kept as sampled. The tokens between them are rendered once, as the template's continuation.

Elsewhere: who speaks next (player.py), seats in other processes (partners.py), tokens of other turns (turn_format.py).
"""

import asyncio
import hashlib
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np

from hacpo_grading.texts.chat_messages import tools_of
from hacpo_mega.config import Config
from hacpo_mega.conversations.environment import merged_user_messages
from hacpo_mega.conversations.tool_calls import Message
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.records import HISTORY, Completion, Conversation, History, Prompt, Stop, Turn
from hacpo_mega.rollout.vllm.engine_loop import TurnRequest
from hacpo_mega.samples.tokenizers import TextCodec, with_opening

Trouble = Literal["", "too_long", "unencodable", "full"]


def turn_seed(seed: int, turn: int) -> int:
    """Sampling seed of an agent's own turn, in [0, 2^63); that of the first is the answer's own."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Spoken:
    """An own turn as the driver gets it.

    text         all of it, without its end token
    content      its words, without thinking and calls: what other agents read
    tool_calls   (name, arguments) of each
    stop         reason why it ended
    trouble      the reason why nothing was said: the prompt is too long, a text has no tokens, the conversation is full
    opened       as Turn.opened
    """

    text: str = ""
    content: str = ""
    tool_calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    stop: Stop = Stop.ABORT
    trouble: Trouble = ""
    opened: str = ""


@dataclass(frozen=True)
class Ending:
    """The end of a conversation, as every seat gets it.

    stop       of its last turn; LENGTH where a limit ended it
    reward     of the environment for this seat's agent; None: the judge grades the last turn
    counts     EVENTS of the whole conversation
    answer     (role, text, opened) of the last turn where another agent said it, else None
    """

    stop: Stop
    reward: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    answer: tuple[str, str, str] | None = None


class AnySeat(Protocol):
    """A seat in this process or in another one."""

    async def speak(self, others: Sequence[Message], opening: str) -> Spoken:
        """The next turn, behind what others said since the last one; `opening` follows the task in a first prompt."""

    async def end(self, ending: Ending) -> None:
        """Ends the conversation for this agent."""


class _Unreadable(Exception):
    """The agent has no token for what others said."""


@dataclass(frozen=True)
class PlayLimits:
    """Limits of a conversation: own turns, tokens of its prompt, and tokens after it.

    as_rendered  whether a rewritten history begins a segment that is trained, too (`conversation.history`)
    """

    max_turns: int
    max_prompt_tokens: int
    max_total_tokens: int
    as_rendered: bool = False

    @classmethod
    def of(cls, config: Config) -> Self:
        """Limits of a run's conversations."""
        talk = config.conversation
        return cls(talk.max_turns, config.rollout.max_prompt_tokens, config.longest_rollout, talk.as_rendered)


@dataclass(frozen=True)
class TurnSampling:
    """The sampling of every turn: `max_tokens` of one, and whether log-probs are returned."""

    max_tokens: int
    temperature: float = 1.0
    return_logprobs: bool = False


@dataclass(frozen=True)
class SeatContext:
    """Everything that the seats of an agent share: its tokenizer, its limits, its engine.

    ask    the completion of a request
    """

    codec: TextCodec
    format: TurnFormat
    limits: PlayLimits
    ask: Callable[[TurnRequest], Awaitable[Completion]]
    sampling: TurnSampling


class Seat:
    """An agent in one conversation.

    completion   the finished conversation, as the completion of an answer with its turns
    """

    def __init__(self, key: str, prompt: Prompt, seed: int, context: SeatContext) -> None:
        """`key` is unique among the conversations under way; `seed` is the answer's. Made on an event loop."""
        self.prompt, self.seed = prompt, seed
        self._key, self._context = key, context
        self._head: list[int] = []  # ids of the prompt
        self._ids: list[int] = []  # ids after it
        self._logprobs: list[float] = []  # float32 nats, 0 for those that were not sampled
        self._start: int | None = None  # of the last segment, in `_ids`; None: there is one segment, from the prompt on
        self._turns: list[Turn] = []
        self._messages: list[Message] = []  # all turns behind the task
        self._opening = ""
        self._num_own = 0
        self._counts: Counter[str] = Counter()
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    async def speak(self, others: Sequence[Message], opening: str) -> Spoken:
        """The agent's next turn; with `trouble` where it can take none."""
        try:
            trouble = self._continue(others) if self._turns else self._open(others, opening)
        except _Unreadable:
            trouble = "unencodable"
        return Spoken(trouble=trouble) if trouble else await self._own_turn()

    async def end(self, ending: Ending) -> None:
        """Makes the completion. An agent that has said nothing has an empty turn and no reward."""
        self._counts.update(ending.counts)
        reward = ending.reward
        if not self._turns:  # it ended before the agent's first turn, for which there may be no prompt
            self._opening, reward = "", None
            self._counts["failed" if ending.answer is None else "silent"] = 1
            self._turns.append(Turn("assistant", "", 0, Stop.ABORT))
        if ending.answer is not None:
            role, text, opens = ending.answer
            self._turns.append(Turn("user", text, 0, ending.stop, role, opens))
        conversation = Conversation(tuple(self._turns), self._opening, reward, dict(+self._counts))
        logprobs = np.array(self._logprobs, dtype=np.float32) if self._context.sampling.return_logprobs else None
        ids = np.array(self._ids, dtype=np.int32)
        if not self.completion.done():
            self.completion.set_result(Completion(ids, ending.stop, logprobs, None, conversation))

    def _open(self, others: Sequence[Message], opening: str) -> Trouble:
        """Sets the prompt, if it is short enough: the task, what the environment adds, and what others have said."""
        opening += self._context.format.text_of_others(others)
        try:
            head = list(self._context.codec.encode_prompt(self.prompt.text, opening))
        except ValueError as error:  # a character without a token
            raise _Unreadable from error
        if len(head) > self._context.limits.max_prompt_tokens:
            return "too_long"
        self._head, self._opening = head, opening
        return ""

    @property
    def _before(self) -> list[int]:
        """Tokens that the agent reads before its next one."""
        return [*self._head, *self._ids] if self._start is None else self._ids[self._start :]

    def _continue(self, others: Sequence[Message]) -> Trouble:
        """Adds others' turns, if the limit of the conversation leaves room for them and one own token."""
        messages = merged_user_messages([*self._messages, *others])
        try:
            ids = self._context.format.continuation(self._before, others, ended=True)
            rewritten = self._rewritten_prompt(ids, messages) if self._context.limits.as_rendered else None
        except ValueError as error:  # a character without a token
            raise _Unreadable from error
        new = ids if rewritten is None else rewritten
        if len(self._ids) + len(new) >= self._context.limits.max_total_tokens:
            return "full"
        for n, message in enumerate(others):  # the first message has the tokens of all
            size, name = (0 if n or rewritten is not None else len(ids)), message.get("name", "")
            self._turns.append(Turn(message["role"], message["content"], size, name=name))
        if rewritten is not None:
            self._start = len(self._ids)
            self._counts["segments"] += 1
            self._turns.append(Turn(HISTORY, History(messages).content, len(rewritten)))
        self._ids += new
        self._logprobs += [0.0] * len(new)
        self._messages = messages
        return ""

    def _rewritten_prompt(self, continuation: Sequence[int], history: list[Message]) -> list[int] | None:
        """The whole history as the template writes it; None where that is what the agent reads anyway."""
        codec, task = self._context.codec, with_opening(self.prompt.text, self._opening)
        messages = [*codec.prompting.messages(task), *history]
        return self._context.format.rewritten([*self._before, *continuation], messages, tools_of(task))

    async def _own_turn(self) -> Spoken:
        context, sampling, before = self._context, self._context.sampling, self._before
        room = min(sampling.max_tokens, context.limits.max_total_tokens - len(self._ids))
        seed, options = turn_seed(self.seed, self._num_own), (sampling.temperature, sampling.return_logprobs)
        completion = await context.ask(TurnRequest(f"{self._key}.{self._num_own}", before, seed, room, *options))
        self._num_own += 1
        ids, ended = completion.token_ids.tolist(), completion.stop is Stop.EOS
        text = context.codec.decode_answer(ids[:-1] if ended else ids)
        self._ids += ids
        self._logprobs += [0.0] * len(ids) if completion.logprobs is None else completion.logprobs.tolist()
        opens = context.codec.opened_before(self.prompt.text, before)
        self._turns.append(Turn("assistant", text, len(ids), completion.stop, opened=opens))
        if not ended:
            return Spoken(text, stop=completion.stop, opened=opens)
        parsed = context.format.parse(ids, before)
        self._messages.append(parsed.message)
        self._counts["unreadable_calls"] += parsed.error is not None
        self._counts["calls"] += len(parsed.tool_calls)
        return Spoken(text, parsed.content, parsed.tool_calls, completion.stop, opened=opens)
