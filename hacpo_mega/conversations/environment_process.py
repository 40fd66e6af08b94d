"""The program of the processes that run a user's environment class, and the contract of such a class.

A fork server, a fresh interpreter, imports the class once and forks a process for each conversation: a fork costs
milliseconds where the import may cost seconds, and a process, unlike a thread, can be killed when a call
hangs, has its own memory limit and random numbers, and takes no other conversation with it when it ends. Threads of
the importing code would not live on in a fork, so a file that starts some is refused.

The contract is that of TRL's `environment_factory` (its GRPO trainer, 1.16):
- the class, or a function, is called with nothing; the instance is used for many conversations, one after the other;
- `reset(**row)` begins one: None, or text (or text blocks) for the end of the last user message;
- functions of the class without a leading underscore are tools, except reset and get_reward; inherited and static ones
  and lambdas are, properties, class methods and attributes of the instance are not;
- `get_reward()`, if there is one, gives a number or None at the end; or, where agents play roles, a number for each.
Every one of them may be async. A class that derives from `Responder` has `respond`, which is no tool. A class that
derives from `AgentProgram` has `play`, and no tools.

Fork server: datagrams {"id", "describes"} with a socket fork a process, {"end"} kills and reaps it. Process: frames of
JSON (`frame_of`), one reply {"value"} or {"error"} to each request. Imports the standard library alone.
Elsewhere: limits of time, and the pool of processes (environment.py).
"""

import asyncio
import inspect
import json
import math
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from typing import Any

from hacpo_grading.workers.own_file import load_by_name

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 24
MAX_ERROR_CHARACTERS = 500
MAX_TEXT = 1 << 20  # characters of a result; longer than any model reads
MEMORY_BYTES = 4 << 30  # of a process, beside what the import took
ORDER_BYTES = 1 << 12
PR_SET_PDEATHSIG = 1
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
NOT_TOOLS = ("reset", "get_reward")
ROLES = ("user", "tool")
BLOCKS = ("text", "image", "image_url", "audio", "video")


class Responder:
    """Base of environment classes that answer an own turn without a tool call, such as a user, a game or a test run.

    turn_timeout_s   seconds that a call may take, as the configuration says
    """

    turn_timeout_s = 60.0

    def respond(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The next messages, of role "user" or "tool" with a text as content; None when the conversation is over.

        `messages` is the conversation so far, the agent's turn last. May be async.
        """


class AgentProgram:
    """Base of environment classes that play the whole conversation themselves, over the model's HTTP endpoint."""

    def play(self, base_url: str, api_key: str) -> None:
        """Converses with the model by POST {base_url}/chat/completions (OpenAI's shapes), and returns at the end.

        OPENAI_BASE_URL and OPENAI_API_KEY say the same to programs that read the environment. May be async.
        """


class Misuse(ValueError):
    """A class, a call or a result that breaks the contract."""


class HeldEnvironment:
    """An instance of a user's class, and the requests that it is asked."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._instance = factory()
        self._class = type(self._instance)
        self._plays = isinstance(self._instance, AgentProgram)
        self._tools = [] if self._plays else tool_names(self._class)
        self._runner = asyncio.Runner()

    def describe(self) -> dict[str, Any]:
        """{"tools": JSON schemas, "responds", "plays", "rewards"}. Misuse for a class that lacks a method."""
        name, responds = self._class.__name__, isinstance(self._instance, Responder)
        if not inspect.isfunction(getattr(self._class, "reset", None)):
            raise Misuse(f"{name} has no method reset(**row), which begins a conversation")
        if responds and self._class.respond is Responder.respond:
            raise Misuse(f"{name} derives from Responder and has no method respond(messages)")
        if self._plays and (responds or self._class.play is AgentProgram.play):
            lacks = "from Responder, too; one of both plays" if responds else "has no method play(base_url, api_key)"
            raise Misuse(f"{name} derives from AgentProgram and {lacks}")
        # transformers takes a second and 100 MB, which the processes of conversations go without
        schema_of = load_by_name("transformers.utils:get_json_schema") if self._tools else None
        return {
            "tools": [_schema(schema_of, name, tool, getattr(self._instance, tool)) for tool in self._tools],
            "responds": responds,
            "plays": self._plays,
            "rewards": inspect.isfunction(getattr(self._class, "get_reward", None)),
        }

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The result of one request: {"do": "begin", "row", "seed"}, "call" with "name" and "arguments", "respond" with
        "messages", "play" with "url" and "key", or "reward"."""
        if request["do"] == "begin":
            _seed(request["seed"])
            observation = _observation(self._awaited(self._instance.reset(**request["row"])))
            if self._plays and observation:
                raise Misuse("reset of an agent program returns None: the program writes its prompts itself")
            return observation
        if request["do"] == "play":
            os.environ |= {"OPENAI_BASE_URL": request["url"], "OPENAI_API_KEY": request["key"]}
            exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
            if not {"*", "127.0.0.1"} & set(exempt.replace(" ", "").split(",")):
                exempt = f"{exempt},127.0.0.1".lstrip(",")  # beside the program's own servers
            os.environ |= dict.fromkeys(("NO_PROXY", "no_proxy"), exempt)
            self._awaited(self._instance.play(request["url"], request["key"]))
            return None
        if request["do"] == "call":
            if request["name"] not in self._tools:
                raise Misuse(f"Tool {request['name']} not found.")
            return _tool_text(self._awaited(getattr(self._instance, request["name"])(**request["arguments"])))
        if request["do"] == "respond":
            return _messages(self._awaited(self._instance.respond(request["messages"])))
        return _reward(self._awaited(self._instance.get_reward()))

    def _awaited(self, result: Any) -> Any:
        async def outcome() -> Any:
            return await result

        return self._runner.run(outcome()) if inspect.isawaitable(result) else result


def tool_names(kind: type) -> list[str]:
    """The names of a class's tools, in alphabetical order, by TRL's rule."""
    names = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
    others = (*NOT_TOOLS, "respond") if issubclass(kind, Responder) else NOT_TOOLS
    return [name for name in names if not name.startswith("_") and name not in others]


def _schema(schema_of: Callable, kind: str, name: str, tool: Callable) -> dict[str, Any]:
    unnamed = [one for one in inspect.signature(tool).parameters.values() if one.kind not in BY_NAME]
    if unnamed:
        raise Misuse(f"the tool {kind}.{name} takes {unnamed[0]}, and a model gives each argument by its own name")
    try:
        return schema_of(tool)
    except Exception as error:
        raise Misuse(
            f"the tool {kind}.{name} cannot be described: {error}. A public method is a tool, and needs a docstring "
            "with an Args section and a type hint for every argument; begin its name with _ if it is none"
        ) from error


def _seed(seed: int) -> None:
    """Seeds the process's random numbers, so that a conversation does not depend on the ones before."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _observation(result: Any) -> str | None:
    if result is None or isinstance(result, str):
        return None if result is None else _checked_text(result)
    if isinstance(result, list):
        return _checked_text(_joined(result))
    raise Misuse(f"reset returned {type(result).__name__}; it returns None, text, or a list of text blocks")


def _tool_text(result: Any) -> str:
    """The text of a tool's result: text blocks joined, anything else as str() has it, as TRL does."""
    are_blocks = isinstance(result, list) and result and all(_is_block(part) for part in result)
    return _checked_text(_joined(result) if are_blocks else str(result))


def _is_block(part: Any) -> bool:
    """True for a block of a message; the "type" must be one of BLOCKS, since any table may have such a key."""
    return isinstance(part, dict) and part.get("type") in BLOCKS


def _joined(blocks: Sequence[Any]) -> str:
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise Misuse('a list needs blocks {"type": "text", "text": ...}; images and the like are not read')
    return "".join(texts)


def _checked_text(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer takes. Misuse above MAX_TEXT characters."""
    if len(text) > MAX_TEXT:
        raise Misuse(f"the result has {len(text):,} characters, more than {MAX_TEXT:,}")
    return text.encode("utf-8", "replace").decode()


def _messages(result: Any) -> list[dict[str, Any]] | None:
    if result is None:
        return None
    if not isinstance(result, list) or not result:
        raise Misuse(f"respond returned {type(result).__name__}; it returns a list of messages, or None at the end")
    for message in result:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES or not isinstance(message.get("content"), str):
            what = f"of role {role!r}" if isinstance(message, dict) else f"that is a {type(message).__name__}"
            raise Misuse(f"respond returned a message {what}; each has role {' or '.join(ROLES)}, and a text")
    _checked_text("".join(message["content"] for message in result))
    kept = ("role", "content", "name", "tool_call_id")
    return [{key: _checked_text(str(message[key])) for key in kept if key in message} for message in result]


def _reward(result: Any) -> float | dict[str, float] | None:
    if result is None:
        return None
    if isinstance(result, dict):
        return {str(role): _number(number) for role, number in result.items()}
    return _number(result)


def _number(result: Any) -> float:
    if isinstance(result, str | bytes) or not math.isfinite(number := float(result)):
        raise Misuse(f"get_reward returned {str(result)[:80]!r}; it returns a finite number or None")
    return number


def error_text(error: BaseException) -> str:
    """An error of the user's code with its name, a Misuse by its text alone; at most MAX_ERROR_CHARACTERS."""
    text = str(error) if isinstance(error, Misuse) else f"{type(error).__name__}: {error}"
    return _checked_text(text[:MAX_ERROR_CHARACTERS])


def frame_of(message: Any) -> bytes:
    """The bytes of a message: its length, and JSON in ASCII. ValueError for one that is nested too deeply."""
    try:
        data = json.dumps(message, default=str).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return HEADER.pack(len(data)) + data


def read_frame(connection: socket.socket) -> Any:
    """The next message of a blocking socket. TimeoutError after its timeout, if it has one; EOFError at its end."""
    (num_bytes,) = HEADER.unpack(_read(connection, HEADER.size))
    return json.loads(_read(connection, num_bytes))


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        if not (part := connection.recv(min(num_bytes - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)


def _serve_conversations(connection: socket.socket, factory: Callable[[], Any], *, describes: bool) -> None:
    """Serves one connection until it closes; with `describes` it only describes the class."""
    pid, environment = os.getpid(), None
    os.register_at_fork(after_in_child=connection.close)
    try:
        environment = HeldEnvironment(factory)
        reply = {"value": environment.describe() if describes else None}
    except BaseException as error:
        reply = {"error": error_text(error)}
    while os.getpid() == pid:  # else a child that the user's code has forked and returned in
        connection.sendall(frame_of(reply))
        if describes or environment is None:
            return
        request = read_frame(connection)
        try:
            reply = {"value": environment.answer(request)}
        except MemoryError:
            return  # too little memory is left for another conversation
        except BaseException as error:  # sys.exit among them: it ends its conversation, not the process
            text = str(error) if request["do"] == "call" else ""  # as TRL tells it to the model
            reply = {"error": _checked_text(text[:MAX_ERROR_CHARACTERS]) or error_text(error)}


def _run_child(connection: socket.socket, factory: Callable[[], Any], fork_server: int, *, describes: bool) -> None:
    os.setpgid(0, 0)
    CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        if os.getppid() == fork_server:
            _serve_conversations(connection, factory, describes=describes)
            status = 0
    except (EOFError, OSError):  # the trainer has closed the connection
        status = 0
    finally:
        os._exit(status)


def serve(control: socket.socket, name: str, start_limit_s: float) -> None:
    """Imports the class and forks until the control socket closes; then it kills every process it has forked."""
    signal.setitimer(signal.ITIMER_REAL, start_limit_s)  # the trainer may be gone before a hanging import ends
    fork_server, pids = os.getpid(), dict[int, int]()
    try:
        factory = load_by_name(name, "own_environment")
        problem = None if callable(factory) else f"{name} is a {type(factory).__name__}, and a class is needed"
        if threading.active_count() > 1:
            problem = "its import starts threads, which processes forked later lack; start them in the constructor"
    except BaseException as error:
        problem = error_text(error)
    if os.getpid() != fork_server:
        os._exit(0)  # a child that the import has forked
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    control.send(json.dumps({"problem": problem}).encode())
    if problem is not None:
        return
    held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with suppress(ValueError):  # an administrator has set a lower limit, which cannot be raised
        resource.setrlimit(resource.RLIMIT_AS, (held_bytes + MEMORY_BYTES,) * 2)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES, 1)
        if not data:
            break
        order = json.loads(data)
        if "end" in order:
            _end(pids.pop(order["end"], None))
            continue
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            _run_child(connection, factory, fork_server, describes=order["describes"])
        connection.close()
        with suppress(OSError):  # the child has done it, and may have ended
            os.setpgid(pid, pid)
        pids[order["id"]] = pid
    for pid in pids.values():
        _end(pid)


def _end(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(control: int, name: str, start_limit_s: float, call_limit_s: float) -> None:
    """The fork server, with the descriptor of its control socket; what classes print goes to standard error."""
    Responder.turn_timeout_s = call_limit_s
    # Ctrl-C reaches the whole group, a scheduler's signals every process of a job; the trainer decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    os.set_inheritable(control, False)
    serve(socket.socket(fileno=control), name, start_limit_s)
