"""Seats of other agents, in other processes of the job: who drives a conversation asks them for turns.

    driver -> seat   {"id", "seat": [call of play, prompt index, rollout index], "do": "speak", "heard", "opening"}
                     {"id", "seat", "do": "end", "ending"}
    seat -> driver   {"id", "value"} or {"id", "error"}
Frames of JSON over one connection for each pair of engines, after the handshake of the job's secret; texts travel, and
no token. Any number of questions is under way at once.

Elsewhere: who is where (cluster/rank_map.py), connections and the secret (cluster/place.py).
"""

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hacpo_mega.cluster.security.secret import AuthListener
from hacpo_mega.conversations.environment_process import HEADER, MAX_FRAME_BYTES, frame_of
from hacpo_mega.conversations.seat import AnySeat, Ending, Seat, Spoken
from hacpo_mega.conversations.tool_calls import Message
from hacpo_mega.records import Stop

MOST_HEARD = (MAX_FRAME_BYTES - 2**16) // 12  # characters, of 12 bytes at most in JSON
SeatKey = tuple[int, int, int]  # call of Player.play, prompt index, rollout index


class Line:
    """A connection to the process of other seats, on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._error: BaseException | None = None
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, **question: Any) -> Any:
        """The value of a reply. RuntimeError for an error, ConnectionError once the other process has hung up."""
        if self._error is not None:
            raise ConnectionError("the other process has hung up") from self._error
        number = next(self._ids)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame_of({"id": number, **question}))
        try:
            await self._writer.drain()
            return await answered
        finally:
            self._asked.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                reply = await _read(self._reader)
                answered = self._asked.get(reply["id"])
                if answered is None or answered.done():
                    continue
                if "error" in reply:
                    answered.set_exception(RuntimeError(str(reply["error"])))
                else:
                    answered.set_result(reply["value"])
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            self._error = error
            for answered in self._asked.values():
                if not answered.done():
                    answered.set_exception(ConnectionError(f"the other process has hung up ({error})"))
        finally:
            self._writer.close()


@dataclass(frozen=True)
class Partners:
    """The roles of a run's conversations, and the way to their engines.

    names       of the roles, in the order in which they speak
    mine        place of this process's role among them; the first one's processes drive
    connect     a connection to the seats of a rank; called in a thread
    rank_with   (role, place of an answer among this engine's, whether it is greedy) -> rank that has the seat
    named       a rank in words
    wait_s      most seconds that a turn of another process takes
    """

    names: tuple[str, ...]
    mine: int
    connect: Callable[[int], socket.socket]
    rank_with: Callable[[int, int, bool], int]
    named: Callable[[int], str]
    wait_s: float

    @property
    def drives(self) -> bool:
        """True where conversations are driven, and no other process asks."""
        return self.mine == 0


class Lines:
    """Connections to other seats' processes, each made when it is first needed. One event loop uses them."""

    def __init__(self, partners: Partners) -> None:
        self._partners = partners
        self._lines: dict[int, asyncio.Task[Line]] = {}

    async def to(self, rank: int) -> Line:
        """The line to a rank; OSError or RuntimeError where there is none."""
        if rank not in self._lines:
            self._lines[rank] = asyncio.create_task(self._connected(rank))
        return await asyncio.shield(self._lines[rank])

    async def _connected(self, rank: int) -> Line:
        connection = await asyncio.get_running_loop().run_in_executor(None, self._partners.connect, rank)
        return Line(*await asyncio.open_connection(sock=connection))


class OtherSeat:
    """A seat of another process. RunStopped names its rank where no turn comes in time."""

    def __init__(self, lines: Lines, partners: Partners, rank: int, key: SeatKey) -> None:
        self._lines, self._partners, self._rank, self._key = lines, partners, rank, key

    async def speak(self, heard: Sequence[Message], opening: str) -> Spoken:
        """The other agent's next turn; none where it would hear more than a frame holds, which no model reads."""
        if len(opening) + sum(len(message["content"]) for message in heard) > MOST_HEARD:
            return Spoken(trouble="full")
        found = await self._ask(do="speak", heard=list(heard), opening=opening)
        calls = tuple((str(name), dict(arguments)) for name, arguments in found["tool_calls"])
        return Spoken(found["text"], found["content"], calls, Stop(found["stop"]), found["trouble"], found["opened"])

    async def end(self, ending: Ending) -> None:
        """Ends the conversation there."""
        await self._ask(do="end", ending=asdict(ending))

    async def _ask(self, **question: Any) -> Any:
        who = f"the engine of {self._partners.named(self._rank)}"
        try:
            async with asyncio.timeout(self._partners.wait_s):
                line = await self._lines.to(self._rank)
                return await line.ask(seat=self._key, **question)
        except TimeoutError as error:
            raise RuntimeError(f"{who} has not answered a turn for {self._partners.wait_s:g} s (wait_s)") from error
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"{who} answers no turn: {error}") from error


class SeatDoor:
    """Answers the drivers in other processes, on one event loop; a thread lets them in."""

    def __init__(
        self, listener: AuthListener, loop: asyncio.AbstractEventLoop, seat_of: Callable[[SeatKey], Awaitable[Seat]]
    ) -> None:
        """`seat_of` may wait for a seat that is not there yet."""
        self._listener, self._loop, self._seat_of = listener, loop, seat_of
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._admit, name="seats", daemon=True).start()

    def _admit(self) -> None:
        with suppress(OSError, ValueError):  # the process ends
            while True:
                connection = self._listener.admit()
                self._loop.call_soon_threadsafe(self._keep, self._serve(connection))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins a task and holds it: an event loop alone would lose it to the garbage collector."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with suppress(OSError, EOFError, ValueError, TypeError, KeyError):  # the driver's process has ended
            while True:
                self._keep(self._answer(await _read(reader), writer))
        writer.close()

    async def _answer(self, question: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            play, prompt, rollout = question["seat"]
            reply = {"value": await _asked(await self._seat_of((play, prompt, rollout)), question)}
        except Exception as error:  # told to the driver, whose process ends with it
            reply = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            writer.write(frame_of({"id": question["id"], **reply}))
            await writer.drain()


async def _asked(seat: AnySeat, question: Mapping[str, Any]) -> Any:
    if question["do"] == "speak":
        return asdict(await seat.speak(question["heard"], question["opening"]))
    given = question["ending"]
    answer = None if given["answer"] is None else tuple(given["answer"])
    return await seat.end(Ending(Stop(given["stop"]), given["reward"], given["counts"], answer))


async def _read(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    """The next frame. EOFError at the end, ValueError for one that is none."""
    (num_bytes,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes")
    found = json.loads(await reader.readexactly(num_bytes))
    if not isinstance(found, dict):
        raise ValueError("a frame that is no object")
    return found
