"""The training loop: every agent answers, all share, each learns. The table of contents of a HACPO step.

Every process of the job runs it, in lockstep, for its own agent, lane and cell (cluster/place.py). build.py makes what
stands before step 1, observers.py examines the run, logbook/step_report.py sums up what a step measured.
Elsewhere: the thread that answers one step ahead (rollout/vllm/engine_thread.py).
"""

import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self, Unpack

import torch

from hacpo_mega.agent.policy_loss import complete_scores, own_scores
from hacpo_mega.agent.rollout_client import RolloutClient
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.algorithm import (
    CapabilityTracker,
    Judged,
    learning_of,
    reads_skills,
    reads_source_tokens,
    reward_tally,
    skill_tally,
)
from hacpo_mega.checkpoint.files import Checkpoint, StartOptions, plain
from hacpo_mega.config import Config
from hacpo_mega.data.prompts import PromptSampler
from hacpo_mega.logbook.files.metrics import Metrics, StepMetrics
from hacpo_mega.logbook.files.trace import StepTrace
from hacpo_mega.logbook.files.trackers import Trackers
from hacpo_mega.logbook.run.rank_files import RankFile
from hacpo_mega.logbook.run.run_folder import RunFolder
from hacpo_mega.logbook.step_report import StepReport, StepResult
from hacpo_mega.logbook.steps.held_out import mean_held_out
from hacpo_mega.logbook.steps.skipped_updates import SkippedUpdates
from hacpo_mega.logbook.steps.start_parts import StartParts
from hacpo_mega.records import Prompt, Rollout
from hacpo_mega.rollout.exchange import (
    SharedRewards,
    deal_rollouts,
    exchange,
    judged_rollouts,
    scored_trajectories,
    share_rewards,
)
from hacpo_mega.rollout.ready_answers import SUFFIX, ReadyAnswers, read_answers
from hacpo_mega.samples.learner_view import ReencodingRules, learner_view, routing_by_answer, scores_by_answer
from hacpo_mega.trainer.build import (
    JoinedJob,
    RunData,
    config_observers,
    join_job,
    load_agent,
    load_judge,
    rate_observers,
    read_data,
    say_agents,
)
from hacpo_mega.trainer.joint_checkpoint import JointCheckpoint, RunState, TerminationRequested
from hacpo_mega.trainer.joint_disk import JointDisk
from hacpo_mega.trainer.observers import HeldOutEvaluation, Observer, Observers, Reports
from hacpo_mega.trainer.phases import Phases
from hacpo_mega.trainer.rollout_judge import RolloutJudge


class RolloutSchedule:
    """Prompts and answers of one cell, step by step: on policy, or prefetched while the step before learns.

    Steps count from 0.

                    main thread                                      engine
    on policy       roll_out 1, learn 1, publish 1, roll_out 2 ...   in the main thread
    one step off    roll_out 1, learn 1, publish 1, learn 2 ...      1, then 2 while 1 learns, 3 while 2 ...

    One step off, the policy after step t - 2 writes the answers of step t: `staleness_steps` is 1. The first step of a
    run, and the first after a checkpoint without prefetched answers, has none ready: its answers are generated when it
    begins, and are not stale. The last step prefetches too if checkpoints are saved: a run resumed with a larger
    num_steps then has the answers that it would have had without the end. This costs one rollout beside the last
    updates. Prompts and seeds are functions of the run's seed and the step, so answers do not depend on timing.

    my_share   the prompts of a lane that this cell answers
    ready      prefetched answers to the next step; None if there are none
    """

    def __init__(self, sampler: PromptSampler, rollout: RolloutClient, config: Config, metrics: Metrics) -> None:
        self._sampler, self._rollout, self._config, self._metrics = sampler, rollout, config, metrics
        self._place, self._prefetches = rollout.place, config.mode.one_step_off
        self.my_share = self._place.rank_map.share_of_lane(self._place.coordinate)
        self.ready: ReadyAnswers | None = None
        self._prefetching: tuple[Prompt, ...] = ()  # prompts of the next step that the engine answers now

    def prompts_of(self, step: int) -> tuple[Prompt, ...]:
        """The step's prompts of this lane."""
        return self._sampler.at(step, self._place.lane, self._config.lanes)

    def restore(self, start: Checkpoint) -> str | None:
        """Restores a checkpoint's prefetched answers if they are still valid. Collective over the job.

        Another seed, [rollout] or conversation, other tokens of a prompt, and files of an older version make them
        invalid. All agents take theirs or none, since those of one conversation answer each other. Returns the log line
        on discarded answers, if there are any.
        """
        if not self._prefetches:
            return None
        config, keys = plain(self._config), ("seed", "rollout", "conversation", "roles")
        ready = None
        if all(start.config.get(key) == config.get(key) for key in keys):
            prefix = f"{self._rollout.name}/"
            files = [start.folder / path for path in start.files if path.startswith(prefix) and path.endswith(SUFFIX)]
            prompts = self.prompts_of(start.step)[self.my_share]
            ready = read_answers(files, prompts, self._encoded(prompts), self._config.answers_per_prompt)
        if all(self._place.gather_job(b"" if ready is None else b"ready")):
            self.ready = ready
        elif any(path.endswith(SUFFIX) for path in start.files):
            return f"answers prefetched for step {start.step + 1}, of other settings or an older version, are made anew"
        return None

    def roll_out(self, step: int, on_answer: Callable[[Prompt, Rollout], None] | None) -> list[Rollout]:
        """This cell's answers, by prompt, then by rollout; `on_answer` is called for each as soon as it ends.

        One step off, it takes prefetched answers if there are any, without a call, and begins to prefetch the next
        step's.
        """
        ready, sampler, self.ready = self.ready, self._rollout.sampler, None
        if ready is None:
            rollouts = self._rollout.roll_out(self.prompts_of(step)[self.my_share], step, on_answer)
            self._add_engine_use()
        else:
            rollouts = sampler.rollouts(sampler.slots(ready.prompts), ready.completions)
        if not self._prefetches:
            return rollouts
        if step + 1 < self._config.num_steps or self._config.checkpoint.is_on:
            self._prefetching = self.prompts_of(step + 1)[self.my_share]
            self._rollout.begin_prefetch(self._prefetching, step + 1)
        if self._place.is_leader:
            self._metrics.add(f"agent/{self._rollout.name}/staleness_steps", int(ready is not None), 1)
        return rollouts

    def finish_prefetch(self, phase: Phases) -> None:
        """Waits for the answers of the next step, if the engine generates them. Collective over the cell."""
        prefetcher = self._rollout.prefetcher
        if prefetcher.is_busy:
            with phase("roll_out"):
                answers = self._rollout.finish_prefetch(self._prefetching)
                self.ready = ReadyAnswers(self._prefetching, self._encoded(self._prefetching), answers)
            self._add_engine_use()
            if self._place.coordinate.is_first_to_answer:
                self._metrics.add(f"agent/{self._rollout.name}/roll_out_hidden_s", prefetcher.hidden_s, 1)

    def _encoded(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [self._rollout.codec.encode_prompt(prompt.text) for prompt in prompts]

    def _add_engine_use(self) -> None:
        """Adds busy and idle seconds of this rank's engine in conversations, and its cache's share of prompt tokens."""
        player, prefix = self._rollout.player, f"agent/{self._rollout.name}/conversation"
        if player is not None and (tally := player.tally) is not None:
            self._metrics.add(f"{prefix}/engine_busy_s", tally.step_s, 1)
            self._metrics.add(f"{prefix}/engine_idle_s", tally.idle_s, 1)
            self._metrics.add(f"{prefix}/prefix_hits", tally.num_cached_tokens, tally.num_prompt_tokens)


class Trainer:
    """All agents of a configuration, trained together. One per process; a context manager, whose exit ends the job.

    config       the user's, with the time of chat templates' clocks; read-only
    place        this process's position: agent, lane, cell, and its process groups
    phase        context of a phase of a step: timed, shown, named when it fails
    rollout      generates the answers of this process's agent: engine, sampler, weight sync
    agent        the agent: tokenizer, Megatron actor, and the same `rollout`; None on a rank that only generates
    schedule     prompts of every step, a pure function of seed and step, and their answers
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
        **options: Unpack[StartOptions],
    ) -> None:
        """Joins the job, loads the agents as the run left them, opens the run folder. Collective over the job.

        A run that `run_dir` holds resumes from its last checkpoint, unless the `options` say otherwise. `sampler`,
        `judge` and `observers` are for benchmarks: generation requests, judge, further observers.
        TypeError for anything but a Config, such as the path of one.
        """
        if not isinstance(config, Config):
            raise TypeError(f"Trainer needs a Config, found {config!r}; hacpo_mega.load_config(PATH) makes one")
        # An error while building ends the job as one in a step does: with the name of this rank and its phase.
        with ExitStack() as stack:
            parts = StartParts()
            job = join_job(config, options, parts, stack)
            self.config, self.place, self.console, self.steps_done = job.config, job.place, job.console, job.steps_done
            self.place.take_waits()  # waits of joining are in no step's metrics
            metrics = Metrics(self.place.coordinate.agent_name, self.place.gather_to_first, self.console.phase)
            self.phase = Phases(self.place, metrics, [observer.around for observer in observers])
            self.phase.step = self.steps_done + 1
            with self.phase("load", f"before step {self.phase.step}"):
                with self.place.spans.span("data"):
                    data = read_data(self.config)
                    self.judge = load_judge(job, judge, data, stack)
                self.agent, self.rollout = load_agent(job, sampler)
            self.schedule = RolloutSchedule(data.prompts, self.rollout, self.config, metrics)
            say_agents(job, self.agent, self.rollout, data)
            self._open_run(job, metrics, data, observers, stack)
            self.console.say(parts.finish(self.place.spans, metrics))
            if job.start is not None:
                self._restore(job.start)
            state = self._state(None if job.start is None else job.start.accuracy)
            self.checkpoint = JointCheckpoint(
                self.place, self.config, self.agent, self.disk, state, is_on_disk=job.goes_on
            )
            self._stack = stack.pop_all()

    def _open_run(
        self, job: JoinedJob, metrics: Metrics, data: RunData, observers: Sequence[Observer], stack: ExitStack
    ) -> None:
        """Opens the run folder, and makes the report, the observers, the capability tracker and the joint disk."""
        config, place, console, rollout = self.config, self.place, self.console, self.rollout
        folder = stack.enter_context(RunFolder(config, place, job.lock, self.steps_done, goes_on=job.goes_on))
        is_first = place.coordinate.global_rank == 0
        trackers = stack.enter_context(Trackers(config, console.say, goes_on=job.goes_on, quiet=not is_first))
        self.report = StepReport(metrics, console, place, config, folder, trackers)
        stack.enter_context(RankFile(config.run_dir, place))
        place.watchdog.keep_stack_in(config.run_dir / "logs")
        self.skips = SkippedUpdates(
            config.training.max_skipped_updates, config.run_dir / "logs", rollout.name,
            place.coordinate.cell if place.is_leader else None, rollout.codec.decode_answer, place.gather_agent,
        )  # fmt: skip
        self._reports = Reports(config, place)
        run_observers = [
            self._reports,
            *config_observers(config, self.agent, rollout, metrics, self.phase, trackers),
            HeldOutEvaluation(config, data.held_out, rollout, self.judge, metrics, self.report, self.phase),
            *rate_observers(config, self.agent, rollout),
            *observers,
        ]
        for observer in run_observers:
            observer.joins(rollout, metrics)
        self.observers = Observers(run_observers)
        skills = data.prompts.skills if reads_skills(config.algorithm) else ()
        self.capability = CapabilityTracker(len(config.agents), config.algorithm, skills)
        self.reencoding_rules = ReencodingRules.of(config, data.codecs, rollout.turn_format)
        self.trace = StepTrace(config.traced_steps, place, config.run_dir, console.say, folder.misplaced)
        self.disk = JointDisk(place, config, folder, console.say)

    def fit(self) -> bool:
        """Evaluates, trains up to `num_steps` steps, evaluates, and exports every agent. Collective over the job.

        Returns False when a signal has ended it early, with its last step on disk (docs/guide/troubleshooting.md).
        """
        if self.config.checkpoint.is_on:
            self.place.watchdog.defers_signals = True
        try:
            self.observers.before_training(self.steps_done + 1)
            if self.steps_done == 0:
                self._show(self.report.write_metrics(0, self.phase))
            while self.steps_done < self.config.num_steps:
                self._exit_if_preempted()
                with self.trace.step(self.steps_done + 1):
                    self.step()
            self._exit_if_preempted()
        except TerminationRequested as request:
            self.console.say(f"told to end ({signal.Signals(*request.args).name}); {self.checkpoint.outlook}")
            return False
        with self.phase("export", "after the last step"):
            self.disk.export(self.agent, self.checkpoint.safe_step, self.checkpoint.last_step_error)
        run_dir = self.config.run_dir
        command = f"`hacpo-mega watch {shlex.quote(str(run_dir))}`"
        self.console.say(f"done: the models are in {run_dir / 'agents'}; {command} shows the run")
        return True

    def write_report(self) -> None:
        """Writes the report of a run that is done, and says where it is, or why there is none. Collective over the
        job."""
        self.place.enter_phase("report", "after the last step")
        self.console.say(self._reports.finish())

    def step(self) -> None:
        """One HACPO step (Algorithm 1 of the paper): everyone answers, everyone shares, each learns."""
        if self.agent is None:
            return self._generate_only()
        prompts = self.schedule.prompts_of(self.steps_done)  # my lane's
        with self.phase("roll_out"):
            rollouts = self.schedule.roll_out(self.steps_done, self.judge.on_answer)
        self._exit_if_preempted()
        with self.phase("judge"):
            judgements = self.judge.judge(prompts[self.schedule.my_share], rollouts)
            judged, report = judged_rollouts(self.place, rollouts, judgements), self.judge.take_report()
        with self.phase("exchange"):  # rewards first: they say which answers need a score
            shared = share_rewards(judged, len(prompts), self.place, self.config.answers_per_prompt)
            learning = learning_of(self._judged(shared, prompts), self.config.algorithm)
            # Each answer is scored and trained by one cell of the lane, chosen so that all cells finish together.
            cell_PNG = self.agent.deal(prompts, shared.num_tokens_PNG, learning.trains_PNG)
            mine_PNG = cell_PNG == self.place.coordinate.cell_in_lane
            rollouts, judged = deal_rollouts(rollouts, judged, prompts, cell_PNG[:, self.place.agent], self.place)
        with self.phase("score"):  # log-probs of the policy that will learn, before it learns
            scores = self.agent.score(prompts, rollouts, learning.own_P, learning.wanted_PG)
        with self.phase("exchange"):
            # An answer's mean log-prob travels, and those of its tokens only if an objective reads them.
            trajectories = scored_trajectories(judged, scores, by_token=reads_source_tokens(self.config.algorithm))
            pool = exchange(trajectories, prompts, self.place, self.config.answers_per_prompt)
            learning = learning.weighted(pool.engine_weights_PNG)  # 1 unless engine_correction is "sequence"
            samples, reencodings = learner_view(
                pool, learning.advantages_PNG, learning.trains_PNG, self.place.agent, self.agent.codec,
                self.reencoding_rules, scores_by_answer(rollouts, scores), routing_by_answer(rollouts), mine_PNG
            )  # fmt: skip
        self._exit_if_preempted()  # an update cannot be undone: from here on the step is finished first
        step, updates = self.steps_done + 1, []
        with self.rollout.devices.learning(self.phase):  # the engine sleeps, unless one step off
            for m, update in enumerate(self.agent.plan(prompts, samples)):  # the cross band tightens with m
                self.observers.before_update(step, m, update)
                with self.phase("learn"):
                    updates.append(self.agent.learn(update, m, step))
                    self.skips.see(step, m, update, updates[-1])
                    self.observers.after_update(step, m, update, updates[-1])
        self.observers.after_learning(step, updates)
        self.schedule.finish_prefetch(self.phase)  # one step off: the engine has answered the next step's prompts
        with self.phase("publish"):  # Megatron shards -> the live vLLM engine
            self.rollout.publish_weights(step)
        self.observers.after_publishing(step)
        result = StepResult(
            pool, learning.advantages_PNG, rollouts, judgements, report, scores, trajectories, reencodings, updates
        )
        self._end_step(result)

    def _judged(self, shared: SharedRewards, prompts: Sequence[Prompt]) -> Judged:
        """The lane's judged answers, and capabilities that count this step's rewards. Collective over lanes.

        Only reward tallies cross lanes: from its own prompts alone, each lane would compute another omega.
        """
        rewards_PNG, successes_PNG, num_tokens_PNG, text_hash_PNG = shared
        self.capability.add(self.place.sum_over_lanes(reward_tally(rewards_PNG, successes_PNG)))
        judged = Judged(
            rewards_PNG, successes_PNG, self.capability.values(), self.place.agent,
            self.steps_done + 1, self.config.num_steps, num_tokens_PNG, text_hash_PNG,
        )  # fmt: skip
        if not (skills := self.capability.skills):
            return judged
        skill_P = torch.tensor([skills.index(prompt.skill) for prompt in prompts])
        tally_SN3 = skill_tally(rewards_PNG, successes_PNG, skill_P, len(skills))
        self.capability.add_skills(self.place.sum_over_lanes(tally_SN3))
        capability_NS, judged_NS = self.capability.skill_values()
        by_skill = {"skill_P": skill_P, "skill_capability_NS": capability_NS, "skill_judged_NS": judged_NS}
        return replace(judged, skill_names=skills, **by_skill)

    def _generate_only(self) -> None:
        """The same step on a rank that only generates (placement = "apart"); it joins the job's collectives."""
        with self.phase("roll_out"):
            self.schedule.roll_out(self.steps_done, None)
        with self.phase("wait"):
            self._exit_if_preempted()  # as training ranks do before they judge
            self._exit_if_preempted()  # and before they learn
        self.schedule.finish_prefetch(self.phase)
        with self.phase("publish"):
            self.rollout.publish_weights(self.steps_done + 1)
        self.observers.after_publishing(self.steps_done + 1)
        self._count_step(self.report.write_metrics(self.steps_done + 1, self.phase))

    def _end_step(self, result: StepResult) -> None:
        """Ends a step: writes it, counts it, saves it if that is due, and shows it."""
        self.observers.before_writing(self.steps_done + 1, result)
        if self.config.scores_in_first_update:  # the first update has scored the answers that had no score before it
            scores = complete_scores(result.rollouts, result.scores, result.updates)
            result = replace(result, scores=scores, trajectories=scored_trajectories(result.trajectories, scores))
        notes = self.agent.answer_notes(result)
        if self.config.engine_scores:  # the engine gap needs the trainer's log-probs, which its first update computed
            result = replace(result, scores=own_scores(result.rollouts, result.updates[0], self.agent.index))
        capability_N, asleep_bytes = self.capability.values(), self.rollout.devices.asleep_bytes
        self._count_step(self.report.write(self.steps_done + 1, result, notes, capability_N, asleep_bytes, self.phase))

    def _count_step(self, reduced: StepMetrics) -> None:
        """Counts the step, whose metrics are written, and saves it if that is due."""
        self.steps_done += 1
        self.phase.step = self.steps_done + 1
        accuracy = mean_held_out(reduced.values, [agent.name for agent in self.config.agents])
        self.checkpoint.set_state(self._state(accuracy))
        if self.checkpoint.has_work():  # after its metrics are written: a resumed run must have those of every step
            with self.phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.advance()
        self._show(reduced)

    def _restore(self, start: Checkpoint) -> None:
        """Restores a checkpoint's state other than the agents' own."""
        agent = start.agents[self.rollout.name]
        self.steps_done = start.step
        self.capability.load_state_dict(start.capability)
        self.skips.go_on(agent.num_skipped)
        if line := self.schedule.restore(start):
            self.console.say(line)
        self.report.load_state_dicts(agent.alarms)

    def _state(self, accuracy: float | None) -> RunState:
        """State for a checkpoint other than the agents' own; `_restore` is its inverse."""
        num_skipped, alarms, ready = self.skips.num_in_row, self.report.state_dict(), self.schedule.ready
        return RunState(self.steps_done, accuracy, self.capability.state_dict(), num_skipped, alarms, ready)

    def _exit_if_preempted(self) -> None:
        """Ends the run at its last whole step if any rank has got a signal to end. Collective over the job."""
        if self.config.checkpoint.is_on and (number := self.place.agreed_signal()):
            with self.phase("checkpoint", f"of step {self.steps_done}"):
                self.checkpoint.save_now()
            raise TerminationRequested(number)

    def _show(self, reduced: StepMetrics) -> None:
        self.console.step(self.steps_done, reduced, self.checkpoint.safe_now if self.config.checkpoint.is_on else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.rollout.close()  # after an error the process ends as it is: closing an engine may wait for dead peers
        self._stack.__exit__(kind, *error)
