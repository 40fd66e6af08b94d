"""An answer as a judge is asked about it, and the judgement of it. Imported by worker processes: the standard library
alone.
"""

import enum
import functools
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EXACT_FLOATS = 2.0**53  # below which each whole number is one


class Stop(enum.IntEnum):
    """The reason for an answer's end: end-of-sequence token, length limit, aborted by the engine, cut as too late."""

    EOS = 0
    LENGTH = 1
    ABORT = 2
    CUT = 3


@dataclass(frozen=True)
class Asked:
    """One answer to a prompt, as it is judged, and as it travels to a worker.

    gold     a number, as a column of them has it, becomes its text
    row      the other fields of the prompt's data row as JSON text; "" for a row without fields
    agent    the author of the answer
    place    number of the prompt in a step: its answers are a group. None: answers to equal prompts are a group
    group    all answers of the group, which the judge adds for a grader that asks for them
    is_explained   asks the grader to explain its verdict
    """

    prompt: str
    answer: str
    gold: str
    stop: Stop = Stop.EOS
    row: str = ""
    agent: str = ""
    place: int | None = None
    group: tuple[str, ...] = ()
    is_explained: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.gold, numbers.Real) and not isinstance(self.gold, bool) and math.isfinite(self.gold):
            object.__setattr__(self, "gold", gold_text(self.gold))

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """The fields of `row`."""
        return json.loads(self.row) if self.row else {}


def gold_text(answer: str | numbers.Real) -> str:
    """A gold answer as text. A whole float is written as an integer: Parquet makes floats of a column with a gap.

    A larger one has no digits of units: written out, 6.022e23 would be 602200000000000027262976.
    """
    is_whole = not isinstance(answer, str | int) and float(answer).is_integer() and abs(answer) < EXACT_FLOATS
    return str(int(answer)) if is_whole else str(answer)


@dataclass(frozen=True)
class Outcome:
    """The result of grading a text: a reward; None with `error` or `timed_out` for a failure, else without an answer.

    `is_misuse`: the answer is not the cause of the failure: the grader returned no valid reward, or no worker started.
    `parts` are other numbers that the grader returned with the reward.
    """

    reward: float | None
    error: str | None = None
    timed_out: bool = False
    is_misuse: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    explanation: Mapping[str, Any] | None = None
    cpu_s: float = 0.0

    @property
    def is_failure(self) -> bool:
        """Tells whether the grader gave no result."""
        return self.timed_out or self.error is not None


class Verdict(enum.IntEnum):
    """The judge's verdict. CORRECT is a success by `reward.success`: readers need not compare rewards.

    TIMEOUT and ERROR earn 0 where the answer is their cause, else a policy could learn to cause them. Where the judge
    is their cause, the answer is unjudged and its reward is NaN.
    """

    CORRECT = 0
    WRONG = 1
    NO_ANSWER = 2
    TIMEOUT = 3
    ERROR = 4

    def allows(self, reward: float) -> bool:
        """Tells whether a reward fits this verdict: only 0 or NaN do where the grader gave no result."""
        if self in (Verdict.TIMEOUT, Verdict.ERROR):
            return math.isnan(reward) or reward == 0.0
        return not math.isnan(reward)


class Judgement(NamedTuple):
    """A verdict and its reward; the reward is NaN exactly when the answer is unjudged.

    `parts` are the named rewards that it is made of, and other numbers that a grader returned: they are only logged.
    """

    verdict: Verdict
    reward: float
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def is_judged(self) -> bool:
        return not math.isnan(self.reward)

    @property
    def is_success(self) -> bool:
        return self.verdict is Verdict.CORRECT
