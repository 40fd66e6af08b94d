"""Driver of conversations: turns of agents from their engines, between them the environment's, without a barrier.

`Player.play` stands in for `Engine.generate`. The engine runs in the thread that calls it; the environment's calls run
on an event loop in a thread of the player. A turn that ends goes to its conversation at once, and the next turn joins
the engine's batch while others run.
Where roles are played by several agents, each has a seat in every conversation (seat.py). The player of the first role
drives, and asks the others' seats in their processes (partners.py); their players wait until all is ended.
An agent program converses with an endpoint instead (endpoint.py), which lives as long as one call of `play`.
Seeds are functions of the answer's seed and the turn, so the order in which an environment answers changes no draw.

Elsewhere: the environment's contract (environment.py), tokens of turns (seat.py), steps of the engine
(rollout/vllm/engine_loop.py).
"""

import asyncio
import functools
import json
import secrets
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from hacpo_mega.cluster.security.secret import AuthListener
from hacpo_mega.config.tables.schema import ConversationConfig
from hacpo_mega.conversations.endpoint import Endpoint
from hacpo_mega.conversations.environment import EnvironmentClass, Episode, prompt_messages, with_observation
from hacpo_mega.conversations.foreign_conversation import Terms
from hacpo_mega.conversations.partners import OtherSeat, Partners, SeatConnections, SeatKey, SeatServer
from hacpo_mega.conversations.seat import AnySeat, Ending, PlayLimits, Seat, SeatContext, Spoken, TurnSampling
from hacpo_mega.conversations.tool_calls import Message
from hacpo_mega.conversations.turn_format import TurnFormat
from hacpo_mega.conversations.turn_queue import TurnQueue
from hacpo_mega.records import Completion, Prompt, Stop
from hacpo_mega.rollout.vllm.engine_loop import ServeTally, TurnLimits, TurnRequest, TurnSource
from hacpo_mega.rollout.wire import LONE_SURROGATE
from hacpo_mega.samples.tokenizers import TextCodec


class Dialogue:
    """One conversation from its first turn to its end: who speaks, and what each agent reads.

    Every role reads what the others say, and what the environment says behind it; results of tools go to the role that
    called them. The environment ends the conversation, or a turn that does, or the limit of turns.
    """

    def __init__(self, seats: Sequence[AnySeat], roles: Sequence[str], episode: Episode, max_turns: int) -> None:
        """`max_turns` are those of each role; a role without a name speaks alone."""
        self._seats, self._roles, self._episode, self._max_turns = seats, roles, episode, max_turns
        self._unread: list[list[Message]] = [[] for _ in seats]  # by seat, since its last turn
        self._num_turns = [0] * len(seats)
        self._last: tuple[int, Spoken] | None = None  # the last turn, and its seat
        self.messages: list[Message] = []
        self.stop = Stop.ABORT
        self.trouble = ""
        self.num_call_errors = 0

    @property
    def was_spoken(self) -> bool:
        return self._last is not None

    async def run(self, opening: str, *, responds: bool) -> None:
        """Plays it; `opening` is what the environment adds to the task."""
        speaker = 0
        while True:
            news, self._unread[speaker] = self._unread[speaker], []
            spoken = await self._seats[speaker].speak(news, opening)
            if spoken.trouble:
                self.trouble, self.stop = spoken.trouble, Stop.LENGTH if self.was_spoken else Stop.ABORT
                return
            self._add_turn(speaker, spoken)
            if spoken.stop is not Stop.EOS:
                return
            reaction = await self._episode.react(spoken.tool_calls, self.messages)
            self.num_call_errors += sum(message["content"].startswith("{'error': ") for message in reaction)
            others = [{**message, "content": _encodable(message["content"])} for message in reaction]
            passes_on = len(self._seats) > 1 and not spoken.tool_calls
            if self._episode.failure is not None or not (others or (passes_on and not responds)):
                return
            self.messages += others
            speaker = self._pass_on(speaker, spoken, others, passes_on=passes_on)
            if self._num_turns[speaker] == self._max_turns:
                self.stop = Stop.LENGTH if others else self.stop
                return

    def _add_turn(self, speaker: int, spoken: Spoken) -> None:
        self._num_turns[speaker] += 1
        self._last, self.stop = (speaker, spoken), spoken.stop
        named = {"name": self._roles[speaker]} if self._roles else {}
        self.messages.append({"role": "assistant", "content": spoken.text, **named})

    def _pass_on(self, speaker: int, spoken: Spoken, others: list[Message], *, passes_on: bool) -> int:
        """Keeps the messages for the seats that read them; returns the seat that speaks next."""
        if not passes_on:
            self._unread[speaker] += others
            return speaker
        for seat, unread in enumerate(self._unread):
            if seat != speaker:
                unread.append({"role": "user", "content": _encodable(spoken.content), "name": self._roles[speaker]})
            unread += others
        return (speaker + 1) % len(self._seats)

    def ending(self, seat: int, reward: Any, counts: Counter[str]) -> Ending:
        """The end as a seat gets it; a mapping of rewards has one for each role."""
        mine = reward[self._roles[seat]] if isinstance(reward, dict) else reward
        answer = None
        if self._last is not None and self._last[0] != seat:
            speaker, spoken = self._last
            answer = self._roles[speaker], spoken.text, spoken.opened
        return Ending(self.stop, mine, dict(counts), answer)


class TurnEngine(Protocol):
    """The part of an engine that plays conversations (rollout/engine.py)."""

    eos_ids: Sequence[int]

    @property
    def turn_limits(self) -> TurnLimits: ...
    def serve(self, source: TurnSource | None) -> ServeTally: ...


class Player:
    """Plays one agent's conversations with an environment, any number at once.

    tally   counts of the engine in the last `play`
    """

    def __init__(
        self, environment: EnvironmentClass, codec: TextCodec, limits: PlayLimits, partners: Partners | None = None
    ) -> None:
        """`codec` is used from the player's thread alone; `partners` where roles are played by several agents."""
        self._environment, self._codec, self._partners = environment, codec, partners
        self.format = turn_format(codec, environment, has_roles=partners is not None)
        self._limits = limits
        self._num_plays = 0
        self.tally: ServeTally | None = None
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._connections = None if partners is None else SeatConnections(partners)
        self._seats: dict[SeatKey, asyncio.Future[Seat]] = {}  # of this agent, for drivers in other processes

    def serve_seats(self, listener: AuthListener) -> None:
        """Serves this agent's seats to the drivers in other processes that connect to `listener`."""
        self._start()
        SeatServer(listener, self._loop, self._seat_of)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="conversations", daemon=True)
            self._thread.start()

    def play(
        self,
        engine: TurnEngine,
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

        `max_tokens` is the most of one own turn. `on_answer` is called for each conversation as it ends, on the
        player's thread. Once `is_unwanted` returns true, all are dropped. Raises the engine's error. Where several
        agents play, all call it for the same prompts.
        """
        self._start()
        sampling = TurnSampling(max_tokens, temperature, return_logprobs)
        # Evaluation may ask for a turn that is longer than a conversation of training.
        limits = replace(self._limits, max_total_tokens=max(self._limits.max_total_tokens, max_tokens))
        self._num_plays += 1
        turns = TurnQueue(engine.turn_limits, is_unwanted)
        if self._environment.plays:
            terms = Terms(engine.eos_ids, limits, max_tokens, temperature)
            work = self._run_programs(places, seeds, turns, terms, on_answer)
        else:
            work = self._play_all(places, seeds, turns, limits, sampling, on_answer)
        playing = asyncio.run_coroutine_threadsafe(_retrieving_errors(work), self._loop)
        playing.add_done_callback(lambda _: turns.finish())
        try:
            self.tally = engine.serve(turns)
        except BaseException:
            playing.cancel()
            raise
        if is_unwanted():
            playing.cancel()
            return []
        return playing.result()

    async def _run_programs(
        self,
        places: Sequence[tuple[Prompt, int]],
        seeds: Sequence[int],
        turns: TurnQueue,
        terms: Terms,
        on_answer: Callable[[int, Completion], None] | None,
    ) -> list[Completion]:
        """Runs a program for each place, all against one endpoint on this event loop."""
        endpoint = Endpoint(turns, "agent", secrets.token_hex(32), self._format_of, terms, codec=self._codec)
        await endpoint.begin()

        def one(n: int) -> Awaitable[Completion]:
            return self._run_program(endpoint, str(n), places[n][0], seeds[n])

        try:
            return await _gather(one, len(places), on_answer)
        finally:
            await endpoint.end()

    def _format_of(self, tools: Sequence[Mapping[str, Any]]) -> TurnFormat:
        """The turn format of a program that shows these tools."""
        return TurnFormat.of(self._codec, tools, plays_user=True)

    async def _run_program(self, endpoint: Endpoint, name: str, prompt: Prompt, seed: int) -> Completion:
        """One program's conversation. A program that fails leaves it unjudged; one that meets a limit is truncated."""
        episode, reward = self._environment.episode(seed), None
        url, key, conversation = endpoint.open(name, seed)
        try:
            await episode.begin(row_of(prompt))
            if episode.failure is None:
                error = await episode.play(url, key, lambda: conversation.idle_s)
                episode.seconds -= conversation.busy_s
                if error is not None and not conversation.is_limited:
                    episode.fail("play", error)
            endpoint.close(name)
            if episode.failure is None:
                reward = await episode.reward()
        finally:
            episode.close()
        counts = _event_counts(episode, has_failed=episode.failure is not None)
        return conversation.completion(self._codec, reward, counts)

    async def _play_all(
        self,
        places: Sequence[tuple[Prompt, int]],
        seeds: Sequence[int],
        turns: TurnQueue,
        limits: PlayLimits,
        sampling: TurnSampling,
        on_answer: Callable[[int, Completion], None] | None,
    ) -> list[Completion]:
        def ask(request: TurnRequest) -> Awaitable[Completion]:
            return asyncio.wrap_future(turns.ask(request))

        context = SeatContext(self._codec, self.format, limits, ask, sampling)
        prompts = enumerate(zip(places, seeds, strict=True))
        seats = [Seat(str(n), prompt, seed, context) for n, ((prompt, _), seed) in prompts]
        keys = [(self._num_plays, prompt.index, g) for prompt, g in places]

        async def one(n: int) -> Completion:
            if self._partners is None or self._partners.drives:
                roles = () if self._partners is None else self._partners.names
                everyone = self._all_seats(n, seats[n], keys[n], sampling)
                await _drive(self._environment, seats[n], everyone, roles, self._limits.max_turns)
            return await seats[n].completion

        if self._partners is not None:
            for key, seat in zip(keys, seats, strict=True):
                self._seat_future(key).set_result(seat)
        try:
            return await _gather(one, len(places), on_answer)
        finally:
            for key in keys:
                self._seats.pop(key, None)

    def _seat_future(self, key: SeatKey) -> asyncio.Future[Seat]:
        return self._seats.setdefault(key, self._loop.create_future())

    async def _seat_of(self, key: SeatKey) -> Seat:
        """This agent's seat, once it plays: another agent may have begun before."""
        return await asyncio.shield(self._seat_future(key))

    def _all_seats(self, n: int, own: Seat, key: SeatKey, sampling: TurnSampling) -> list[AnySeat]:
        """Seats of all roles in one of the conversations, in the order in which they speak."""
        is_greedy = sampling.temperature == 0.0
        if self._partners is None or self._connections is None:
            return [own]
        others = (self._partners.seat_rank(role, n, is_greedy) for role in range(1, len(self._partners.names)))
        return [own, *(OtherSeat(self._connections, self._partners, rank, key) for rank in others)]

    def close(self) -> None:
        """Ends the thread of the conversations. May be called twice."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None


async def _drive(
    environment: EnvironmentClass, first: Seat, seats: Sequence[AnySeat], roles: Sequence[str], max_turns: int
) -> None:
    """Plays one conversation and ends it for all seats. An environment that fails ends it, counted and unjudged."""
    episode, reward = environment.episode(first.seed), None
    dialogue = Dialogue(seats, roles, episode, max_turns)
    row = row_of(first.prompt)
    try:
        opening = _encodable(await episode.begin(row) or "")
        dialogue.messages = with_observation(prompt_messages(row), opening)
        if episode.failure is None:
            await dialogue.run(opening, responds=environment.responds)
            if dialogue.was_spoken and dialogue.trouble != "unencodable":
                reward = await episode.reward(roles)
    finally:
        episode.close()
    has_failed = episode.failure is not None or dialogue.trouble == "unencodable"
    counts = _event_counts(episode, has_failed=has_failed)
    counts["unencodable"] += dialogue.trouble == "unencodable"
    counts["too_long"] += dialogue.trouble == "too_long"
    counts["truncated"] += dialogue.stop is Stop.LENGTH
    counts["call_errors"] += dialogue.num_call_errors
    for place, seat in enumerate(seats):
        await seat.end(dialogue.ending(place, None if has_failed else reward, counts))


def _event_counts(episode: Episode, *, has_failed: bool) -> Counter[str]:
    """EVENTS of a conversation, and the name under which its environment failed."""
    failure = {episode.failure: 1} if episode.failure is not None else {}
    timing = {"timeouts": episode.failure == "hung", "environment_ms": round(1000 * episode.seconds)}
    return Counter(failed=has_failed, **timing, **failure)


class _ScriptedEngine:
    """An engine whose turns are given texts, the last of them again and again, with log-probs of 0."""

    def __init__(self, codec: TextCodec, texts: Sequence[str], max_model_len: int, eos_ids: Sequence[int]) -> None:
        self._codec, self._texts, self.eos_ids = codec, list(texts), eos_ids
        self.turn_limits = TurnLimits(len(codec.tokenizer), max_model_len)

    def serve(self, source: TurnSource | None) -> ServeTally:
        """Answers until the source is done; counts nothing."""
        while not source.is_done:
            for request in source.take(idle=True)[0]:
                text = self._texts[0] if len(self._texts) == 1 else self._texts.pop(0)
                source.give(request.key, _as_sampled(self._codec, text, request))
        return ServeTally()


def _as_sampled(codec: TextCodec, text: str, request: TurnRequest) -> Completion:
    """A given text as the completion of a request, with log-probs of 0."""
    ids = np.array(codec.encode_answer(text, ended=True), np.int32)
    stop = Stop.EOS if len(ids) <= request.max_tokens else Stop.LENGTH
    ids = ids[: request.max_tokens]
    return Completion(ids, stop, np.zeros(len(ids), np.float32))


def play_once(
    player: Player, codec: TextCodec, limits: PlayLimits, prompt: Prompt, texts: Sequence[str], max_tokens: int
) -> Completion:
    """One conversation on a prompt whose own turns are the given texts, of `max_tokens` at most."""
    engine = _ScriptedEngine(codec, texts, limits.max_prompt_tokens + limits.max_total_tokens, player.format.stop_ids)
    return player.play(engine, [(prompt, 0)], [0], max_tokens=max_tokens, return_logprobs=True)[0]


def play_roles(
    environment: EnvironmentClass,
    codecs: Mapping[str, TextCodec],
    limits: PlayLimits,
    prompt: Prompt,
    text: str,
    max_tokens: int,
) -> list[Completion]:
    """One conversation between roles, each with the tokenizer of its agent, in which all turns are one text."""

    def context_of(codec: TextCodec) -> SeatContext:
        async def ask(request: TurnRequest) -> Completion:
            return _as_sampled(codec, text, request)

        sampling = TurnSampling(max_tokens, return_logprobs=True)
        return SeatContext(codec, turn_format(codec, environment, has_roles=True), limits, ask, sampling)

    async def play() -> list[Completion]:
        seats = [Seat(role, prompt, 0, context_of(codec)) for role, codec in codecs.items()]
        await _drive(environment, seats[0], seats, tuple(codecs), limits.max_turns)
        return [await seat.completion for seat in seats]

    return asyncio.run(play())


def environment_of(conversation: ConversationConfig, *, has_roles: bool = False) -> EnvironmentClass | None:
    """The environment of a [conversation] table, loaded once in a process; None without conversations.

    ValueError, one line, for one that cannot be loaded, or says nothing where no other agent speaks.
    """
    if conversation.environment is None:
        return None
    environment = _load(conversation.environment, conversation.turn_timeout_s)
    if environment.plays and has_roles:
        raise ValueError(f"environment {environment.name} is an agent program, which speaks alone; leave [[roles]] out")
    if not (environment.tools or environment.responds or environment.plays or has_roles):
        raise ValueError(
            f"environment {environment.name} has no tool (a public method) and does not derive from Responder, so only "
            "agents that play [[roles]] can converse in it"
        )
    return environment


def turn_format(codec: TextCodec, environment: EnvironmentClass, *, has_roles: bool = False) -> TurnFormat:
    """An agent's tokens of what others say in an environment. ValueError as of `TurnFormat.of`."""
    hears_users = environment.responds or environment.plays or has_roles
    return TurnFormat.of(codec, environment.tools, plays_user=hears_users)


@functools.cache
def _load(name: str, call_s: float) -> EnvironmentClass:
    return EnvironmentClass.load(name, call_s=call_s)


async def _retrieving_errors(work: Coroutine[Any, Any, list[Completion]]) -> list[Completion]:
    """The result of `work`. Marks its error as retrieved: where the engine dies, that error is the one to raise."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await work


async def _gather(
    play: Callable[[int], Awaitable[Completion]], number: int, on_answer: Callable[[int, Completion], None] | None
) -> list[Completion]:
    """The results of `number` conversations, in order, each given to `on_answer` as it ends. An error ends the rest."""

    async def play_one(n: int) -> Completion:
        completion = await play(n)
        if on_answer is not None:
            on_answer(n, completion)
        return completion

    playing = [asyncio.ensure_future(play_one(n)) for n in range(number)]
    try:
        return await asyncio.gather(*playing)
    finally:
        for conversation in playing:
            conversation.cancel()


async def _cancel_all() -> None:
    """Ends everything else on this event loop: connections of other processes, and what was dropped."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The data row of a prompt, as an environment's reset gets it."""
    return {"prompt": prompt.text, **(json.loads(prompt.row) if prompt.row else {})}


def _encodable(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return LONE_SURROGATE.sub("\ufffd", text)
