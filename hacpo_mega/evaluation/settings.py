"""Settings of an evaluation: those of the user, and those of a run's own folder.

Not here: benchmarks and their files (benchmarks.py).
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacpo_mega.checkpoint.stored_agent import StoredAgent, stored_agent_at
from hacpo_mega.config import AgentConfig, Config, Prompting, RewardConfig, config_of_run
from hacpo_mega.config.tables.schema import DataConfig, WeightedPartConfig
from hacpo_mega.config.user_code import (
    code_of_engine,
    code_of_model,
    code_of_reward,
    grader_problem,
    option_problem,
    parse_options,
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
from hacpo_mega.grading.run_judge import judge_of
from hacpo_mega.models.files.documents import parse_toml, short
from hacpo_mega.models.files.folder import dtype_name
from hacpo_mega.models.files.links import require_inside
from hacpo_mega.models.weight_files import require_one_reading, weights_fingerprint


@dataclass(frozen=True)
class EvaluationSettings:
    """Everything that can change an answer or its verdict; all of it must be equal for an evaluation to be resumed.

    model       a Hugging Face folder, or RUN/checkpoints/step_N/NAME
    stored      the agent that the second is
    stop_text   where an answer is cut before it is judged: a base model goes on with the next question of a few-shot
                prompt. The tokens behind it were drawn all the same and count as such
    vllm        engine arguments, as in `agents.vllm` of a run
    reward_parts   several rewards in place of one; `reward` is the kind of the first
    reward_success   which answers are a success, as reward.success of a run says it; None: those with the full reward
    """

    model: Path
    benchmarks: tuple[Benchmark, ...]
    prompting: Prompting = field(default_factory=Prompting)
    reward: str = "math"
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    reward_range: tuple[float, float] = (0.0, 1.0)
    reward_parts: Mapping[str, WeightedPartConfig] = field(default_factory=dict)
    reward_success: str | float | None = None
    reward_timeout_s: float = 5.0
    reward_start_timeout_s: float = 120.0
    require_stop: bool = False
    max_prompt_tokens: int = 1024
    max_answer_tokens: int = 4096
    stop_text: str | None = None
    seed: int = 0
    trust_remote_code: bool = False
    vllm: Mapping[str, Any] = field(default_factory=dict)
    stored: StoredAgent | None = None

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
    def voted(self) -> str:
        """The kind of judge that normalises votes: of the part that is the success, else of the first."""
        return self.reward_parts[self.reward_success].kind if isinstance(self.reward_success, str) else self.reward

    def rewarded(self, num_workers: int = 1, relative: float = 0.0) -> RewardConfig:
        """The reward of an evaluation; a benchmark's tolerance is an option of `math`, unless the user sets it."""
        how = {"timeout_s": self.reward_timeout_s, "require_stop": self.require_stop, "num_workers": num_workers}
        how |= {"success": self.reward_success, "start_timeout_s": self.reward_start_timeout_s}
        if self.reward_parts:
            return RewardConfig(parts=self.reward_parts, **how)
        options = ({"relative": relative} if relative else {}) | dict(self.reward_options)
        return RewardConfig(kind=self.reward, options=options, range=self.reward_range, **how)

    def record(self, fingerprint: str) -> dict[str, Any]:
        """The settings as JSON; problems and weights by their hashes."""
        left_out = ("stored", "reward_start_timeout_s")  # no score depends on them
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out} | {
            "model": str(self.model),
            "weights": fingerprint,
            "prompting": {key: value for key, value in asdict(self.prompting).items() if key != "time" or value},
            "vllm": dict(self.vllm),
            "reward_options": dict(self.reward_options),
            "reward_parts": {name: part.model_dump(mode="json") for name, part in self.reward_parts.items()},
            "benchmarks": [describe_benchmark(benchmark) for benchmark in self.benchmarks],
        }


def settings_for(
    model: Path, benchmarks: Sequence[Benchmark], *, reward: str | None = None, trust: bool = False
) -> EvaluationSettings:
    """The defaults; for RUN/agents/NAME and RUN/checkpoints/step_N/NAME the run's settings, so that an agent is
    evaluated as it was trained.

    reward   the grader that the user names himself
    trust    whether code that the run's configuration names may run: a grader, Python in the model folder, the engine's

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
    named = (*code_of_reward(config.reward, reward), *code_of_model(agent), *code_of_engine(agent))
    require_trust(named, file, trusted=trust, instead="--reward names a grader of yours; ")
    return EvaluationSettings(
        model,
        benchmarks,
        prompting=agent.prompting,
        reward=grader.kind,
        reward_options=grader.options if is_judged_alike and not config.reward.parts else {},
        reward_range=grader.range if is_judged_alike else (0.0, 1.0),
        reward_parts=config.reward.parts if is_judged_alike else {},
        reward_success=config.reward.success if is_judged_alike else None,
        reward_timeout_s=config.reward.timeout_s,
        reward_start_timeout_s=config.reward.start_timeout_s,
        require_stop=config.reward.require_stop,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_answer_tokens=config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens,
        trust_remote_code=agent.trust_remote_code,
        vllm=agent.vllm,
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
    """Row layouts: the fields that the user names, of which the other is the run's; else, for an agent of a run, the
    run's own if a file has them, else any known layout."""
    stored = None if model is None else stored_agent_at(model)
    config = stored.config if stored is not None else _of_run(model)[0] if model is not None else None
    is_asked = prompt_field is not None or gold_field is not None
    if config is None and not is_asked:
        return LAYOUTS
    data = DataConfig(generator="arithmetic") if config is None else config.data
    fields = prompt_field or data.prompt_field, gold_field or data.gold_field
    return layouts_of(*fields, only=is_asked, tools_field=data.tools_field)


def benchmarks_of(
    files: Sequence[Path],
    suite: str | None,
    data: Path | None,
    num_answers: int,
    temperature: float | None,
    limit: int | None,
    *,
    model: Path | None = None,
    prompt_field: str | None = None,
    gold_field: str | None = None,
) -> tuple[Benchmark, ...]:
    """The benchmarks that the command line names: files, or the suite "paper" below `data`.

    Rows are read by the two fields, or as those of the run whose agent `model` is, or in any known layout. A suite says
    itself how many answers a problem gets, and at which temperature. ValueError for both or none.
    """
    if suite is None:
        if not files or data is not None:
            raise ValueError("give benchmark files, or --suite paper with --data FOLDER")
        sampled = 1.0 if num_answers > 1 else 0.0
        layouts = _layouts_for(model, prompt_field, gold_field)
        return load_benchmarks(files, num_answers, sampled if temperature is None else temperature, limit, layouts)
    if suite != "paper":
        raise ValueError(f"--suite {suite!r} is unknown; there is 'paper'")
    if files or data is None or temperature is not None or num_answers != 1 or prompt_field or gold_field:
        raise ValueError("--suite paper takes --data FOLDER, and neither files nor fields, --samples, --temperature")
    return load_suite(PAPER_SUITE, data, limit)


@dataclass(frozen=True)
class Wording:
    """The command line's wording of a problem; None leaves it unset.

    template_args    texts KEY=VALUE for the chat template
    prompt_template    a text, or @FILE that holds it
    """

    chat_template: bool | None = None
    template_args: Sequence[str] = ()
    system_prompt: str | None = None
    prompt_template: str | None = None

    def changed(self, prompting: Prompting) -> Prompting:
        """`prompting` with this wording. ValueError for an argument or a file that cannot be read."""
        given = {
            "chat_template": self.chat_template,
            "template_kwargs": dict(map(_template_argument, self.template_args)) or None,
            "system_prompt": self.system_prompt,
            "prompt_template": _text_of(self.prompt_template),
        }
        if self.chat_template is False:
            prompting = replace(prompting, time=None)
        return replace(prompting, **{key: value for key, value in given.items() if value is not None})


def ask(
    model: Path,
    benchmarks: Sequence[Benchmark],
    wording: Wording,
    *,
    is_suite: bool,
    stop_text: str | None,
    reward: str | None,
    max_prompt_tokens: int | None,
    max_answer_tokens: int | None,
    seed: int,
    options: Sequence[str] = (),
    success: str | None = None,
    trust: bool = False,
) -> EvaluationSettings:
    """The settings of the model (`settings_for`), overridden by the command line; None sets nothing.

    ValueError also for a grader that is not there, or has not the options, as far as can be told without running it.
    """
    settings = settings_for(model, benchmarks, reward=reward, trust=trust)
    asked = {
        "prompting": wording.changed(settings.prompting),
        "stop_text": stop_text,
        "reward": reward,
        "reward_options": {**settings.reward_options, **parse_options(options)},
        "reward_success": success if success is None else _success_of(success, settings.reward_parts),
        "max_prompt_tokens": max_prompt_tokens,
        "max_answer_tokens": PAPER_MAX_TOKENS if is_suite and max_answer_tokens is None else max_answer_tokens,
        "seed": seed,
    }
    settings = replace(settings, **{k: v for k, v in asked.items() if v is not None})
    if problem := grader_problem(settings.reward, settings.reward_options):
        raise ValueError(f"--reward: {problem}")
    if problem := option_problem(settings.reward, settings.reward_options):
        raise ValueError(f"--option: {problem}")
    return settings


def _success_of(text: str, parts: Mapping[str, WeightedPartConfig]) -> str | float:
    """The value of --success: a part, or a number. ValueError for a value that reward.success of a run could not be."""
    try:
        return RewardConfig(parts=parts, success=text if text in parts else _number_or_text(text)).success
    except ValidationError as error:
        raise ValueError(f"--success: {error.errors()[0]['ctx']['error']}") from error


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def require_judge(settings: EvaluationSettings) -> None:
    """Starts the judge of an evaluation and ends it. ValueError where it cannot be started, before an engine is."""
    judge_of(settings.rewarded()).close()


def require_weights(settings: EvaluationSettings) -> None:
    """ValueError, a line per problem, for a model whose weights training, vLLM and transformers would read
    differently."""
    if settings.stored is None or settings.stored.agent.lora is not None:
        require_one_reading(settings.folder)


def _template_argument(text: str) -> tuple[str, Any]:
    """KEY=VALUE with a TOML value, as overrides of a configuration have it."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"--template-arg {text!r}: expected KEY=VALUE, such as enable_thinking=false")
    try:
        return key, parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    except ValueError as error:
        raise ValueError(f"--template-arg {short(text)}: {error}") from error


def _text_of(prompt_template: str | None) -> str | None:
    if prompt_template is None or not prompt_template.startswith("@"):
        return prompt_template
    try:
        return Path(prompt_template[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--prompt-template {prompt_template}: cannot be read ({error.strerror})") from error
