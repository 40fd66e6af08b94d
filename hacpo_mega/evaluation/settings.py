"""Settings of an evaluation: those of a run's own folder, overridden by those of the user (keys.py).

Elsewhere: benchmarks and their files (benchmarks.py).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacpo_mega.checkpoint.stored_agent import StoredAgent, stored_agent_at
from hacpo_mega.config import AgentConfig, Config, Prompting, RewardConfig, config_of_run
from hacpo_mega.config.tables.schema import ConversationConfig, DataConfig, RewardPartConfig
from hacpo_mega.config.user_code import (
    code_of_engine,
    code_of_environment,
    code_of_model,
    code_of_reward,
    environment_problem,
    grader_problem,
    option_problem,
    require_trust,
)
from hacpo_mega.data.datasets import LAYOUTS, Layout, layouts_of
from hacpo_mega.evaluation.benchmarks import (
    PAPER_MAX_TOKENS,
    PAPER_SUITE,
    Benchmark,
    describe_benchmark,
    load_benchmarks,
    load_suite,
)
from hacpo_mega.evaluation.keys import EvaluationTable
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.models.families.families import is_tied
from hacpo_mega.models.files.folder import dtype_name
from hacpo_mega.models.files.hub import HubModel
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.models.files.weight_files import require_one_reading, weights_fingerprint

NO_ENVIRONMENT = "none"


@dataclass(frozen=True)
class EvaluationSettings:
    """Everything that can change an answer or its verdict; all of it must be equal for an evaluation to be resumed.

    model       a Hugging Face folder, or RUN/checkpoints/step_N/NAME
    stored      the agent that the second is
    stop_text   where an answer is cut before it is judged: a base model goes on with the next question of a few-shot
                prompt. The tokens behind it were drawn all the same and count as such
    vllm        engine arguments, as in `agents.vllm` of a run
    conversation   environment that plays the other side, and limits of a conversation
    turn_tokens    rollout.max_answer_tokens of the run whose conversations these are: without a max_total_tokens they
                   end where those of its own evaluation do
    """

    model: Path
    benchmarks: tuple[Benchmark, ...]
    prompting: Prompting = field(default_factory=Prompting)
    reward: RewardConfig = field(default_factory=RewardConfig)
    max_prompt_tokens: int = 1024
    max_answer_tokens: int = 4096
    stop_text: str | None = None
    seed: int = 0
    trust_remote_code: bool = False
    vllm: Mapping[str, Any] = field(default_factory=dict)
    conversation: ConversationConfig = field(default_factory=ConversationConfig)
    turn_tokens: int | None = None
    stored: StoredAgent | None = None

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer or conversation, its prompt not counted: a turn may exceed the latter's limit,
        which is that of training."""
        return max(self.conversation.longest(self.turn_tokens or self.max_answer_tokens), self.max_answer_tokens)

    @property
    def _has_other_turns(self) -> bool:
        return self.longest_answer != replace(self, turn_tokens=None).longest_answer

    @property
    def folder(self) -> Path:
        """The Hugging Face folder with the architecture and the tokenizer."""
        return self.model if self.stored is None else self.stored.agent.model

    @property
    def dtype(self) -> str:
        """The type of the weights, such as "bfloat16"."""
        return dtype_name(self.model) if self.stored is None else self.stored.dtype

    @property
    def fingerprint(self) -> str:
        """A hash of the weights."""
        return weights_fingerprint(self.model) if self.stored is None else self.stored.fingerprint

    @property
    def agent(self) -> str:
        """The name of the evaluated agent for graders: its own in a run, else that of its folder or on the Hub."""
        on_hub = HubModel.of_snapshot(self.model)
        return on_hub.repo if on_hub is not None else self.model.resolve().name

    @property
    def voted(self) -> str:
        """The kind of judge that normalises votes: of the part that is the success, else of the first."""
        success = self.reward.success
        return self.reward.parts[success].kind if isinstance(success, str) else self.grader.kind

    @property
    def grader(self) -> RewardPartConfig:
        """The reward's grader, of several the first."""
        return next(iter(self.reward.graders.values()))

    def rewarded(self, num_workers: int = 1, relative: float = 0.0) -> RewardConfig:
        """The reward of an evaluation; a benchmark's tolerance is an option of `math`, unless the user sets it."""
        options = ({"relative": relative} if relative else {}) | self.reward.options
        return self.reward.model_copy(update={"options": options, "num_workers": num_workers})

    def record(self, fingerprint: str) -> dict[str, Any]:
        """The settings as JSON; problems and weights by their hashes."""
        play, reward = self.conversation, self.reward.model_dump(mode="json", include={"parts", "success", "timeout_s"})
        # No score depends on `stored`, nor on `turn_tokens` where it changes no limit.
        left_out = ("stored", "conversation", *([] if self._has_other_turns else ["turn_tokens"]))
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out} | {
            "model": str(self.model),
            "reward": self.grader.kind,
            "reward_options": self.reward.options,
            "reward_range": self.grader.range,
            **{f"reward_{key}": value for key, value in reward.items()},
            "require_stop": self.reward.require_stop,
            "weights": fingerprint,
            "prompting": {key: value for key, value in asdict(self.prompting).items() if key != "time" or value},
            "vllm": dict(self.vllm),
            "benchmarks": [describe_benchmark(benchmark) for benchmark in self.benchmarks],
            **({"conversation": play.model_dump(mode="json")} if play.environment is not None else {}),
        }


def settings_for(
    model: Path,
    benchmarks: Sequence[Benchmark],
    *,
    reward: str | None = None,
    environment: str | None = None,
    trust: bool = False,
) -> EvaluationSettings:
    """The defaults; for RUN/agents/NAME and RUN/checkpoints/step_N/NAME the run's settings, so that an agent is
    evaluated as it was trained.

    reward        the grader that the user names himself
    environment   the environment, likewise; an agent that played one of several roles is asked alone without it
    trust         whether code that the run's configuration names may run: a grader, an environment, Python in the model
                  folder, the engine's

    ValueError when the run's configuration is broken or names code that is not trusted, or the checkpoint cannot be
    used.
    """
    benchmarks = tuple(benchmarks)
    stored = stored_agent_at(model)
    if stored is not None and not trust:
        stored.require_own_model()
    config, agent, file = _of_run(model) if stored is None else (stored.config, stored.agent, stored.file)
    if agent is None:
        return EvaluationSettings(model, benchmarks)
    grader = next(iter(config.reward.graders.values()))
    is_judged_alike = reward is None or (reward == grader.kind and not config.reward.parts)
    conversation = ConversationConfig() if environment is not None or config.roles else config.conversation
    replaceable = (*code_of_reward(config.reward, reward), *code_of_environment(conversation))
    named = (*replaceable, *code_of_model(agent), *code_of_engine(agent))
    alternative = "reward.kind=FILE.py:NAME and environment=FILE.py:NAME name code of yours; " if replaceable else ""
    require_trust(named, file, trusted=trust, instead=alternative)
    limits = {key: getattr(config.reward, key) for key in ("timeout_s", "start_timeout_s", "require_stop")}
    return EvaluationSettings(
        model,
        benchmarks,
        prompting=agent.prompting,
        reward=config.reward if is_judged_alike else RewardConfig(kind=reward, **limits),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_answer_tokens=config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens,
        trust_remote_code=agent.trust_remote_code,
        vllm=agent.vllm,
        conversation=conversation,
        turn_tokens=None if conversation.environment is None else config.rollout.max_answer_tokens,
        stored=stored,
    )


def _of_run(model: Path) -> tuple[Config, AgentConfig, Path] | tuple[None, None, None]:
    """Configuration of the run of which RUN/agents/NAME is an agent, and its file; nothing for another folder."""
    for path in map(Path, (os.path.abspath(model), os.path.realpath(model))):
        if path.parent.name == "agents" and os.path.lexists(path.parent.parent / "config.toml"):
            require_inside(path.parent.parent, model)
    folder = model.resolve()
    run_dir = folder.parent.parent
    file = run_dir / "config.toml"
    if folder.parent.name != "agents" or not file.is_file():
        return None, None, None
    config = config_of_run(run_dir)
    agent = next((agent for agent in config.agents if agent.name == folder.name), None)
    return (None, None, None) if agent is None else (config, agent, file)


def _layouts_for(model: Path | None, prompt_field: str | None, gold_field: str | None) -> Mapping[str, Layout]:
    """Row layouts: the fields that the user names (a missing one is the run's); else, for an agent of a run, the run's
    own if a file has them, else any known layout."""
    stored = None if model is None else stored_agent_at(model)
    config = stored.config if stored is not None else _of_run(model)[0] if model is not None else None
    is_asked = prompt_field is not None or gold_field is not None
    if config is None and not is_asked:
        return LAYOUTS
    data = DataConfig(generator="arithmetic") if config is None else config.data
    fields = prompt_field or data.prompt_field, gold_field or data.gold_field
    return layouts_of(*fields, only=is_asked, tools_field=data.tools_field)


def benchmarks_of(table: EvaluationTable, files: Sequence[Path], model: Path | None = None) -> tuple[Benchmark, ...]:
    """The benchmarks that are asked for: files, or the suite "paper" below `data`.

    Rows are read by the two fields, or as those of the run whose agent `model` is, or in any known layout. A suite says
    itself how many answers a problem gets, and at which temperature. ValueError for both or none.
    """
    fields = table.prompt_field, table.gold_field
    if table.suite is None:
        if not files or table.data is not None:
            raise ValueError("give benchmark files, or suite=paper with data=FOLDER")
        sampled = 1.0 if table.num_answers > 1 else 0.0
        temperature = sampled if table.temperature is None else table.temperature
        return load_benchmarks(files, table.num_answers, temperature, table.limit, _layouts_for(model, *fields))
    if files or table.data is None or table.temperature is not None or table.num_answers != 1 or any(fields):
        raise ValueError("suite=paper takes data=FOLDER, and neither files nor fields, num_answers, temperature")
    return load_suite(PAPER_SUITE, table.data, table.limit)


def ask(
    table: EvaluationTable, model: Path, benchmarks: Sequence[Benchmark], *, trust: bool = False
) -> EvaluationSettings:
    """The settings of the model (`settings_for`), overridden by what the table gives.

    ValueError also for a grader that is not there, or has not the options, as far as can be told without running it.
    """
    settings = settings_for(model, benchmarks, reward=table.reward.kind, environment=table.environment, trust=trust)
    given = {"kind": table.reward.kind, "success": table.reward.success}
    given = {key: value for key, value in given.items() if value is not None}
    given["options"] = settings.reward.options | table.reward.options
    asked = {
        "prompting": worded(table, settings.prompting),
        "stop_text": table.stop_text,
        "reward": settings.reward.model_copy(update=given),
        "max_prompt_tokens": table.max_prompt_tokens,
        "max_answer_tokens": table.max_answer_tokens or (PAPER_MAX_TOKENS if table.suite else None),
        "seed": table.seed,
        "conversation": _conversation(table, settings.conversation),
    }
    settings = replace(settings, **{k: v for k, v in asked.items() if v is not None})
    try:
        RewardConfig(parts=settings.reward.parts, success=settings.reward.success)
    except ValidationError as error:
        raise ValueError(f"reward.success: {error.errors()[0]['ctx']['error']}") from error
    kind, options = settings.grader.kind, settings.reward.options
    if problem := grader_problem(kind, options):
        raise ValueError(f"reward.kind: {problem}")
    if problem := option_problem(kind, options):
        raise ValueError(f"reward.options: {problem}")
    return settings


def _conversation(table: EvaluationTable, of_run: ConversationConfig) -> ConversationConfig:
    """The run's conversation with what the table gives. ValueError for an environment that is not there."""
    names = ("environment", "max_turns", "max_total_tokens")
    given = {name: value for name in names if (value := getattr(table, name)) is not None}
    if table.environment == NO_ENVIRONMENT:
        return ConversationConfig()
    conversation = of_run.model_copy(update=given)
    if conversation.environment is None and given:
        raise ValueError(f"{next(iter(given))}: nothing reads it without environment=FILE.py:CLASS")
    if table.environment is not None and (problem := environment_problem(table.environment)) is not None:
        raise ValueError(f"environment: {problem}")
    return conversation


def worded(table: EvaluationTable, prompting: Prompting) -> Prompting:
    """`prompting` with the wording that the table gives. ValueError for a file that cannot be read."""
    given = {
        "chat_template": table.chat_template,
        "template_kwargs": table.chat_template_kwargs or None,
        "system_prompt": table.system_prompt,
        "prompt_template": _text_of(table.prompt_template),
    }
    if table.chat_template is False:
        prompting = replace(prompting, time=None)
    return replace(prompting, **{key: value for key, value in given.items() if value is not None})


def require_judge(settings: EvaluationSettings) -> None:
    """Starts the judge of an evaluation and ends it. ValueError where it cannot be started, before an engine is."""
    judge_of(settings.rewarded()).close()


def require_weights(settings: EvaluationSettings) -> None:
    """ValueError, a line per problem, for a model whose weights training, vLLM and transformers would read
    differently."""
    if settings.stored is None or settings.stored.agent.lora is not None:
        require_one_reading(settings.folder, tied=is_tied(settings.folder))


def _text_of(prompt_template: str | None) -> str | None:
    if prompt_template is None or not prompt_template.startswith("@"):
        return prompt_template
    try:
        return Path(prompt_template[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"prompt_template={prompt_template}: cannot be read ({error.strerror})") from error
