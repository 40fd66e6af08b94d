"""The tables of a run's configuration: typed and frozen. `load.py` reads the file, `checks.py` holds every cross-check.

Nothing in this package imports torch or a model library, so that `hacpo-mega check` answers at once.
Not here: anything that acts on a configuration. Functions elsewhere get the numbers they need, not this object.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hacpo_mega.config.prompting import Prompting

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A frozen table of the configuration; a key that it does not know is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "cross_baseline": "source",
        "capability_metric": "mean_reward",
        "capability_floor_per_step": False,
        "omega_clip": None,
        "baseline_guard": False,
        "aggregation": "sum",
        "kl_coef": 0.0,
        "eos_in_loss": True,
        "log_ratio_clamp": 20.0,
    },
    "authors": {
        "cross_baseline": "learner",
        "capability_metric": "positive_rate",
        "capability_floor_per_step": True,
        "omega_clip": (0.1, 10.0),
        "baseline_guard": True,
        "aggregation": "mean",
        "kl_coef": 1e-3,
        "eos_in_loss": False,
        "log_ratio_clamp": 10.0,
    },
}


class AlgorithmConfig(Section):
    """HACPO (arXiv 2603.02604) and its baselines: every choice the paper and the authors' code make, by name.

    `preset` fills what is not given: `paper` follows the text, `authors` their public code.
    `method = "gspo"` trains every agent on its own answers alone: the same code, nothing shared.
    """

    method: Literal["hacpo", "gspo"] = "hacpo"
    preset: Literal["paper", "authors"] = "paper"
    # Capability (eq. 9) and advantage (eq. 10)
    cross_baseline: Literal["source", "learner"] = "source"
    capability_metric: Literal["mean_reward", "positive_rate"] = "mean_reward"
    capability_window: Count = 5
    capability_includes_current: bool = True
    capability_floor: float = Field(1e-8, gt=0.0)
    capability_floor_per_step: bool = False
    omega_clip: tuple[float, float] | None = None
    uniform_group_is_zero: bool = True
    baseline_guard: bool = False
    advantage_eps: float = Field(1e-6, ge=0.0)
    # Objective (eq. 47 own, eq. 50 cross)
    aggregation: Literal["sum", "mean"] = "sum"
    eps_low: float = Field(3e-4, ge=0.0)
    eps_high: float = Field(4e-4, ge=0.0)
    delta: Share = 0.2
    delta_step: float = Field(0.025, ge=0.0)
    alpha: float = Field(1.0, ge=0.0)
    log_ratio_clamp: float = Field(20.0, gt=0.0)
    ratio_length: Literal["own", "source"] = "own"
    eos_in_loss: bool = True
    kl_coef: float = Field(0.0, ge=0.0)
    kl_on: Literal["own", "all"] = "own"

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {**PRESETS.get(given.get("preset", "paper"), {}), **given}

    @model_validator(mode="after")
    def _ordered_bounds(self) -> Self:
        if self.omega_clip and not 0.0 < self.omega_clip[0] <= 1.0 <= self.omega_clip[1]:
            raise ValueError(f"omega_clip {self.omega_clip}: needs 0 < low <= 1 <= high, since omega of equals is 1")
        return self

    @property
    def shares_answers(self) -> bool:
        """Whether a learner trains on the answers of other agents."""
        return self.method == "hacpo"


class OptimizerConfig(Section):
    """Adam and its learning rate, per agent. `schedule` runs over the optimizer updates of the whole run."""

    lr: float = Field(1e-6, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    clip_grad: float = Field(1.0, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = Field(0, ge=0)
    min_lr_ratio: Share = 0.0


class SkillShare(Section):
    """How much of the warm start is one skill: its share of the examples, and how many distinct ones it sees."""

    share: Share
    num_examples: Count | None = None


class WarmStartConfig(Section):
    """Supervised training of a fresh model on worked answers, through the same Megatron actor."""

    skills: dict[str, SkillShare]
    num_updates: Count = 600
    batch_size: Count = 128
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        total = sum(skill.share for skill in self.skills.values())
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"the shares of warm_start.skills add up to {total:g}; they must add up to 1")
        return self


class InitConfig(Section):
    """A small model that `hacpo-mega init` creates at the agent's `model` folder, with a tokenizer of its own."""

    family: Literal["qwen2", "qwen3", "llama"]
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    ffn_size: Count
    tied_embeddings: bool
    max_positions: Count = 256
    vocabulary: tuple[str, ...]
    warm_start: WarmStartConfig | None = None


class AgentConfig(Section):
    """One agent: its Hugging Face folder, its parallel layout, its optimizer and two pass-through tables.

    `megatron` goes to Megatron's TransformerConfig and `vllm` to vLLM's engine arguments, as they are; keys
    that this file decides itself (parallel sizes, model path, dtype) are refused there.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    model: Path
    tp: Count = 1
    pp: Count = 1
    cells_per_lane: Count = 1
    engine_tp: Count | None = None
    trust_remote_code: bool = False
    chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    system_prompt: str | None = None
    prompt_template: str | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    megatron: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
    init: InitConfig | None = None

    @model_validator(mode="after")
    def _prompting_is_sound(self) -> Self:
        _ = self.prompting  # it checks itself
        return self

    @property
    def prompting(self) -> Prompting:
        """How this agent is asked, in training and in evaluation. ValueError for wording that nobody would read."""
        return Prompting(self.chat_template, self.chat_template_kwargs, self.system_prompt, self.prompt_template)

    @property
    def cell_size(self) -> int:
        """Ranks of one replica of this agent."""
        return self.tp * self.pp

    @property
    def engine_tensor_parallel(self) -> int:
        """Ranks of one vLLM engine; a cell holds cell_size / engine_tensor_parallel of them."""
        return self.engine_tp or self.cell_size


class DataConfig(Section):
    """Where prompts come from: files (JSONL or Parquet) or a seeded generator of worked arithmetic."""

    files: tuple[Path, ...] = ()
    generator: Literal["arithmetic"] | None = None
    skills: tuple[str, ...] = ("add", "sub", "mul", "srt")
    prompt_field: str = "prompt"
    gold_field: str = "answer"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.files) == bool(self.generator):
            raise ValueError("give data.files or data.generator, exactly one of them")
        return self


class RewardConfig(Section):
    """Who judges an answer, and how many CPU seconds one judgement may take before its worker is killed.

    `kind` is one of grading/kinds.py ("math", "number", "program", ...), or a grader of your own as "module:function";
    `options` are what it offers to be set. With `require_stop` an answer that did not end by itself has no answer.
    """

    kind: str = "math"
    options: dict[str, bool | int | float | str] = {}
    timeout_s: float = Field(5.0, gt=0.0)
    num_workers: Count = 1
    require_stop: bool = False


class RolloutConfig(Section):
    """How answers are sampled: G of them for every prompt, by every agent."""

    rollouts_per_prompt: Count = 8
    temperature: float = Field(1.0, gt=0.0)
    max_prompt_tokens: Count = 1024
    max_answer_tokens: Count = 4096


class TrainingConfig(Section):
    """Batch arithmetic: prompts of a step over all lanes, prompts of one optimizer update, tokens of a micro-batch."""

    prompts_per_step: Count = 128
    prompts_per_update: Count = 64
    max_tokens_per_microbatch: Count = 8192


class EvaluationConfig(Section):
    """Held-out greedy accuracy before, during (every n steps; 0 = never) and after training."""

    every_steps: int = Field(0, ge=0)
    files: tuple[Path, ...] = ()
    num_prompts: Count = 600
    max_answer_tokens: Count | None = None


class Config(Section):
    """A whole run. Load it with `load_config`; nobody writes to it afterwards."""

    run_dir: Path
    seed: int = Field(1, ge=0)
    num_steps: Count
    lanes: Count = 1
    agents: tuple[AgentConfig, ...] = Field(min_length=1)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer that training or evaluation may ask for."""
        return max(self.rollout.max_answer_tokens, self.evaluation.max_answer_tokens or 0)
