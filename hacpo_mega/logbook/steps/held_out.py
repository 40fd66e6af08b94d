"""The metrics of held-out answers: their names, how everybody reads them, and when a mean is an accuracy.

    agent/<name>/accuracy                          of graders whose rewards are 0 or 1: the share of right answers
    agent/<name>/eval/reward_mean, reward_square   of all others: the mean reward, and the mean of its square
    agent/<name>/num_evaluated                     judged answers

Each also by skill, /<skill> behind it. A mean of rewards is called an accuracy only where every reward was 0 or 1;
`is_graded` says where one was not. Elsewhere: adding them up (step_metrics.py). Imports no torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ACCURACY, REWARD_MEAN, REWARD_SQUARE = "accuracy", "eval/reward_mean", "eval/reward_square"
OLD_SQUARE = "accuracy_square"  # its name in older runs, which had it for every grader
ROUNDING = 1e-9  # of sums over ranks


class HeldOut(NamedTuple):
    """Mean reward of an agent's held-out answers at one step.

    num_evaluated   None when the run did not say
    square          mean squared reward; None of graders whose rewards are 0 or 1
    """

    value: float
    num_evaluated: int | None = None
    square: float | None = None


def is_graded(mean: float, square: float | None) -> bool:
    """True if a reward lay between 0 and 1, by the means of rewards and of their squares: the mean is no accuracy."""
    return square is not None and mean - square > ROUNDING


def are_accuracies(found: Iterable[HeldOut]) -> bool:
    """True if the means of all these evaluations are accuracies: every reward was 0 or 1.

    Where a part of a reward may be given and no answer earned anything, nothing says so.
    """
    found = list(found)
    may_be = all(point.square is None for point in found) or any(point.value > 0.0 for point in found)
    return may_be and not any(is_graded(point.value, point.square) for point in found)


def held_out(values: Mapping[str, float], name: str, skill: str | None = None) -> HeldOut | None:
    """An agent's evaluation in a step's metrics, of one skill if given; None where there is none."""
    prefix, suffix = f"agent/{name}", f"/{skill}" if skill else ""
    mean = values.get(f"{prefix}/{REWARD_MEAN}{suffix}", values.get(f"{prefix}/{ACCURACY}{suffix}"))
    if mean is None:
        return None
    square = values.get(f"{prefix}/{REWARD_SQUARE}{suffix}", values.get(f"{prefix}/{OLD_SQUARE}{suffix}"))
    number = values.get(f"{prefix}/num_evaluated{suffix}")
    return HeldOut(mean, None if number is None else int(number), square)


def held_out_skills(values: Mapping[str, float], name: str) -> list[str]:
    """The skills that an agent was evaluated on in a step, in order of name."""
    starts = tuple(f"agent/{name}/{mean}/" for mean in (ACCURACY, REWARD_MEAN))
    return sorted(key.removeprefix(start) for key in values for start in starts if key.startswith(start))


def mean_held_out(values: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Held-out mean reward of a step's reduced metrics, mean over the agents; None where one of them has none."""
    found = [held_out(values, name) for name in names]
    return None if None in found else math.fsum(point.value for point in found) / len(found)


def score_name(name: str, *, graded: bool) -> str:
    """A score of `eval`, such as avg@8, as people read it: of graded rewards "mean reward@8" and "best reward@8"."""
    what, at, k = name.partition("@")
    return f"{what.replace('avg', 'mean')} reward{at}{k}" if graded and what in ("avg", "best") else name
