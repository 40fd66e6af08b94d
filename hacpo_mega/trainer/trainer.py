"""The loop: every agent answers, all share, each learns. This file is the table of contents of a HACPO step.

Every process of the job runs it, in lockstep, each for the agent, lane and cell that its rank belongs to
(cluster/place.py). What a step measured is added up in logbook/step_metrics.py.
"""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self, Unpack

import torch
from torch import Tensor

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.policy_loss import useful_ratios
from hacpo_mega.algorithm import BandTracker, CapabilityTracker, learning_of, reward_tally
from hacpo_mega.checkpoint.files import Checkpoint, StartOptions, folder_of, plain
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.config.changes import changes
from hacpo_mega.data.prompt_sets import held_out_prompts, training_sampler
from hacpo_mega.grading.judge import Judge
from hacpo_mega.grading.rollout_judge import RolloutJudge
from hacpo_mega.logbook.console import Console
from hacpo_mega.logbook.metrics import Metrics, StepMetrics
from hacpo_mega.logbook.rollout_log import AnswerNotes
from hacpo_mega.logbook.run_folder import RunFolder
from hacpo_mega.logbook.run_lock import RunLock
from hacpo_mega.logbook.skipped_updates import SkippedUpdates
from hacpo_mega.logbook.step_metrics import add_accuracy, add_band, add_diagnosis, mean_accuracy
from hacpo_mega.logbook.step_report import StepReport
from hacpo_mega.logbook.trace import StepTrace
from hacpo_mega.logbook.trackers import Trackers
from hacpo_mega.records import Judgement, Pool, Prompt, Rollout, Sample, UpdateStats
from hacpo_mega.rollout.exchange import exchange, share_rewards, trajectories_of
from hacpo_mega.samples.learner_view import ViewRules, learner_view, scores_by_answer
from hacpo_mega.samples.tokenizers import agent_codecs, longest_encodings
from hacpo_mega.trainer.joint_checkpoint import JointCheckpoint, RunState, ToldToEnd, agree_on_start
from hacpo_mega.trainer.joint_disk import JointDisk
from hacpo_mega.trainer.step_answers import step_answers


class Trainer:
    """All agents of a configuration, trained together. One per process; use it as a context: leaving it ends the job.

    config       what was asked, nobody writes to it
    place        this process's seat: agent, lane, cell, and the groups it speaks in
    agent        the agent of this process: tokenizer, Megatron actor, live vLLM engine
    answers      prompts of every step, a pure function of seed and step, and answers; `held_out` those of evaluation
    judge        text and gold in, verdict and reward out; `rollout_judge` gives it answers, also while others come
    capability   P_hat of all agents, equal on every rank
    band         where the band of each source begins for this agent; None where the configuration fixes it
    metrics, report, console, folder, trackers, trace   what is measured, shown and written
    skips        ends a run whose updates are all skipped
    checkpoint   what the run goes on from when it dies     disk   asked together by all ranks
    """

    def __init__(self, config: Config, **how: Unpack[StartOptions]) -> None:
        """Takes its place in the job, loads the agents as the run left them, opens its folder. Collective over the job.

        A run that `run_dir` holds goes on from its last checkpoint, unless the options of `how` say otherwise.
        """
        self.config = config
        self.names = tuple(agent.name for agent in config.agents)
        # An error while building ends the job as one in a step does: with the name of this rank and its phase.
        with ExitStack() as stack:
            self.place = stack.enter_context(Place.join(RankMap.of(config), config.wait_s, config.stall_s))
            is_first = self.place.coordinate.global_rank == 0
            lock = stack.enter_context(RunLock(config.run_dir)) if is_first else None
            start = agree_on_start(self.place, config, **how)
            self.steps_done = 0 if start is None else start.step
            self.console = stack.enter_context(Console(config.num_steps, self.steps_done, quiet=not is_first))
            if start is not None:
                self.console.say(f"goes on after step {start.step}, from {start.folder}")
                for change in changes(start.config, plain(config)):
                    self.console.say(f"changed since: {change}")
            self.metrics = Metrics(self.names[self.place.agent], self.place.gather_to_first, self.console.phase)
            with self._phase("load", f"before step {self.steps_done + 1}"):
                codecs = agent_codecs(config.agents)
                num_tokens = longest_encodings(codecs)
                sampler, num_dropped = training_sampler(config, num_tokens)
                self.held_out = held_out_prompts(config, num_tokens)
                # every other key of [reward] is an argument of the judge
                reward = config.reward.model_dump(exclude={"max_unjudged_share", "while_sampling"})
                self.judge = stack.enter_context(Judge(**reward))
                beside = config.reward.while_sampling and self.place.is_leader
                self.rollout_judge = stack.enter_context(RolloutJudge(self.judge, while_sampling=beside))
                self.agent = Agent(config.agents[self.place.agent], self.place, config, start)
            self.answers = step_answers(sampler, self.agent, self.place, config, self.metrics)
            layers = [said.decode() for said in self.place.gather_to_first(self.agent.layers_said.encode())]
            self.console.say(f"layers: {', '.join(dict.fromkeys(layers))}")
            if num_dropped:
                self.console.say(f"{num_dropped} prompts dropped: longer than rollout.max_prompt_tokens for some agent")
            self.capability = CapabilityTracker(len(config.agents), config.algorithm)
            is_calibrated = config.algorithm.band == "calibrated"
            self.band = BandTracker(len(config.agents), config.algorithm) if is_calibrated else None
            self.report = StepReport(self.metrics, self.console, self.place, config, self.agent.dtype)
            self.view_rules = ViewRules.of(config.algorithm, config.rollout, codecs)
            goes_on = start is not None and start.folder == folder_of(config.run_dir, start.step)
            self.folder = stack.enter_context(RunFolder(config, self.place, lock, self.steps_done, goes_on=goes_on))
            self.trackers = stack.enter_context(Trackers(config, self.console.say, goes_on=goes_on, quiet=not is_first))
            self.trace = StepTrace(config.logging, self.place, config.run_dir, self.console.say, self.folder.misplaced)
            self.disk = JointDisk(self.place, config, self.folder, self.console.say)
            self.place.keep_stack_in(config.run_dir / "logs")
            self.skips = SkippedUpdates(
                config.training.max_skipped_updates,
                config.run_dir / "logs",
                self.agent.name,
                self.place.coordinate.cell if self.place.is_leader else None,
                self.agent.codec.decode_answer,
                self.place.gather_agent,
            )
            if start is not None:
                self._take_up(start)
            state = self._state(None if start is None else start.accuracy)
            self.checkpoint = JointCheckpoint(self.place, config, self.agent, self.disk, state, is_on_disk=goes_on)
            self._stack = stack.pop_all()

    def fit(self) -> bool:
        """Evaluates, trains up to `num_steps` steps, evaluates, and exports every agent. Collective over the job.

        False when a signal has ended it before that, with the last step that was done on disk (docs/faults.md).
        """
        if self.checkpoint.is_on:
            self.place.defer_signals()
        try:
            self._train()
        except ToldToEnd as told:
            self.console.say(f"told to end ({signal.Signals(*told.args).name}); {self.checkpoint.outlook}")
            return False
        with self._phase("export", "after the last step"):
            self.disk.export(self.agent, self.checkpoint.safe_step, self.checkpoint.lost)
        return True

    def _train(self) -> None:
        self._verify_weights(f"before step {self.steps_done + 1}")
        if self.steps_done == 0:
            self.evaluate("before step 1")
            self._show(self._write_metrics(0))
        while self.steps_done < self.config.num_steps:
            self._leave_if_told()
            with self.trace.step(self.steps_done + 1):
                self.step()
        self._leave_if_told()

    def step(self) -> None:
        """One HACPO step (Algorithm 1 of the paper): everyone answers, everyone shares, each learns."""
        prompts, my_share = self.answers.prompts_of(self.steps_done), self.answers.my_share
        mine = prompts[my_share]  # of the lane's prompts, this cell's
        with self._phase("roll_out"):
            rollouts = self.answers.take(self.steps_done, self.rollout_judge.on_answer)
        self._leave_if_told()
        with self._phase("judge"):
            judgements = self._judge(mine, rollouts)
            judged = self.judge.take_report()
        with self._phase("exchange"):  # rewards first: they say which answers need a score
            rewards = [judgement.reward for judgement in judgements]
            rewards_PNG = share_rewards(rewards, len(prompts), self.place, self.config.answers_per_prompt)
            # The one number that crosses lanes: P_hat is over the whole step, or lanes would disagree on omega.
            self.capability.update(*self._means_over_lanes(rewards_PNG))
            capability_N = self.capability.values()
            learning = learning_of(rewards_PNG, capability_N, self.place.agent, self.config.algorithm)
        with self._phase("score"):  # log-probs of the policy that will learn, before it learns
            asked = learning.own_P[my_share], learning.wanted_PG[my_share]
            scores = self.agent.scoring.before_learning(mine, rollouts, *asked)
        with self._phase("exchange"):
            trajectories = trajectories_of(self.place, rollouts, judgements, scores)
            pool = exchange(trajectories, prompts, self.place, self.config.answers_per_prompt)
            # Of every answer, for every learner; 1 unless rollout.engine_correction is "sequence".
            advantages_PNG = learning.advantages_PNG * pool.engine_weights_PNG
            samples, views = learner_view(
                pool.part(my_share),
                advantages_PNG[my_share],
                learning.trains_PNG[my_share],
                self.place.agent,
                self.agent.codec,
                self.view_rules,
                scores_by_answer(rollouts, scores),
            )
        self._leave_if_told()  # what is learnt cannot be taken back: from here on the step is finished first
        # The engine sleeps, unless one step off (roll_out put it to bed): its memory is what the actor learns in.
        low_N = None if self.band is None else self.band.values()
        updates = []
        with self.agent.devices.learning(self._phase):
            for m, update in enumerate(self.agent.plan(mine, samples)):  # the cross band tightens with every update
                if self._diagnosis_is_due():
                    self._diagnose(update, m, low_N)
                with self._phase("learn"):
                    updates.append(self.agent.learn(update, m, low_N))
                    self.skips.see(self.steps_done + 1, m, update, updates[-1])
        if self.band is not None:
            self._calibrate(self.band, updates)
        self.answers.finish(self._phase)  # those of the next step, with rollout.one_step_off
        with self._phase("publish"):  # Megatron shards -> the live vLLM engine
            self.agent.publish_weights()
        self._examine()
        if self.config.training.score_in_first_update:  # what was not scored before has been by now
            scores = self.agent.scoring.after_learning(rollouts, scores, updates)
            trajectories = trajectories_of(self.place, rollouts, judgements, scores)
        self.report.add(trajectories, scores, capability_N, views, updates, judged, self.agent.asleep_bytes)
        reduced = self._write(pool, advantages_PNG, self.agent.describe(pool.prompts, rollouts, scores, updates))
        self.report.warn(reduced)
        self._end_step(reduced)

    def _examine(self) -> None:
        """What is asked of the new weights, when it is due: whether the engine has them, and how well they answer."""
        if self._falls_due(self.config.training.verify_weights_every):
            self._verify_weights()
        if self._evaluation_is_due():
            self.evaluate()

    def _end_step(self, reduced: StepMetrics) -> None:
        """What makes a step one that was done: it is counted, kept when it is due, and shown."""
        self.steps_done += 1
        self.checkpoint.settle(self._state(mean_accuracy(reduced.values, self.names)))
        if self.checkpoint.has_work():  # after its metrics: a resumed run has them all
            with self._phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.go_on()
        self._show(reduced)

    def evaluate(self, when: str = "") -> None:
        """Greedy accuracy on the held-out prompts, which the agent's cells share among themselves."""
        if not self.held_out:
            return
        mine = self.held_out[self.place.rank_map.share_of_agent(self.place.coordinate)]
        longest = self.config.evaluation.max_answer_tokens or self.config.rollout.max_answer_tokens
        with self._phase("evaluate", when):
            answers = self.agent.answer_greedily(mine, longest)
            judgements = self._judge(mine, answers)
        if self.place.is_leader:
            add_accuracy(self.metrics, self.agent.name, mine, judgements)
            self.report.warn_of_grader(self.judge.take_report(), "held-out answers")

    def _verify_weights(self, when: str = "") -> None:
        """Ends the run where an engine answers with other weights than its actor's. Collective over the cell."""
        with self._phase("verify", when):
            self.agent.verify_weights()

    def _take_up(self, start: Checkpoint) -> None:
        """What a checkpoint holds beside the agents' own state."""
        agent = start.agents[self.agent.name]
        self.capability.load_state_dict(start.capability)
        if self.band is not None and agent.band is not None:  # None: the user has accepted another algorithm.band
            self.band.load_state_dict(agent.band)
        self.skips.go_on(agent.num_skipped)
        self.answers.take_up(start)
        # Another number of cells deals them out again.
        self.report.load_state_dict(agent.alarms[self.place.coordinate.cell % len(agent.alarms)])

    def _state(self, accuracy: float | None) -> RunState:
        """What a checkpoint holds beside the agents' own state; `_take_up` is its inverse."""
        band = None if self.band is None else self.band.state_dict()
        rest = self.skips.num_in_row, self.report.state_dict(), self.answers.ready
        return RunState(self.steps_done, accuracy, self.capability.state_dict(), band, *rest)

    def _leave_if_told(self) -> None:
        """Ends the run at its last whole step if a signal has asked any rank for it. Collective over the job."""
        if self.checkpoint.is_on and (number := self.place.told_to_end()):
            with self._phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.keep()
            raise ToldToEnd(number)

    def _judge(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Judgement]:
        """One judgement per rollout, on the cell's leader; nobody else needs them."""
        if not self.place.is_leader:
            return []
        judgements = self.rollout_judge.judge(prompts, rollouts)
        if self.rollout_judge.hidden_s:
            self.metrics.add(f"agent/{self.agent.name}/judge_hidden_s", self.rollout_judge.hidden_s, 1)
        return judgements

    def _means_over_lanes(self, rewards_PNG: Tensor) -> tuple[Tensor, Tensor]:
        """(mean reward, share of rewards above 0) of every agent over the whole step [N], NaN without a verdict."""
        reward_N, positive_N, judged_N = self.place.sum_over_lanes(reward_tally(rewards_PNG)).unbind(dim=1)
        return reward_N / judged_N, positive_N / judged_N

    def _calibrate(self, band: BandTracker, updates: Sequence[UpdateStats]) -> None:
        """Lets the band of the next step follow the ratios of this one. Collective over the agent's ranks."""
        if self.place.is_leader:
            add_band(self.metrics, self.place.agent, self.names, band.values())
        mine = json.dumps(useful_ratios(updates, len(self.names)))
        with self._phase("calibrate"):
            cells = [json.loads(payload) for payload in self.place.gather_agent(mine.encode())]
        for source in range(len(self.names)):
            band.update(source, torch.tensor([ratio for cell in cells for ratio in cell[source]], dtype=torch.float64))

    def _diagnose(self, update: Sequence[Sample], update_index: int, low_N: Sequence[float] | None) -> None:
        """Measures own against cross gradients of an update that is about to be learnt from."""
        with self._phase("diagnose"):
            found = self.agent.diagnose(update, update_index, low_N)
        if self.place.is_leader:
            add_diagnosis(self.metrics, found, self.place.agent, self.names)

    def _write(self, pool: Pool, advantages_PNG: Tensor, notes: AnswerNotes) -> StepMetrics:
        """The step's answers and numbers into the run folder. Collective over the job."""
        with self._phase("write"):
            self.folder.write_rollouts(self.steps_done + 1, pool, advantages_PNG, notes)
        return self._write_metrics(self.steps_done + 1)

    def _write_metrics(self, step: int) -> StepMetrics:
        with self._phase("wait"):  # for the slowest rank, which would else hide in the reduction
            self.place.barrier()
        with self._phase("write"):
            reduced = self.metrics.reduce()
            self.folder.write_step(step, reduced)
            self.trackers.log(step, reduced)
        return reduced

    def _show(self, reduced: StepMetrics) -> None:
        self.console.step(self.steps_done, reduced, self.checkpoint.safe_step if self.checkpoint.is_on else None)

    def _diagnosis_is_due(self) -> bool:
        """Where nobody learns from others there is nothing to compare."""
        compares = self.config.algorithm.shares_answers and len(self.names) > 1
        return compares and self._falls_due(self.config.training.diagnose_every)

    def _evaluation_is_due(self) -> bool:
        is_last = self.steps_done + 1 == self.config.num_steps
        return is_last or self._falls_due(self.config.evaluation.every_steps)

    def _falls_due(self, every: int) -> bool:
        """Whether this step is one of every so many; 0 is never."""
        return every > 0 and (self.steps_done + 1) % every == 0

    @contextmanager
    def _phase(self, phase: str, when: str = "") -> Iterator[None]:
        """Times a phase, shows it, and names it ("learn of step 3") in case this process dies in it."""
        self.place.enter_phase(phase, when or f"of step {self.steps_done + 1}")
        with self.metrics.time(phase), self.place.spans.span(phase, "phase"):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.agent.close()  # after an error the process ends as it is: closing an engine may wait for dead peers
        self._stack.__exit__(kind, *error)
