"""What an evaluation asks of whom, and what a run's own folder says about it. Imports no torch.

Not here: benchmarks and their files (benchmarks.py).
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hacpo_mega.checkpoint.stored_agent import StoredAgent, stored_agent_at
from hacpo_mega.config import AgentConfig, Config, Prompting, config_of_run
from hacpo_mega.config.named_code import code_of_engine, code_of_model, code_of_reward, require_trust
from hacpo_mega.evaluation.benchmarks import (
    PAPER_MAX_TOKENS,
    PAPER_SUITE,
    Benchmark,
    describe_benchmark,
    load_benchmarks,
    load_suite,
)
from hacpo_mega.models.documents import parse_toml, short
from hacpo_mega.models.folder import dtype_name
from hacpo_mega.models.weight_files import weights_fingerprint


@dataclass(frozen=True)
class EvaluationSettings:
    """Everything that can change an answer or its verdict; all of it must be equal for an evaluation to be resumed.

    model       a Hugging Face folder, or RUN/checkpoints/step_N/NAME
    stored      the agent that the second is
    stop_text   where an answer is cut before it is judged: a base model goes on with the next question of a few-shot
                prompt. The tokens behind it were drawn all the same and count as such
    vllm        engine arguments, as in `agents.vllm` of a run
    """

    model: Path
    benchmarks: tuple[Benchmark, ...]
    prompting: Prompting = field(default_factory=Prompting)
    reward: str = "math"
    reward_options: Mapping[str, Any] = field(default_factory=dict)
    reward_timeout_s: float = 5.0
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

    def record(self, fingerprint: str) -> dict[str, Any]:
        """The settings as JSON; problems and weights by their hashes."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "stored"} | {
            "model": str(self.model),
            "weights": fingerprint,
            "prompting": asdict(self.prompting),
            "vllm": dict(self.vllm),
            "reward_options": dict(self.reward_options),
            "benchmarks": [describe_benchmark(benchmark) for benchmark in self.benchmarks],
        }


def settings_for(
    model: Path, benchmarks: Sequence[Benchmark], *, reward: str | None = None, trust: bool = False
) -> EvaluationSettings:
    """The defaults; for RUN/agents/NAME and RUN/checkpoints/step_N/NAME those of the run, so that an agent is asked and
    judged as in its training.

    reward   the grader that the user names himself
    trust    whether code that the run's configuration names may run: a grader, Python in the model folder, the engine's

    ValueError when the run's configuration is broken or names code that is not trusted, or the checkpoint cannot be
    used.
    """
    benchmarks = tuple(benchmarks)
    stored = stored_agent_at(model)
    config, agent, file = _of_run(model) if stored is None else (stored.config, stored.agent, stored.file)
    if agent is None:
        return EvaluationSettings(model, benchmarks)
    named = (*code_of_reward(config.reward, reward), *code_of_model(agent), *code_of_engine(agent))
    require_trust(named, file, trusted=trust, instead="--reward names a grader of yours; ")
    return EvaluationSettings(
        model,
        benchmarks,
        prompting=agent.prompting,
        reward=config.reward.kind,
        reward_options=config.reward.options,
        reward_timeout_s=config.reward.timeout_s,
        require_stop=config.reward.require_stop,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_answer_tokens=config.evaluation.max_answer_tokens or config.rollout.max_answer_tokens,
        trust_remote_code=agent.trust_remote_code,
        vllm=agent.vllm,
        stored=stored,
    )


def _of_run(model: Path) -> tuple[Config, AgentConfig, Path] | tuple[None, None, None]:
    """What the run says, and in which file, whose agent RUN/agents/NAME is; nothing for another folder."""
    folder = model.resolve()
    run_dir = folder.parent.parent
    file = run_dir / "config.toml"
    if folder.parent.name != "agents" or not file.is_file():
        return None, None, None
    config = config_of_run(run_dir)
    agent = next((agent for agent in config.agents if agent.name == folder.name), None)
    return (None, None, None) if agent is None else (config, agent, file)


def benchmarks_of(
    files: Sequence[Path],
    suite: str | None,
    data: Path | None,
    num_answers: int,
    temperature: float | None,
    limit: int | None,
) -> tuple[Benchmark, ...]:
    """The benchmarks that the command line names: files, or the suite "paper" below `data`.

    A suite says itself how many answers a problem gets, and at which temperature. ValueError for both or none.
    """
    if suite is None:
        if not files or data is not None:
            raise ValueError("give benchmark files, or --suite paper with --data FOLDER")
        sampled = 1.0 if num_answers > 1 else 0.0
        return load_benchmarks(files, num_answers, sampled if temperature is None else temperature, limit)
    if suite != "paper":
        raise ValueError(f"--suite {suite!r} is unknown; there is 'paper'")
    if files or data is None or temperature is not None or num_answers != 1:
        raise ValueError("--suite paper takes --data FOLDER, and neither files nor --samples nor --temperature")
    return load_suite(PAPER_SUITE, data, limit)


def ask(
    model: Path,
    benchmarks: Sequence[Benchmark],
    *,
    is_suite: bool,
    chat_template: bool | None,
    template_args: Sequence[str],
    system_prompt: str | None,
    prompt_template: str | None,
    stop_text: str | None,
    reward: str | None,
    max_prompt_tokens: int | None,
    max_answer_tokens: int | None,
    seed: int,
    trust: bool = False,
) -> EvaluationSettings:
    """The settings of the model (`settings_for`), less what the command line says otherwise; None says nothing."""
    settings = settings_for(model, benchmarks, reward=reward, trust=trust)
    worded = {
        "chat_template": chat_template,
        "template_kwargs": dict(map(_template_argument, template_args)) or None,
        "system_prompt": system_prompt,
        "prompt_template": _text_of(prompt_template),
    }
    asked = {
        "prompting": replace(settings.prompting, **{k: v for k, v in worded.items() if v is not None}),
        "stop_text": stop_text,
        "reward": reward,
        "max_prompt_tokens": max_prompt_tokens,
        "max_answer_tokens": PAPER_MAX_TOKENS if is_suite and max_answer_tokens is None else max_answer_tokens,
        "seed": seed,
    }
    return replace(settings, **{k: v for k, v in asked.items() if v is not None})


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
