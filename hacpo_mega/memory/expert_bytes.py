"""Bytes that the experts of a layer take on one device beside their weights: a formula. Imports no torch.

The terms are what megatron/model/moe.py keeps. A rank's s tokens are k rows each, which go to the ranks that have the
experts and come back; where every expert gets as many, a rank computes R = s k rows, of hidden size h and an expert's
width f. Only with ep can they be more: all tokens of its ep ranks may ask for the experts of one of them. Compared
with the real layer by tests/unit/memory/test_memory_trace.py, as actor_bytes.py is.
"""

from dataclasses import dataclass

from hacpo_mega.memory.adapter_numbers import is_adapted
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.experts import expert_number_bytes
from hacpo_mega.models.sharding.layout import Layout
from hacpo_mega.models.sharding.lora import Lora

INT16, FLOAT32, INT64 = 2, 4, 8


@dataclass(frozen=True)
class ExpertBytes:
    """Expert bytes of one layer and one micro-batch, every expert having as many tokens.

    kept      for backward
    working   what backward takes at most on top of that
    forward   what a forward that keeps nothing takes
    worst     how much more is kept where all tokens go to the experts of this rank
    """

    kept: int
    working: int
    forward: int
    worst: int


def expert_bytes(
    a: Architecture, layout: Layout, own_tokens: int, itemsize: int, lora: Lora | None = None
) -> ExpertBytes:
    """Expert bytes for `own_tokens` of a cp rank, whose tensor ranks have a part of them each; none for a dense model.

    Backward takes the most where shares have met their rows, whose gradients are put in order; where the second matrix
    gets its gradient; at the activation; where the first matrix gets its gradient. With `lora` matrices have none, and
    only what has an adapter keeps what it reads.
    """
    if not a.has_experts:
        return ExpertBytes(0, 0, 0, 0)
    tokens, per_token, experts = own_tokens // layout.tp, a.experts_per_token, a.num_experts // layout.ep
    rows = tokens * per_token
    hidden, ffn = rows * a.hidden_size * itemsize, rows * a.expert_ffn * itemsize
    down = experts * a.hidden_size * a.expert_ffn * itemsize
    crosses = layout.ep > 1
    # Probabilities of all experts; shares before and after they add up to 1, their sum, the numbers of their experts.
    routing = tokens * (a.num_experts * FLOAT32 + per_token * (2 * FLOAT32 + INT64) + FLOAT32)
    if a.traits.experts.beside:  # and the factor of each, the shares before it, and their numbers again
        routing += rows * (2 * FLOAT32 + INT64)
    orders = rows * INT64 * (3 if crosses else 1)
    reads, reads_product = (lora is None or is_adapted(a, lora, f"mlp.experts.{name}") for name in ("gate_up", "down"))
    # Rows as they come, gate and up, their product, rows as they went back.
    kept = routing + orders + (1 + reads) * hidden + (2 + reads_product) * ffn
    learnt = (ffn + down, 2 * ffn - hidden, 2 * down - ffn) if lora is None else (ffn, 3 * ffn - hidden)
    more = tokens * (layout.ep * min(per_token, experts) - per_token)
    return ExpertBytes(
        kept=kept,
        working=max(2 * hidden, *learnt),
        forward=routing + (3 if crosses else 2) * hidden + 3 * ffn,
        worst=more * ((reads * a.hidden_size + (2 + reads_product) * a.expert_ffn) * itemsize + 2 * INT64),
    )


def replayed_bytes(a: Architecture, tokens: int, num_layers: int) -> int:
    """Bytes of the replayed expert choices of so many tokens in so many layers."""
    return tokens * num_layers * a.experts_per_token * INT16


def answer_routing_bytes(a: Architecture, tokens: int) -> int:
    """Host bytes of the routing of so many tokens of answers and their prompts (samples/routing.py)."""
    return tokens * a.num_layers * a.experts_per_token * expert_number_bytes(a.num_experts)
