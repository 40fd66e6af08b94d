"""The bytes that a device sends in a step, by link, and their seconds: every collective of a phase as a row.

Each of n ranks sends (n - 1) / n of what it gathers or scatters, twice that of what it sums (a ring; arXiv 2205.05198
for those of tensor and sequence parallelism). Megatron gathers the inputs of both matrices of a block, and scatters
their outputs; backward mirrors that and gathers the inputs again for the gradient of the weights. Context parallelism
sends queries, keys, values and the output of every attention to other ranks, and their gradients back. Experts take
what a rank has of the tokens, so that nothing is gathered but for shared ones: expert parallelism sends every token to
each of its experts and back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hacpo_lab.planning.cluster_file import Cluster
from hacpo_lab.planning.configuration import Work
from hacpo_lab.planning.publication import Published, published
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.memory.actor_bytes import FLOAT32, trained_parts
from hacpo_mega.memory.adapter_numbers import is_adapted
from hacpo_mega.memory.budget import Budget
from hacpo_mega.models.sharding.layout import stage_layers

# Bytes of a message (rollout/wire.py), and of an answer beside its tokens and text: ROW of exchange.py, and two counts.
HEADER_BYTES, ROW_BYTES, COUNT_BYTES = 64, 47, 8
# Bytes of a token in the exchange: its number, and its text, about four letters.
TOKEN_BYTES = 4 + 4
# Gathers and scatters of one layer's activations: forward, backward, and what recomputation repeats.
FORWARD, BACKWARD = 4, 6
AGAIN = {"none": 0, "mlp": 2, "full": FORWARD}
# All-to-alls of an attention, one way: of queries, keys, values, the output; of experts: there and back.
EXCHANGES, TO_EXPERTS = 4, 2
# Sums over tensor parallelism in a layer of the engine.
ENGINE_SUMS = 2


@dataclass(frozen=True)
class Spread:
    """The groups of an agent that stay inside a node: of tensor ranks, of these and those of cp, of those that share
    experts, of stages, of the cells, of one engine."""

    tp: bool
    cp: bool
    ep: bool
    pp: bool
    dp: bool
    engine: bool


@dataclass(frozen=True)
class Message:
    """Bytes of a kind that a device sends in a step: `num_bytes` in all, in `count` messages that wait for each other.

    `piped` says that every micro-batch of a pipeline has its part of it, for which other stages wait.
    """

    phase: str
    what: str
    inside: bool
    num_bytes: float
    count: float
    piped: bool = False

    def seconds(self, cluster: Cluster) -> float:
        """Seconds on the link."""
        latency_s = cluster.links.latency_us * 1e-6 * self.count
        return self.num_bytes / cluster.bytes_per_s(inside=self.inside) + latency_s


def spread_of(ranks: RankMap, agent: int, devices_per_node: int) -> Spread:
    """Where the groups of an agent lie: ranks fill the nodes in their order."""
    shape, first = ranks.agents[agent], ranks.first_ranks[agent]
    last = first + ranks.agent_world_size(agent)
    sharing = shape.ep if shape.block_cells == 1 else shape.block_size

    def together(size: int, width: int) -> bool:
        """Tells whether each block of `width` neighbours, of which all `size` blocks exist, lies in one node."""
        return all(
            start // devices_per_node == (start + width - 1) // devices_per_node for start in range(first, last, size)
        )

    return Spread(
        tp=together(shape.tp, shape.tp),
        cp=together(shape.tp * shape.cp, shape.tp * shape.cp),
        ep=together(sharing, sharing),
        pp=together(shape.cell_size, shape.cell_size),
        dp=together(last - first, last - first),
        engine=together(shape.engine_tp, shape.engine_tp),
    )


def messages_of(budget: Budget, work: Work, lanes: int, spread: Spread, rounds: float) -> Iterator[Message]:
    """Every kind of message of an agent's device; `rounds` are those of its engine (seconds.py)."""
    cells = budget.actor.dp
    yield from _of_engine(budget, work, spread, rounds)
    scored, trained = work.scored / cells, work.trained / cells
    yield from _of_model("score", budget, scored * work.length, sum(score_batches(budget, work)), 1, spread)
    yield from _of_model("learn", budget, trained * work.length, sum(learn_batches(budget, work)), 2, spread)
    yield from _of_gradients(budget, work, spread)
    yield from _of_exchange(budget, work, lanes, spread)
    yield from _of_publication(budget, spread)


def score_batches(budget: Budget, work: Work) -> list[int]:
    """Micro-batches in which a cell scores its own answers: of the first update's, then of the rest."""
    first = work.answers / work.updates
    parts = [first] * (work.scored_updates == work.updates) + [work.answers - first] * (work.updates > 1)
    return [_micro_batches(budget, work, part) for part in parts]


def learn_batches(budget: Budget, work: Work) -> list[int]:
    """Micro-batches of a cell's updates. In the first own answers are apart, as scored; in all if they are replayed."""
    trained, sources = work.trained / work.updates, work.sources
    own, others = trained / sources, trained - trained / sources
    first = _micro_batches(budget, work, own) + (_micro_batches(budget, work, others) if sources > 1 else 0)
    later = first if budget.actor.replayed else _micro_batches(budget, work, trained)
    return [first, *[later] * (work.updates - 1)]


def _micro_batches(budget: Budget, work: Work, answers: float) -> int:
    return max(1, math.ceil(answers / budget.actor.dp * work.length / budget.actor.num_tokens))


def message_bytes(answers: float, answer_tokens: float) -> float:
    """Bytes of what a cell's leader sends the others of its lane (rollout/wire.py)."""
    return HEADER_BYTES + answers * (ROW_BYTES + COUNT_BYTES + TOKEN_BYTES * answer_tokens)


def _of_engine(budget: Budget, work: Work, spread: Spread, rounds: float) -> Iterator[Message]:
    a, tp = budget.actor.architecture, budget.engine.tp
    if tp == 1:
        return
    engines = budget.actor.dp * budget.actor.layout.cell_size / tp
    tokens = work.answers / engines * work.answer_tokens + _prompts_of_engine(work, engines) * work.prompt_tokens
    sums = ENGINE_SUMS * a.num_layers
    size = sums * 2 * (tp - 1) / tp * tokens * a.hidden_size * budget.actor.device.itemsize
    yield Message("roll_out", "sums of an engine", spread.engine, size, sums * rounds)


def _prompts_of_engine(work: Work, engines: float) -> float:
    """Every prompt once: an engine keeps what it has read for the further answers to it."""
    return min(work.prompts, work.answers / engines)


def _of_model(phase: str, budget: Budget, tokens: float, batches: int, ways: int, spread: Spread) -> Iterator[Message]:
    actor = budget.actor
    a, layout, itemsize = actor.architecture, actor.layout, actor.device.itemsize
    row, tokens = a.hidden_size * itemsize, tokens / layout.cp
    if layout.cp > 1:
        yield _of_attention(phase, budget, tokens, batches, spread)
    if layout.ep > 1:
        yield _of_experts(phase, budget, tokens / layout.tp, batches, spread)
    if layout.tp > 1:
        collectives = math.ceil(_gathers(phase, budget) / layout.pp)
        size = collectives * (layout.tp - 1) / layout.tp * tokens * row
        yield Message(phase, "gathers and scatters of tp", spread.tp, size, collectives * batches, piped=True)
    if layout.pp > 1:
        sends = ways * layout.vpp
        yield Message(phase, "sends of pp", spread.pp, sends * tokens / layout.tp * row, sends * batches, piped=True)


def _gathers(phase: str, budget: Budget) -> int:
    """Gathers and scatters of all layers over tensor parallelism, of which experts have no part but for shared ones."""
    a, again = budget.actor.architecture, AGAIN[budget.actor.recompute]
    whole = {"score": FORWARD, "learn": FORWARD + BACKWARD + again}[phase]
    half = {"score": FORWARD, "learn": FORWARD + BACKWARD + (again if again == FORWARD else 0)}[phase] // 2
    halves = 0 if a.shared_ffn else a.expert_layers
    return (a.num_layers - halves) * whole + halves * half


def _of_experts(phase: str, budget: Budget, tokens: float, batches: int, spread: Spread) -> Message:
    """The message of a rank that sends its `tokens` to their experts, of which those of other ranks are as likely as
    its own, and what it sends back; again backward, and where it is computed again."""
    actor = budget.actor
    a, ep = actor.architecture, actor.layout.ep
    ways = {"score": 1, "learn": 2 + (actor.recompute != "none")}[phase]
    count = ways * TO_EXPERTS * math.ceil(a.expert_layers / actor.layout.pp)
    size = count * (ep - 1) / ep * tokens * a.experts_per_token * a.hidden_size * actor.device.itemsize
    return Message(phase, "tokens of ep", spread.ep, size, count * batches, piped=True)


def _of_attention(phase: str, budget: Budget, tokens: float, batches: int, spread: Spread) -> Message:
    """The message of a rank of cp that sends its `tokens` around every attention, forward, backward and computed again.

    And the output once more, for who learns of it (context_parallel.py: FromHeads).
    """
    actor = budget.actor
    a, layout = actor.architecture, actor.layout
    ways = {"score": 1, "learn": 2 + (actor.recompute == "full")}[phase]
    learns = actor.lora is None or is_adapted(a, actor.lora, "self_attention.linear_proj")
    again, attentions = int(phase == "learn" and learns), math.ceil(a.num_layers / layout.pp)
    # Queries and keys, and, as long as values, these and the output.
    numbers, q = 0, a.num_heads // layout.tp
    for heads in a.attention_heads:
        k = max(heads.kv_heads // layout.tp, layout.cp)
        value = heads.size if a.latent is None else a.value_dim
        numbers += ways * (q + k) * (heads.size + value) + again * q * value
    size = (layout.cp - 1) / layout.cp * tokens * numbers / a.num_layers * attentions * actor.device.itemsize
    count = attentions * (ways * EXCHANGES + again)
    return Message(phase, "heads of cp", spread.cp, size, count * batches, piped=True)


def _of_gradients(budget: Budget, work: Work, spread: Spread) -> Iterator[Message]:
    actor = budget.actor
    dense, experts = trained_parts(actor, budget.stage)
    parts = (("dp", dense, actor.shards), ("experts", experts, actor.expert_shards))
    for what, numbers, ranks in parts:
        if numbers and ranks > 1:
            size = (ranks - 1) / ranks * numbers * (FLOAT32 + actor.device.itemsize)
            # Each of the ring's 2 (ranks - 1) steps waits for the one before.
            count = 2.0 * (ranks - 1) * work.updates
            yield Message("learn", f"gradients and weights of {what}", spread.dp, size * work.updates, count)


def _of_exchange(budget: Budget, work: Work, lanes: int, spread: Spread) -> Iterator[Message]:
    """Answers go over the hosts' network: agents are on different nodes, where there are several."""
    lane = message_bytes(work.pool / lanes, work.answer_tokens)
    mine = message_bytes(work.answers / budget.actor.dp, work.answer_tokens)
    if lane > mine:
        yield Message("exchange", "answers down the lane", False, lane - mine, 4.0)
    if budget.actor.layout.cell_size > 1:
        yield Message("exchange", "answers inside a cell", spread.pp, lane, 2.0)


def _of_publication(budget: Budget, spread: Spread) -> Iterator[Message]:
    moved = publication_of(budget)
    if moved.num_receivers:
        size = max(moved.sent) * budget.actor.device.itemsize
        several = budget.actor.layout.block_cells > 1
        where, inside = ("over cells", spread.ep) if several else ("inside a cell", spread.pp)
        yield Message("publish", f"shards {where}", inside, size, moved.num_receivers)


def publication_of(budget: Budget) -> Published:
    """The traffic of one publication of the agent in each of its cells, or of the blocks of them that share experts."""
    actor = budget.actor
    stages = stage_layers(actor.architecture.num_layers, actor.layout)
    layout = actor.layout
    return published(actor.architecture, layout.tp, stages, budget.engine.tp, layout.cp, layout.ep)
