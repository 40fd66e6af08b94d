"""The program of a grading worker: reads answers from standard input, writes one verdict per line, knows nothing else.

It is started as a fresh interpreter (never forked, so it holds no CUDA context and no locks of the trainer) and imports
the standard library and its grader alone. It guards against what a kill by the parent
(guarded_workers.py) would end too late, or at unequal times:
- time: each answer has an allowance of CPU seconds of this process. The kernel counts them and ends the process with
  SIGPROF, in the middle of C code too; a busy machine changes nothing about it;
- memory, beside what the import took: RLIMIT_AS turns a giant power into a MemoryError instead of taking the node down;
- a parent that died: an idle worker reads end-of-file, a thread notices a new parent process, and a grader stuck in C
  code, where no thread of ours ever runs, spends its CPU allowance;
- a grader that prints or reads: the protocol has descriptors of its own, which a forked child loses. A print goes to
  standard error, standard input is empty. Code that writes into these descriptors does not know the token of the
  request, and its text is told from a reply. This is against accidents: the grader is the user's own code, and could
  look the token up in here.
Protocol: JSON lines in, first the fields of GraderSpec with "patience_s", "path", "memory_bytes", "cpu_s" and "token",
then lists of [fields of Asked, token]. Frames out, each the token of what it replies to, the length of what follows,
and JSON: {"ready": the grader's signature} or {"error"}; then for each answer, in order, the fields of Outcome.
Elsewhere: how a grader is called (grader_calls.py).
"""

import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TextIO

from hacpo_grading.judgement import Asked
from hacpo_grading.workers.grader_calls import GraderCall, error_text, explain

TOKEN_BYTES = 16
HEADER = struct.Struct(f"!{TOKEN_BYTES}sI")
MAX_FRAME_BYTES = 1 << 24


def serve(requests: TextIO, replies: int) -> None:
    """Grades until end-of-file; `replies` is the descriptor of the frames."""
    pid = os.getpid()
    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    try:
        call = GraderCall(setup["name"], setup["options"], setup["reward_range"], setup["patience_s"])
    except BaseException as error:  # sys.exit, too: the user must learn of it
        _send(replies, setup["token"], {"error": error_text(error)})
        return
    if os.getpid() != pid:
        os._exit(0)  # a child that the grader's file has forked
    with open("/proc/self/statm") as numbers:  # CUDA's libraries map more than any answer needs
        memory_bytes = setup["memory_bytes"] + int(numbers.read().split()[0]) * resource.getpagesize()
    with suppress(ValueError):  # an administrator has set a lower limit, which cannot be raised
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _send(replies, setup["token"], {"ready": asdict(call.signature)})
    for line in requests:
        tasks = [(Asked(**asked | {"group": tuple(asked["group"])}), token) for asked, token in json.loads(line)]
        for together in [tasks] if call.signature.takes_many else [[task] for task in tasks]:
            signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"] * len(together))
            started = time.process_time()
            graded = call.grade([asked for asked, _ in together], is_worker=True)
            explained = [
                explain(call.grader, setup["explainer"], setup["kind"], asked) if asked.is_explained else None
                for asked, _ in together
            ]
            if os.getpid() != pid:
                os._exit(1)  # a child that the grader has forked and returned in
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            cpu_s = (time.process_time() - started) / len(together)
            for (_, token), outcome, how in zip(together, graded, explained, strict=True):
                _send(replies, token, vars(outcome) | {"explanation": how, "cpu_s": cpu_s})


def _send(replies: int, token: str, message: dict) -> None:
    data = json.dumps(message, default=repr).encode()
    if len(data) > MAX_FRAME_BYTES:
        note = {"explanation failed": f"it is longer than {MAX_FRAME_BYTES} bytes"}
        data = json.dumps(message | {"explanation": note}).encode()
    frame = memoryview(HEADER.pack(bytes.fromhex(token), len(data)) + data)
    try:
        while frame:
            frame = frame[os.write(replies, frame) :]
    except OSError as error:
        sys.exit(f"a grading worker cannot reply: the trainer is gone, or the grader closed the pipe ({error})")


def _end_with_parent(parent: int) -> None:
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
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    serve(os.fdopen(requests, encoding="ascii"), replies)
