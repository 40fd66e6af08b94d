"""Parts of a start, before step 1: the job joined, prompts read, the judge tried, agents loaded, observers made.

`Trainer` puts them together. All errors that a user may have to fix are raised before an older run is moved aside.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from hacpo_mega.agent.agent import Agent
from hacpo_mega.agent.rollout_client import RolloutClient, require_fit
from hacpo_mega.agent.sampler import Sampler
from hacpo_mega.checkpoint.files import Checkpoint, StartOptions, folder_of, plain
from hacpo_mega.cluster.machine.environment import is_first_of_its_node
from hacpo_mega.cluster.place import Place
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.config.changes import changes
from hacpo_mega.config.checks.notes import default_success_note, narrow_clip_note
from hacpo_mega.config.checks.tokenizer_checks import lacks_time, steadiness_notes, with_times, with_times_of
from hacpo_mega.config.user_code import require_named_functions, unfinished_import
from hacpo_mega.conversations.player import environment_of
from hacpo_mega.data.prompt_sets import held_out_prompts, left_out_line, training_sampler
from hacpo_mega.data.prompts import PromptSampler
from hacpo_mega.grading.reward_trial import MOST_ROWS, servers_of, try_reward
from hacpo_mega.grading.run_judge import environment_judgement, judge_of
from hacpo_mega.jobs.attempts import record_termination
from hacpo_mega.logbook.console import Console
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.files.trackers import Trackers
from hacpo_mega.logbook.run.provenance import threads_warning
from hacpo_mega.logbook.run.run_inputs import Inputs, input_changes, run_contents
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.logbook.steps.start_parts import StartParts
from hacpo_mega.models.files.chat_template import utc_now
from hacpo_mega.models.files.weight_files import some
from hacpo_mega.records import Prompt
from hacpo_mega.samples.tokenizers import TextCodec, agent_codecs, longest_encodings
from hacpo_mega.trainer.joint_checkpoint import agree_on_start
from hacpo_mega.trainer.observers import (
    GradientDiagnosis,
    Observer,
    Rates,
    TrackedAnswers,
    UserMetrics,
    WeightVerification,
    num_gpus,
    peak_flops,
)
from hacpo_mega.trainer.phases import Phases
from hacpo_mega.trainer.rollout_judge import RolloutJudge

MAX_SHOWN = 3  # differences between two nodes


@dataclass(frozen=True)
class JoinedJob:
    """The job as this rank has joined it, before a model is loaded.

    config   the user's, with the time at which the clocks of chat templates stand
    lock     the run's, on rank 0; None elsewhere
    start    the checkpoint that the run goes on from; None for a new run
    """

    config: Config
    place: Place
    lock: RunLock | None
    start: Checkpoint | None
    console: Console

    @property
    def steps_done(self) -> int:
        """Steps of the run that are behind it."""
        return 0 if self.start is None else self.start.step

    @property
    def goes_on(self) -> bool:
        """True if the start is a checkpoint of this run itself."""
        return self.start is not None and self.start.folder == folder_of(self.config.run_dir, self.start.step)


def join_job(config: Config, options: StartOptions, parts: StartParts, stack: ExitStack) -> JoinedJob:
    """Joins the job, and agrees with its ranks on where the run starts. Collective over the job.

    An error inside `stack` ends the job with the name of this rank and its phase.
    """
    place = stack.enter_context(Place.join(RankMap.of(config), config.wait_s, config.stall_s))
    parts.joined(place.spans)
    is_first = place.coordinate.global_rank == 0
    lock = None
    if is_first:  # a killed run, too, records its end and releases the lock
        lock = stack.enter_context(RunLock(config.run_dir))
        place.watchdog.on_termination = partial(record_termination, config.run_dir)
        place.at_end(lock.leave)
    start = agree_on_start(place, config, **options)
    if start is not None:
        config = with_times_of(config, start.config)
    # The time of chat templates' clocks is the resumed run's, else rank 0's current time.
    now = place.share_in_job((utc_now() if lacks_time(config) else "").encode() if is_first else None).decode()
    config = with_times(config, now) if now else config
    require_same_inputs(place, plain(config), run_contents(config) if is_first_of_its_node() else None)
    names, steps_done = tuple(agent.name for agent in config.agents), 0 if start is None else start.step
    console = stack.enter_context(Console(config.num_steps, steps_done, names=names, quiet=not is_first))
    place.watchdog.before_end = console.clear
    _say_begin(console, config, start, is_first=is_first, on_cpu=place.device.type == "cpu")
    if problem := place.first_message(unfinished_import(config) if is_first else None):
        raise ValueError(problem)
    require_named_functions(config)  # the user's own code, once rank 0 has seen that its import ends
    return JoinedJob(config, place, lock, start, console)


@dataclass(frozen=True)
class RunData:
    """Prompts that every agent can read, and the agents' codecs.

    prompts, num_dropped           for training, and the number left out as too long
    held_out, num_not_held_out     for evaluation, likewise
    """

    prompts: PromptSampler
    num_dropped: int
    held_out: tuple[Prompt, ...]
    num_not_held_out: int
    codecs: Sequence[TextCodec]


def read_data(config: Config) -> RunData:
    """Reads the prompts that every agent can read."""
    environment = environment_of(config.conversation, has_roles=bool(config.roles))
    codecs = agent_codecs(config.agents, () if environment is None else environment.tools)
    num_tokens = longest_encodings(config.agents, codecs)
    return RunData(*training_sampler(config, num_tokens), *held_out_prompts(config, num_tokens), codecs)


def load_agent(job: JoinedJob, sampler: Callable[..., Sampler]) -> tuple[Agent | None, RolloutClient]:
    """Agent and rollout side of this rank; one that only generates has no agent. Collective over the job."""
    config, place = job.config, job.place
    spec = config.agents[place.agent]
    if place.trains:
        agent = Agent(spec, place, config, job.start, sampler=sampler)
        return agent, agent.rollout
    step, agents_on_device = job.steps_done, require_fit(spec, place, config)
    return None, RolloutClient(spec, place, config, None, step=step, agents_on_device=agents_on_device, sampler=sampler)


def say_agents(job: JoinedJob, agent: Agent | None, rollout: RolloutClient, data: RunData) -> None:
    """Prints what the ranks have loaded. Collective over the job."""
    place, console = job.place, job.console
    layers = [line.decode() for line in place.gather_to_first(b"" if agent is None else agent.backend_summary.encode())]
    console.say(f"layers: {'; '.join(filter(None, dict.fromkeys(layers)))}")
    for summary in rollout.summaries:
        for line in filter(None, dict.fromkeys(place.gather_to_first(summary.encode()))):
            console.say(line.decode())
    if data.num_dropped:
        console.say(f"{data.num_dropped} prompts dropped: longer than rollout.max_prompt_tokens for some agent")
    if data.num_not_held_out:
        console.say(f"{len(data.held_out)} prompts to evaluate on, {left_out_line(data.num_not_held_out)}")


def _say_begin(console: Console, config: Config, start: Checkpoint | None, *, is_first: bool, on_cpu: bool) -> None:
    """Prints the first lines of a start, before models are loaded, which takes minutes for large ones."""
    agents = ", ".join(agent.name for agent in config.agents)
    ranks, first = RankMap.of(config).world_size, 1 if start is None else start.step + 1
    steps = f"steps {first} to {config.num_steps}" if first <= config.num_steps else "no step left but the export"
    console.say(f"{config.algorithm.method} of {agents} on {ranks} ranks, {steps}, in {config.run_dir}")
    for line in default_success_note(config) if config.algorithm.success_readers else ():
        console.say(line)
    for line in (*narrow_clip_note(config), *(line for agent in config.agents for line in steadiness_notes(agent))):
        console.say(line)
    if start is not None:
        console.say(f"goes on after step {start.step}, from {start.folder}")
        for change in [*changes(start.config, plain(config)), *(input_changes(start, config) if is_first else ())]:
            console.say(f"changed since: {change}")
        for change in threads_warning(start.folder.parents[1]) if is_first and on_cpu else ():
            console.say(f"changed since: {change}")


def require_same_inputs(place: Place, config: dict[str, Any], contents: Inputs | None) -> None:
    """ValueError on every rank if one has another configuration, or files of other contents, than rank 0.

    Nothing later would notice: answers are matched by a prompt's number, and an optimizer spreads its share of the
    weights to all cells. A branch of the Hub, for one, may move between the downloads of two nodes. `contents` are the
    digests of the node's files, on its first rank; None on the others. Collective over the job.
    """
    own_config = json.loads(json.dumps(config))  # as rank 0's arrives
    first_config, first_contents = json.loads(place.share_in_job(json.dumps([config, contents]).encode()))
    differences = [f"{one.key} = {one.now} where rank 0 has {one.before}" for one in changes(first_config, own_config)]
    for key, digests in {} if contents is None else contents.items():
        other = [name for name, digest in digests.items() if first_contents.get(key, {}).get(name) != digest]
        differences += [f"other contents of {key} ({some(other)}) than rank 0"] if other else []
    remedy = "give all nodes the same keys and files, and models by their commit (NAME@COMMIT)"
    text = f"rank {place.coordinate.global_rank} has {'; '.join(differences[:MAX_SHOWN])}: {remedy}"
    if problem := place.first_message(text if differences else None):
        raise ValueError(problem)


def load_judge(job: JoinedJob, factory: Callable[..., RolloutJudge], data: RunData, stack: ExitStack) -> RolloutJudge:
    """The cell's judge of rollouts. Collective over the job.

    ValueError for data rows without a field that a grader asks for, and for a reward that fails on the first prompts.
    Rank 0 alone tries it, and not a reward that would call a server.
    """
    place, reward = job.place, job.config.reward
    judge = stack.enter_context(judge_of(reward))
    judge.require_fields(prompt.row for prompt in chain(*data.prompts.rows_by_skill, data.held_out))
    for line in judge.how_called:
        job.console.say(line)
    agent, refusal = job.config.agents[place.agent].name, None
    if place.coordinate.global_rank == 0 and not servers_of(reward):
        trial = try_reward(reward, judge, data.prompts.rows_by_skill[0][:MOST_ROWS], agent)
        refusal = trial.refusal
        for line in () if refusal else trial.warnings:
            job.console.say(line)
    if problem := place.first_message(refusal):
        raise ValueError(problem)
    environment = environment_of(job.config.conversation, has_roles=bool(job.config.roles))
    rollout_judge = factory(
        judge,
        while_sampling=reward.while_sampling,
        is_leader=place.is_leader,
        agent=agent,
        opened_thinking=data.codecs[place.agent].opened_thinking,
        judge_reward=partial(environment_judgement, reward),
        last_error=lambda: "" if environment is None else environment.last_error,
    )
    return stack.enter_context(rollout_judge)


def config_observers(
    config: Config, agent: Agent | None, rollout: RolloutClient, metrics: Metrics, phase: Phases, trackers: Trackers
) -> Iterator[Observer]:
    """Observers of weights, gradients and answers that the configuration asks for."""
    names = [agent.name for agent in config.agents]
    yield WeightVerification(config.training.verify_weights_every, rollout, phase)
    if agent is not None and config.diagnoses:
        yield GradientDiagnosis(config.training.diagnose_every, agent, metrics, phase, names)
    if config.logging.metrics:
        yield UserMetrics(config.logging.metrics)
    if trackers:
        yield TrackedAnswers(trackers, config.logging.tracked_prompts, names)


def rate_observers(config: Config, agent: Agent | None, rollout: RolloutClient) -> Iterator[Observer]:
    """Observer of rates per GPU, if all GPUs are of one known type. Collective over the job."""
    place = rollout.place
    if place.device.type != "cuda":
        return
    peak = peak_flops(place.device, rollout.dtype)
    peaks = {payload.decode() for payload in place.gather_job(str(peak).encode())}
    if peak is not None and len(peaks) == 1:
        shares = agent is not None and agent.actor.shares_prompts
        yield Rates(config.agents[place.agent], place, peak, num_gpus(place), share_prompts=shares)
