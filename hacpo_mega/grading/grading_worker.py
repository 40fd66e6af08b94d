"""The program of a grading worker: reads answers from standard input, writes one verdict per line, knows nothing else.

It is started as a fresh interpreter (never forked, so it holds no CUDA context and no locks of the trainer) and imports
the standard library and its grader alone. What happens here guards against everything that a kill by the parent
(guarded_workers.py) would come too late for, or would do unevenly:
- time: each answer has an allowance of CPU seconds of this process. The kernel counts them and ends the process with
  SIGPROF, in the middle of C code too; a busy machine changes nothing about it;
- memory: RLIMIT_AS turns a giant power into a MemoryError instead of taking the node down;
- a parent that died: an idle worker reads end-of-file, a thread notices a new parent process, and a grader stuck in C
  code, where no thread of ours ever runs, spends its CPU allowance;
- a grader that prints or reads: the protocol has descriptors of its own, which a forked child loses. A print goes to
  standard error, standard input is empty. Whoever writes into them does not know the token of the request, and is told
  from a reply. That is against accidents: the grader is the user's own code, and could look the token up in here.
Protocol: JSON lines in, first {"kind", "grader", "options", "explainer", "path", "memory_bytes", "cpu_s", "token"},
then lists of [prompt, answer, gold, explain, token]. Frames out, each the token of what it replies to, the length of
what follows, and JSON: {"ready": true} or {"error"}; then for each answer, in order, {"reward": number or null,
"error": text or null, "is_misuse": bool, "explanation": object or null, "cpu_s": number}.
"""

import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat, TextIO

Grader = Callable[[str, str, str], float | None]
Reply = dict[str, Any]
MAX_SAID = 500
TOKEN_BYTES = 16
HEADER = struct.Struct(f"!{TOKEN_BYTES}sI")
MAX_FRAME_BYTES = 1 << 24


def load_grader(spec: str, options: Mapping[str, Any]) -> Grader:
    """What "package.module:name" or "path/to/file.py:name" names, with its options bound.

    A function takes (prompt, answer, gold) and its options as keyword-only arguments; a class takes them where it is
    made, and its objects are called. ValueError for what cannot be called so, and for an option it does not have.
    """
    found = load_by_name(spec)
    if not callable(found):
        raise ValueError(f"it is a {type(found).__name__}, and a grader is a function (prompt, answer, gold)")
    _check_options(found, options)
    grader = found(**options) if isinstance(found, type) else functools.partial(found, **options)
    try:
        inspect.signature(grader).bind("", "", "")
    except TypeError as error:
        takes = inspect.signature(grader)
        raise ValueError(f"it takes {takes}, and is called with (prompt, answer, gold): {error}") from error
    return grader


def load_by_name(spec: str) -> Any:
    """The object that "package.module:name" or "path/to/file.py:name" names."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise ValueError(f"{spec!r} is no grader; write module:function or file.py:function")
    if place.endswith(".py"):
        description = importlib.util.spec_from_file_location(Path(place).stem, place)
        module = importlib.util.module_from_spec(description)
        sys.modules[description.name] = module  # a dataclass looks its module up there
        description.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def _check_options(found: Callable, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(found).parameters.values()
    kinds = (inspect.Parameter.KEYWORD_ONLY,)
    if isinstance(found, type):
        kinds = (*kinds, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"it has no option {', '.join(unknown)}; its options are: {', '.join(known) or 'none'}")


def grade(grader: Grader, prompt: str, answer: str, gold: str, is_worker: bool = False) -> Reply:
    """One verdict: a reward from 0 to 1, null for a text without an answer, or the error that left it unjudged.

    `is_misuse` marks a return value that no answer excuses: the grader is wrong.
    """
    try:
        reward = grader(prompt, answer, gold)
    except Exception as error:
        return _reply(error=_said(error))
    except (SystemExit, KeyboardInterrupt) as error:
        if not is_worker:
            raise  # somebody ends the trainer
        return _reply(error=_said(error))
    if reward is None:
        return _reply()
    try:
        number = float(reward) if isinstance(reward, SupportsFloat) else math.nan  # numpy's scalars are welcome
    except Exception:
        number = math.nan
    if not 0.0 <= number <= 1.0:
        shown = f"returned {type(reward).__name__} {_shown(reward)}"[:MAX_SAID]
        return _reply(error=f"the grader {shown}, expected a number in [0, 1] or None", is_misuse=True)
    return _reply(number)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {_shown(error, str)}"[:MAX_SAID]


def _shown(found: object, show: Callable[[Any], str] = repr) -> str:
    try:
        return show(found)
    except Exception:  # such as an int of too many digits
        return "that cannot be shown"


def _reply(reward: float | None = None, error: str | None = None, is_misuse: bool = False) -> Reply:
    return {"reward": reward, "error": error, "is_misuse": is_misuse, "explanation": None}


def explain(grader: Grader, explainer: str | None, kind: str, answer: str, gold: str) -> dict[str, Any]:
    """How a verdict came about: from the grader's own `explain`, else from the function (kind, answer, gold) of that
    name; nothing where there is neither."""
    try:
        if hasattr(grader, "explain"):
            return grader.explain(answer, gold)
        return load_by_name(explainer)(kind, answer, gold) if explainer else {}
    except Exception as error:
        return {"explanation failed": _said(error)}


def serve(requests: TextIO, replies: int) -> None:
    """Grades until end-of-file; `replies` is the descriptor of the frames."""
    pid = os.getpid()
    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    try:
        grader = load_grader(setup["grader"], setup["options"])
    except Exception as error:
        _say(replies, setup["token"], {"error": _said(error)})
        return
    _say(replies, setup["token"], {"ready": True})
    for line in requests:
        for prompt, answer, gold, is_explained, token in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
            started = time.process_time()
            reply = grade(grader, prompt, answer, gold, is_worker=True)
            if is_explained:
                reply["explanation"] = explain(grader, setup["explainer"], setup["kind"], answer, gold)
            if os.getpid() != pid:
                os._exit(1)  # a child that the grader has forked and returned in
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            _say(replies, token, reply | {"cpu_s": time.process_time() - started})


def _say(replies: int, token: str, message: dict) -> None:
    data = json.dumps(message, default=_shown).encode()
    if len(data) > MAX_FRAME_BYTES:
        note = {"explanation failed": f"it is longer than {MAX_FRAME_BYTES} bytes"}
        data = json.dumps(message | {"explanation": note}).encode()
    frame = memoryview(HEADER.pack(bytes.fromhex(token), len(data)) + data)
    try:
        while frame:
            frame = frame[os.write(replies, frame) :]
    except OSError as error:
        sys.exit(f"a grading worker cannot reply: the trainer is gone, or the grader closed the pipe ({error})")


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpid(), signal.SIGKILL)  # its own group: what graders have left running ends, too


def main() -> None:
    """Serves tasks from standard input until it closes or the parent is gone; what graders print goes to stderr."""
    parent = os.getppid()
    # Ctrl-C reaches the whole group, a scheduler's signals every process of a job; the parent decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    os.register_at_fork(after_in_child=lambda: os.closerange(min(requests, replies), max(requests, replies) + 1))
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    serve(os.fdopen(requests, encoding="ascii"), replies)


if __name__ == "__main__":
    main()
