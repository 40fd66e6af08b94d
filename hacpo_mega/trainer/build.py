"""Builds everything before step 1: this rank's place, its agent, the judge, the run folder, and the observers.

All errors that a user may have to fix are raised here, before an older run is moved aside.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.rollout_worker import RolloutWorker
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.algorithm import CapabilityTracker
from hacpo_mega.checkpoint.files import Checkpoint, StartOptions, folder_of, plain
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.config.changes import changes
from hacpo_mega.config.checks.notes import default_success_note
from hacpo_mega.config.checks.tokenizer_checks import lacks_time, steadiness_notes, with_times, with_times_of
from hacpo_mega.config.user_code import require_named_functions
from hacpo_mega.data.prompt_sets import held_out_prompts, training_sampler
from hacpo_mega.data.prompts import PromptSampler
from hacpo_mega.data.reading.files import PromptRow
from hacpo_mega.grading.reward_trial import MOST_ROWS, servers_of, try_reward
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.jobs.attempts import record_termination
from hacpo_mega.logbook.console import Console
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.files.trace import StepTrace
from hacpo_mega.logbook.files.trackers import Trackers
from hacpo_mega.logbook.run.provenance import other_threads
from hacpo_mega.logbook.run.run_folder import RunFolder
from hacpo_mega.logbook.run.run_inputs import input_changes
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.logbook.step_report import StepReport
from hacpo_mega.logbook.steps.skipped_updates import SkippedUpdates
from hacpo_mega.logbook.steps.start_parts import StartParts
from hacpo_mega.models.files.chat_template import utc_now
from hacpo_mega.models.files.hub import model_name
from hacpo_mega.records import Prompt
from hacpo_mega.samples.learner_view import ReencodingRules
from hacpo_mega.samples.tokenizers import TextCodec, agent_codecs, longest_encodings
from hacpo_mega.trainer.joint_checkpoint import agree_on_start
from hacpo_mega.trainer.joint_disk import JointDisk
from hacpo_mega.trainer.observers import (
    Diagnosis,
    Evaluation,
    Observer,
    Observers,
    OwnMetrics,
    Rates,
    Skips,
    TrackedAnswers,
    Verification,
    num_gpus,
    peak_flops,
)
from hacpo_mega.trainer.phases import Phases
from hacpo_mega.trainer.rollout_judge import RolloutJudge
from hacpo_mega.trainer.schedule import SCHEDULES, OnPolicy


@dataclass(frozen=True)
class TrainerOverrides:
    """Overrides for benchmarks: generation requests, judge, further observers. Every run has the defaults."""

    sampler: Callable[..., Sampler] = Sampler
    judge: Callable[..., RolloutJudge] = RolloutJudge
    observers: Sequence[Observer] = ()


@dataclass(frozen=True)
class Built:
    """Parts of a trainer.

    config   as the user wrote it, with the time at which the clocks of chat templates stand
    start    the checkpoint that the run goes on from; `goes_on`: whether it is this run's own
    """

    config: Config
    start: Checkpoint | None
    goes_on: bool
    place: Place
    phase: Phases
    console: Console
    agent: Agent | RolloutWorker
    schedule: OnPolicy
    judge: RolloutJudge
    capability: CapabilityTracker
    skips: SkippedUpdates
    reencoding_rules: ReencodingRules
    report: StepReport
    trace: StepTrace
    disk: JointDisk
    observers: Observers


def build(config: Config, how: StartOptions, overrides: TrainerOverrides, stack: ExitStack) -> Built:
    """Joins the job, loads this rank's agent as the run left it, opens the run folder. Collective over the job.

    An error inside `stack` ends the job with the name of this rank and its phase.
    """
    parts = StartParts()
    place = stack.enter_context(Place.join(RankMap.of(config), config.wait_s, config.stall_s))
    parts.stands(place.spans)
    is_first = place.coordinate.global_rank == 0
    lock = _lock(config, place, stack) if is_first else None
    config, start = _agreed(place, config, how)
    require_same_models(place, [agent.model for agent in config.agents])
    steps_done = 0 if start is None else start.step
    names = tuple(agent.name for agent in config.agents)
    console = stack.enter_context(Console(config.num_steps, steps_done, names=names, quiet=not is_first))
    place.before_end(console.clear)
    _say_begin(console, config, start, is_first=is_first, on_cpu=place.device.type == "cpu")
    require_named_functions(config)
    metrics = Metrics(names[place.agent], place.gather_to_first, console.phase)
    phase = Phases(place, metrics, [observer.around for observer in overrides.observers])
    phase.step = steps_done + 1
    kind = SCHEDULES[config.rollout.one_step_off]
    with phase("load", f"before step {phase.step}"):
        with place.spans.span("data"):
            codecs = agent_codecs(config.agents)
            prompts, num_dropped, held_out = _prompts(config, codecs)
            rows = (prompt.row for prompt in chain(*prompts.groups, held_out))
            tried = prompts.groups[0][:MOST_ROWS]
            judge = _judge(config, place, overrides.judge, codecs[place.agent], rows, tried, console, stack)
        agent = _agent(config, place, start, kind, overrides)
    schedule = kind(prompts, agent, place, config, metrics)
    _say_agents(console, place, agent, num_dropped)
    goes_on = start is not None and start.folder == folder_of(config.run_dir, start.step)
    folder = stack.enter_context(RunFolder(config, place, lock, steps_done, goes_on=goes_on))
    trackers = stack.enter_context(Trackers(config, console.say, goes_on=goes_on, quiet=not is_first))
    report = StepReport(metrics, console, place, config, agent.dtype, folder, trackers, is_on_policy=kind.is_on_policy)
    place.keep_stack_in(config.run_dir / "logs")
    skips = _skips(config, agent)
    evaluation = Evaluation(config, held_out, agent, judge, metrics, report, phase)
    examiners = *_examiners(config, agent, metrics, phase), *_onlookers(config, trackers)
    observers = [Skips(skips), *examiners, evaluation, *_rates(config, place, agent), *overrides.observers]
    for observer in observers:
        observer.joins(agent, metrics)
    console.say(parts.finish(place.spans, metrics))
    return Built(
        config=config,
        start=start,
        goes_on=goes_on,
        place=place,
        phase=phase,
        console=console,
        agent=agent,
        schedule=schedule,
        judge=judge,
        capability=CapabilityTracker(len(names), config.algorithm),
        skips=skips,
        reencoding_rules=ReencodingRules.of(config.algorithm, config.rollout, codecs),
        report=report,
        trace=StepTrace(config.traced_steps, place, config.run_dir, console.say, folder.misplaced),
        disk=JointDisk(place, config, folder, console.say),
        observers=Observers(observers),
    )


def _lock(config: Config, place: Place, stack: ExitStack) -> RunLock:
    """Takes the run's lock. Rank 0 releases it even if a signal kills it, after it has recorded that."""
    lock = stack.enter_context(RunLock(config.run_dir))
    place.on_termination(partial(record_termination, config.run_dir))
    place.at_end(lock.leave)
    return lock


def _agent(
    config: Config, place: Place, start: Checkpoint | None, kind: type[OnPolicy], overrides: TrainerOverrides
) -> Agent | RolloutWorker:
    """Agent of this rank, or its rollout side alone on a rank that only generates."""
    spec = config.agents[place.agent]
    if not place.trains:
        return RolloutWorker(spec, place, config, 0 if start is None else start.step, sampler=overrides.sampler)
    return Agent(spec, place, config, start, split_devices=kind.devices, sampler=overrides.sampler)


def _prompts(config: Config, codecs: Sequence[TextCodec]) -> tuple[PromptSampler, int, tuple[Prompt, ...]]:
    """Training prompts, how many others are too long for an agent, and held-out prompts."""
    num_tokens = longest_encodings(config.agents, codecs)
    return *training_sampler(config, num_tokens), held_out_prompts(config, num_tokens)


def _say_agents(console: Console, place: Place, agent: Agent | RolloutWorker, num_dropped: int) -> None:
    layers = [line.decode() for line in place.gather_to_first(agent.backend_summary.encode())]
    console.say(f"layers: {'; '.join(filter(None, dict.fromkeys(layers)))}")
    for mine in (agent.ends_summary, agent.weight_sync_summary, agent.routing_summary):
        for line in filter(None, dict.fromkeys(place.gather_to_first(mine.encode()))):
            console.say(line.decode())
    if num_dropped:
        console.say(f"{num_dropped} prompts dropped: longer than rollout.max_prompt_tokens for some agent")


def _say_begin(console: Console, config: Config, start: Checkpoint | None, *, is_first: bool, on_cpu: bool) -> None:
    """Prints the first lines of a start, before models are loaded, which takes minutes for large ones."""
    agents = ", ".join(agent.name for agent in config.agents)
    ranks, first = RankMap.of(config).world_size, 1 if start is None else start.step + 1
    steps = f"steps {first} to {config.num_steps}" if first <= config.num_steps else "no step left but the export"
    console.say(f"{config.algorithm.method} of {agents} on {ranks} ranks, {steps}, in {config.run_dir}")
    for line in default_success_note(config) if config.algorithm.success_readers else ():
        console.say(line)
    for line in (line for agent in config.agents for line in steadiness_notes(agent)):
        console.say(line)
    if start is not None:
        console.say(f"goes on after step {start.step}, from {start.folder}")
        for change in [*changes(start.config, plain(config)), *(input_changes(start, config) if is_first else ())]:
            console.say(f"changed since: {change}")
        for change in other_threads(start.folder.parents[1]) if is_first and on_cpu else ():
            console.say(f"changed since: {change}")


def _agreed(place: Place, config: Config, how: StartOptions) -> tuple[Config, Checkpoint | None]:
    """The checkpoint to start from, and the configuration with the time of its chat templates' clocks.

    That time is the resumed run's, else rank 0's current time. Collective over the job.
    """
    start = agree_on_start(place, config, **how)
    if start is not None:
        config = with_times_of(config, start.config)
    is_first = place.coordinate.global_rank == 0
    now = place.share_in_job((utc_now() if lacks_time(config) else "").encode() if is_first else None).decode()
    return with_times(config, now) if now else config, start


def require_same_models(place: Place, models: Sequence[Path]) -> None:
    """ValueError on every rank when a node's cache has another commit of a model than rank 0's. Collective.

    A branch of the Hub may have moved between the downloads of two nodes.
    """
    mine = [model_name(model) for model in models]
    first = json.loads(place.share_in_job(json.dumps(mine).encode()))
    apart = [f"{here} where rank 0 has {there}" for here, there in zip(mine, first) if here != there]
    found = f"rank {place.coordinate.global_rank} has {', '.join(apart)}: name the commit, as in NAME@COMMIT"
    if problem := place.first_message(found if apart else None):
        raise ValueError(problem)


def _judge(
    config: Config,
    place: Place,
    kind: Callable[..., RolloutJudge],
    codec: TextCodec,
    rows: Iterable[str],
    tried: Sequence[PromptRow],
    console: Console,
    stack: ExitStack,
) -> RolloutJudge:
    """The cell's judge of rollouts. Collective over the job.

    ValueError for data rows without a field that a grader asks for, and for a reward that gives none for the rows
    `tried`. Rank 0 tries it, but never calls a server.
    """
    judge = stack.enter_context(judge_of(config.reward))
    judge.require_fields(rows)
    for line in judge.how_called:
        console.say(line)
    agent, refusal = config.agents[place.agent].name, None
    if place.coordinate.global_rank == 0 and not servers_of(config.reward):
        trial = try_reward(config.reward, judge, tried, agent)
        refusal = trial.refusal
        for line in () if refusal else trial.warnings:
            console.say(line)
    if problem := place.first_message(refusal):
        raise ValueError(problem)
    beside = config.reward.while_sampling
    options = {"while_sampling": beside, "is_leader": place.is_leader, "agent": agent}
    return stack.enter_context(kind(judge, **options, opened=codec.opened_thinking))


def _examiners(config: Config, agent: Agent, metrics: Metrics, phase: Phases) -> Iterator[Observer]:
    """Observers of weights and gradients that the configuration asks for."""
    names = [agent.name for agent in config.agents]
    yield Verification(config.training.verify_weights_every, agent, phase)
    if config.algorithm.shares_answers and len(names) > 1 and config.training.diagnose_every:
        yield Diagnosis(config.training.diagnose_every, agent, metrics, phase, names)


def _onlookers(config: Config, trackers: Trackers) -> Iterator[Observer]:
    """Observers of a step's answers for the user's own metrics and trackers."""
    if config.logging.metrics:
        yield OwnMetrics(config.logging.metrics)
    if trackers:
        yield TrackedAnswers(trackers, config.logging.tracked_prompts, [agent.name for agent in config.agents])


def _rates(config: Config, place: Place, agent: Agent | RolloutWorker) -> Iterator[Observer]:
    """Observer of GPU utilisation, if all GPUs are of one known kind. Collective over the job."""
    if place.device.type != "cuda":
        return
    peak = peak_flops(place.device, agent.dtype)
    peaks = {payload.decode() for payload in place.gather_job(str(peak).encode())}
    if peak is not None and len(peaks) == 1:
        shares = config.training.share_prompts
        yield Rates(config.agents[place.agent], place, peak, num_gpus(place), share_prompts=shares)


def _skips(config: Config, agent: Agent) -> SkippedUpdates:
    return SkippedUpdates(
        config.training.max_skipped_updates,
        config.run_dir / "logs",
        agent.name,
        agent.place.coordinate.cell if agent.place.is_leader else None,
        agent.codec.decode_answer,
        agent.place.gather_agent,
    )
