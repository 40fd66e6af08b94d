"""Where a step's answers come from: generated when it begins or, one step off, while the step before it learnt.

                  main thread                                        engine
    AnswersNow    roll_out 1, learn 1, publish 1, roll_out 2 ...     in the main thread
    AnswersAhead  roll_out 1, learn 1, publish 1, learn 2 ...        1, then 2 while 1 learns, 3 while 2 learns ...

So one step off, the answers of step t are those of the policy after step t - 2: `staleness_steps` is 1. The first step
of a run has nobody before it, and neither has the first one that goes on from a checkpoint without answers: its answers
are generated when it begins, and are not stale. Prompts and seeds are functions of the run's seed and the step, so
which answers come does not depend on time.
Not here: the thread (rollout/engine_thread.py) and whose log-probs a ratio has below it (scoring.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from hacpo_mega.agent.agent import Agent
from hacpo_mega.checkpoint.files import Checkpoint, plain
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import Config
from hacpo_mega.data.prompts import PromptSampler
from hacpo_mega.logbook.metrics import Metrics
from hacpo_mega.records import Prompt, Rollout
from hacpo_mega.rollout.ready_answers import SUFFIX, ReadyAnswers, read_answers

Phase = Callable[[str], AbstractContextManager[None]]
OnAnswer = Callable[[Prompt, Rollout], None]


class AnswersNow:
    """Prompts and answers of one cell, step by step; steps count from 0.

    my_share   of the prompts of a lane, those that this cell answers
    ready      answers to the step that comes next; None: there are none yet
    """

    def __init__(self, sampler: PromptSampler, agent: Agent, place: Place, config: Config, metrics: Metrics) -> None:
        self._sampler, self._agent, self._place, self._config = sampler, agent, place, config
        self._metrics = metrics
        self.my_share = place.rank_map.share_of_lane(place.coordinate)
        self.ready: ReadyAnswers | None = None

    def prompts_of(self, step: int) -> tuple[Prompt, ...]:
        """Those of this lane."""
        return self._sampler.at(step, self._place.lane, self._config.lanes)

    def take_up(self, start: Checkpoint) -> None:
        """Takes what a checkpoint has ready for its next step."""

    def take(self, step: int, on_answer: OnAnswer | None) -> list[Rollout]:
        """This cell's answers, by prompt, then by rollout; `on_answer` is told of each that ends meanwhile."""
        return self._agent.roll_out(self.prompts_of(step)[self.my_share], step, on_answer)

    def finish(self, _phase: Phase) -> None:
        """Returns when the engine does nothing. `_phase` is the trainer's, under which a wait for this is counted."""


class AnswersAhead(AnswersNow):
    """The same, each step's generated while the one before it is judged, exchanged and learnt."""

    _asked: tuple[Prompt, ...] = ()  # by the engine, at present

    def take_up(self, start: Checkpoint) -> None:
        """Nothing where another seed or [rollout] table would have sampled other answers, or another number of them."""
        now, key = plain(self._config), ("seed", "rollout")
        if [start.config[name] for name in key] == [now[name] for name in key]:
            name = self._agent.name
            files = [
                start.folder / path for path in start.files if path.startswith(f"{name}/") and path.endswith(SUFFIX)
            ]
            prompts = self.prompts_of(start.step)[self.my_share]
            self.ready = read_answers(files, prompts, self._config.answers_per_prompt)

    def take(self, step: int, on_answer: OnAnswer | None) -> list[Rollout]:
        """Those that are ready, else generated now; those of the next step are begun."""
        staleness, ready = 1, self.ready
        if ready is None:
            staleness, rollouts = 0, super().take(step, on_answer)
        else:
            rollouts = self._agent.rollouts_of(ready.prompts, ready.completions)
        self.ready = None
        if step + 1 < self._config.num_steps:
            self._asked = self.prompts_of(step + 1)[self.my_share]
            self._agent.begin_ahead(self._asked, step + 1)
        if self._place.is_leader:
            self._metrics.add(f"agent/{self._agent.name}/staleness_steps", staleness, 1)
        return rollouts

    def finish(self, phase: Phase) -> None:
        """Waits for the answers of the next step. Collective over the cell."""
        if self._agent.ahead.is_busy:
            with phase("roll_out"):
                self.ready = ReadyAnswers(self._asked, self._agent.finish_ahead(self._asked))
            if self._place.is_leader:
                self._metrics.add(f"agent/{self._agent.name}/roll_out_hidden_s", self._agent.ahead.hidden_s, 1)


def step_answers(sampler: PromptSampler, agent: Agent, place: Place, config: Config, metrics: Metrics) -> AnswersNow:
    """What the configuration asks for."""
    kind = AnswersAhead if config.rollout.one_step_off else AnswersNow
    return kind(sampler, agent, place, config, metrics)
