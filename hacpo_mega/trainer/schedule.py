"""Schedule of a run: where a step's answers come from, and whose log-probs are their scores.

                main thread                                      engine                                     scores
    OnPolicy    roll_out 1, learn 1, publish 1, roll_out 2 ...   in the main thread                         actor's
    OneStepOff  roll_out 1, learn 1, publish 1, learn 2 ...      1, then 2 while 1 learns, 3 while 2 ...    engine's

Chosen once, from `SCHEDULES`, in build.py.
One step off, the policy after step t - 2 writes the answers of step t: `staleness_steps` is 1. The first step of a run,
and the first after a checkpoint without prefetched answers, has none ready: its answers are generated when it begins,
and are not stale. Where checkpoints are saved, the last step prefetches too: with a larger num_steps the run goes on as
if it had never ended, at the price of one rollout beside its last updates. Prompts and seeds are functions of the run's
seed and the step, so answers do not depend on timing.

Not here: the thread (rollout/vllm/engine_thread.py) and the two ways of scoring (hacpo_mega/agent/scoring.py).
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.devices import BusyDevices, OwnDevices
from hacpo_mega.agent.scoring import Scoring, WritersScoring
from hacpo_mega.checkpoint.files import Checkpoint, plain
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import Config
from hacpo_mega.data.prompts import PromptSampler
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.records import Prompt, Rollout, Score, UpdateStats
from hacpo_mega.rollout.ready_answers import SUFFIX, ReadyAnswers, read_answers
from hacpo_mega.trainer.phases import Phases

OnAnswer = Callable[[Prompt, Rollout], None]


class OnPolicy:
    """Prompts, answers and scores of one cell, step by step; steps count from 0.

    my_share       the prompts of a lane that this cell answers
    ready          prefetched answers to the next step; None if there are none
    is_on_policy   whether the policy that wrote a step's answers is the one that learns from them
    """

    is_on_policy = True
    devices: type[OwnDevices] = OwnDevices  # of an agent whose engine sleeps while its actor learns
    scoring: type[Scoring] = Scoring

    def __init__(self, sampler: PromptSampler, agent: Agent, place: Place, config: Config, metrics: Metrics) -> None:
        self._sampler, self._agent, self._place, self._config = sampler, agent, place, config
        self._metrics = metrics
        if place.trains:
            self._scoring = self.scoring(agent.actor, agent.devices, agent.codec, config, agent.num_cells)
        self.my_share = place.rank_map.share_of_lane(place.coordinate)
        self.ready: ReadyAnswers | None = None

    def prompts_of(self, step: int) -> tuple[Prompt, ...]:
        """The step's prompts of this lane."""
        return self._sampler.at(step, self._place.lane, self._config.lanes)

    def take_up(self, start: Checkpoint) -> None:
        """Restores prefetched answers from a checkpoint."""

    def roll_out(self, step: int, on_answer: OnAnswer | None) -> list[Rollout]:
        """This cell's answers, by prompt, then by rollout; `on_answer` is called for each as soon as it ends."""
        return self._agent.roll_out(self.prompts_of(step)[self.my_share], step, on_answer)

    def score(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], own_P: Tensor, wanted_PG: Tensor
    ) -> list[Score | None]:
        """Log-probs of this cell's answers before any update of the step; None for answers that need none now.

        own_P      bool [P], prompts whose own answers this agent trains on
        wanted_PG  bool [P, G], answers that others train on
        """
        return self._scoring.before_learning(prompts, rollouts, own_P, wanted_PG)

    def complete(
        self, rollouts: Sequence[Rollout], scores: Sequence[Score | None], updates: Sequence[UpdateStats]
    ) -> list[Score | None]:
        """Completes the scores with those that the step's first update has computed."""
        return self._scoring.after_learning(rollouts, scores, updates)

    def finish(self, _phase: Phases) -> None:
        """Blocks until the engine is idle. The wait is counted under `_phase`."""


class OneStepOff(OnPolicy):
    """Generates each step's answers while the previous step is judged, exchanged and learnt."""

    is_on_policy = False
    devices = BusyDevices
    scoring = WritersScoring
    _asked: tuple[Prompt, ...] = ()  # by the engine, at present

    def take_up(self, start: Checkpoint) -> None:
        """Restores prefetched answers, unless seed or [rollout] table have changed so that they would differ."""
        now, key = plain(self._config), ("seed", "rollout")
        if [start.config[name] for name in key] == [now[name] for name in key]:
            name = self._agent.name
            files = [
                start.folder / path for path in start.files if path.startswith(f"{name}/") and path.endswith(SUFFIX)
            ]
            prompts = self.prompts_of(start.step)[self.my_share]
            self.ready = read_answers(files, prompts, self._config.answers_per_prompt)

    def roll_out(self, step: int, on_answer: OnAnswer | None) -> list[Rollout]:
        """Answers that are ready, else generated now; those of the next step are begun."""
        staleness, ready = 1, self.ready
        if ready is None:
            staleness, rollouts = 0, super().roll_out(step, on_answer)
        else:
            rollouts = self._agent.rollouts_of(ready.prompts, ready.completions)
        self.ready = None
        if step + 1 < self._config.num_steps or self._config.checkpoint.is_on:
            self._asked = self.prompts_of(step + 1)[self.my_share]
            self._agent.begin_ahead(self._asked, step + 1)
        if self._place.is_leader:
            self._metrics.add(f"agent/{self._agent.name}/staleness_steps", staleness, 1)
        return rollouts

    def finish(self, phase: Phases) -> None:
        """Waits for the answers of the next step. Collective over the cell."""
        if self._agent.ahead.is_busy:
            with phase("roll_out"):
                self.ready = ReadyAnswers(self._asked, self._agent.finish_ahead(self._asked))
            if self._place.coordinate.is_first_to_answer:
                self._metrics.add(f"agent/{self._agent.name}/roll_out_hidden_s", self._agent.ahead.hidden_s, 1)


SCHEDULES: Mapping[bool, type[OnPolicy]] = {False: OnPolicy, True: OneStepOff}  # by rollout.one_step_off
