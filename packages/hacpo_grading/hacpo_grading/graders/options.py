"""Options of graders: the values that each takes, as a test and in words. Graders check theirs with these tables."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """The values that an option takes, in words and as a test."""

    words: str
    takes: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


FLAG = Option("true or false", lambda value: isinstance(value, bool))
COUNT = Option("a whole number from 1", lambda value: type(value) is int and value >= 1)
SHARE = Option("a number from 0, below 1", lambda value: _is_number(value) and 0.0 <= value < 1.0)
DISTANCE = Option("a number from 0, below inf", lambda value: _is_number(value) and 0.0 <= value < math.inf)
SECONDS = Option("a number above 0, below inf", lambda value: _is_number(value) and 0.0 < value < math.inf)
TEXT = Option("text", lambda value: isinstance(value, str))
NAME = Option("a text that is not empty", lambda value: isinstance(value, str) and value.strip() != "")
ADDRESS = Option(
    "an address that begins with http:// or https://",
    lambda value: isinstance(value, str) and value.startswith(("http://", "https://")),
)
NUMBER_OPTIONS = {"rel_tol": SHARE, "abs_tol": DISTANCE}
PROGRAM_OPTIONS = {
    **dict.fromkeys(("graded", "isolated"), FLAG),
    **dict.fromkeys(("cpu_s", "memory_mb", "num_processes", "output_kb"), COUNT),
}
# Requests to a model: how many, seconds of each, and the longest wait between two.
ATTEMPTS, REQUEST_S, WAIT_S = 4, 60.0, 30.0
MODEL_OPTIONS = {
    **{"url": ADDRESS, "model": NAME, "template": TEXT},
    **{"max_tokens": COUNT, "attempts": COUNT, "request_s": SECONDS},
    **dict.fromkeys(("api_key_env", "cache", "extra_body"), TEXT),
}


def model_wall_s(options: Mapping[str, Any], gold: str) -> float:
    """Seconds until all attempts of a question to a model are over."""
    return options.get("attempts", ATTEMPTS) * (options.get("request_s", REQUEST_S) + WAIT_S)


def wrong_value(known: Mapping[str, Option], given: Mapping[str, Any]) -> str | None:
    """A complaint about the first option with a value that it does not take; None without one. All names are known."""
    wrong = ((name, value) for name, value in given.items() if not known[name].takes(value))
    return next((f"option {name} ({value!r}) must be {known[name].words}" for name, value in wrong), None)
