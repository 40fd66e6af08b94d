"""Observers of a run: gradients, the band, weights and held-out answers. Each is called at fixed moments of a step.

An observer may measure, write metrics, track state, and end the run. It changes no answer, no sample and no update.
Every rank calls every observer, in the order in which they are listed.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.policy_loss import useful_ratios
from hacpo_mega.algorithm import BandTracker
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import Config
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.step_report import StepReport, StepResult
from hacpo_mega.logbook.steps.skipped_updates import SkippedUpdates
from hacpo_mega.logbook.steps.step_metrics import add_band, add_diagnosis, add_held_out
from hacpo_mega.records import Prompt, Sample, UpdateStats
from hacpo_mega.trainer.phases import Phases
from hacpo_mega.trainer.rollout_judge import RolloutJudge


class Observer:
    """Base class with the moments of a run; an observer overrides those that it needs. `step` counts from 1."""

    def around(self, _phase: str) -> AbstractContextManager[None]:
        """Context around every phase, from loading on."""
        return nullcontext()

    def joins(self, agent: Agent, metrics: Metrics) -> None:
        """Called once, with the agent to observe and the metrics to write to."""

    def before_training(self, step: int) -> None:
        """Called when the agents are built; `step` is the first to come."""

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Called before update `m` of the step, from 0."""

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """Called after update `m`."""

    def after_learning(self, step: int, updates: Sequence[UpdateStats]) -> None:
        """Called after all updates of the step."""

    def after_publishing(self, step: int) -> None:
        """Called when the engine has the new weights."""

    def before_writing(self, step: int, found: StepResult) -> None:
        """Called when the step is complete, before it is written."""


class Observers(Observer):
    """Several observers, called one after the other."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = tuple(observers)

    def before_training(self, step: int) -> None:
        """Calls all observers."""
        for observer in self._all:
            observer.before_training(step)

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Calls all observers."""
        for observer in self._all:
            observer.before_update(step, m, update)

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """Calls all observers."""
        for observer in self._all:
            observer.after_update(step, m, update, stats)

    def after_learning(self, step: int, updates: Sequence[UpdateStats]) -> None:
        """Calls all observers."""
        for observer in self._all:
            observer.after_learning(step, updates)

    def after_publishing(self, step: int) -> None:
        """Calls all observers."""
        for observer in self._all:
            observer.after_publishing(step)

    def before_writing(self, step: int, found: StepResult) -> None:
        """Calls all observers."""
        for observer in self._all:
            observer.before_writing(step, found)


class Skips(Observer):
    """Ends a run with too many skipped updates in a row."""

    def __init__(self, skips: SkippedUpdates) -> None:
        self._skips = skips

    def after_update(self, step: int, m: int, update: Sequence[Sample], stats: UpdateStats) -> None:
        """Counts the update; RunStopped at the limit."""
        self._skips.see(step, m, update, stats)


class Diagnosis(Observer):
    """Compares own and cross gradients of every update of every n-th step."""

    def __init__(self, every: int, agent: Agent, band: BandTracker | None, metrics: Metrics, phase: Phases,
                 names: Sequence[str]) -> None:  # fmt: skip
        self._every, self._agent, self._band = every, agent, band
        self._metrics, self._phase, self._names = metrics, phase, tuple(names)

    def before_update(self, step: int, m: int, update: Sequence[Sample]) -> None:
        """Measures the gradients; the agent is bit-identical afterwards. Collective over the agent's ranks."""
        if step % self._every:
            return
        with self._phase("diagnose"):
            found = self._agent.diagnose(update, m, None if self._band is None else self._band.values())
        if self._agent.place.is_leader:
            add_diagnosis(self._metrics, found, self._agent.index, self._names)


class Calibration(Observer):
    """Moves the band of the next step to the ratios of this one."""

    def __init__(self, band: BandTracker, place: Place, metrics: Metrics, phase: Phases, names: Sequence[str]) -> None:
        self._band, self._place, self._metrics, self._phase = band, place, metrics, phase
        self._names = tuple(names)

    def after_learning(self, step: int, updates: Sequence[UpdateStats]) -> None:
        """Gathers the ratios and updates the band. Collective over the agent's ranks."""
        if self._place.is_leader:
            add_band(self._metrics, self._place.agent, self._names, self._band.values())
        mine = json.dumps(useful_ratios(updates, len(self._names)))
        with self._phase("calibrate"):
            cells = [json.loads(payload) for payload in self._place.gather_agent(mine.encode())]
        for source in range(len(self._names)):
            ratios = [ratio for cell in cells for ratio in cell[source]]
            self._band.update(source, torch.tensor(ratios, dtype=torch.float64))


class Verification(Observer):
    """Ends the run if an engine's weights differ from its actor's."""

    def __init__(self, every: int, agent: Agent, phase: Phases) -> None:
        """Checks before training, and after every n-th step; 0 checks before training only."""
        self._every, self._agent, self._phase = every, agent, phase

    def before_training(self, step: int) -> None:
        """Checks the weights. Collective over the cell."""
        self._verify(f"before step {step}")

    def after_publishing(self, step: int) -> None:
        """Checks the weights if it is due. Collective over the cell."""
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
        """Evaluates before a run's first step."""
        if step == 1:
            self._evaluate(0, "before step 1")

    def after_publishing(self, step: int) -> None:
        """Evaluates every n-th step, and after the last one."""
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
