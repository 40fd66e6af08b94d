"""The configuration of a run as a whole, and its tables of data, reward, rollouts, batches and evaluation.

`algorithm.py` and `agents.py` have the tables of those names, `load.py` reads the file, `checks.py` and
`input_checks.py` check across tables. Nothing in this package imports torch or a model library, or acts on a
configuration. Functions elsewhere get the numbers they need, not this object.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from hacpo_grading.graders.registry import GRADERS, gives_parts
from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.algorithm import AlgorithmConfig
from hacpo_mega.config.tables.choices import TRACKERS, Skill
from hacpo_mega.config.tables.methods import METHODS
from hacpo_mega.config.tables.section import (
    Count,
    CountOrZero,
    FilePath,
    Flag,
    FlagOrAuto,
    OwnFunction,
    Positive,
    Seconds,
    Section,
    one_of,
)
from hacpo_mega.config.tables.slurm import SlurmConfig
from hacpo_mega.models.files.documents import short

RewardEnd = Annotated[float, Field(strict=True)]
RewardRange = tuple[RewardEnd, RewardEnd]


def _success(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str) and not (is_number and 0.0 < value <= 1.0):
        nearest = 0.5 if is_number and value <= 0.0 else 1.0
        needs = "needs the name of a part, or a number above 0, at most 1"
        raise ValueError(f"{needs}, found {short(value)}. Nearest: {nearest}")
    return float(value) if is_number else value


Success = Annotated[str | float, BeforeValidator(_success)]
Option = Annotated[bool | int | float | str, one_of("true or false, a number or a text")]
PartName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,30}$")]


class DataConfig(Section):
    """Source of prompts: files (JSON Lines or Parquet) or a seeded generator of worked arithmetic."""

    files: tuple[FilePath, ...] = ()
    """Training prompts: files in JSON Lines or Parquet, or folders that `datasets` has saved (one split), each once,
    relative to the current folder; or hub:ORG/NAME@REVISION/CONFIG/SPLIT of the Hugging Face Hub."""
    generator: Literal["arithmetic"] | None = None
    """Built-in task instead of files: worked arithmetic, one in five prompts held out for evaluation."""
    skills: Annotated[tuple[Skill, ...], Field(min_length=1)] = ("add", "sub", "mul", "srt")
    """Skills of the generator, each once; every step has the same number of prompts of each."""
    prompt_field: str = "prompt"
    """Field of a row that holds the task's text, in data.files and evaluation.files."""
    gold_field: str = "answer"
    """Field of a row that holds the gold answer, in data.files and evaluation.files."""
    repeated: Literal["refuse", "keep_first"] = "refuse"
    """Treatment of rows that repeat prompt and gold of an earlier row of data.files, or of evaluation.files: refuse
    them, or keep the first. The same prompt with another gold, and a prompt in both sets, is always refused."""
    tools_field: str | None = None
    """Field of a row that holds the JSON schemas of tools for the agents' chat templates; nothing calls a tool."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.files) == bool(self.generator):
            raise ValueError("give data.files or data.generator, exactly one of them")
        return self


class RewardPartConfig(Section):
    """One reward: its grader, and the range of its values."""

    kind: str = "math"
    """The grader: math (last boxed answer), math_any (an answer anywhere), another built-in one
    (docs/guide/data-and-rewards.md), or a function of yours as module:function or file.py:function."""
    options: dict[str, Option] = Field(default_factory=dict)
    """Options of the grader, such as {rel_tol = 0.01} of number; docs/guide/data-and-rewards.md lists them."""
    range: RewardRange = (0.0, 1.0)
    """Lowest and highest reward that the grader returns; they are mapped linearly to 0 and 1."""

    @property
    def may_be_graded(self) -> bool:
        """True if a reward may lie between 0 and 1, so that its mean need not be an accuracy."""
        return gives_parts(self.kind, self.options) or self.range != (0.0, 1.0)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range needs its lower end first, found {list(self.range)}")
        return self


class WeightedPartConfig(RewardPartConfig):
    """One of several rewards, and its weight in their mean."""

    weight: Positive = 1.0
    """Weight in the reward, which is the weighted mean of all parts; the parts are logged by name."""


class RewardConfig(RewardPartConfig):
    """The judge of answers, and the most that one judgement may cost."""

    parts: dict[PartName, WeightedPartConfig] = Field(default_factory=dict)
    """Several named rewards, [reward.parts.NAME] each, instead of kind, options and range."""
    success: Success | None = None
    """Definition of a success, for pass@k, maj@k, sgt and capability_metric = "positive_rate": full reward in the part
    of this name, or a reward of at least this number; not given: the full reward, 1."""
    timeout_s: Annotated[float, Field(strict=True, ge=0.01, le=3600.0)] = 5.0
    """CPU seconds of one judgement. An answer that exceeds them is graded wrong, unless its gold does too. A grader of
    yours may sleep twice as long over an answer."""
    start_timeout_s: Annotated[float, Field(strict=True, ge=1.0, le=86400.0)] = 120.0
    """Seconds for a grader of yours to load: its file is imported and, for a class, an instance made."""
    num_workers: Count = 1
    """Grading processes of each cell."""
    require_stop: Flag = False
    """Count an answer that was cut at max_answer_tokens as no answer."""
    while_sampling: Flag = False
    """Judge an answer as soon as it has ended, while the engine still generates others, for the same judgements. Only
    graders in processes of their own do (program, math, math_any, model, and yours without the parameter `group`)."""
    max_unjudged_share: Annotated[float, Field(strict=True, ge=0.0, le=1.0)] = 0.5
    """Largest share of a cell's answers that may stay unjudged; above it in 3 steps in a row the run stops."""

    @model_validator(mode="after")
    def _parts_or_one(self) -> Self:
        alone = RewardPartConfig()
        if self.parts and (self.kind, self.options, self.range) != (alone.kind, alone.options, alone.range):
            raise ValueError("reward.parts takes the place of reward.kind, options and range: give these to a part")
        return self

    @field_validator("success")
    @classmethod
    def _names_a_part(cls, success: str | float | None, info: ValidationInfo) -> str | float | None:
        parts = info.data.get("parts")  # absent where they are wrong themselves
        if isinstance(success, str) and parts is not None and success not in parts:
            near = (*difflib.get_close_matches(success[:80], parts, n=1), *parts, 1.0)[0]
            known = f"there are: {', '.join(parts)}" if parts else "there is none, so give a number above 0, at most 1"
            raise ValueError(f"{short(success)} is no part of the reward; {known}. Nearest: {near!r}")
        return success

    @property
    def may_be_graded(self) -> bool:
        """True if a reward may lie between 0 and 1, so that its mean need not be an accuracy."""
        if len(self.parts) > 1:
            return True
        return any(part.may_be_graded for part in self.parts.values()) if self.parts else super().may_be_graded

    @property
    def has_workers(self) -> bool:
        """True if a grader runs in processes of its own, with limits of time."""
        return any(grader.kind not in GRADERS or not GRADERS[grader.kind].is_linear for grader in self.graders.values())

    @property
    def graders(self) -> Mapping[str, RewardPartConfig]:
        """Every grader by the key of its table: "reward", or "reward.parts.NAME"."""
        return {f"reward.parts.{name}": part for name, part in self.parts.items()} or {"reward": self}


class RolloutConfig(Section):
    """Sampling of answers: by every agent, several to every prompt."""

    rollouts_per_prompt: Count = 8
    """Answers of each agent to each prompt (G of the paper); the method gspo_x2 takes twice as many."""
    temperature: Annotated[float, Field(strict=True, ge=0.01, le=2.0)] = 1.0
    """Sampling temperature, which log-probs use too: divides the logits. vLLM takes 0.01 to 2."""
    max_prompt_tokens: Count = 1024
    """Longest prompt in tokens, template included. A prompt that is longer for any agent is left out, not cut."""
    max_answer_tokens: Count = 4096
    """Longest answer in training, in tokens; longer ones are cut."""
    one_step_off: Flag = False
    """Generate the next step's answers, with the weights from before this step's update, while this step's are judged,
    exchanged and learnt. Their ratio is to the policy that wrote them. Needs engine_tp = 1 unless engines are apart."""
    train_changed_reencodings: bool = False
    """Train on another agent's answer even if it reads differently in the learner's tokens. Its verdict was on the
    original text, so by default it is left out and counted."""
    engine_correction: Literal["none", "token", "sequence", "ratio"] = "none"
    """Truncated importance sampling between engine and trainer: none, a weight on each `token` of own answers, or on
    the advantage of each `sequence` for all learners. `ratio` scores nothing: ratios are to the engine's log-probs."""
    engine_correction_cap: Annotated[float, Field(strict=True, ge=1.0, le=1e12)] = 2.0
    """Upper bound of that weight: the trainer's probability over the engine's."""


class ConversationConfig(Section):
    """Environment that answers the agents, turn by turn; without one a task is one prompt and one answer."""

    environment: str | None = None
    """Class that plays the other side, as FILE.py:CLASS or module:CLASS, or a built-in one: calculator, repair,
    number_game, relay (docs/guide/environments.md). Not given: no conversation."""
    max_turns: Count = 8
    """Most turns of an agent in a conversation; each has at most rollout.max_answer_tokens tokens."""
    max_total_tokens: Count | None = None
    """Most tokens of a conversation after its prompt, those of the environment included; not given: max_turns times
    rollout.max_answer_tokens."""
    history: Literal["as_sampled", "as_rendered"] = "as_sampled"
    """Earlier turns that a template or a program writes anew: "as_sampled" goes on from the sampled tokens, and trains
    one history of a program; "as_rendered" begins a segment there, and trains all segments."""
    turn_timeout_s: Annotated[float, Field(strict=True, ge=0.01, le=86400.0)] = 60.0
    """Seconds that the environment may take over one turn. A slower one fails its conversation. An agent program may
    take as long between two turns."""

    @property
    def as_rendered(self) -> bool:
        return self.history == "as_rendered"

    def longest(self, max_answer_tokens: int) -> int:
        """Tokens of the longest answer or conversation, where one answer or turn has at most so many."""
        if self.environment is None:
            return max_answer_tokens
        return self.max_total_tokens or self.max_turns * max_answer_tokens


class RoleConfig(Section):
    """A role in every conversation, in the order in which they speak."""

    name: PartName
    """Name of the role, for the environment's messages and rewards and in logs."""
    agent: str
    """Name of the agent that plays it; every agent plays one role."""


class TrainingConfig(Section):
    """Batch arithmetic: sizes of a step, an optimizer update and a micro-batch."""

    prompts_per_step: Count = 128
    """Prompts of one step, over all lanes; a multiple of prompts_per_update."""
    prompts_per_update: Count = 64
    """Prompts whose answers train one optimizer update, over all lanes; a multiple of lanes x cells_per_lane. The
    method gspo_x2 takes half as many."""
    max_tokens_per_microbatch: Count = 8192
    """Tokens of a process's micro-batch; a multiple of every tp x cp."""
    share_prompts: Flag = True
    """Compute a prompt once for all its answers in a micro-batch, instead of once for each; changes results by
    rounding. Has no effect with cp or TransformerEngine's layers."""
    score_in_first_update: FlagOrAuto = "auto"
    """Take log-probs of own answers in a step's first update from that update, instead of a pass before it; results are
    the same to the last bit. auto: unless something needs them earlier (shared answers, engine_correction)."""
    max_skipped_updates: Count = 5
    """Updates of an agent that may be skipped in a row, for a loss or gradient that is not finite. Then the run stops
    with the samples of these updates in logs/."""
    verify_weights_every: CountOrZero = 0
    """Steps between comparisons of every engine's weights with its trainer's; one costs about a publish phase. 0: only
    before the first step of every start, which always has one."""
    diagnose_every: CountOrZero = 0
    """Steps between measurements of own against cross gradients; one costs about a learn phase and changes no weight.
    0: never; there is none if no answers are shared."""


class EvaluationConfig(Section):
    """Greedy answers to prompts that are not trained: before, during and after training."""

    every_steps: CountOrZero = 0
    """Steps from one evaluation to the next; 0: only before and after training."""
    files: tuple[FilePath, ...] = ()
    """Files of evaluation prompts; not given: the generator's held-out prompts, and none with data.files."""
    num_prompts: Count = 600
    """Most prompts of an evaluation: the first of the files, or equally many of each skill, rounded down."""
    max_answer_tokens: Count | None = None
    """Longest answer in an evaluation, in tokens; not given: rollout.max_answer_tokens."""


class CheckpointConfig(Section):
    """Checkpoints: when the run is stored to resume from, and the number of steps that are kept."""

    every_steps: CountOrZero = 10
    """Steps between checkpoints; the last step has one, too. Set this and every_minutes to 0 to disable checkpoints."""
    every_minutes: Annotated[float, Field(strict=True, ge=0.0, le=525_600.0)] = 30.0
    """Minutes after which the next step ends with a checkpoint, whatever its number; 0: never."""
    asynchronous: Flag = True
    """Continue training while a checkpoint is written from a copy in host memory (about 12 bytes a parameter, over the
    ranks of an agent). It counts from the end of the step in which all ranks have written."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep; the second newest is there in case the newest is damaged."""
    keep_every: CountOrZero = 0
    """Keep the checkpoints of steps that are multiples of this number; 0: no such step."""
    keep_best: Flag = False
    """Keep the checkpoint with the highest held-out mean reward over all agents as well, the newest of equals. Only
    steps that end with an evaluation of the newest prompts count."""
    wait_for_room_s: Seconds = 600.0
    """Seconds that the last checkpoint and the export wait for room on a full disk before the run ends without them."""

    @property
    def is_on(self) -> bool:
        """True if the run is ever stored."""
        return bool(self.every_steps or self.every_minutes)


def _tracker(name: str) -> str:
    if name not in TRACKERS and ":" not in name:
        raise ValueError(f"must be one of {', '.join(TRACKERS)}, or FILE.py:CLASS of your own, found {name!r}")
    return name


class LoggingConfig(Section):
    """Destinations of a run's numbers beside its own folder, and the steps that are traced; changes no result."""

    metrics: tuple[OwnFunction, ...] = ()
    """Metrics of your own: FILE.py:function or module:function, called for every answer of a step with the arguments
    that its parameters name. The mean is logged as agent/NAME/own/FUNCTION (docs/guide/monitoring.md)."""
    trackers: tuple[Annotated[str, AfterValidator(_tracker)], ...] = ()
    """Experiment trackers that also get every number, tables of answers and histograms: installed packages, or a class
    of your own as FILE.py:CLASS or module:CLASS (docs/guide/monitoring.md)."""
    tracked_prompts: CountOrZero = 1
    """Prompts per step whose answers, by all agents, trackers get as a table; 0: none."""
    project: str = Field(default="hacpo_mega", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Project of the run in trackers: letters, digits, - and _."""
    trace: Flag = False
    """Write a Chrome trace of the trace_steps, one track per rank, to trace/ of the run folder."""
    trace_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (2,)
    """Steps that `trace` records, each once. The first also warms up; a run of one step records that."""
    rollout_tokens: Flag = False
    """Log every answer's tokens, their ids, log-probs and own ratios: rollouts/ is then several times larger."""
    report: Annotated[Literal["end", "never"] | Count, one_of("'end', 'never' or a number of steps from 1 on")] = "end"
    """When report.html is written: at the end of the run, never, or after so many steps each time and at the end."""


class Mode(NamedTuple):
    """Where and when actors and engines work, derived once from a configuration (`Config.mode`).

    is_apart             engines have devices of their own
    takes_turns          agents take turns on the same devices
    one_step_off         the engine answers the next step while the actor learns
    engine_stays_awake   the engine keeps its device memory while the actor learns
    """

    placement: str
    is_apart: bool
    takes_turns: bool
    one_step_off: bool
    engine_stays_awake: bool


class Config(Section):
    """A whole run. Load it with `load_config`; nobody writes to it afterwards."""

    run_dir: FilePath
    """Folder that the run alone writes: new, empty, or a run's. That run resumes from its last checkpoint; without a
    checkpoint its folder is renamed to run_dir.1, run_dir.2, ..."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 1
    """Seed of the order of prompts and of every sampled answer, below 2^32; it repeats a run on one machine."""
    num_steps: Count
    """Steps of the run; each answers, judges, exchanges and trains on prompts_per_step prompts."""
    lanes: Count = 1
    """Data-parallel columns that all agents share; each takes its part of every update, so their number changes results
    by rounding only. Work is evened over the cells of a lane, not over lanes."""
    placement: Literal["split", "shared", "apart"] = "split"
    """Each agent on its own devices (split), all in turn on those of one node, offloaded to host memory in between
    (shared), or engines on further devices, rollout_gpus a cell (apart). Same bits in each."""
    device_memory_gib: Annotated[float, Field(strict=True, gt=0.0, le=65536.0)] | None = None
    """Memory of one CUDA device in GiB, which every phase of every agent must fit; not given: 79, for an 80 GB device,
    or no limit with the CPU build of vLLM."""
    stall_s: Annotated[float, Field(strict=True, ge=10.0, le=604_800.0)] = 600.0
    """Heartbeat timeout in seconds. The job names a process that gives no sign of life for so long, writes all stacks
    to logs/ and ends. Long phases give signs of life."""
    wait_s: Annotated[float, Field(strict=True, ge=10.0, le=604_800.0)] = 1800.0
    """Timeout in seconds of waits for other processes, at the start and in each later exchange, before the job ends.
    Must exceed the fastest agent's lead over the slowest in a step; if placement is "shared", others' longest turn."""
    agents: tuple[AgentConfig, ...] = Field(min_length=1)
    """The agents that teach each other, one [[agents]] table each."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Method: how agents learn from their own and from each other's answers."""
    data: DataConfig
    """Source of prompts."""
    reward: RewardConfig = RewardConfig()
    """Judges of answers."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of answers."""
    conversation: ConversationConfig = ConversationConfig()
    """Environment that answers the agents."""
    roles: tuple[RoleConfig, ...] = ()
    """Roles of the conversations where the agents play one conversation together, one [[roles]] table each; without
    them every agent plays its own."""
    training: TrainingConfig = TrainingConfig()
    """Numbers of prompts and tokens that are trained at once."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Prompts and times of evaluations."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, to resume from."""
    logging: LoggingConfig = LoggingConfig()
    """Trackers and traces."""
    slurm: SlurmConfig = SlurmConfig()
    """Resources asked of a Slurm cluster; only cpus_per_rank on the CPU changes results, by rounding."""

    @model_validator(mode="before")
    @classmethod
    def _engines_that_answer_ahead_are_single(cls, given: Any) -> Any:
        """Fills engine_tp = 1 beside one_step_off: larger engines would be refused (checks.py)."""
        if not isinstance(given, dict):
            return given
        rollout, agents = given.get("rollout"), given.get("agents")
        is_ahead = isinstance(rollout, dict) and rollout.get("one_step_off") is True
        if not is_ahead or given.get("placement", "split") != "split" or not isinstance(agents, list | tuple):
            return given
        is_wide = [isinstance(a, dict) and any(a.get(key, 1) != 1 for key in ("tp", "cp", "pp")) for a in agents]
        filled = ({"engine_tp": 1, **agent} if wide else agent for agent, wide in zip(agents, is_wide))
        return {**given, "agents": tuple(filled)}

    @property
    def mode(self) -> Mode:
        """Placement and timing of actors and engines, as booleans."""
        is_apart, ahead = self.placement == "apart", self.rollout.one_step_off
        return Mode(self.placement, is_apart, self.placement == "shared", ahead, is_apart or ahead)

    @property
    def traced_steps(self) -> tuple[int, ...]:
        """The steps to be traced; none without logging.trace. A run of one step has no second."""
        chosen = self.logging.trace_steps
        is_default = chosen == type(self.logging).model_fields["trace_steps"].default
        return ((1,) if is_default and self.num_steps == 1 else chosen) if self.logging.trace else ()

    @property
    def colocated(self) -> Self:
        """The configuration with every engine on the devices that train, to compare both placements in one process."""
        if not self.mode.is_apart:
            return self
        agents = (agent.model_copy(update={"rollout_gpus": None, "engine_tp": None}) for agent in self.agents)
        return self.model_copy(update={"placement": "split", "agents": tuple(agents)})

    @property
    def answers_per_prompt(self) -> int:
        """Answers of each agent to each prompt (G): rollout.rollouts_per_prompt, times the method's factor."""
        return self.rollout.rollouts_per_prompt * METHODS[self.algorithm.method].answers

    @property
    def answers_compared(self) -> int:
        """Answers to a prompt that an own answer's reward is measured against, itself included."""
        algorithm = self.algorithm
        is_alone = not algorithm.shares_answers or algorithm.method == "sgt"
        is_alone |= algorithm.method == "f_tis" and algorithm.answer_group == "author"
        return self.answers_per_prompt * (1 if is_alone else len(self.agents))

    @property
    def prompts_per_update(self) -> int:
        """Prompts of an optimizer update, over all lanes: training.prompts_per_update, by the method's factor."""
        return self.training.prompts_per_update // METHODS[self.algorithm.method].updates

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of each agent in a step."""
        return self.training.prompts_per_step // self.prompts_per_update

    @property
    def scores_in_first_update(self) -> bool:
        """training.score_in_first_update, with "auto" decided."""
        setting = self.training.score_in_first_update
        return not self.why_scored_before if setting == "auto" else setting

    @property
    def diagnoses(self) -> bool:
        """True if own gradients are compared with others' now and then."""
        shares = self.algorithm.shares_answers and len(self.agents) > 1
        return shares and self.training.diagnose_every > 0

    @property
    def engine_scores(self) -> bool:
        """True if old log-probs are those that the engine returned, so that nothing is scored."""
        return self.mode.one_step_off or self.rollout.engine_correction == "ratio"

    @property
    def why_scored_before(self) -> tuple[str, ...]:
        """Reasons why own answers must be scored before an update, each as the end of a complaint about the key."""
        reasons = []
        if self.algorithm.shares_answers and len(self.agents) > 1:
            reasons.append(
                f"the {len(self.agents)} agents need each other's scores before they learn by {self.algorithm.method!r}"
            )
        if self.rollout.engine_correction != "none":
            correction = self.rollout.engine_correction
            needs = "takes the engine's log-probs" if correction == "ratio" else "needs the scores before an update"
            reasons.append(f"rollout.engine_correction = {correction!r} {needs}")
        if self.mode.one_step_off:
            reasons.append(
                "with rollout.one_step_off the first update learns from another policy than wrote the answers, and "
                "none is scored"
            )
        return tuple(reasons)

    @property
    def longest_rollout(self) -> int:
        """Tokens of the longest answer or conversation that is trained, its prompt not counted."""
        return self.conversation.longest(self.rollout.max_answer_tokens)

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer or conversation that training or evaluation may ask for."""
        return max(self.longest_rollout, self.evaluation.max_answer_tokens or 0)
