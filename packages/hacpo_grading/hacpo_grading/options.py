"""Options of graders: which values each takes, and that in words."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """The values that an option takes, as a sentence names them and as a test."""

    said: str
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
