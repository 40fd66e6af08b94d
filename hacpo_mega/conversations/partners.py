"""Seats of other agents, in other processes of the job: the driver of a conversation asks them for turns.

    driver -> seat   {"id", "seat": [call of play, prompt index, rollout index], "do": "speak", "others", "opening"}
                     {"id", "seat", "do": "end", "ending"}
    seat -> driver   {"id", "value"} or {"id", "error"}
Frames of JSON over one connection for each pair of engines, after the handshake with the job's secret. They carry
texts, never tokens. Any number of questions is under way at once.

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

MAX_CHARACTERS = (MAX_FRAME_BYTES - 2**16) // 12  # of a frame's texts; a character has at most 12 bytes in JSON
SeatKey = tuple[int, int, int]  # call of Player.play, prompt index, rollout index


class SeatConnection:
    """A connection to the process of another agent's seats, on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._error: BaseException | None = None
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, **question: Any) -> Any:
        """The value of a reply. RuntimeError for an error, ConnectionError once the other process has hung up."""
        if self._error is not None:
            raise ConnectionError("the other process has hung up") from self._error
        number = next(self._ids)
        answered = self._pending[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame_of({"id": number, **question}))
        try:
            await self._writer.drain()
            return await answered
        finally:
            self._pending.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                reply = await _read(self._reader)
                answered = self._pending.get(reply["id"])
                if answered is None or answered.done():
                    continue
                if "error" in reply:
                    answered.set_exception(RuntimeError(str(reply["error"])))
                else:
                    answered.set_result(reply["value"])
        except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
            self._error = error
            for answered in self._pending.values():
                if not answered.done():
                    answered.set_exception(ConnectionError(f"the other process has hung up ({error})"))
        finally:
            self._writer.close()


@dataclass(frozen=True)
class Partners:
    """The roles of a run's conversations, and the way to their engines.

    names       of the roles, in the order in which they speak
    role        index of this process's role among them; the processes of the first role drive
    connect     a connection to the seats of a rank; called in a thread
    seat_rank   (role, index of an answer among this engine's, whether it is greedy) -> rank that has the seat
    rank_text   a rank in words
    wait_s      most seconds that a turn of another process takes
    """

    names: tuple[str, ...]
    role: int
    connect: Callable[[int], socket.socket]
    seat_rank: Callable[[int, int, bool], int]
    rank_text: Callable[[int], str]
    wait_s: float

    @property
    def drives(self) -> bool:
        """True where this process drives conversations; else it waits for drivers."""
        return self.role == 0


class SeatConnections:
    """Connections to the processes of other seats, each made when it is first needed, on one event loop."""

    def __init__(self, partners: Partners) -> None:
        self._partners = partners
        self._connections: dict[int, asyncio.Task[SeatConnection]] = {}

    async def to(self, rank: int) -> SeatConnection:
        """The connection to a rank; OSError or RuntimeError where it cannot be made."""
        if rank not in self._connections:
            self._connections[rank] = asyncio.create_task(self._connected(rank))
        return await asyncio.shield(self._connections[rank])

    async def _connected(self, rank: int) -> SeatConnection:
        connection = await asyncio.get_running_loop().run_in_executor(None, self._partners.connect, rank)
        return SeatConnection(*await asyncio.open_connection(sock=connection))


class OtherSeat:
    """A seat of another process. RunStopped names its rank where no turn comes in time."""

    def __init__(self, connections: SeatConnections, partners: Partners, rank: int, key: SeatKey) -> None:
        self._connections, self._partners, self._rank, self._key = connections, partners, rank, key

    async def speak(self, others: Sequence[Message], opening: str) -> Spoken:
        """The other agent's next turn; none where the texts exceed a frame, which is more than any model reads."""
        if len(opening) + sum(len(message["content"]) for message in others) > MAX_CHARACTERS:
            return Spoken(trouble="full")
        turn = await self._ask(do="speak", others=list(others), opening=opening)
        calls = tuple((str(name), dict(arguments)) for name, arguments in turn["tool_calls"])
        return Spoken(turn["text"], turn["content"], calls, Stop(turn["stop"]), turn["trouble"], turn["opened"])

    async def end(self, ending: Ending) -> None:
        """Ends the conversation there."""
        await self._ask(do="end", ending=asdict(ending))

    async def _ask(self, **question: Any) -> Any:
        who = f"the engine of {self._partners.rank_text(self._rank)}"
        try:
            async with asyncio.timeout(self._partners.wait_s):
                connection = await self._connections.to(self._rank)
                return await connection.ask(seat=self._key, **question)
        except TimeoutError as error:
            raise RuntimeError(f"{who} has not answered a turn for {self._partners.wait_s:g} s (wait_s)") from error
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"{who} answers no turn: {error}") from error


class SeatServer:
    """Answers the drivers in other processes, on one event loop; a thread accepts their connections."""

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
            reply = {"value": await _answer_of(await self._seat_of((play, prompt, rollout)), question)}
        except Exception as error:  # sent to the driver, which raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            writer.write(frame_of({"id": question["id"], **reply}))
            await writer.drain()


async def _answer_of(seat: AnySeat, question: Mapping[str, Any]) -> Any:
    if question["do"] == "speak":
        return asdict(await seat.speak(question["others"], question["opening"]))
    ending = question["ending"]
    answer = None if ending["answer"] is None else tuple(ending["answer"])
    return await seat.end(Ending(Stop(ending["stop"]), ending["reward"], ending["counts"], answer))


async def _read(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    """The next frame. EOFError at the end of the stream, ValueError for bytes that are no frame."""
    (num_bytes,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes")
    frame = json.loads(await reader.readexactly(num_bytes))
    if not isinstance(frame, dict):
        raise ValueError("a frame that is no object")
    return frame
