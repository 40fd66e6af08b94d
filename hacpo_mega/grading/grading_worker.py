"""The program of a grading worker: reads answers from standard input, writes one verdict per line, knows nothing else.

It is started as a fresh interpreter (never forked, so it holds no CUDA context and no locks of the trainer) and imports
the standard library and its grader alone. The parent (guarded_workers.py) kills it when an answer takes too long; what
happens here guards against everything that a kill from outside would come too late for:
- memory: RLIMIT_AS turns a giant power into a MemoryError instead of taking the node down;
- a parent that died: an idle worker reads end-of-file, a thread notices a new parent process, and a grader stuck in C
  code, where no thread of ours ever runs, spends its CPU allowance and is killed by the kernel;
- a grader that prints: standard output belongs to the protocol, so a print goes to standard error.
Protocol, JSON lines: first {"grader", "path", "memory_bytes", "cpu_seconds"} in, {"ready": true} or {"error"} out; then
a list of [prompt, answer, gold] in, one {"reward": number or null, "error": text or null} out for each, in order.
"""

import importlib
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

Grader = Callable[[str, str, str], float | None]


def load_grader(spec: str) -> Grader:
    """The function that "package.module:function" or "path/to/file.py:function" names."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise ValueError(f"{spec!r} is no grader; write module:function or file.py:function")
    if place.endswith(".py"):
        description = importlib.util.spec_from_file_location(Path(place).stem, place)
        module = importlib.util.module_from_spec(description)
        description.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def grade(grader: Grader, prompt: str, answer: str, gold: str) -> dict[str, float | str | None]:
    """One verdict: a reward from 0 to 1, null for a text without an answer, or the error that left it unjudged."""
    try:
        reward = grader(prompt, answer, gold)
    except Exception as error:
        return {"reward": None, "error": f"{type(error).__name__}: {error}"[:500]}
    if reward is not None and not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
        return {"reward": None, "error": f"the grader returned {reward}; a reward is from 0 to 1"}
    return {"reward": None if reward is None else float(reward), "error": None}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Grades until end-of-file."""
    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    try:
        grader = load_grader(setup["grader"])
    except Exception as error:
        _say(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(replies, {"ready": True})
    for line in requests:
        for prompt, answer, gold in json.loads(line):
            _allow_cpu(setup["cpu_seconds"])
            verdict = grade(grader, prompt, answer, gold)
            _say(replies, verdict)


def _say(replies: TextIO, message: dict) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _allow_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Serves tasks from standard input until it closes or the parent is gone; what graders print goes to stderr."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    serve(os.fdopen(0, encoding="ascii"), replies)


if __name__ == "__main__":
    main()
