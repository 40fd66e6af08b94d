"""The judge: text and gold in, verdict and reward out. Failures of grading count against the answer or the judge.

An answer on which its grader gives no result (out of CPU time, out of memory, an error) is wrong and earns 0, or a
policy could learn such answers to be left out of every group mean. Where the judge is at fault it stays unjudged
(reward NaN), since a 0 would bias the capability of its agent, and with it omega and every advantage (HACPO, eq. 9).
The judge is at fault when the gold as the answer fails too, when no worker can be started, when a grader returns no
valid reward, and as long as a grader of the user's own has never come to a verdict. `WeightedJudge` gives an
answer several graders.
"""

import functools
import json
import math
import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

from hacpo_grading.graders.registry import find_grader
from hacpo_grading.judgement import Asked, Judgement, Outcome, Stop, Verdict
from hacpo_grading.workers.grader_calls import UNIT, GraderCall, explain, missing_field
from hacpo_grading.workers.grader_signature import Signature
from hacpo_grading.workers.guarded_workers import (
    MEMORY_BYTES,
    START_TIMEOUT_S,
    GraderSpec,
    GuardedWorkers,
)

# Answers on which a grader of the user's own is tried before the rest.
NUM_TRIED = 8
NOT_TRIED = "not tried: the grader failed on all answers before"
NOT_ENDED = Judgement(Verdict.NO_ANSWER, 0.0)
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
FULL = 1.0  # the reward of a success, unless reward.success says otherwise
ROUNDING = 1e-9  # of a reward, relative: the weighted mean of full parts may be .9999999999999999

Explained = tuple[Judgement, Mapping[str, Any]]


@dataclass(frozen=True)
class JudgeReport:
    """Totals of a judge over its life, or since the last report; cpu_s is of the graders, wall_s of the calls.

    num_distinct   tasks that were graded, equal ones once
    num_timeouts, num_errors   of answers, whether they cost the answer its reward or left it unjudged
    hidden_s   seconds of judging that overlapped sampling
    errors     since the last report: every distinct text with its number, in order of appearance
    """

    num_answers: int = 0
    num_distinct: int = 0
    num_unjudged: int = 0
    num_timeouts: int = 0
    num_errors: int = 0
    num_workers_replaced: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    hidden_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def first_error(self) -> str | None:
        """The text of the first error; None without any."""
        return next(iter(self.errors), None)

    def since(self, before: "JudgeReport", errors: Mapping[str, int]) -> "JudgeReport":
        """The difference to the totals of `before`, with its errors."""
        names = [one.name for one in fields(self) if one.name != "errors"]
        return JudgeReport(**{name: getattr(self, name) - getattr(before, name) for name in names}, errors=errors)


class Judge(AbstractContextManager["Judge"]):
    """Judges answers of one kind.

    `kind` is a name of registry.py ("math", "number", "program", ...) or "module:function" / "file.py:function", a
    grader of your own; `options` are its keyword-only arguments. Graders linear in the text run in this process, since
    a pipe would cost more than they do; all others run in `num_workers` guarded processes, with `start_timeout_s` to
    load and `timeout_s` CPU seconds for each answer. With `require_stop` an answer that did not end by itself has no
    answer. Equal answers to equal prompts are graded once. Rewards lie in `reward_range`, whose ends become 0 and 1;
    from `success` on an answer is correct.

    A process that is forked from this one has its own workers, from its first judging on.
    """

    _all: ClassVar[weakref.WeakSet["Judge"]] = weakref.WeakSet()

    def __init__(
        self,
        kind: str,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        require_stop: bool = False,
        memory_bytes: int = MEMORY_BYTES,
        options: Mapping[str, Any] = NO_OPTIONS,
        reward_range: tuple[float, float] = UNIT,
        success: float = FULL,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Starts the workers. ValueError for an unknown kind or option, or a grader that cannot be loaded."""
        self.kind = kind
        self.success = success
        self.require_stop = require_stop
        self.counts = self._reported = JudgeReport()
        record = self._record = find_grader(kind)
        self._errors: Counter[str] = Counter()
        self._has_worked = not record.is_own
        self._sound: set[Asked] = set()
        self._lock = threading.Lock()
        self._call: GraderCall | None = None
        self._workers: GuardedWorkers | None = None
        wall_s = functools.partial(record.wall_s, options)
        spec = GraderSpec(kind, record.function, options, record.explainer, record.is_own, reward_range, wall_s)
        try:
            if record.is_linear:
                self._call = GraderCall(spec.name, spec.options, reward_range)
            else:
                self._workers = GuardedWorkers(spec, num_workers, timeout_s, memory_bytes, start_timeout_s)
        except ValueError as error:
            raise ValueError(f"reward kind {kind!r}: {error}") from error
        self._all.add(self)

    @classmethod
    def _after_fork(cls) -> None:
        """Drops the parent's lock and workers in a new child: the lock may be held by a thread that the child lacks."""
        for judge in cls._all:
            judge._lock = threading.Lock()
            if judge._workers is not None:
                judge._workers.leave_to_parent()

    @property
    def has_workers(self) -> bool:
        """Tells whether its graders run in processes of their own."""
        return self._workers is not None

    @property
    def compares_groups(self) -> bool:
        """Tells whether its grader asks for all answers to a prompt."""
        return "group" in self.signature.wants

    @property
    def asks_for_source(self) -> bool:
        """Tells whether its grader is verl's and asks for a row's data_source: "" where the row has none."""
        asked = {"data_source", "data_sources"} & self.signature.names.keys()
        return bool(asked) and self.signature.style.startswith("verl")

    @property
    def signature(self) -> Signature:
        """The form in which its grader is called."""
        return self._call.signature if self._workers is None else self._workers.signature

    @property
    def how_called(self) -> tuple[str, ...]:
        """The line that a start prints for a grader of the user's own: its function, and how it is called."""
        return (f"the grader {self.kind} is called {self.signature}",) if self._record.is_own else ()

    def require_fields(self, rows: Iterable[str]) -> None:
        """ValueError where a data row (JSON text) lacks a field that the grader cannot do without."""
        for row in rows if self.signature.fields else ():
            fields = json.loads(row) if row else {}
            for name in self.signature.fields:
                if name not in fields:
                    raise ValueError(f"reward kind {self.kind!r}: {missing_field(name, fields)}")

    def judge(self, asked: Sequence[Asked]) -> list[Judgement]:
        """One judgement per answer, in order."""
        return [judgement for judgement, _ in self._judge(asked)]

    def judge_and_explain(self, asked: Sequence[Asked]) -> list[Explained]:
        """Each judgement with what the grader says about it: what it took for the answer, how it read both sides."""
        return self._judge([replace(one, is_explained=True) for one in asked])

    def take_report(self) -> JudgeReport:
        """The failures since the last report, for the console of a step."""
        with self._lock:
            report = self.counts.since(self._reported, self._errors)
            self._reported, self._errors = self.counts, Counter()
        return report

    def _judge(self, asked: Sequence[Asked]) -> list[Explained]:
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for one in asked:
            groups[_group_of(one)].append(one.answer)
        with self._lock:
            start = time.monotonic()
            tasks = [
                self._task(one, groups[_group_of(one)]) if one.stop == Stop.EOS or not self.require_stop else None
                for one in asked
            ]
            distinct = list(dict.fromkeys(task for task in tasks if task is not None))
            outcomes = dict(zip(distinct, self._outcomes(distinct)))
            failed = [task for task, outcome in outcomes.items() if outcome.is_failure and not outcome.is_misuse]
            sound = self._sound_among(failed) if failed else set()
            judged = []
            for one, task in zip(asked, tasks, strict=True):
                if task is None:
                    how = {"rule": "the answer did not end by itself"} if one.is_explained else {}
                    judged.append((NOT_ENDED, how))
                else:
                    outcome, is_gold_sound = outcomes[task], self._gold_task(task) in sound
                    judged.append((judgement_of(outcome, is_gold_sound, self.success), outcome.explanation or {}))
            self._errors.update(outcomes[task].error for task in tasks if task is not None and outcomes[task].error)
            self._count([judgement for judgement, _ in judged], outcomes.values(), time.monotonic() - start)
        return judged

    def _task(self, asked: Asked, group: Sequence[str]) -> Asked:
        """The task with only what its grader asks for, so that tasks that the grader cannot tell apart are equal."""
        wants = self.signature.wants
        return replace(
            asked,
            stop=Stop.EOS,
            place=None,
            row=asked.row if "row" in wants else "",
            agent=asked.agent if "agent" in wants else "",
            group=tuple(group) if "group" in wants else (),
        )

    def _outcomes(self, tasks: Sequence[Asked]) -> list[Outcome]:
        """One per task. A grader of the user's own that fails on the first few is not tried on the rest."""
        if self._has_worked:
            return self._run(tasks)
        first = self._run(tasks[:NUM_TRIED])
        self._has_worked = any(not outcome.is_failure for outcome in first)
        rest = tasks[NUM_TRIED:]
        return first + (self._run(rest) if self._has_worked else [Outcome(None, NOT_TRIED)] * len(rest))

    def _run(self, tasks: Sequence[Asked]) -> list[Outcome]:
        if self._workers is not None:
            return self._workers.run(tasks)
        return [self._in_process(task) for task in tasks]

    def _in_process(self, task: Asked) -> Outcome:
        start = time.process_time()
        (outcome,) = self._call.grade([task])
        if task.is_explained:
            how = explain(self._call.grader, self._record.explainer, self.kind, task)
            outcome = replace(outcome, explanation=how)
        return replace(outcome, cpu_s=time.process_time() - start)

    def _sound_among(self, failed: Sequence[Asked]) -> set[Asked]:
        """The gold tasks of the failed ones on which the grader gives a result: there the answer is at fault.

        A built-in grader is asked once per gold. The user's grader is asked at every call, since something that it
        depends on may fail after it worked.
        """
        if not self._has_worked:
            return set()
        if self._record.is_own:
            self._sound.clear()
        unknown = [task for task in dict.fromkeys(map(self._gold_task, failed)) if task not in self._sound]
        self._sound |= {task for task, outcome in zip(unknown, self._run(unknown)) if not outcome.is_failure}
        return self._sound

    def _gold_task(self, task: Asked) -> Asked:
        """The same task with its gold as the answer."""
        answer = self._record.gold_as_answer(task.gold)
        return replace(task, answer=answer, group=(answer,) if task.group else (), is_explained=False)

    def _count(self, judgements: Sequence[Judgement], outcomes: Collection[Outcome], seconds: float) -> None:
        verdicts = [judgement.verdict for judgement in judgements]
        so_far = self.counts
        self.counts = JudgeReport(
            num_answers=so_far.num_answers + len(verdicts),
            num_distinct=so_far.num_distinct + len(outcomes),
            num_unjudged=so_far.num_unjudged + sum(not judgement.is_judged for judgement in judgements),
            num_timeouts=so_far.num_timeouts + verdicts.count(Verdict.TIMEOUT),
            num_errors=so_far.num_errors + verdicts.count(Verdict.ERROR),
            num_workers_replaced=self._workers.num_replaced if self._workers else 0,
            cpu_s=so_far.cpu_s + sum(outcome.cpu_s for outcome in outcomes),
            wall_s=so_far.wall_s + seconds,
        )

    def close(self) -> None:
        """Ends the workers; none is left, not even as a zombie. May be called twice."""
        if self._workers is not None:
            self._workers.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


os.register_at_fork(after_in_child=Judge._after_fork)


def _group_of(asked: Asked) -> Hashable:
    return (asked.prompt, asked.gold, asked.row) if asked.place is None else asked.place


def is_success(reward: float, least: float = FULL) -> bool:
    """Tells whether a reward is a success: at least `least`, up to the rounding of a sum. 0 and NaN never are."""
    return reward >= least * (1.0 - ROUNDING)


def judgement_of(outcome: Outcome, is_gold_sound: bool, success: float = FULL) -> Judgement:
    """The verdict on an outcome: a reward below `success` counts as wrong, and keeps its value.

    A failure costs the answer its reward when its gold is sound, else it stays unjudged.
    """
    if outcome.is_failure:
        verdict = Verdict.TIMEOUT if outcome.timed_out else Verdict.ERROR
        return Judgement(verdict, 0.0 if is_gold_sound and not outcome.is_misuse else math.nan)
    parts = tuple(outcome.parts.items())
    if outcome.reward is None:
        return Judgement(Verdict.NO_ANSWER, 0.0, parts)
    verdict = Verdict.CORRECT if is_success(outcome.reward, success) else Verdict.WRONG
    return Judgement(verdict, outcome.reward, parts)


@dataclass(frozen=True)
class RewardPart:
    """One reward by name: its grader with options, its weight in the mean, the range of what it returns."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)
    weight: float = 1.0
    reward_range: tuple[float, float] = UNIT


class WeightedJudge(AbstractContextManager["WeightedJudge"]):
    """Several named rewards of one answer, and their weighted mean as its reward; used as one judge is.

        [reward.parts.right]
        kind = "math"
        weight = 0.8

        [reward.parts.short]
        kind = "my_rewards.py:brevity"
        weight = 0.2

    Each part has a judge of its own, and an answer that one of them leaves unjudged is unjudged. `success` is a part
    whose full reward makes an answer correct, or the weighted mean from which on it is. `common` are arguments that
    all judges take.
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
        return [self._combined(of_answer) for of_answer in zip(*judged, strict=True)]

    def judge_and_explain(self, asked: Sequence[Asked]) -> list[Explained]:
        """Each judgement with what every part's grader says about it, by the part's name."""
        explained = [judge.judge_and_explain(asked) for judge in self._judges]
        return [
            (self._combined([judgement for judgement, _ in of_answer]), self._by_part(how for _, how in of_answer))
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

    def _combined(self, judgements: Sequence[Judgement]) -> Judgement:
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
