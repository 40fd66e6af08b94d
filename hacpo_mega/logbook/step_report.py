"""Report of a training step: the metrics and log lines each part adds, and the alarms.

Every leader reports for its cell, the job's rank 0 for values that are equal everywhere. Elsewhere: the meaning of each
number (step_metrics.py) and the conditions of alarms (alarms.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hacpo_grading.judge import JudgeReport
from hacpo_mega.algorithm import capability_ratios
from hacpo_mega.cluster.machine.device import actor_dtype
from hacpo_mega.cluster.place import Place
from hacpo_mega.config import Config
from hacpo_mega.logbook.console import Console, warn
from hacpo_mega.logbook.files.metrics import Metrics, StepMetrics
from hacpo_mega.logbook.files.rollout_log import AnswerNotes
from hacpo_mega.logbook.files.trackers import Trackers
from hacpo_mega.logbook.run.run_folder import RunFolder
from hacpo_mega.logbook.steps.alarms import (
    AdvantageAlarm,
    EngineAlarm,
    GradNormAlarm,
    IdleAlarm,
    JudgeAlarm,
    MemoryLeakAlarm,
    OmegaAlarm,
    SharingAlarm,
    UnjudgedLimit,
)
from hacpo_mega.logbook.steps.step_metrics import (
    FirstRewards,
    add_advantages,
    add_answers,
    add_capability,
    add_engine_gap,
    add_engine_weights,
    add_host,
    add_reencodings,
    add_reward_parts,
    add_skips,
    add_update,
)
from hacpo_mega.records import Judgement, Pool, ReencodingCounts, Rollout, Score, Trajectory, UpdateStats

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class StepResult:
    """Results of a step on one rank.

    pool, advantages_PNG   of the lane
    rollouts, scores       of the cell      judgements, trajectories   the same on its leader, elsewhere none
    judged                 the judge's report on these answers alone, without held-out ones
    reencodings, updates   counts of re-encoded answers by source, and statistics of every update
    """

    pool: Pool
    advantages_PNG: Tensor
    rollouts: Sequence[Rollout]
    judgements: Sequence[Judgement]
    judged: JudgeReport
    scores: Sequence[Score | None]
    trajectories: Sequence[Trajectory]
    reencodings: Sequence[ReencodingCounts]
    updates: Sequence[UpdateStats]


class StepReport:
    """Measures, writes and shows a step, on every rank; most ranks print nothing."""

    def __init__(
        self,
        metrics: Metrics,
        console: Console,
        place: Place,
        config: Config,
        folder: RunFolder,
        trackers: Trackers,
    ) -> None:
        self._metrics, self._console, self._place = metrics, console, place
        self._folder, self._trackers, self._engine_scores = folder, trackers, config.engine_scores
        self._algorithm, self._rollout = config.algorithm, config.rollout
        self._names = tuple(agent.name for agent in config.agents)
        self._omega_alarm, self._judge_alarm = OmegaAlarm(self._names), JudgeAlarm()
        self._unjudged_limit = UnjudgedLimit(config.reward.max_unjudged_share)
        # Rank 0 watches all agents, whose dtypes may differ.
        dtypes = [actor_dtype(place.device, agent.dtype) for agent in config.agents]
        self._engine_alarm = EngineAlarm(self._names, dtypes)
        self._grad_norm_alarm, self._sharing_alarm = GradNormAlarm(self._names), SharingAlarm(self._names)
        is_weighed = config.rollout.engine_correction == "sequence"
        highest_weight = max(1.0, config.rollout.engine_correction_cap) if is_weighed else 1.0
        answers = config.answers_per_prompt, highest_weight
        self._advantage_alarm = AdvantageAlarm(self._names, config.algorithm, *answers)
        # These watch one start: their state is not kept.
        self._leak_alarm = MemoryLeakAlarm(self._names)
        self._idle_alarm = IdleAlarm(config.answers_compared, config.algorithm.advantages)
        self.first_rewards = FirstRewards()
        self._stateful = {
            "omega": self._omega_alarm,
            "judge": self._judge_alarm,
            "unjudged": self._unjudged_limit,
            "engine": self._engine_alarm,
            "grad_norm": self._grad_norm_alarm,
            "advantage": self._advantage_alarm,
            "sharing": self._sharing_alarm,
        }

    def state_dict(self) -> dict[str, Any]:
        """State of the alarms on this rank, and the baseline of gains, as plain values."""
        kept = {name: alarm.state_dict() for name, alarm in self._stateful.items()}
        return kept | {"first_rewards": self.first_rewards.state_dict()}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the `state_dict()` of all cells of the agent; state that an older version did not keep begins anew.

        Another number of cells deals the alarms out again.
        """
        who = self._place.coordinate
        state = states[who.cell % len(states)]
        for name, alarm in self._stateful.items():
            if name in state:
                alarm.load_state_dict(state[name])
        rewards = [state.get("first_rewards", {}) for state in states]
        self.first_rewards.load_state_dicts(rewards, self._place.rank_map.share_of_agent(who))

    def write(
        self,
        step: int,
        result: StepResult,
        notes: AnswerNotes,
        capability_N: Tensor,
        asleep_bytes: int | None,
        phase: Phase,
    ) -> StepMetrics:
        """Everything of a step into metrics, log and trackers, and alarms. Collective over the job.

        notes          what this cell knows of the answers, for the log
        asleep_bytes   what was held on this rank's device when its engine had fallen asleep; None: it never does
        RunStopped where the grader has failed for too long.
        """
        if self._place.is_leader:
            self._add_cell(result)
            self.warn_of_grader(result.judged, "answers")
            self._unjudged_limit.see(result.judged)
        if self._place.coordinate.global_rank == 0:
            self._add_capability(step, capability_N)
        with phase("write"):
            self._folder.write_rollouts(step, result.pool, result.advantages_PNG, notes)
        reduced = self.write_metrics(step, phase, asleep_bytes)
        self._warn(step, reduced)
        return reduced

    def write_metrics(self, step: int, phase: Phase, asleep_bytes: int | None = None) -> StepMetrics:
        """Writes all measurements since the last call, and this process's host numbers. Collective over the job."""
        with phase("wait"):  # for the slowest rank, which would else hide in the reduction
            self._place.barrier()
        with phase("write"):
            # behind the barrier: a line has the waits of its own seconds
            add_host(self._metrics, self._names[self._place.agent], self._place.take_waits(), asleep_bytes)
            reduced = self._metrics.reduce()
            self._folder.write_step(step, reduced)
            self._trackers.log(step, reduced)
        return reduced

    def _add_capability(self, step: int, capability_N: Tensor) -> None:
        omega_NN = capability_ratios(capability_N, self._algorithm.omega_clip)
        add_capability(self._metrics, self._names, capability_N, omega_NN)
        if self._algorithm.uses_capability:
            for warning in self._omega_alarm.warnings(omega_NN):
                self._alarm(step, warning)

    def warn_of_grader(self, judged: JudgeReport, what: str) -> None:
        """Reports on a leader its judge's failures, if they are new; `what` are the answers it was given."""
        for warning in self._judge_alarm.warnings(judged, what):
            warn(f"{self._place.coordinate}: {warning}")

    def _add_cell(self, result: StepResult) -> None:
        name, learner = self._names[self._place.agent], self._place.agent
        add_answers(self._metrics, name, result.trajectories)
        add_reward_parts(self._metrics, name, result.judgements)
        if result.judged.hidden_s:
            self._metrics.add(f"agent/{name}/judge_hidden_s", result.judged.hidden_s, 1)
        answered = zip(result.trajectories, result.scores, strict=True)
        scored = [(trajectory.rollout, score) for trajectory, score in answered if score is not None]
        if not self._rollout.one_step_off:  # else another policy than the engine's has learnt from them
            add_engine_gap(self._metrics, name, scored, eos_in_loss=self._algorithm.eos_in_loss)
        correction, cap = self._rollout.engine_correction, self._rollout.engine_correction_cap
        add_engine_weights(self._metrics, name, [score for _, score in scored], correction, cap)
        add_advantages(self._metrics, name, result.advantages_PNG)
        add_reencodings(self._metrics, learner, self._names, result.reencodings)
        for m, update in enumerate(result.updates):
            add_update(self._metrics, update, m, learner, self._names, self._algorithm, self._engine_scores)
        if self._place.coordinate.agent_rank == 0:
            add_skips(self._metrics, name, result.updates)

    def _alarm(self, step: int, warning: str) -> None:
        self._console.say(warning)
        self._folder.write_alarm(step, warning)

    def _warn(self, step: int, reduced: StepMetrics) -> None:
        """Warns of alarming numbers in a step's reduced metrics, which the job's rank 0 has."""
        known = reduced.values | reduced.timing
        gaps, norms, residues, rewards, trained, advantages = (
            [known.get(f"agent/{name}/{what}") for name in self._names]
            for what in (
                *("engine_gap_mean", "grad_norm_max", "asleep_bytes", "reward_mean"),
                *("num_trained_answers", "advantage_max"),
            )
        )
        omegas = [value for name, value in known.items() if name.startswith("omega/")]
        highest_omega = max([1.0, *omegas]) if self._algorithm.uses_capability else 1.0
        for warning in (
            *self._engine_alarm.warnings(gaps),
            *self._advantage_alarm.warnings(advantages, highest_omega),
            *self._grad_norm_alarm.warnings(norms),
            *self._leak_alarm.warnings(residues),
            *self._sharing_alarm.warnings(reduced.values),
            *(self._idle_alarm.warnings(rewards, trained) if known else ()),
        ):
            self._alarm(step, warning)
