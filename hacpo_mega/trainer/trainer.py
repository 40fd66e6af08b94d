"""The training loop: every agent answers, all share, each learns. The table of contents of a HACPO step.

Every process of the job runs it, in lockstep, for its own agent, lane and cell (cluster/place.py). build.py makes what
stands before step 1, schedule.py decides when answers are generated and who scores them, observers.py examines the run,
logbook/step_report.py sums up what a step measured.
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
from hacpo_mega.logbook.step_report import StepResult
from hacpo_mega.logbook.steps.held_out import mean_held_out
from hacpo_mega.records import Sample, UpdateStats
from hacpo_mega.rollout.exchange import exchange, share_rewards, trajectories_of
from hacpo_mega.samples.learner_view import learner_view, routing_by_answer, scores_by_answer
from hacpo_mega.trainer.build import TrainerOverrides, build
from hacpo_mega.trainer.joint_checkpoint import JointCheckpoint, RunState, TerminationRequested
from hacpo_mega.trainer.observers import Observer
from hacpo_mega.trainer.rollout_judge import RolloutJudge


class Trainer:
    """All agents of a configuration, trained together. One per process; a context manager, whose exit ends the job.

    config       as the user wrote it; read-only
    place        this process's position: agent, lane, cell, and its process groups
    phase        context of a phase of a step: timed, shown, named when it fails
    agent        the agent of this process: tokenizer, Megatron actor, live vLLM engine
    schedule     prompts of every step, a pure function of seed and step; when they are answered, and who scores that
    judge        turns answers into verdicts and rewards
    capability   P_hat of all agents, equal on every rank
    observers    examine the run: weights, held-out answers, gradients, skipped updates
    report, console, trace   measure, show and write
    checkpoint   what the run resumes from     disk   disk errors, agreed on by all ranks
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
        """Joins the job, loads the agents as the run left them, opens the run folder. Collective over the job.

        A run that `run_dir` holds resumes from its last checkpoint, unless the options of `how` say otherwise.
        `sampler`, `judge` and `observers` are for benchmarks: generation requests, judge, further observers.
        """
        # An error while building ends the job as one in a step does: with the name of this rank and its phase.
        with ExitStack() as stack:
            built = build(config, how, TrainerOverrides(sampler, judge, observers), stack)
            self.config, self.place, self.phase, self.console = built.config, built.place, built.phase, built.console
            self.agent, self.schedule, self.judge = built.agent, built.schedule, built.judge
            self.capability, self.skips = built.capability, built.skips
            self.reencoding_rules, self.report, self.trace = built.reencoding_rules, built.report, built.trace
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

        Returns False when a signal has ended it early, with its last step on disk (docs/guide/troubleshooting.md).
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
            samples, reencodings = learner_view(
                pool.part(mine), learning.advantages_PNG[mine], learning.trains_PNG[mine], self.place.agent,
                self.agent.codec, self.reencoding_rules, scores_by_answer(rollouts, scores),
                routing_by_answer(rollouts))  # fmt: skip
        self._exit_if_preempted()  # what is learnt cannot be taken back: from here on the step is finished first
        updates = self._learn(self.agent.plan(prompts[mine], samples))
        self.schedule.finish(self.phase)  # one step off: the engine has answered the next step's prompts
        with self.phase("publish"):  # Megatron shards -> the live vLLM engine
            self.agent.publish_weights(self.steps_done + 1)
        self.observers.after_publishing(self.steps_done + 1)
        found = pool, learning.advantages_PNG, rollouts, judgements, judged, scores, trajectories, reencodings, updates
        self._end_step(StepResult(*found))

    def _answer_alone(self) -> None:
        """The same step on a rank that only generates (placement = "apart"); it joins the job's collectives."""
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
        """Runs the updates of the step. The cross band tightens with every one of them.

        The engine sleeps, unless one step off: the actor learns in its memory.
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

    def _end_step(self, found: StepResult) -> None:
        """Ends a step: writes it, counts it, saves it if that is due, and shows it."""
        self.observers.before_writing(self.steps_done + 1, found)
        if self.config.scores_in_first_update:  # what was not scored before has been by now
            scores = self.schedule.complete(found.rollouts, found.scores, found.updates)
            trajectories = trajectories_of(self.place, found.rollouts, found.judgements, scores)
            found = replace(found, scores=scores, trajectories=trajectories)
        notes = self.agent.describe(found.pool.prompts, found.rollouts, found.scores, found.updates, found.reencodings)
        known = notes, self.capability.values(), self.agent.asleep_bytes
        self._count_step(self.report.write(self.steps_done + 1, found, *known, self.phase))

    def _count_step(self, reduced: StepMetrics) -> None:
        """Counts the step, whose metrics are written, and saves it if that is due."""
        self.steps_done += 1
        self.phase.step = self.steps_done + 1
        self.checkpoint.settle(self._state(mean_held_out(reduced.values, [agent.name for agent in self.config.agents])))
        if self.checkpoint.has_work():  # after its metrics: a resumed run has them all
            with self.phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.go_on()
        self._show(reduced)

    def _take_up(self, start: Checkpoint) -> None:
        """Restores what a checkpoint holds beside the agents' own state."""
        agent = start.agents[self.agent.name]
        self.steps_done = start.step
        self.capability.load_state_dict(start.capability)
        self.skips.go_on(agent.num_skipped)
        self.schedule.take_up(start)
        # Another number of cells deals them out again.
        self.report.load_state_dict(agent.alarms[self.place.coordinate.cell % len(agent.alarms)])

    def _state(self, accuracy: float | None) -> RunState:
        """State for a checkpoint beside the agents' own; `_take_up` is its inverse."""
        rest = self.skips.num_in_row, self.report.state_dict(), self.schedule.ready
        return RunState(self.steps_done, accuracy, self.capability.state_dict(), *rest)

    def _exit_if_preempted(self) -> None:
        """Ends the run at its last whole step if any rank has got a signal to end. Collective over the job."""
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
