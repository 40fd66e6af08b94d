"""Graders that misbehave in every way a reward function of a user can, for the tests of the judge."""

import os
import sys
import time

import numpy


def reward(prompt, answer, gold):
    """Does what the answer says."""
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
