"""Environment classes of the user's, or built in, behind one async interface, a process for each conversation.

    environment = EnvironmentClass.load("shop:Shop")
    episode = environment.episode(seed)
    observation = await episode.begin(row)
    text = await episode.call("order", {"number": 3})
    reward = await episode.reward()
    episode.close()
Every call returns, whatever the class does. One that overruns its time limit or ends its process ends its conversation,
whose further calls fail at once, and is counted by name. Processes are kept in a pool for later conversations, at most
`most_processes` of them; a conversation waits where all are in use. All of it runs on one event loop at a time.
Elsewhere: the contract of a class, and the processes' side (environment_process.py).
"""

import asyncio
import collections
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self, TypeVar

from hacpo_grading.texts.chat_messages import messages_of
from hacpo_mega.config.user_code import ENVIRONMENTS, environment_problem
from hacpo_mega.conversations.environment_process import (
    HEADER,
    MAX_FRAME_BYTES,
    ORDER_BYTES,
    error_text,
    frame_of,
    read_frame,
)

T = TypeVar("T")
CALL_S, START_S = 60.0, 300.0
MOST_PROCESSES = 256
PROGRAM = """
import json, sys
control, name, limit, call_s, path = sys.argv[1:]
sys.path[:] = json.loads(path)
from hacpo_grading.texts.chat_messages import messages_of
from hacpo_mega.conversations.environment_process import main
main(int(control), name, float(limit), float(call_s))
"""
# Sets have the same order in every run, and a process of a conversation has one thread of a numeric library.
SETTINGS = ("PYTHONHASHSEED=0", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")


class _Failure(Exception):
    """A request that has no result: `name` is what it is counted by."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(eq=False)
class _Process:
    """A process of one conversation: its connection, and its number at the fork server."""

    number: int
    connection: socket.socket

    async def ask(self, frame: bytes = b"") -> Mapping[str, Any]:
        """The reply to a request; without a request the first reply, which says that the instance is made.

        EOFError or OSError when the process has ended, ValueError for a reply that is none.
        """
        await asyncio.get_running_loop().sock_sendall(self.connection, frame)
        (num_bytes,) = HEADER.unpack(await self._read(HEADER.size))
        if num_bytes > MAX_FRAME_BYTES:
            raise ValueError("it is too long")
        reply = json.loads(await self._read(num_bytes))
        if not isinstance(reply, dict) or len(reply) != 1 or not ({"value", "error"} & reply.keys()):
            raise ValueError("it is none")
        return reply

    async def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(self.connection, min(num_bytes - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


class _ForkServer:
    """The process that has imported the class and forks one for each conversation, and the pool of these."""

    def __init__(self, name: str, call_s: float, start_s: float, most_processes: int) -> None:
        """ValueError, one line, when the class cannot be imported."""
        self.start_s = start_s
        self._most = most_processes
        self._idle: list[_Process] = []
        self._num_live = self._next = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = json.dumps([folder or "." for folder in sys.path])
        arguments = (str(theirs.fileno()), name, str(start_s), str(call_s), path)
        with theirs:
            self.process = subprocess.Popen(
                ["/usr/bin/env", *SETTINGS, sys.executable, "-P", "-c", PROGRAM, *arguments],
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        self._control.settimeout(2.0 * start_s)
        started = b""
        with contextlib.suppress(TimeoutError):
            started = self._control.recv(ORDER_BYTES)
        problem = json.loads(started)["problem"] if started else f"its import ends or outlasts {start_s:g} s"
        if problem is not None:
            self.close()
            raise ValueError(f"{name}: {problem}")

    def fork(self, *, describes: bool = False) -> _Process:
        """A new process, which makes its instance now. RuntimeError when the fork server has ended."""
        ours, theirs = socket.socketpair()
        self._next += 1
        try:
            order = json.dumps({"id": self._next, "describes": describes}).encode()
            socket.send_fds(self._control, [order], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise RuntimeError("the process that starts environments has ended; nothing of ours ends it") from error
        finally:
            theirs.close()
        return _Process(self._next, ours)

    async def take(self) -> _Process:
        """A process whose instance is made: an idle one, a new one, or one that is given back.

        _Failure where the class cannot be made.
        """
        while not self._idle and self._num_live >= self._most:
            self._waiting.append(waiting := asyncio.get_running_loop().create_future())
            try:
                await waiting
            except asyncio.CancelledError:
                self._wake()  # if this one was woken, another must be instead
                raise
        if self._idle:
            return self._idle.pop()
        self._num_live += 1
        process = self.fork()
        process.connection.setblocking(False)
        try:
            async with asyncio.timeout(self.start_s):
                reply = await process.ask()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            reply = {"error": f"the constructor has no end ({error_text(error)})"}
        except BaseException:
            self.give_back(process, is_whole=False)
            raise
        if "error" in reply:
            self.give_back(process, is_whole=False)
            raise _Failure("not_made", str(reply["error"]))
        return process

    def give_back(self, process: _Process, *, is_whole: bool) -> None:
        """Takes a process back into the pool, or ends one that is not whole; wakes the first that waits."""
        if is_whole:
            self._idle.append(process)
        else:
            self._num_live -= 1
            self.end(process)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done() and not waiting.get_loop().is_closed():
                waiting.set_result(None)
                return

    def end(self, process: _Process) -> None:
        """Kills a process and what it has started."""
        process.connection.close()
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"end": process.number}).encode())

    def close(self) -> None:
        """Ends all processes; the fork server kills those it has forked when its socket closes."""
        for process in self._idle:
            process.connection.close()
        self._control.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # the usual case: the import has left nothing running
            os.killpg(self.process.pid, signal.SIGKILL)


class EnvironmentClass(contextlib.AbstractContextManager["EnvironmentClass"]):
    """A class that plays conversations, as a first instance of it describes it.

    name        as the configuration names it
    tools       JSON schemas of its tools, as transformers' get_json_schema gives them
    responds    whether it answers turns without a tool call
    plays       whether it is an agent program, which plays whole conversations over the endpoint
    rewards     whether it has get_reward; without it the run's own reward judges
    last_error  the name and the text of the last failure
    failures    conversations lost, by name: not_made, reset, respond, play, reward (it raised, or returned what it may
                not), hung, ended (its process), no_reply, cancelled; and calls of tools that gave an error, tool_error
    """

    def __init__(self, name: str, fork_server: _ForkServer, description: Mapping[str, Any], call_s: float) -> None:
        self.name = name
        self.tools: list[dict[str, Any]] = description["tools"]
        self.responds: bool = description["responds"]
        self.plays: bool = description["plays"]
        self.rewards: bool = description["rewards"]
        self.call_s = call_s
        self.failures: collections.Counter[str] = collections.Counter()
        self.last_error = ""
        self._fork_server = fork_server

    @classmethod
    def load(
        cls, spec: str, *, call_s: float = CALL_S, start_s: float = START_S, most_processes: int = MOST_PROCESSES
    ) -> Self:
        """The class "file.py:Class", "module:Class" or of a built-in name, imported and made once to describe it.

        A call may take `call_s` seconds, the import and the constructor `start_s` each. ValueError, one line, for a
        name that is none, a class that cannot be imported or made, has no reset, or has a tool without a schema.
        """
        if (problem := environment_problem(spec)) is not None:
            raise ValueError(problem)
        fork_server = _ForkServer(ENVIRONMENTS.get(spec, spec), call_s, start_s, most_processes)
        process = fork_server.fork(describes=True)
        process.connection.settimeout(start_s)
        try:
            reply = read_frame(process.connection)
        except TimeoutError:
            reply = {"error": f"its constructor has not ended after {start_s:g} s"}
        except (EOFError, OSError):
            reply = {"error": "its constructor ends the process"}
        fork_server.end(process)
        if "error" in reply:
            fork_server.close()
            raise ValueError(f"environment {spec}: {reply['error']}".splitlines()[0])
        return cls(spec, fork_server, reply["value"], call_s)

    def episode(self, seed: int = 0) -> "Episode":
        """A conversation; `seed` seeds the random numbers of its process, which it takes when it begins."""
        return Episode(self, self._fork_server, seed)

    def close(self) -> None:
        """Ends every process of the class."""
        self._fork_server.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


class Episode:
    """One conversation with an environment: one request at a time.

    failure   the name under which it failed, as in `EnvironmentClass.failures`; the driver ends it then
    error     the text of that failure
    seconds   spent in the environment's code, in total; waiting for a process is not counted
    """

    def __init__(self, environment: EnvironmentClass, fork_server: _ForkServer, seed: int) -> None:
        self._environment, self._fork_server, self._seed = environment, fork_server, seed
        self._process: _Process | None = None
        self.failure: str | None = None
        self.error = ""
        self.seconds = 0.0

    async def begin(self, row: Mapping[str, Any]) -> str | None:
        """Resets the environment with a data row; text for the end of the prompt's last user message, or None."""
        assert self._process is None, "an episode begins once"
        try:
            self._process = await self._fork_server.take()
        except _Failure as error:
            self.fail(error.name, str(error))
            return None
        return await self._value("reset", do="begin", row=dict(row), seed=self._seed)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result, or TRL's {'error': '...'} as text."""
        try:
            return await self._ask(do="call", name=name, arguments=dict(arguments))
        except _Failure as error:
            if error.name == "raised":
                self._environment.failures["tool_error"] += 1
            else:
                self.fail(error.name, str(error))
            return str({"error": str(error)})

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """The environment's messages after a turn without a tool call; None when the conversation is over."""
        if not self._environment.responds:
            return None
        return await self._value("respond", do="respond", messages=list(messages))

    async def play(self, url: str, key: str, idle_s: Callable[[], float]) -> str | None:
        """Runs an agent program to its end; the text of its error, which has not failed the conversation yet.

        `idle_s` gives the seconds since it last waited for a turn: no more than `call_s` may pass without one.
        """
        try:
            return await self._ask(idle_s=idle_s, do="play", url=url, key=key)
        except _Failure as error:
            if error.name != "raised":
                self.fail(error.name, str(error))
            return str(error)

    async def react(
        self, tool_calls: Sequence[tuple[str, Mapping[str, Any]]], messages: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages that follow an own turn, the last of `messages`, with these calls (name, arguments).

        None where the conversation is over.
        """
        if not tool_calls:
            return await self.respond(messages) or []
        return [
            {"role": "tool", "name": name, "content": await self.call(name, arguments)}
            for name, arguments in tool_calls
        ]

    async def reward(self, roles: Sequence[str] = ()) -> float | dict[str, float] | None:
        """The environment's reward, or one for each of the roles; None where it gives none, or has failed."""
        reward = await self._value("reward", do="reward") if self._environment.rewards else None
        if isinstance(reward, dict) and reward.keys() != set(roles):
            needed = f"a number for each of {', '.join(roles)}" if roles else "a number"
            self.fail("reward", f"get_reward returned numbers for {', '.join(reward) or 'nobody'}; here it is {needed}")
            return None
        return reward

    def close(self) -> None:
        """Gives the process back to the pool; one that failed has been ended."""
        process, self._process = self._process, None
        if process is not None:
            self._fork_server.give_back(process, is_whole=True)

    async def _value(self, failure: str, **request: Any) -> Any:
        try:
            return await self._ask(**request)
        except _Failure as error:
            self.fail(failure if error.name == "raised" else error.name, str(error))
            return None

    async def _ask(self, *, idle_s: Callable[[], float] = lambda: math.inf, **request: Any) -> Any:
        if self.failure is not None or self._process is None:
            raise _Failure(self.failure or "ended", self.error or "the conversation has no environment any more")
        try:
            frame = frame_of(request)
        except ValueError as error:
            raise _Failure("raised", f"the call cannot be passed on: {error}") from error
        limit_s, started = self._environment.call_s, time.monotonic()
        try:
            reply = await _within(limit_s, lambda: min(time.monotonic() - started, idle_s()), self._process.ask(frame))
        except TimeoutError as error:
            raise _Failure("hung", f"no result after {limit_s:g} s") from error
        except (EOFError, OSError) as error:
            raise _Failure("ended", "the process of the environment has ended") from error
        except (ValueError, RecursionError) as error:
            raise _Failure("no_reply", f"something else than a reply has come from its process: {error}") from error
        except BaseException:  # the reply may still come, and would be taken for that of the next request
            self.fail("cancelled", "the conversation was cancelled")
            raise
        finally:
            self.seconds += time.monotonic() - started
        if "error" in reply:
            raise _Failure("raised", str(reply["error"]))
        return reply["value"]

    def fail(self, name: str, text: str) -> None:
        """Notes the first failure and ends the process."""
        if self.failure is None:
            self.failure, self.error = name, text
            self._environment.failures[name] += 1
            self._environment.last_error = f"{name}: {text}"
        process, self._process = self._process, None
        if process is not None:
            self._fork_server.give_back(process, is_whole=False)


async def _within(limit_s: float, waited_s: Callable[[], float], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. TimeoutError once `waited_s()`, the seconds that count, exceeds `limit_s`."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if (left := limit_s - waited_s()) <= 0:
                raise TimeoutError
            await asyncio.wait({task}, timeout=left)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})  # until it has released its socket, whose number a later one may get


def prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row's `prompt`: a list of them, their canonical text, or a task as the user's message."""
    prompt = row["prompt"]
    messages = messages_of(prompt) if isinstance(prompt, str) else prompt
    return [{"role": "user", "content": prompt}] if messages is None else [dict(message) for message in messages]


def with_observation(messages: Sequence[Mapping[str, Any]], text: str | None) -> list[dict[str, Any]]:
    """The messages of a prompt with an environment's first text at the end of the last user message, as TRL has it."""
    copies = [dict(message) for message in messages]
    last = next((message for message in reversed(copies) if message["role"] == "user"), None)
    if text and last is not None:
        last["content"] += text
    return copies


def merged_user_messages(others: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, those of the user that follow one another joined into one: several agents may have spoken, and many
    templates want roles to alternate."""
    merged: list[Mapping[str, Any]] = []
    for is_user, group in groupby(others, key=lambda message: message["role"] == "user"):
        run = list(group)
        merged += [{"role": "user", "content": "\n\n".join(m["content"] for m in run)}] if is_user else run
    return merged
