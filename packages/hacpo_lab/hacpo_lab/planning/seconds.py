"""The seconds of an agent's phases on a cluster: a roofline whose every constant is a key of the cluster file.

    seconds = FLOPs / (peak x share) + bytes / (bandwidth x share) + messages + the host's

Decoding is bound by the slower of its matrix products and its reads of weights and cache. In the phases of the trainer
both add up: activations pass through memory between the products. FLOPs are those of models/flops.py.
Elsewhere: who waits for whom (plan.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Work
from hacpo_lab.planning.traffic import Message, Spread, learn_batches, messages_of, publication_of, score_batches
from hacpo_mega.memory.actor_bytes import FLOAT32, ActorPlan, actor_memory, trained_parts
from hacpo_mega.memory.adapter_numbers import num_merged
from hacpo_mega.memory.budget import (
    Budget,
    answers_at_once,
    cache_per_token,
    copies_s,
    engine_experts,
    engine_weights,
)
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.flops import feed_forward_parameters, forward_flops, learning_flops, touched_experts
from hacpo_mega.models.sharding.segments import all_sources

PHASES = ("roll_out", "judge", "score", "exchange", "learn", "publish", "other")
# Bytes per number in Adam's step: gradient, main weight and both moments read, all but the gradient written.
STEP_PASSES = 4 + 2 * 4 + 2 * 8
# Copied numbers are read and written.
COPY_PASSES = 2
# Per number that an adapter is merged into and unit of its rank: a product written, it and a sum read, the sum written.
MERGE_PASSES = 4

Terms = Mapping[str, float]


@dataclass(frozen=True)
class Demand:
    """The work of an agent, and the ranks and engines that do it.

    num_workers    grading processes of a cell
    max_requests   answers that an engine may run at once
    """

    budget: Budget
    work: Work
    lanes: int
    spread: Spread
    num_workers: int
    max_requests: int

    @property
    def engines(self) -> float:
        """Engines of the agent."""
        return self.budget.actor.dp * self.budget.actor.layout.cell_size / self.budget.engine.tp

    @property
    def at_once(self) -> float:
        """Answers that an engine runs at once: the least of its cache's room, its limit, and its requests."""
        tokens = self.work.prompt_tokens + self.work.answer_tokens / 2
        return answers_at_once(self.budget, self.work.answers / self.engines, tokens, self.max_requests)

    @property
    def rounds(self) -> float:
        """Tokens that an engine samples one after the other: of the longest answer, or more where not all fit."""
        requests = self.work.answers / self.engines
        return max(self.work.longest, requests * self.work.own_tokens / self.at_once)

    def messages(self) -> tuple[Message, ...]:
        """The messages that a device sends."""
        return tuple(messages_of(self.budget, self.work, self.lanes, self.spread, self.rounds))


def phase_seconds(demand: Demand, cluster: Cluster) -> dict[str, Terms]:
    """Seconds of every phase of an agent, by term; their sum is the phase's."""
    terms: dict[str, dict[str, float]] = {
        "roll_out": _roll_out(demand, cluster),
        "judge": {"host": _judge(demand, cluster)},
        "score": _score(demand, cluster),
        "exchange": {"host": _exchange(demand, cluster)},
        "learn": _learn(demand, cluster),
        "publish": _publish(demand, cluster),
        "other": {"host": cluster.rates.step_s},
    }
    piped_s = {phase: terms[phase]["compute"] + terms[phase]["memory"] for phase in ("score", "learn")}
    for message in demand.messages():
        link, phase = "link inside" if message.inside else "link between", message.phase
        seconds = message.seconds(cluster)
        terms[phase][link] = terms[phase].get(link, 0.0) + seconds
        if message.piped:
            piped_s[phase] += seconds
    # Idle time of a stage before and after its work, over that work: pp - 1 chunks of every pass over batches.
    layout = demand.budget.actor.layout
    waits = (layout.pp - 1) / layout.vpp
    for phase, batches in (("score", score_batches), ("learn", learn_batches)):
        passes = batches(demand.budget, demand.work)
        terms[phase]["bubble"] = piped_s[phase] * waits * len(passes) / max(1, sum(passes))
    return {phase: {term: s for term, s in terms[phase].items() if s > 0.0} for phase in PHASES}


def _roll_out(demand: Demand, cluster: Cluster) -> dict[str, float]:
    budget, work, rates = demand.budget, demand.work, cluster.rates
    model, peak = budget.actor.architecture, _peak(budget.actor.architecture, cluster) * budget.engine.tp
    answers = work.answers / demand.engines
    tokens, whole = answers * work.own_tokens, work.prompt_tokens + work.answer_tokens
    weights = engine_weights(budget.actor, budget.engine)
    if model.has_experts:  # weights of experts without a token are not read
        idle = 1.0 - touched_experts(model, demand.at_once)
        weights -= idle * engine_experts(budget.actor, budget.engine)
    read = demand.rounds * weights
    read += tokens * (work.prompt_tokens + work.answer_tokens / 2) * cache_per_token(budget)
    memory_s = read / cluster.memory_bytes_per_s()
    flops = forward_flops(model, answers, whole) - forward_flops(model, answers, work.prompt_tokens)
    read_flops = flops * work.others_tokens / work.answer_tokens  # others' turns are prefilled, not decoded
    decode_s = (flops - read_flops) / (peak * rates.decode)
    prompts = min(float(work.prompts), answers)
    prefill_s = (forward_flops(model, prompts, work.prompt_tokens) + read_flops) / (peak * rates.prefill)
    bound = {"memory": memory_s} if memory_s > decode_s else {"compute": decode_s}
    bound["compute"] = bound.get("compute", 0.0) + prefill_s
    requests = answers * work.turns
    host_s = demand.rounds * rates.round_s + requests * rates.request_s + tokens * rates.token_s
    # The waits of one conversation are added, as if no other one's turns were computed meanwhile: an upper bound.
    waits = {"environment": (work.turns - 1) * work.environment_s} if work.environment_s else {}
    return {**bound, "host": host_s, **waits}


def _judge(demand: Demand, cluster: Cluster) -> float:
    return cluster.rates.answer_s * demand.work.answers / demand.budget.actor.dp / demand.num_workers


def _exchange(demand: Demand, cluster: Cluster) -> float:
    """Every rank unpacks its lane's answers, and cuts those of others that its cell learns from into own tokens."""
    work, rates = demand.work, cluster.rates
    others = work.trained * (1.0 - 1.0 / work.sources) / demand.budget.actor.dp
    return rates.pool_s * work.pool / demand.lanes + others * (rates.view_s + rates.view_token_s * work.answer_tokens)


def _score(demand: Demand, cluster: Cluster) -> dict[str, float]:
    answers, rates = demand.work.scored / demand.budget.actor.dp, cluster.rates
    flops = forward_flops(demand.budget.actor.architecture, answers, demand.work.length)
    passed = rates.score_passes * answers * demand.work.length * _kept_per_token(demand.budget.actor)
    return {
        "compute": flops / (_peak_of_cell(demand, cluster) * rates.score),
        "memory": passed / cluster.memory_bytes_per_s(),
        "host": rates.batch_s * sum(score_batches(demand.budget, demand.work)),
    }


def _learn(demand: Demand, cluster: Cluster) -> dict[str, float]:
    actor, work, rates = demand.budget.actor, demand.work, cluster.rates
    answers = work.trained / actor.dp
    forward = forward_flops(actor.architecture, answers, work.length)
    learning = learning_flops(actor.architecture, answers, work.length, actor.lora)
    again = {"none": 0.0, "mlp": _feed_forward_share(actor), "full": 1.0}[actor.recompute]
    passed = rates.learn_passes * answers * work.length * _kept_per_token(actor)
    dense, experts = trained_parts(actor, demand.budget.stage)
    # The gradient's buffer is cleared, Adam works on this rank's share.
    step = work.updates * (dense * (FLOAT32 + STEP_PASSES / actor.shards) + experts * FLOAT32)
    step += work.updates * experts * STEP_PASSES / actor.expert_shards
    return {
        "compute": (learning + again * forward) / (_peak_of_cell(demand, cluster) * rates.learn),
        "memory": passed / cluster.memory_bytes_per_s(),
        "optimizer": step / cluster.memory_bytes_per_s(),
        # a backward is launched, too
        "host": 2.0 * rates.batch_s * sum(learn_batches(demand.budget, work)),
    }


def _publish(demand: Demand, cluster: Cluster) -> dict[str, float]:
    actor, moved = demand.budget.actor, publication_of(demand.budget)
    passed = COPY_PASSES * (max(moved.written) + max(moved.received)) * actor.device.number
    if actor.lora is not None:
        merged = num_merged(actor.architecture, actor.layout, demand.budget.stage, actor.lora)
        passed += MERGE_PASSES * FLOAT32 * actor.lora.rank * merged
    host_s = cluster.rates.publish_s + cluster.rates.tensor_s * _num_tensors(actor.architecture)
    host_s += copies_s(demand.budget) if actor.offloads else 0.0  # as if nothing hid them
    return {"memory": passed / cluster.memory_bytes_per_s(), "host": host_s}


@cache
def _num_tensors(model: Architecture) -> int:
    return sum(1 for _ in all_sources(model))


def _peak_of_cell(demand: Demand, cluster: Cluster) -> float:
    return _peak(demand.budget.actor.architecture, cluster) * demand.budget.actor.layout.cell_size


def _peak(model: Architecture, cluster: Cluster) -> float:
    """FLOP/s of a device, of which the rates are shares."""
    return 1e12 * cluster.device.peak_tflops * (cluster.rates.experts if model.has_experts else 1.0)


def _feed_forward_share(actor: ActorPlan) -> float:
    """The share of a forward pass that the feed-forwards take."""
    model = actor.architecture
    return 2.0 * feed_forward_parameters(model) / forward_flops(model, 1, 1)


def _kept_per_token(actor: ActorPlan) -> float:
    """Bytes of activations that one rank of the last stage has of a token, all of them kept."""
    plain = replace(actor, recompute="none")
    return actor_memory(plain, actor.layout.pp - 1).kept / actor.num_tokens
