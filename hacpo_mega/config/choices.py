"""Names that a configuration may say and that other rooms give a meaning to, with what must be known of them here.

`grading/kinds.py` has a grader for every reward kind and `data/tasks.py` makes the prompts of every skill; tests hold
that they agree with these lists.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Option:
    """Of a judge: which values it takes, and that in words."""

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

# Every kind of judge with the options that it has.
REWARD_KINDS: Mapping[str, Mapping[str, Option]] = {
    "math": {"relative": SHARE},
    "math_any": {"relative": SHARE},
    "number": {"rel_tol": SHARE, "abs_tol": DISTANCE},
    "choice": {},
    "json": {},
    "program": {
        **dict.fromkeys(("graded", "isolated"), FLAG),
        **dict.fromkeys(("cpu_s", "memory_mb", "num_processes", "output_kb"), COUNT),
    },
    "exact": {},
    "arithmetic": {},
    "model": {
        **dict.fromkeys(("url", "model", "template"), TEXT),
        **{"max_tokens": COUNT, "attempts": COUNT, "request_s": SECONDS},
        **dict.fromkeys(("api_key_env", "cache", "extra_body"), TEXT),
    },
}


def value_problem(kind: str, options: Mapping[str, Any]) -> str | None:
    """Which of the options of a kind of judge has a value that it does not take; its names are known."""
    known = REWARD_KINDS[kind]
    wrong = (name for name, value in options.items() if not known[name].takes(value))
    return next((f"option {name} ({options[name]!r}) must be {known[name].said}" for name in wrong), None)


def gives_parts(kind: str, options: Mapping[str, Any]) -> bool:
    """Whether a grader may give a part of a reward: a program's with `graded`, a model's, and the user's own."""
    if kind == "program":
        return bool(options.get("graded"))
    return kind == "model" or kind not in REWARD_KINDS


TRACKERS = ("wandb", "trackio", "swanlab", "mlflow", "comet_ml")

Skill = Literal["add", "sub", "mul", "srt", "sum"]


@dataclass(frozen=True)
class SkillSize:
    """How many different prompts of a skill there are to train on, and how many are held out for evaluation."""

    num_training: int
    num_held_out: int


SKILLS: Mapping[Skill, SkillSize] = {
    "add": SkillSize(6445, 1655),
    "sub": SkillSize(3269, 826),
    "mul": SkillSize(570, 150),
    "srt": SkillSize(8010, 1990),
    "sum": SkillSize(7925, 2075),
}
