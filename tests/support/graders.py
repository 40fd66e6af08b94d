"""A graded reward for trainer tests: a model with random weights can climb it within a few steps."""

import os
import time
import zlib


def share_of_ones(prompt: str, answer: str, gold: str) -> float | None:
    """The share of the answer that is the digit 1; an empty answer is none."""
    return answer.count("1") / len(answer) if answer else None


def odd_length(prompt: str, answer: str, gold: str) -> float:
    """True if the answer has an odd number of characters."""
    return float(len(answer) % 2)


def text(prompt: str, answer: str, gold: str) -> str:
    """A broken grader: it returns its verdict as text."""
    return "correct"


def text_for_others(prompt: str, answer: str, gold: str) -> str | float:
    """The same, but for the answers on which a reward is tried before training."""
    from hacpo_mega.grading.reward_trial import FORMS  # here: it would take every worker a second

    tried = {form.replace("GOLD", gold): 1.0 for form in FORMS} | {"": 0.0}
    return tried.get(answer, "correct")


def hostile(prompt, answer, gold):
    """Does to some answers what a reward of a user can do to its process; `fate_of` says to which."""
    fate = "right" if answer == gold else fate_of(answer)
    if fate == "sleeps":
        time.sleep(3600)
    while fate == "spins":
        pass
    if fate == "ends":
        os._exit(3)
    if fate == "raises":
        raise LookupError("no such answer")
    if fate == "forks" and os.fork() == 0:
        time.sleep(3600)
    return float(fate in ("right", "forks"))


def fate_of(answer: str) -> str:
    """A function of the text alone: one in 16 answers each sleeps, spins, ends, raises or forks."""
    number = zlib.crc32(answer.encode()) % 16
    return ("sleeps", "spins", "ends", "raises", "forks", "right")[number] if number < 6 else "wrong"
