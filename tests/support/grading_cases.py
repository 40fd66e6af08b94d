"""Graders that misbehave in every way a reward function of a user can, for the tests of the judge."""

import os
import sys
import time

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
    """What a language model says instead of a number."""
    return "0.5"


def ends(prompt, answer, gold):
    """Takes its worker with it."""
    os._exit(7)


def two_arguments(answer, gold):
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
