"""Who judges: text and gold in, verdict and reward out, with a hang never mistaken for a wrong answer.

A time-out or an error leaves an answer unjudged (reward NaN): a 0 would bias the capability of its agent, and with
it omega and every advantage (eq. 9 and 10 of the paper).
"""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from hacpo_mega.grading.graders import GUARDED, IN_PROCESS, Grader
from hacpo_mega.grading.guarded_workers import MEMORY_BYTES, GuardedWorkers, Outcome, Task
from hacpo_mega.records import Judgement, Stop, Verdict


@dataclass(frozen=True)
class JudgeCounts:
    """Totals over the life of a judge; answers per second is num_answers / wall_s."""

    num_answers: int = 0
    num_timeouts: int = 0
    num_errors: int = 0
    num_workers_replaced: int = 0
    wall_s: float = 0.0


class Judge:
    """Judges answers of one kind.

    `kind` is "math" (last boxed answer against gold), "math_any" (an answer anywhere in the text), "arithmetic",
    "exact", or "module:function" / "file.py:function", a grader of your own: (prompt, answer, gold) -> reward from 0 to
    1, or None for no answer. String comparisons run in this process, since they cannot hang and a pipe would cost more
    than they do; everything else runs in `num_workers` guarded processes, `timeout_s` of wall time for each answer.
    With `require_stop` an answer that did not end by itself has no answer.
    """

    def __init__(
        self,
        kind: str,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        require_stop: bool = False,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Starts the workers. ValueError for an unknown kind, or a grader that cannot be imported."""
        if ":" not in kind and kind not in IN_PROCESS and kind not in GUARDED:
            known = ", ".join([*IN_PROCESS, *GUARDED])
            raise ValueError(f"reward kind {kind!r} is unknown; known: {known}, or your own as module:function")
        self.kind = kind
        self.require_stop = require_stop
        self.counts = JudgeCounts()
        self.last_errors: tuple[str, ...] = ()
        self._grader = IN_PROCESS.get(kind)
        self._workers = None
        if self._grader is None:
            self._workers = GuardedWorkers(GUARDED.get(kind, kind), num_workers, timeout_s, memory_bytes)
        self._lock = threading.Lock()

    def judge(
        self, prompts: Sequence[str], golds: Sequence[str], texts: Sequence[str], stops: Sequence[Stop]
    ) -> list[Judgement]:
        """One judgement per answer, in order. `last_errors` then says why answers of this call are unjudged."""
        assert len(prompts) == len(golds) == len(texts) == len(stops), (len(prompts), len(golds), len(texts))
        with self._lock:
            start = time.monotonic()
            ended = [i for i, stop in enumerate(stops) if stop == Stop.EOS or not self.require_stop]
            outcomes = self._grade([Task(prompts[i], texts[i], golds[i]) for i in ended])
            judgements = [Judgement(Verdict.NO_ANSWER, 0.0)] * len(texts)
            for i, outcome in zip(ended, outcomes):
                judgements[i] = judgement_of(outcome)
            self.last_errors = tuple(outcome.error for outcome in outcomes if outcome.error)
            self._count(judgements, time.monotonic() - start)
        return judgements

    def _grade(self, tasks: list[Task]) -> list[Outcome]:
        if self._workers is not None:
            return self._workers.run(tasks)
        return [_in_process(self._grader, task) for task in tasks]

    def _count(self, judgements: list[Judgement], seconds: float) -> None:
        verdicts = [judgement.verdict for judgement in judgements]
        self.counts = replace(
            self.counts,
            num_answers=self.counts.num_answers + len(verdicts),
            num_timeouts=self.counts.num_timeouts + verdicts.count(Verdict.TIMEOUT),
            num_errors=self.counts.num_errors + verdicts.count(Verdict.ERROR),
            num_workers_replaced=self._workers.num_replaced if self._workers else 0,
            wall_s=self.counts.wall_s + seconds,
        )

    def close(self) -> None:
        """Ends the workers; none is left, not even as a zombie. May be called twice."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _in_process(grader: Grader, task: Task) -> Outcome:
    try:
        return Outcome(grader(task.prompt, task.answer, task.gold))
    except ValueError as error:
        return Outcome(None, error=f"ValueError: {error}")


def judgement_of(outcome: Outcome) -> Judgement:
    """The verdict on an outcome: a reward below 1 counts as wrong, and keeps its value."""
    if outcome.timed_out:
        return Judgement(Verdict.TIMEOUT, math.nan)
    if outcome.error is not None:
        return Judgement(Verdict.ERROR, math.nan)
    if outcome.reward is None:
        return Judgement(Verdict.NO_ANSWER, 0.0)
    return Judgement(Verdict.CORRECT if outcome.reward >= 1.0 else Verdict.WRONG, outcome.reward)
