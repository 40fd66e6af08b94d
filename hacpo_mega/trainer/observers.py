"""What examines a run while it goes on: gradients, weights and held-out answers. Each is told of its moments.

An observer may measure, write metrics, follow what it sees, and end the run; it changes no answer, no sample and no
update that it is shown. Every rank calls every observer alike, in the order in which they are listed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from hacpo_mega.agent.agent import Agent
from hacpo_mega.config import Config
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.step_report import StepFindings, StepReport
from hacpo_mega.logbook.steps.skipped_updates import SkippedUpdates
from hacpo_mega.logbook.steps.step_metrics import add_diagnosis, add_held_out
from hacpo_mega.records import Prompt, Sample, UpdateStats
from hacpo_mega.trainer.phases import Phases
from hacpo_mega.trainer.rollout_judge import RolloutJudge


class Observer:
    """The moments of a run; an observer has those that it needs. `step` is the one under way, from 1."""

    def around(self, _phase: str) -> AbstractContextManager[None]:
        """What is done around every phase, from loading on."""
        return nullcontext()

    def joins(self, agent: Agent, metrics: Metrics) -> None:
        """Once: whom it looks at, and where it may write."""

    def before_training(self, step: int) -> None:
        """The agents stand, `step` is the first to come."""

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Update `m` of the step, from 0, is about to be learnt from."""

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """It has been learnt from."""

    def after_learning(self, step: int, updates: Sequence[UpdateStats]) -> None:
        """All updates of the step have been learnt from."""

    def after_publishing(self, step: int) -> None:
        """The engine has the new weights."""

    def before_writing(self, step: int, found: StepFindings) -> None:
        """All of a step is known but what writing it takes."""


class Observers:
    """Several observers, one after the other, at every moment of a run that is named on `Observer`."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = tuple(observers)

    def __getattr__(self, moment: str) -> Callable[..., None]:
        """The method that calls every observer's; AttributeError for what is no moment."""
        getattr(Observer, moment)
        return partial(self._call, moment)

    def _call(self, moment: str, *what: Any) -> None:
        for observer in self._all:
            getattr(observer, moment)(*what)


class Skips(Observer):
    """Ends a run whose updates are all skipped."""

    def __init__(self, skips: SkippedUpdates) -> None:
        self._skips = skips

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """RunStopped when it is one too many."""
        self._skips.see(step, m, update, stats)


class Diagnosis(Observer):
    """Measures own against cross gradients of every update of every so many steps."""

    def __init__(self, every: int, agent: Agent, metrics: Metrics, phase: Phases,
                 names: Sequence[str]) -> None:  # fmt: skip
        self._every, self._agent = every, agent
        self._metrics, self._phase, self._names = metrics, phase, tuple(names)

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """The agent is the same afterwards, to the last bit. Collective over the agent's ranks."""
        if step % self._every:
            return
        with self._phase("diagnose"):
            found = self._agent.diagnose(update, m)
        if self._agent.place.is_leader:
            add_diagnosis(self._metrics, found, self._agent.index, self._names)


class Verification(Observer):
    """Ends the run where an engine answers with other weights than its actor's."""

    def __init__(self, every: int, agent: Agent, phase: Phases) -> None:
        """Before training, and after every so many steps; 0: before training alone."""
        self._every, self._agent, self._phase = every, agent, phase

    def before_training(self, step: int) -> None:
        """Collective over the cell."""
        self._verify(f"before step {step}")

    def after_publishing(self, step: int) -> None:
        """Collective over the cell."""
        if self._every and step % self._every == 0:
            self._verify()

    def _verify(self, when: str = "") -> None:
        with self._phase("verify", when):
            self._agent.verify_weights()


class Evaluation(Observer):
    """Greedy answers to the held-out prompts, which the agent's cells share among themselves."""

    def __init__(self, config: Config, held_out: Sequence[Prompt], agent: Agent, judge: RolloutJudge,
                 metrics: Metrics, report: StepReport, phase: Phases) -> None:  # fmt: skip
        place = agent.place
        self._config, self._agent, self._judge = config, agent, judge
        self._metrics, self._report, self._phase = metrics, report, phase
        self._mine = held_out[place.rank_map.share_of_agent(place.coordinate)]
        self._longest = config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens
        self._is_on = bool(held_out)

    def before_training(self, step: int) -> None:
        """Before a run's first step."""
        if step == 1:
            self._evaluate(0, "before step 1")

    def after_publishing(self, step: int) -> None:
        """Every so many steps, and after the last one."""
        every = self._config.evaluation.every_steps
        if step == self._config.num_steps or (every and step % every == 0):
            self._evaluate(step)

    def _evaluate(self, after: int, when: str = "") -> None:
        if not self._is_on:
            return
        with self._phase("evaluate", when):
            answers = self._agent.answer_greedily(self._mine, self._longest, after)
            judgements = self._judge.judge(self._mine, answers)
        if self._agent.place.is_leader:
            graded = self._config.reward.may_be_graded
            add_held_out(self._metrics, self._agent.name, self._mine, judgements, may_be_graded=graded)
            self._report.first_rewards.compare(self._metrics, self._agent.name, self._mine, judgements, after)
            self._report.warn_of_grader(self._judge.take_report(), "held-out answers")
