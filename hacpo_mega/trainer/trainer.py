"""The loop: every agent answers, all share, each learns. This file is the table of contents of a HACPO step.

Every process of the job runs it, in lockstep, each for the agent, lane and cell that its rank belongs to
(cluster/place.py). What stands before step 1 is made in build.py, when answers come and who scores them is chosen in
schedule.py, what examines the run is in observers.py, and what a step measured is added up in logbook/step_report.py.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self, Unpack

from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.algorithm import learning_of, reward_tally
from hacpo_mega.checkpoint.files import Checkpoint, StartOptions
from hacpo_mega.config import Config
from hacpo_mega.logbook.files.metrics import StepMetrics
from hacpo_mega.logbook.step_report import StepFindings
from hacpo_mega.logbook.steps.held_out import mean_held_out
from hacpo_mega.records import Sample, UpdateStats
from hacpo_mega.rollout.exchange import exchange, share_rewards, trajectories_of
from hacpo_mega.samples.learner_view import learner_view, routing_by_answer, scores_by_answer
from hacpo_mega.trainer.build import Handed, build
from hacpo_mega.trainer.joint_checkpoint import JointCheckpoint, RunState, TerminationRequested
from hacpo_mega.trainer.observers import Observer
from hacpo_mega.trainer.rollout_judge import RolloutJudge


class Trainer:
    """All agents of a configuration, trained together. One per process; use it as a context: leaving it ends the job.

    config       what was asked, nobody writes to it
    place        this process's place: agent, lane, cell, and the groups it belongs to
    phase        around what belongs to a phase of a step: timed, shown, named when it fails
    agent        the agent of this process: tokenizer, Megatron actor, live vLLM engine
    schedule     prompts of every step, a pure function of seed and step, when they are answered, and who scores that
    judge        answers in, verdict and reward out
    capability   P_hat of all agents, equal on every rank
    observers    what examines the run: weights, held-out answers, gradients, skipped updates
    report, console, trace   what is measured, shown and written
    checkpoint   what the run goes on from when it dies     disk   asked together by all ranks
    """

    def __init__(
        self,
        config: Config,
        *,
        sampler: Callable[..., Sampler] = Sampler,
        judge: Callable[..., RolloutJudge] = RolloutJudge,
        observers: Sequence[Observer] = (),
        **how: Unpack[StartOptions],
    ) -> None:
        """Takes its place in the job, loads the agents as the run left them, opens its folder. Collective over the job.

        A run that `run_dir` holds goes on from its last checkpoint, unless the options of `how` say otherwise.
        `sampler`, `judge` and `observers` are a benchmark's: what engines are asked, who judges, who looks on.
        """
        # An error while building ends the job as one in a step does: with the name of this rank and its phase.
        with ExitStack() as stack:
            built = build(config, how, Handed(sampler, judge, observers), stack)
            self.config, self.place, self.phase, self.console = built.config, built.place, built.phase, built.console
            self.agent, self.schedule, self.judge = built.agent, built.schedule, built.judge
            self.capability, self.skips = built.capability, built.skips
            self.view_rules, self.report, self.trace = built.view_rules, built.report, built.trace
            self.observers, self.disk = built.observers, built.disk
            self.steps_done = 0
            if built.start is not None:
                self._take_up(built.start)
            state = self._state(None if built.start is None else built.start.accuracy)
            self.checkpoint = JointCheckpoint(
                self.place, self.config, self.agent, self.disk, state, is_on_disk=built.goes_on
            )
            self._stack = stack.pop_all()

    def fit(self) -> bool:
        """Evaluates, trains up to `num_steps` steps, evaluates, and exports every agent. Collective over the job.

        False when a signal has ended it before that, with its last step on disk (docs/guide/troubleshooting.md).
        """
        if self.checkpoint.is_on:
            self.place.defer_signals()
        try:
            self.observers.before_training(self.steps_done + 1)
            if self.steps_done == 0:
                self._show(self.report.write_metrics(0, self.phase))
            while self.steps_done < self.config.num_steps:
                self._exit_if_preempted()
                with self.trace.step(self.steps_done + 1):
                    self.step()
            self._exit_if_preempted()
        except TerminationRequested as told:
            self.console.say(f"told to end ({signal.Signals(*told.args).name}); {self.checkpoint.outlook}")
            return False
        with self.phase("export", "after the last step"):
            self.disk.export(self.agent, self.checkpoint.safe_step, self.checkpoint.lost)
        run_dir = self.config.run_dir
        self.console.say(f"done: the models are in {run_dir / 'agents'}; `hacpo-mega report {run_dir}` draws the run")
        return True

    def step(self) -> None:
        """One HACPO step (Algorithm 1 of the paper): everyone answers, everyone shares, each learns."""
        if not self.place.trains:
            return self._answer_alone()
        prompts, mine = self.schedule.prompts_of(self.steps_done), self.schedule.my_share  # my lane's; my cell's part
        with self.phase("roll_out"):
            rollouts = self.schedule.roll_out(self.steps_done, self.judge.on_answer)
        self._exit_if_preempted()
        with self.phase("judge"):
            judgements, judged = self.judge.judge(prompts[mine], rollouts), self.judge.take_report()
        with self.phase("exchange"):  # rewards first: they say which answers need a score
            shared = share_rewards(judgements, len(prompts), self.place, self.config.answers_per_prompt)
            # The one number that crosses lanes: P_hat is over the whole step, or lanes would disagree on omega.
            self.capability.add(self.place.sum_over_lanes(reward_tally(*shared)))
            learning = learning_of(*shared, self.capability.values(), self.place.agent, self.config.algorithm)
        with self.phase("score"):  # log-probs of the policy that will learn, before it learns
            scores = self.schedule.score(prompts[mine], rollouts, learning.own_P[mine], learning.wanted_PG[mine])
        with self.phase("exchange"):
            trajectories = trajectories_of(self.place, rollouts, judgements, scores)
            pool = exchange(trajectories, prompts, self.place, self.config.answers_per_prompt)
            learning = learning.weighted(pool.engine_weights_PNG)  # 1 unless engine_correction is "sequence"
            samples, views = learner_view(
                pool.part(mine), learning.advantages_PNG[mine], learning.trains_PNG[mine], self.place.agent,
                self.agent.codec, self.view_rules, scores_by_answer(rollouts, scores),
                routing_by_answer(rollouts))  # fmt: skip
        self._exit_if_preempted()  # what is learnt cannot be taken back: from here on the step is finished first
        updates = self._learn(self.agent.plan(prompts[mine], samples))
        self.schedule.finish(self.phase)  # one step off: the engine has answered the next step's prompts
        with self.phase("publish"):  # Megatron shards -> the live vLLM engine
            self.agent.publish_weights(self.steps_done + 1)
        self.observers.after_publishing(self.steps_done + 1)
        found = pool, learning.advantages_PNG, rollouts, judgements, judged, scores, trajectories, views, updates
        self._end_step(StepFindings(*found))

    def _answer_alone(self) -> None:
        """The same step on a rank that only answers (placement = "apart"): it meets the others where all ranks meet."""
        with self.phase("roll_out"):
            self.schedule.roll_out(self.steps_done, None)
        with self.phase("wait"):
            self._exit_if_preempted()  # before answers are judged
            self._exit_if_preempted()  # before anything is learnt
        self.schedule.finish(self.phase)
        with self.phase("publish"):
            self.agent.publish_weights(self.steps_done + 1)
        self.observers.after_publishing(self.steps_done + 1)
        self._count_step(self.report.write_host(self.steps_done + 1, self.phase))

    def _learn(self, plan: Sequence[Sequence[Sample]]) -> list[UpdateStats]:
        """The updates of the step. The cross band tightens with every one of them.

        The engine sleeps, unless one step off: its memory is what the actor learns in.
        """
        step, updates = self.steps_done + 1, []
        with self.agent.devices.learning(self.phase):
            for m, update in enumerate(plan):
                self.observers.before_update(step, m, update)
                with self.phase("learn"):
                    updates.append(self.agent.learn(update, m))
                    self.observers.after_update(step, m, update, updates[-1])
        self.observers.after_learning(step, updates)
        return updates

    def _end_step(self, found: StepFindings) -> None:
        """What makes a step one that was done: it is written, counted, kept when it is due, and shown."""
        self.observers.before_writing(self.steps_done + 1, found)
        if self.config.scores_in_first_update:  # what was not scored before has been by now
            scores = self.schedule.complete(found.rollouts, found.scores, found.updates)
            trajectories = trajectories_of(self.place, found.rollouts, found.judgements, scores)
            found = replace(found, scores=scores, trajectories=trajectories)
        notes = self.agent.describe(found.pool.prompts, found.rollouts, found.scores, found.updates, found.views)
        known = notes, self.capability.values(), self.agent.asleep_bytes
        self._count_step(self.report.write(self.steps_done + 1, found, *known, self.phase))

    def _count_step(self, reduced: StepMetrics) -> None:
        """The step has been done, and what it measured is written."""
        self.steps_done += 1
        self.phase.step = self.steps_done + 1
        self.checkpoint.settle(self._state(mean_held_out(reduced.values, [agent.name for agent in self.config.agents])))
        if self.checkpoint.has_work():  # after its metrics: a resumed run has them all
            with self.phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.go_on()
        self._show(reduced)

    def _take_up(self, start: Checkpoint) -> None:
        """What a checkpoint holds beside the agents' own state."""
        agent = start.agents[self.agent.name]
        self.steps_done = start.step
        self.capability.load_state_dict(start.capability)
        self.skips.go_on(agent.num_skipped)
        self.schedule.take_up(start)
        # Another number of cells deals them out again.
        self.report.load_state_dict(agent.alarms[self.place.coordinate.cell % len(agent.alarms)])

    def _state(self, accuracy: float | None) -> RunState:
        """What a checkpoint holds beside the agents' own state; `_take_up` is its inverse."""
        rest = self.skips.num_in_row, self.report.state_dict(), self.schedule.ready
        return RunState(self.steps_done, accuracy, self.capability.state_dict(), *rest)

    def _exit_if_preempted(self) -> None:
        """Ends the run at its last whole step if a signal has asked any rank for it. Collective over the job."""
        if self.checkpoint.is_on and (number := self.place.agreed_signal()):
            with self.phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.keep()
            raise TerminationRequested(number)

    def _show(self, reduced: StepMetrics) -> None:
        self.console.step(self.steps_done, reduced, self.checkpoint.safe_now if self.checkpoint.is_on else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.agent.close()  # after an error the process ends as it is: closing an engine may wait for dead peers
        self._stack.__exit__(kind, *error)
