"""The bytes that a device sends in a step, by link, and their seconds: a `Message` for every kind of collective.

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

# Bytes of a message's header (rollout/wire.py), and of an answer beside tokens and text: ROW of exchange.py, counts.
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
    """Tells of each kind of an agent's groups whether all of them lie inside a node.

    The groups are of tensor ranks, of tp x cp ranks, of ranks that share experts, of a cell's stages, of all cells, and
    of an engine's ranks.
    """

    tp: bool
    cp: bool
    ep: bool
    pp: bool
    dp: bool
    engine: bool


@dataclass(frozen=True)
class Message:
    """A kind of message that a device sends in a step: `num_bytes` in all, in `count` messages, one after the other.

    inside   whether it stays inside a node      piped   whether each micro-batch of a pipeline sends a part of it, for
                                                         which other stages wait
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


Messages = Iterator[Message]


def spread_of(ranks: RankMap, agent: int, devices_per_node: int) -> Spread:
    """The spread of an agent's groups, where ranks fill the nodes in their order."""
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


def messages_of(budget: Budget, work: Work, lanes: int, spread: Spread, rounds: float) -> Messages:
    """Every kind of message of an agent's device; `rounds` are tokens that its engine samples in turn (seconds.py)."""
    cells = budget.actor.dp
    yield from _engine_messages(budget, work, spread, rounds)
    scored, trained = work.scored / cells, work.trained / cells
    yield from _model_messages("score", budget, scored * work.length, sum(score_batches(budget, work)), 1, spread)
    yield from _model_messages("learn", budget, trained * work.length, sum(learn_batches(budget, work)), 2, spread)
    yield from _gradient_messages(budget, work, spread)
    yield from _exchange_messages(budget, work, lanes, spread)
    yield from _publication_messages(budget, spread)


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
    """Bytes of the message in which a cell's leader sends its answers to the others of its lane (rollout/wire.py)."""
    return HEADER_BYTES + answers * (ROW_BYTES + COUNT_BYTES + TOKEN_BYTES * answer_tokens)


def _engine_messages(budget: Budget, work: Work, spread: Spread, rounds: float) -> Messages:
    a, tp = budget.actor.architecture, budget.engine.tp
    if tp == 1:
        return
    engines = budget.actor.dp * budget.actor.layout.cell_size / tp
    tokens = work.answers / engines * work.answer_tokens + _prompts_of_engine(work, engines) * work.prompt_tokens
    sums = ENGINE_SUMS * a.num_layers
    size = sums * 2 * (tp - 1) / tp * tokens * a.hidden_size * budget.actor.device.number
    yield Message("roll_out", "sums of an engine", spread.engine, size, sums * rounds)


def _prompts_of_engine(work: Work, engines: float) -> float:
    """Prompts that an engine reads, each once: its prefix cache serves the further answers."""
    return min(work.prompts, work.answers / engines)


def _model_messages(phase: str, budget: Budget, tokens: float, batches: int, passes: int, spread: Spread) -> Messages:
    actor = budget.actor
    a, layout, number = actor.architecture, actor.layout, actor.device.number
    row, tokens = a.hidden_size * number, tokens / layout.cp
    if layout.cp > 1:
        yield _attention_message(phase, budget, tokens, batches, spread)
    if layout.ep > 1:
        yield _expert_message(phase, budget, tokens / layout.tp, batches, spread)
    if layout.tp > 1:
        collectives = math.ceil(_num_gathers(phase, budget) / layout.pp)
        size = collectives * (layout.tp - 1) / layout.tp * tokens * row
        yield Message(phase, "gathers and scatters of tp", spread.tp, size, collectives * batches, piped=True)
    if layout.pp > 1:
        sends = passes * layout.vpp
        yield Message(phase, "sends of pp", spread.pp, sends * tokens / layout.tp * row, sends * batches, piped=True)


def _num_gathers(phase: str, budget: Budget) -> int:
    """Number of gathers and scatters of all layers over tensor parallelism; experts need none, except shared ones."""
    a, again = budget.actor.architecture, AGAIN[budget.actor.recompute]
    whole = {"score": FORWARD, "learn": FORWARD + BACKWARD + again}[phase]
    half = {"score": FORWARD, "learn": FORWARD + BACKWARD + (again if again == FORWARD else 0)}[phase] // 2
    halves = 0 if a.shared_ffn else a.expert_layers
    return (a.num_layers - halves) * whole + halves * half


def _expert_message(phase: str, budget: Budget, tokens: float, batches: int, spread: Spread) -> Message:
    """Tokens that a rank sends to their experts, and back: forward, backward, and in recomputation.

    A token's experts are as likely on any rank.
    """
    actor = budget.actor
    a, ep = actor.architecture, actor.layout.ep
    passes = {"score": 1, "learn": 2 + (actor.recompute != "none")}[phase]
    count = passes * TO_EXPERTS * math.ceil(a.expert_layers / actor.layout.pp)
    size = count * (ep - 1) / ep * tokens * a.experts_per_token * a.hidden_size * actor.device.number
    return Message(phase, "tokens of ep", spread.ep, size, count * batches, piped=True)


def _attention_message(phase: str, budget: Budget, tokens: float, batches: int, spread: Spread) -> Message:
    """Heads of its `tokens` that a rank of cp sends around every attention: forward, backward, and in recomputation.

    The output is sent once more where the projection after it learns (context_parallel.py: FromHeads).
    """
    actor = budget.actor
    a, layout = actor.architecture, actor.layout
    passes = {"score": 1, "learn": 2 + (actor.recompute == "full")}[phase]
    learns = actor.lora is None or is_adapted(a, actor.lora, "self_attention.linear_proj")
    again, attentions = int(phase == "learn" and learns), math.ceil(a.num_layers / layout.pp)
    # Queries and keys have a head's size, values and the output that of a value.
    numbers, q = 0, a.num_heads // layout.tp
    for heads in a.attention_heads:
        k = max(heads.kv_heads // layout.tp, layout.cp)
        value = heads.size if a.latent is None else a.value_dim
        numbers += passes * (q + k) * (heads.size + value) + again * q * value
    size = (layout.cp - 1) / layout.cp * tokens * numbers / a.num_layers * attentions * actor.device.number
    count = attentions * (passes * EXCHANGES + again)
    return Message(phase, "heads of cp", spread.cp, size, count * batches, piped=True)


def _gradient_messages(budget: Budget, work: Work, spread: Spread) -> Messages:
    actor = budget.actor
    dense, experts = trained_parts(actor, budget.stage)
    parts = (("dp", dense, actor.shards), ("experts", experts, actor.expert_shards))
    for what, numbers, ranks in parts:
        if numbers and ranks > 1:
            size = (ranks - 1) / ranks * numbers * (FLOAT32 + actor.device.number)
            # Each of the ring's 2 (ranks - 1) steps waits for the one before.
            count = 2.0 * (ranks - 1) * work.updates
            yield Message("learn", f"gradients and weights of {what}", spread.dp, size * work.updates, count)


def _exchange_messages(budget: Budget, work: Work, lanes: int, spread: Spread) -> Messages:
    """Answers, which go between nodes: agents are on different ones, where there are several."""
    lane = message_bytes(work.pool / lanes, work.answer_tokens)
    mine = message_bytes(work.answers / budget.actor.dp, work.answer_tokens)
    if lane > mine:
        yield Message("exchange", "answers down the lane", False, lane - mine, 4.0)
    if budget.actor.layout.cell_size > 1:
        yield Message("exchange", "answers inside a cell", spread.pp, lane, 2.0)


def _publication_messages(budget: Budget, spread: Spread) -> Messages:
    moved = publication_of(budget)
    if moved.num_receivers:
        size = max(moved.sent) * budget.actor.device.number
        several = budget.actor.layout.block_cells > 1
        where, inside = ("over cells", spread.ep) if several else ("inside a cell", spread.pp)
        yield Message("publish", f"shards {where}", inside, size, moved.num_receivers)


def publication_of(budget: Budget) -> Published:
    """The traffic of one publication in a cell of the agent, or in a block of cells that share experts."""
    actor = budget.actor
    stages = stage_layers(actor.architecture.num_layers, actor.layout)
    layout = actor.layout
    return published(actor.architecture, layout.tp, stages, budget.engine.tp, layout.cp, layout.ep)
