"""Budget of one device in every phase of a step, and the first phase that does not fit.

An agent's device has an actor (actor_bytes.py) and a part of an engine; the phases are those of
hacpo_mega/trainer/trainer.py, and who sleeps in which is decided in hacpo_mega/agent/devices.py. Everything is a sum
of parts, so that a reader can add it up.
Imports no torch. Elsewhere: where the numbers come from in a configuration (config/checks/device_memory.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hacpo_mega.memory.actor_bytes import ActorPlan, actor_memory
from hacpo_mega.memory.expert_bytes import answer_routing_bytes
from hacpo_mega.memory.quantized import largest_matrix, saved_bytes
from hacpo_mega.memory.weight_numbers import expert_weights, num_weights
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.publish_plan import BUCKET_BYTES

GIB = 1 << 30
# Assumed, for a choice between seconds: a device reads its memory as the plan has it of an H100, and a copy between it
# and pinned host memory has what PCIe 4.0 x16 gives.
DEVICE_BYTES_PER_S, HOST_BYTES_PER_S = 2.3e12, 25e9
# Not in any tensor of ours and not measured here (docs/design/memory.md): context, libraries, the buffers of NCCL; the
# graphs that an engine keeps asleep; what a warm-up of the engine takes beside its weights; what the allocator cannot
# reuse because micro-batches differ in length, as a share of what comes and goes.
CONTEXT, GRAPHS, WARM_UP, FRAGMENTS = 5 * GIB // 2, 3 * GIB // 2, 2 * GIB, 0.05

OFFLOADED = ("main weights", "moments")
STATES = ("weights", "gradients", "main weights", "moments")
PHASES: Mapping[str, tuple[str, ...]] = {
    "generate": (*STATES, "gather buffer", "engine awake", "context"),
    "score": (*STATES, "gather buffer", "forward", "fragments", "engine asleep", "context"),
    "learn, first update": (
        *(part for part in STATES if part != "moments"),
        *("gather buffer", "activations", "backward", "fragments", "engine asleep", "context"),
    ),
    "learn": (*STATES, "gather buffer", "activations", "backward", "fragments", "engine asleep", "context"),
    "diagnose": (
        *(*STATES, "gather buffer", "activations", "backward", "own gradient"),
        *("fragments", "engine asleep", "context"),
    ),
    "optimizer step": (*STATES, "gather buffer", "step", "engine asleep", "context"),
    "publish": (*STATES, "gather buffer", "engine weights", "buckets", "engine asleep", "context"),
    "checkpoint": (*STATES, "gather buffer", "engine awake", "context"),
}
# If agents take turns on a device, the others have freed it except for memory that a process cannot free.
LEARNS = ("learn, first update", "learn", "diagnose", "optimizer step")
IN_TURN: Mapping[str, tuple[str, ...]] = {
    "generate": ("engine awake", "context", "other agents"),
    "score": ("weights", "gather buffer", "forward", "fragments", "engine asleep", "context", "other agents"),
    **{phase: (*PHASES[phase], "other agents") for phase in LEARNS},
    "publish": ("weights", "engine weights", "buckets", "engine asleep", "context", "other agents"),
    "checkpoint": ("engine asleep", "context", "other agents"),
}
# Where engines have devices of their own: parts on all devices, parts on theirs alone, and the phases that fill these.
ON_BOTH, ON_ENGINES = {"buckets", "context"}, {"engine weights", "engine cache", "engine awake", "engine asleep"}
ANSWERS = ("generate", "publish")
Does = Literal["both", "trains", "answers"]


@dataclass(frozen=True)
class EnginePlan:
    """One rank of an engine.

    memory_share   of the device's memory that vLLM takes for everything; or, where that is None,
    cache_bytes    of its key-value cache
    max_tokens     of the longest prompt and answer: its cache must hold one
    keeps_graphs   whether it captures CUDA graphs
    stays_awake    whether it answers while the actor learns, so that it never sleeps
    beside         bytes that other agents leave on the device while it is not their turn
    quantization   how it makes less of its weights (quantized.py); None: it does not
    """

    tp: int
    max_tokens: int
    memory_share: float | None
    cache_bytes: int = 0
    keeps_graphs: bool = True
    stays_awake: bool = False
    beside: int = 0
    quantization: str | None = None


@dataclass(frozen=True)
class Budget:
    """The parts of one pipeline stage of an agent, in bytes; `capacity` is the device's memory, None: not known.

    does          whether the device has the stage and a part of an engine, or one of them
    offload_line  why optimizer state is offloaded, or not, where the configuration leaves it open
    """

    actor: ActorPlan
    engine: EnginePlan
    capacity: int | None
    stage: int = 0
    does: Does = "both"
    offload_line: str = ""

    @cached_property
    def parts(self) -> dict[str, int]:
        """Every part by its name, in the order of a table; the engine's cache is a part of the engine awake.

        "on the host" is on no device: pinned memory for offloaded state. So is "answers' routing", of a step's answers
        in one process. "experts at worst" is added to the activations if all tokens of the ranks that share experts go
        to the experts of one of them.
        """
        of_actor = actor_memory(self.actor, self.stage)
        weights = engine_weights(self.actor, self.engine)
        awake = self._engine_awake(weights)
        cuda = self.actor.device.engine_sleeps
        sleeps = cuda and not self.engine.stays_awake
        asleep = (GRAPHS if self.engine.keeps_graphs else 0) if sleeps else awake
        parts = {
            "weights": of_actor.weights,
            "gradients": of_actor.gradients,
            "main weights": of_actor.main_weights,
            "moments": of_actor.moments,
            "gather buffer": of_actor.gather_buffer,
            "activations": of_actor.kept,
            "backward": of_actor.working,
            "forward": of_actor.forward,
            "step": of_actor.step,
            "fragments": int(FRAGMENTS * (of_actor.kept + of_actor.working)) if cuda else 0,
            "own gradient": of_actor.own_gradient,
            "engine weights": weights if sleeps else 0,
            "engine cache": max(0, awake - weights - (WARM_UP if cuda else 0)),
            "engine awake": awake,
            "engine asleep": asleep,
            "buckets": bucket_bytes(self.actor) + waiting_bytes(self.actor, self.engine),
            "context": CONTEXT if cuda else 0,
            "other agents": self.engine.beside,
            "experts at worst": of_actor.worst_experts,
            "answers' routing": answer_routing_bytes(self.actor.architecture, self.actor.replayed),
            "on the host": (of_actor.weights if self.actor.shares else 0)
            + (of_actor.main_weights + of_actor.moments if self.actor.offloads else 0),
        }
        if self.does == "both":
            return parts
        others = parts.keys() - ON_BOTH - (ON_ENGINES if self.does == "answers" else parts.keys() - ON_ENGINES)
        return parts | dict.fromkeys(others, 0)

    def _engine_awake(self, weights: int) -> int:
        if self.engine.memory_share is not None and self.capacity is not None:
            return int(self.engine.memory_share * self.capacity)
        return weights + self.engine.cache_bytes + (WARM_UP if self.actor.device.engine_sleeps else 0)

    @cached_property
    def phases(self) -> dict[str, int]:
        """Bytes of every phase that there is: the sum of its parts."""
        there = [phase for phase in PHASES if phase != "diagnose" or self.actor.diagnoses]
        if self.does == "answers":
            there = list(ANSWERS)
        elif self.does == "trains":
            there.remove("generate")
        return {phase: sum(self.parts[part] for part in self.parts_of(phase)) for phase in there}

    def parts_of(self, phase: str) -> tuple[str, ...]:
        """The names of the parts that are on the device in a phase."""
        if phase == "learn, first update" and self.actor.offloads:
            phase = "learn"  # moments are made at the start, for the host to have room for them
        if self.actor.shares:
            return IN_TURN[phase]
        if "engine awake" not in PHASES[phase]:
            return PHASES[phase]
        away = (*(OFFLOADED if self.actor.offloads else ()), *(("gradients",) if self.frees_gradients else ()))
        return tuple(part for part in PHASES[phase] if part not in away)

    @property
    def frees_gradients(self) -> bool:
        """True if gradient buffers are off the device while the engine is awake.

        On the CPU no engine sleeps, and taking their memory again costs time: only along with what is offloaded.
        """
        return not self.engine.stays_awake and (self.actor.device.engine_sleeps or self.actor.offloads)

    @property
    def fullest(self) -> str:
        """The phase that takes the most."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def peak(self) -> int:
        """Bytes of the fullest phase."""
        return self.phases[self.fullest]

    @property
    def engine_needs(self) -> int:
        """The least that the engine can work in: weights, warm-up, the cache of one longest sequence."""
        return (
            engine_weights(self.actor, self.engine)
            + WARM_UP
            + self.engine.max_tokens * cache_per_token(self)
            + cache_per_answer(self)
        )

    @property
    def engine_is_too_small(self) -> bool:
        """True if its share of the device is less than `engine_needs`."""
        if self.does == "trains" or self.engine.memory_share is None:
            return False
        return self.parts["engine awake"] < self.engine_needs

    def fits(self, room: float = 0.0) -> bool:
        """True if every phase fits and leaves `room`, a share of the device."""
        return self.capacity is None or self.peak <= (1.0 - room) * self.capacity


def fullest_stage(actor: ActorPlan, engine: EnginePlan, capacity: int | None, does: Does = "both") -> Budget:
    """The budget of the pipeline stage that takes the most."""
    return max(stage_budgets(actor, engine, capacity, does), key=lambda budget: budget.peak)


def stage_budgets(actor: ActorPlan, engine: EnginePlan, capacity: int | None, does: Does = "both") -> Iterator[Budget]:
    """The budgets of the pipeline stages among which the fullest is, in whatever phase.

    Among stages with equal layers between the first and the last, the earliest has most micro-batches in flight.
    """
    last = actor.layout.pp - 1
    stages = range(last + 1) if actor.architecture.dense_layers else sorted({0, min(1, last), last})
    return (Budget(actor, engine, capacity, stage, does) for stage in stages)


def left_behind(engine: EnginePlan) -> int:
    """Bytes that an agent's processes keep on a device while another agent has its turn."""
    return CONTEXT + (GRAPHS if engine.keeps_graphs else 0)


def engine_weights(actor: ActorPlan, engine: EnginePlan) -> int:
    """vLLM cuts a model into tensor-parallel ranks as Megatron does, experts too, and into no stages."""
    whole = Layout(tp=engine.tp)
    dense = num_weights(actor.architecture, whole) - expert_weights(actor.architecture, whole)
    plain = (dense + _absorbed(actor.architecture, engine.tp)) * actor.device.itemsize + engine_experts(actor, engine)
    if engine.quantization is None:
        return plain
    return plain - saved_bytes(actor.architecture, engine.tp, engine.quantization, actor.device.itemsize)


def _absorbed(architecture: Architecture, tp: int) -> int:
    """Numbers that attention with latents holds a second time: the matrix of keys and values, by heads."""
    if (latent := architecture.latent) is None:
        return 0
    heads = architecture.num_heads // tp
    return architecture.attention_layers * heads * (latent.nope_dim + latent.value_dim) * latent.rank


def engine_experts(actor: ActorPlan, engine: EnginePlan) -> int:
    """Bytes of experts in an engine's weights; every rank has a part of every expert."""
    return expert_weights(actor.architecture, Layout()) // engine.tp * actor.device.itemsize


def waiting_bytes(actor: ActorPlan, engine: EnginePlan) -> int:
    """Bytes that quantization takes: two buckets that wait until all ranks have theirs, and copies of a matrix."""
    if engine.quantization is None:
        return 0
    return bucket_bytes(actor) // 2 + 2 * largest_matrix(actor.architecture, engine.tp) * actor.device.itemsize


def cache_per_token(budget: Budget) -> int:
    """Bytes of one token's keys and values in every layer with attention of one rank of the engine."""
    a: Architecture = budget.actor.architecture
    if a.latent is not None:  # one for all heads, on every rank
        return a.attention_layers * a.latent.cached * budget.actor.device.itemsize
    numbers = sum(max(1, heads.kv_heads // budget.engine.tp) * heads.size for heads in a.attention_heads)
    return 2 * numbers * budget.actor.device.itemsize


def cache_per_answer(budget: Budget) -> int:
    """Bytes of one answer's states in every delta net of one rank of the engine: vLLM keeps them in float32 at most."""
    a: Architecture = budget.actor.architecture
    if (delta := a.delta_net) is None:
        return 0
    numbers = delta.state * 4 + delta.mixed_rows * (delta.width - 1) * budget.actor.device.itemsize
    return (a.num_layers - a.attention_layers) * numbers // budget.engine.tp


def answers_at_once(budget: Budget, asked: float, tokens: float, at_most: float) -> float:
    """Answers of so many `tokens`, on average while they grow, that an engine has room for.

    Its cache limits them, its own limit `at_most`, and what it is `asked`.
    """
    each = cache_per_token(budget) * tokens + cache_per_answer(budget)
    return max(1.0, min(asked, at_most, budget.parts["engine cache"] / each))


def copies_s(budget: Budget) -> float:
    """Seconds of the copies of offloaded optimizer state in a step, out and back."""
    return 2 * sum(budget.parts[part] for part in OFFLOADED) / HOST_BYTES_PER_S


def bucket_bytes(actor: ActorPlan) -> int:
    """Most bytes of a weight sync: two buckets on their way, each of sent and of received numbers.

    Adapters are merged into copies of the weights, which take a bucket more.
    """
    whole = num_weights(actor.architecture, Layout(), 0) * actor.device.itemsize
    return (2 * 2 + (actor.lora is not None)) * min(BUCKET_BYTES, whole)
