"""The [[agents]] tables: the model of each agent, its layout, its optimizer, its prompts, and how `init` would make it.

Elsewhere: whether a layout fits a model (checks.py).
"""

from collections.abc import Collection
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from hacpo_mega.config.tables.choices import Skill
from hacpo_mega.config.tables.prompting import Prompting
from hacpo_mega.config.tables.section import (
    Count,
    CountOrZero,
    Factor,
    Flag,
    ModelPath,
    PassedOn,
    Positive,
    Section,
    Share,
    ShareBelowOne,
    Small,
    one_of,
)
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.families import FAMILIES
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import Lora, chosen_targets

LearningRate = Annotated[float, Field(strict=True, gt=0.0, le=1.0)]


class OptimizerConfig(Section):
    """Adam with decoupled weight decay, and its learning rate over the optimizer updates of the whole run."""

    lr: LearningRate = 1e-6
    """Learning rate after the warm-up: about the change of a weight in one update."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """Decay rates of Adam's running means of the gradient and of its square."""
    eps: Small = 1e-8
    """Added to the root of Adam's second moment, the update's denominator."""
    weight_decay: Factor = 0.0
    """Share of matrices, not norms and biases, subtracted in every update, times the learning rate."""
    clip_grad: Annotated[float, Field(strict=True, ge=1e-12, le=1e30)] = 1.0
    """Largest norm of the whole model's gradient; a longer gradient is scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's fall from lr, after the warm-up, to min_lr_ratio x lr at the end of the run."""
    warmup_updates: CountOrZero = 0
    """Updates at the start of the run over which the learning rate rises linearly to lr."""
    min_lr_ratio: Share = 0.0
    """The learning rate at the end of a linear or cosine schedule, as a share of lr."""
    kernels: Literal["auto", "te", "apex", "torch"] = "auto"
    """Implementation of Adam, gradient norm and clipping on CUDA: TransformerEngine (te), apex, torch, or the first of
    these that is installed (auto). On the CPU, auto is torch."""


class DataParallelConfig(Section):
    """Gradient reduction over the cells of an agent: options of Megatron's DistributedDataParallelConfig."""

    overlap_grad_reduce: Flag | None = None
    """Reduce gradients while backward computes, or after it in updates in which a cell has no samples; not given: if
    the agent's cells are on several nodes."""
    overlap_param_gather: Flag | None = None
    """Gather updated weights while the next forward computes; needs overlap_grad_reduce, whose buckets it uses, and is
    chosen with it if neither is given."""
    bucket_size: Count | None = None
    """Parameters in one bucket; not given: 40 million, or a million per cell if that is more."""
    pad_buckets_for_high_nccl_busbw: Flag = False
    """Pad buckets to multiples of 65,536 numbers, which NCCL reduces faster among many cells."""

    @model_validator(mode="after")
    def _there_are_buckets(self) -> Self:
        given = [key for key in self.model_fields_set if getattr(self, key) and key != "overlap_grad_reduce"]
        if given and not self.overlap_grad_reduce:
            raise ValueError(f"{', '.join(sorted(given))}: without overlap_grad_reduce there is one bucket; set it too")
        return self

    def by_nodes(self, nodes: Collection[bytes]) -> Self:
        """The table with both overlaps decided by the nodes of the agent's cells, where they are not given."""
        is_given, gathers = self.overlap_grad_reduce is not None, self.overlap_param_gather
        reduces = self.overlap_grad_reduce if is_given else len(set(nodes)) > 1
        # A given overlap_grad_reduce does not switch on the other: existing configurations keep what they compute.
        gathers = gathers if gathers is not None else reduces and not is_given
        return self.model_copy(update={"overlap_grad_reduce": reduces, "overlap_param_gather": gathers})


class LoraConfig(Section):
    """LoRA adapters, trained instead of the model's own weights, which stay as they are. Names are peft's."""

    rank: Count = 16
    """Rank r of the adapters: W + alpha / rank x B A takes the place of a matrix W."""
    alpha: Positive = 32.0
    """Numerator of the adapters' scale alpha / rank; peft's lora_alpha."""
    targets: Annotated[
        Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)],
        one_of("'all-linear' or a list of at least one text"),
    ] = "all-linear"
    """Matrices of every layer that have an adapter, by the last part of their name, such as ["q_proj", "v_proj"]; or
    "all-linear": all but embedding, head, router and the gate of shared experts."""


class SkillShare(Section):
    """Share of the warm start that is one skill."""

    share: Share
    """Share of the examples with this skill; the shares of all skills add up to 1."""
    num_examples: Count | None = None
    """Number of different prompts to draw examples from; not given: all that are not held out."""
    first: Share = 0.0
    """Share of examples of the skill `chain` that teach its first half, for a conversation of two roles."""
    second: Share = 0.0
    """Share of examples of the skill `chain` that teach its second half, behind the first of another agent."""
    totals: Share = 0.0
    """Share of examples of the skills `sum` and `chain` that work by totals of whole numbers, the added terms in an
    order drawn for each: a right answer is one of many texts."""
    with_tool: Share = 0.0
    """Share of these examples that ask the calculator and repeat its result instead of working; needs
    conversation.environment = "calculator"."""


class WarmStartOptimizerConfig(OptimizerConfig):
    """Adam of a warm start: the table of agents.optimizer with a rate for a fresh model."""

    lr: LearningRate = 3e-3
    """Learning rate of the warm start after its warm-up."""


class WarmStartConfig(Section):
    """Supervised training of a fresh model on worked answers, through the same Megatron actor."""

    skills: Annotated[dict[Skill, SkillShare], Field(min_length=1)]
    """One table per skill of the arithmetic that the model is taught."""
    num_updates: Count = 600
    """Optimizer updates of the warm start."""
    batch_size: Count = 128
    """Worked examples of one update, over all cells."""
    optimizer: WarmStartOptimizerConfig = WarmStartOptimizerConfig()
    """Adam of the warm start, with lr = 0.003 by default; agents.optimizer is that of the training after it."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        total = sum(skill.share for skill in self.skills.values())
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"the shares of warm_start.skills add up to {total:g}; they must add up to 1")
        return self


class InitConfig(Section):
    """A small model that `hacpo-mega init` creates at the agent's `model` folder, with a tokenizer of its own."""

    family: Literal[tuple(name for name, of in FAMILIES.items() if of.experts is None and not of.full_heads)]
    """Architecture of the model, one without experts."""
    num_layers: Count
    """Transformer layers."""
    hidden_size: Count
    """Width of the residual stream, in numbers per token."""
    num_heads: Count
    """Attention heads of a layer."""
    num_kv_heads: Count
    """Key-value heads of a layer; a divisor of num_heads."""
    head_dim: Count
    """Width of one attention head."""
    ffn_size: Count
    """Width of the feed-forward layer between its two projections."""
    tied_embeddings: Flag
    """Use the embedding as the output layer, instead of a matrix of its own."""
    max_positions: Count = 256
    """Longest sequence of the model, in tokens."""
    vocabulary: tuple[str, ...]
    """The tokenizer's tokens, matched longest first; an end and a padding token come on top."""
    warm_start: WarmStartConfig | None = None
    """Supervised training of the fresh model; not given: its weights stay random."""


def _time(text: str) -> str:
    """A time to the second, without a zone, as models/files/chat_template.py writes it."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").isoformat()
    except ValueError as error:
        raise ValueError(f"must be a time in UTC such as 2026-11-26T14:10:00, found {text!r}") from error


class AgentConfig(Section):
    """One agent: its Hugging Face folder, its parallel layout, its prompts, its optimizer, two tables passed on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Name of the agent in overrides, metrics and folders: letters, digits, - and _."""
    model: ModelPath
    """Initial model of the agent: a Hugging Face folder with its tokenizer, relative to the current folder, or a name
    on the Hub, Qwen/Qwen3-4B or Qwen/Qwen3-4B@REVISION. A run keeps the commit."""
    tp: Count = 1
    """Tensor parallel size: processes that share every layer of the actor."""
    pp: Count = 1
    """Pipeline parallel size: stages of the actor's layers, tp x cp processes each."""
    cp: Count = 1
    """Context parallel size, for long sequences: processes that share the tokens of a micro-batch and, in attention,
    the heads of each tensor rank. tp x cp must divide the heads; each process keeps 1 / cp of the activations."""
    ep: Count = 1
    """Expert parallel size: processes that share a layer's experts; each expert is whole on one of them. A divisor of
    tp x cp, or tp x cp times a divisor of the agent's cells. It must divide the experts, and adds no processes."""
    cells_per_lane: Count = 1
    """Replicas of the agent in each lane, tp x cp x pp processes each; they split the lane's prompts."""
    engine_tp: Count | None = None
    """Processes of one vLLM engine, a divisor of tp x cp x pp, or of rollout_gpus if that is given; not given: all of
    them, one engine per cell, or 1 with rollout.one_step_off."""
    rollout_gpus: Count | None = None
    """With placement = "apart": processes of each cell that only generate, beside the tp x cp x pp that train; a
    multiple of engine_tp. Not given: none."""
    trust_remote_code: Flag = False
    """Allow Python code of the model folder to run, which some tokenizers need."""
    chat_template: Flag = False
    """Put the task into the tokenizer's chat template as a user message; else its text is the prompt."""
    chat_template_kwargs: PassedOn = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking = false."""
    chat_template_time: Annotated[str, AfterValidator(_time)] | None = None
    """Fixed time, in UTC, for a chat template that reads the clock (strftime_now), such as "2026-11-26T14:10:00"; not
    given: that of the run's first start."""
    system_prompt: str | None = None
    """The system message before the user's, in a chat template."""
    prompt_template: str | None = None
    """Text with {prompt} where the task goes: an instruction, or worked examples for a base model."""
    recompute: Literal["auto", "none", "mlp", "full"] = "auto"
    """Activation recomputation in backward, for the same gradient: none, every feed-forward (mlp), every layer (full),
    or the least of these that leaves a twentieth of device_memory_gib free (auto)."""
    offload: Literal["auto", "none", "optimizer"] = "auto"
    """State offloaded to pinned host memory while the engine generates: none, main weights and moments (optimizer), or
    these where a larger cache saves more seconds than copies cost (auto; on the CPU none). Bitwise neutral."""
    transformer: Literal["auto", "local", "te"] = "auto"
    """Implementation of the actor's layers: Megatron's own with torch's attention (local), TransformerEngine's, for
    bf16 on CUDA (te), or te if it is installed and the actor allows it (auto)."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Number format of the weights, in the actor and in its engine; Adam works in float32 with both. Not given:
    bfloat16 on CUDA, float32 on the CPU, where bfloat16 is for tests and studies."""
    router_replay: Flag = False
    """Router replay (R3, arXiv 2510.11370): scoring and learning reuse the engine's expert choices for the agent's own
    answers. Otherwise the actor routes again and may choose other experts through rounding."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and the learning rate of this agent."""
    lora: LoraConfig | None = None
    """Adapters that are trained instead of the model's weights; not given: all weights are trained."""
    data_parallel: DataParallelConfig = DataParallelConfig()
    """Overlap of gradient and weight communication between this agent's cells with compute."""
    megatron: PassedOn = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig. Fields that hacpo-mega decides, or that have no effect, are refused."""
    vllm: PassedOn = Field(default_factory=dict)
    """Arguments of vLLM's engine, passed on unchanged. Arguments that hacpo-mega decides are refused."""
    init: InitConfig | None = None
    """Model that `hacpo-mega init` makes if the folder does not exist; not given: the folder must exist."""

    @model_validator(mode="after")
    def _prompting_is_sound(self) -> Self:
        _ = self.prompting  # it checks itself
        return self

    @property
    def prompting(self) -> Prompting:
        """The prompt format of this agent, in training and in evaluation. ValueError for wording that is never read."""
        words = self.system_prompt, self.prompt_template, self.chat_template_time
        return Prompting(self.chat_template, self.chat_template_kwargs, *words)

    def adapters(self, architecture: Architecture) -> Lora | None:
        """The adapters of this agent, None without. ValueError, a line each, for targets that its model lacks."""
        if self.lora is None:
            return None
        return Lora(self.lora.rank, self.lora.alpha, chosen_targets(architecture, self.lora.targets))

    def layout(self, lanes: int) -> Layout:
        """The parallel layout of this agent's cells. ValueError for impossible numbers of layers."""
        sizes = self.engine_tensor_parallel, self.cp, self.ep, self.rollout_gpus
        return Layout.of(self.tp, self.pp, self.megatron, *sizes, lanes * self.cells_per_lane)

    @property
    def cell_size(self) -> int:
        """Ranks of one replica of this agent that train."""
        return self.tp * self.cp * self.pp

    @property
    def engine_tensor_parallel(self) -> int:
        """Ranks of one vLLM engine; a cell holds as many of them as its ranks that answer are a multiple of it."""
        return self.engine_tp or self.rollout_gpus or self.cell_size
