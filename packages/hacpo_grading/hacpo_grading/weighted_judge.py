"""Several named rewards of one answer, and their weighted mean as its reward.

    [reward.parts.right]
    kind = "math"
    weight = 0.8

    [reward.parts.short]
    kind = "my_rewards.py:brevity"
    weight = 0.2

Each part is judged by a judge of its own (judge.py), which says who is to blame for a failure. An answer that one of
them leaves unjudged is unjudged. An answer is correct where `reward.success` says so: where the part of that name gave
its full reward, or where the mean is at least that number, 1 if it is not given.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from hacpo_grading.judge import FULL, NO_OPTIONS, Explained, Judge, JudgeReport, is_success
from hacpo_grading.judgement import Asked, Judgement, Verdict
from hacpo_grading.workers.grader_calls import UNIT


@dataclass(frozen=True)
class RewardPart:
    """One reward by name: its grader with options, its weight in the mean, the range of what it returns."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    weight: float = 1.0
    reward_range: tuple[float, float] = UNIT


class WeightedJudge(AbstractContextManager["WeightedJudge"]):
    """The judges of several parts, used as one judge is. `common` are arguments that all of them take.

    `success` is a part whose full reward makes an answer correct, or the weighted mean from which on it is.
    """

    def __init__(self, parts: Sequence[RewardPart], success: str | float = FULL, **common: Any) -> None:
        """Starts the workers of every part. ValueError names the part whose grader cannot be loaded."""
        assert parts and (not isinstance(success, str) or success in {part.name for part in parts}), (parts, success)
        self._parts, self._success = tuple(parts), success
        self._judges: list[Judge] = []
        with ExitStack() as stack:
            for part in parts:
                try:
                    judge = Judge(part.kind, options=part.options, reward_range=part.reward_range, **common)
                except ValueError as error:
                    raise ValueError(f"reward.parts.{part.name}: {error}") from error
                self._judges.append(stack.enter_context(judge))
            self._open = stack.pop_all()

    @property
    def has_workers(self) -> bool:
        """Tells whether a part's grader runs in processes of its own."""
        return any(judge.has_workers for judge in self._judges)

    @property
    def compares_groups(self) -> bool:
        """Tells whether a part's grader asks for all answers to a prompt."""
        return any(judge.compares_groups for judge in self._judges)

    @property
    def asks_for_source(self) -> bool:
        """Tells whether a part's grader is verl's and asks for a row's data_source."""
        return any(judge.asks_for_source for judge in self._judges)

    @property
    def how_called(self) -> tuple[str, ...]:
        """The lines that a start prints for graders of the user's own."""
        return tuple(line for judge in self._judges for line in judge.how_called)

    def require_fields(self, rows: Iterable[str]) -> None:
        """ValueError where a data row lacks a field that a part's grader cannot do without."""
        rows = list(rows)
        for judge in self._judges:
            judge.require_fields(rows)

    def judge(self, asked: Sequence[Asked]) -> list[Judgement]:
        """One judgement per answer, in order."""
        judged = [judge.judge(asked) for judge in self._judges]
        return [self._together(of_answer) for of_answer in zip(*judged, strict=True)]

    def judge_and_explain(self, asked: Sequence[Asked]) -> list[Explained]:
        """Each judgement with what every part's grader says about it, by the part's name."""
        explained = [judge.judge_and_explain(asked) for judge in self._judges]
        return [
            (self._together([judgement for judgement, _ in of_answer]), self._by_part(said for _, said in of_answer))
            for of_answer in zip(*explained, strict=True)
        ]

    def take_report(self) -> JudgeReport:
        """The failures since the last report: numbers of answers of the part where most did, errors of all parts."""
        reports = [judge.take_report() for judge in self._judges]
        errors: Counter[str] = Counter()
        for part, report in zip(self._parts, reports, strict=True):
            errors.update({f"reward.parts.{part.name}: {text}": number for text, number in report.errors.items()})
        return JudgeReport(
            num_answers=reports[0].num_answers,
            num_unjudged=max(report.num_unjudged for report in reports),
            num_timeouts=max(report.num_timeouts for report in reports),
            num_errors=max(report.num_errors for report in reports),
            errors=errors,
        )

    def _by_part(self, values: Iterable[Any]) -> dict[str, Any]:
        return {part.name: value for part, value in zip(self._parts, values, strict=True)}

    def _together(self, judgements: Sequence[Judgement]) -> Judgement:
        parts = []
        for name, judgement in self._by_part(judgements).items():
            parts += [(name, judgement.reward)] if judgement.is_judged else []
            parts += [(f"{name}_{key}", value) for key, value in judgement.parts]
        if unjudged := [judgement for judgement in judgements if not judgement.is_judged]:
            return Judgement(unjudged[0].verdict, math.nan, tuple(parts))
        weights = [part.weight for part in self._parts]
        weighted = [weight * judgement.reward for weight, judgement in zip(weights, judgements, strict=True)]
        reward = math.fsum(weighted) / math.fsum(weights)
        return Judgement(self._verdict(judgements, reward), reward, tuple(parts))

    def _verdict(self, judgements: Sequence[Judgement], reward: float) -> Verdict:
        if isinstance(self._success, str):
            has_succeeded = self._by_part(judgements)[self._success].is_success
        else:
            has_succeeded = is_success(reward, self._success)
        if has_succeeded:
            return Verdict.CORRECT
        has_answer = any(judgement.verdict is not Verdict.NO_ANSWER for judgement in judgements)
        return Verdict.WRONG if has_answer else Verdict.NO_ANSWER

    def close(self) -> None:
        """Ends the workers of all parts. May be called twice."""
        self._open.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


AnyJudge = Judge | WeightedJudge
