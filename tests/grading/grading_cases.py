"""Graders that misbehave in every way a reward function of a user can, for the tests of the judge."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy

KEPT = []


def reward(prompt, answer, gold):
    """Does what the answer says."""
    start = time.process_time()
    if answer == "hang":
        while True:
            pass
    if answer == "hang in C":
        return float(10 ** (10**10) > 0)
    if answer == "eat memory":
        return float(len(bytearray(8 << 30)))
    if answer == "numpy memory":
        return float(numpy.ones(1 << 30).sum())
    if answer == "die":
        os._exit(3)
    if answer == "memory for good":  # what stays behind in a worker is not the doing of the next answer
        KEPT.append(bytearray(1 << 30))
        return 1.0
    if answer == "half a second":
        while time.process_time() - start < 0.5:
            pass
        return 1.0
    if answer == "sleep for ever":
        time.sleep(10_000)
    if answer == "count calls":
        KEPT.append(bytearray(1))
        return 1.0 / len(KEPT)
    if answer == "raise":
        raise KeyError("what the grader was looking for")
    if answer == "print":
        print("a grader that prints must not disturb the protocol")
        return 1.0
    if answer == "no answer":
        return None
    if answer == "sleep":
        time.sleep(0.05)
        return 1.0
    if answer == "modules":
        return float(any(name in sys.modules for name in ("torch", "vllm", "transformers", "megatron")))
    return float(answer)


def raises(prompt, answer, gold):
    """Never comes to a verdict."""
    raise RuntimeError("the reward service does not answer")


def text(prompt, answer, gold):
    """The answer of a language model that gives no number."""
    return "0.5"


def ends(prompt, answer, gold):
    """Takes its worker with it."""
    os._exit(7)


def two_arguments(text, gold):
    """Written for another trainer."""
    return 1.0


def with_options(prompt, answer, gold, *, bonus=0.0, name="x"):
    """Says what it was given."""
    return bonus


def outage(prompt, answer, gold):
    """Works on the gold "1" alone, whatever the answer."""
    if gold != "1":
        raise ConnectionError("no route to the reward service")
    return float(answer)


def misused(prompt, answer, gold):
    """Every return value that is no reward, and some that are."""
    return {
        "text": "0.5", "two": 2.0, "minus": -1, "nan": float("nan"), "list": [1.0], "nothing": None, "true": True,
        "numpy": numpy.float32(0.5), "object": object(), "complex": 1j, "arrays": numpy.ones(2), "half": 0.5,
    }[answer]  # fmt: skip


def hangs(prompt, answer, gold):
    """Sleeps over everything."""
    time.sleep(10_000)


def works_in_a_child(prompt, answer, gold):
    """Sleeps itself, while a process that it has started uses what CPU it gets."""
    code = "import time\nwhile time.process_time() < 1.5: pass"
    return float(subprocess.run([sys.executable, "-c", code], check=True).returncode == 0)


def intrudes(prompt, answer, gold):
    """Reaches for its worker in the way that the answer names."""
    if answer == "fork":
        os.fork()
    elif answer == "fork and stay":
        if os.fork() == 0:
            time.sleep(10_000)
    elif answer == "fork, stay and die":
        if os.fork() == 0:
            time.sleep(10_000)
        os._exit(3)
    elif answer == "write":
        _to_every_descriptor(lambda number: os.write(number, b'{"reward": 1.0}\n' * 9))
    elif answer == "write little":
        _to_every_descriptor(lambda number: os.write(number, b"1"))
    elif answer == "close":
        _to_every_descriptor(os.close)
    elif answer == "read":
        return 1.0 if sys.stdin.read() == "" and os.read(0, 1) == b"" else 0.0
    elif answer == "exit":
        sys.exit(5)
    elif answer == "interrupt":
        raise KeyboardInterrupt
    elif answer == "thread":
        threading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()
    elif answer == "huge":
        return 10**5000
    return 1.0


def _to_every_descriptor(do):
    for number in range(3, 64):
        with suppress(OSError):
            do(number)
