"""Code of the user's that a configuration names: "FILE.py:name", or "module:name" for one that Python finds.

Paths count from the current folder. Whether there is such a name is said before anything runs (grader_checks.py); here
its file is executed. Not here: graders, which run in processes of their own (hacpo_grading/workers/grader_calls.py).
"""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain

from hacpo_grading.workers import own_file
from hacpo_grading.workers.own_file import own_module
from hacpo_mega.config.tables.schema import Config

# Executes the named code in a process of its own, and writes each name to a pipe; an empty line is the end. The
# loader is run by its file: importing its package takes a second.
TRIAL = """
import importlib.util, json, os, sys
pipe, path, loader, *names = sys.argv[1:]
sys.path[:] = json.loads(path)
spec = importlib.util.spec_from_file_location("own_file", loader)
own_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_file)
pid = os.getpid()
for name in names:
    os.write(int(pipe), f"{name}\\n".encode())
    try:
        own_file.own_module(name.rpartition(":")[0], "own_code")
    except BaseException:
        pass  # the run's own processes say it
    if os.getpid() != pid:
        os._exit(0)  # a child that the file has forked
os.write(int(pipe), b"\\n")
os._exit(0)
"""
TRIAL_S = 120.0
TOLD_BYTES = 1 << 16


def named_in(config: Config) -> tuple[str, ...]:
    """Functions that [algorithm] and [logging] name, without trackers."""
    algorithm = config.algorithm
    names = (algorithm.advantages, algorithm.objective, *config.logging.metrics)
    return tuple(name for name in names if name is not None)


def require_named_functions(config: Config) -> None:
    """Executes the functions of `named_in`, before models load. ValueError, one line, if one fails."""
    for name in named_in(config):
        named_function(name)


def unfinished_import(config: Config) -> str | None:
    """The message for named code, trackers included, whose import hangs or ends its process. The import is tried in a
    process of its own, for TRIAL_S or half of the time that ranks wait for each other."""
    own_trackers = (tracker for tracker in config.logging.trackers if ":" in tracker)
    names = tuple(dict.fromkeys(chain(named_in(config), own_trackers)))
    return _unfinished(names, min(TRIAL_S, config.wait_s / 2)) if names else None


def _unfinished(names: Sequence[str], limit_s: float) -> str | None:
    heard, pipe = os.pipe()
    os.set_blocking(heard, False)  # a process that the code left running may hold the other end
    command = [sys.executable, "-P", "-c", TRIAL, str(pipe), json.dumps(sys.path), own_file.__file__, *names]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(command, pass_fds=(pipe,), process_group=0, **quiet)
    os.close(pipe)
    try:
        status = process.wait(limit_s)
        how = f"ends its process ({f'exit status {status}' if status >= 0 else signal.Signals(-status).name})"
    except subprocess.TimeoutExpired:
        how = f"has not ended after {limit_s:g} s: it waits or loops"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(heard, "rb", buffering=0) as told:
        lines = (told.read(TOLD_BYTES) or b"").decode().splitlines()
    if not lines or not lines[-1]:
        return None
    file = lines[-1].rpartition(":")[0]
    return f"{lines[-1]}: the import of {file} {how}; a file must come to its end, without an exit or a crash"


@functools.lru_cache(maxsize=64)
def named_function(name: str) -> Callable:
    """The function or class of that name; a file is executed once per process. ValueError, one line, where it fails."""
    place, _, attribute = name.rpartition(":")
    try:
        found = getattr(own_module(place, "own_code"), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: {type(error).__name__} while it was loaded: {error}".splitlines()[0]) from error
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, and a function is needed")
    return found
