"""Steps whose seconds others have published, and their plans: how far the formulas are from measurements.

This project has timed only an actor on a GPU (its rates are above the planned ones). So `plan` shows a range: its own
seconds, up to these times the largest ratio of published to planned seconds of a whole step below.

Sources: the performance summary of NeMo-RL 0.5 and 0.6 (GRPO on policy, bf16, Megatron; neither prompts nor
layouts are told, the layouts here are the fastest planned ones); prime-rl benchmarks/baselines (the trainer alone,
16,384 tokens a sequence, activations computed again: "Recompute").
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Lengths, Planned, work_of
from hacpo_lab.planning.kinds import KINDS, KindName
from hacpo_lab.planning.plan import AgentPlan, make_plan
from hacpo_mega.config import Config
from hacpo_mega.config.checks.checks import named_models


@dataclass(frozen=True)
class PublishedStep:
    """A step of one agent.

    answers         of the step, `prompts` times some              prompt_tokens, answer_tokens   means
    seconds         published, of `phases`; None: of the step      layout   keys of [[agents]]; `lanes` beside them
    """

    name: str
    kind: KindName
    nodes: int
    model: str
    prompts: int
    answers: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    lanes: int
    phases: tuple[str, ...] | None = None
    layout: Mapping[str, int | str | dict] = field(default_factory=dict)


def _trainer(name: str, model: str, tokens_per_s: float, **layout: int | dict) -> PublishedStep:
    """prime-rl's trainer on eight H200: 64 sequences of 16,384 tokens at a published rate."""
    return PublishedStep(
        name=f"prime-rl, {name}, the trainer alone",
        kind="h200",
        nodes=1,
        model=model,
        prompts=8,
        answers=64,
        prompt_tokens=1,
        answer_tokens=16383,
        seconds=64 * 16384 / tokens_per_s,
        lanes=8,
        phases=("learn",),
        layout={"recompute": "full", **layout},
    )


PUBLISHED = (
    PublishedStep(
        "NeMo-RL 0.5, Llama-3.1-8B", "h100", 2, "meta-llama/Llama-3.1-8B", 64, 2048, 150, 1000, 92.8, 4,
        layout={"tp": 2, "cp": 2},
    ),
    PublishedStep(
        "NeMo-RL 0.6, Qwen3-30B-A3B", "h100", 4, "Qwen/Qwen3-30B-A3B", 64, 2048, 150, 3150, 192.0, 1,
        layout={"cp": 4, "pp": 8, "engine_tp": 4},
    ),
    _trainer("Qwen3-4B", "Qwen/Qwen3-4B-Base", 27_400.0),
    _trainer("Qwen3-4B LoRA", "Qwen/Qwen3-4B-Base", 52_400.0, lora={"rank": 16}),
)  # fmt: skip


def planned_seconds(step: PublishedStep) -> float:
    """Seconds that a plan has for what was published."""
    agent = _plan(step)
    return agent.busy_s if step.phases is None else sum(agent.phases_s[phase] for phase in step.phases)


@cache
def ratios() -> dict[str, float]:
    """Published over planned seconds by name."""
    return {step.name: step.seconds / planned_seconds(step) for step in PUBLISHED}


def worst_ratio() -> float:
    """The largest ratio of a whole step; 1 if every one was planned slower than it is."""
    return max(1.0, *(ratios()[step.name] for step in PUBLISHED if step.phases is None))


def _plan(step: PublishedStep) -> AgentPlan:
    """The plan of a published step, with an engine memory share that leaves the actor room."""
    cluster = Cluster.model_validate({"kind": step.kind, "nodes": step.nodes, **KINDS[step.kind]})
    longest = max(4096, step.answer_tokens)  # the limit of NeMo-RL's steps
    config = Config.model_validate(
        {
            "run_dir": "runs/published",
            "num_steps": 1,
            "device_memory_gib": cluster.device.memory_gib,
            "lanes": step.lanes,
            "algorithm": {"method": "grpo"},
            "data": {"files": ["prompts.jsonl"]},
            "reward": {"kind": "math"},
            "rollout": {
                "rollouts_per_prompt": step.answers // step.prompts,
                "max_prompt_tokens": 2 * step.prompt_tokens,
                "max_answer_tokens": longest,
            },
            "training": {
                "prompts_per_step": step.prompts,
                "prompts_per_update": step.prompts,
                "max_tokens_per_microbatch": max(16384, 2 * step.prompt_tokens + longest),
            },
            "agents": [{"name": "agent", "model": step.model, "vllm": {"gpu_memory_utilization": 0.3}, **step.layout}],
        }
    )
    work = {"agent": work_of(config, Lengths(step.prompt_tokens, step.answer_tokens))}
    (agent,) = make_plan(Planned(config, named_models(config)[0]), work, cluster).agents
    return agent
