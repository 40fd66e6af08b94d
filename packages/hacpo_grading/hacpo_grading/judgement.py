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
    """Why an answer ended: the end-of-sequence token, the length limit, the engine gave up, or it came too late."""

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
    place    the place of the prompt in a step: answers to one place are a group. None: those to an equal prompt are
    group    all answers of the group, which the judge adds for a grader that asks for them
    is_explained   asks the grader how its verdict comes about
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
    """The end of grading an answer: a reward, or None with `error` or `timed_out`; None alone: it has no answer.

    `is_misuse`: the grader returned what is no reward, or no worker could be started; the answer is not the cause.
    `parts` are other numbers that it returned with the reward.
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
        """Tells whether the grader reached no end."""
        return self.timed_out or self.error is not None


class Verdict(enum.IntEnum):
    """The judge's verdict. CORRECT is a success, as `reward.success` defines one; no reader compares rewards for it.

    TIMEOUT and ERROR earn 0 where the answer is their cause, else a policy could learn to cause them; where the judge
    is, the answer is unjudged and its reward is NaN.
    """

    CORRECT = 0
    WRONG = 1
    NO_ANSWER = 2
    TIMEOUT = 3
    ERROR = 4

    def allows(self, reward: float) -> bool:
        """Tells whether a reward can go with this verdict: nothing but 0 or NaN where the grader reached no end."""
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
