"""Router replay (R3, arXiv 2510.11370): the engine's expert assignment of each token, returned with an answer.

Engine and actor round differently, and choose other experts where two are about as likely: the sampled policy and the
trained one then differ. So the actor takes the engine's choice for the agent's own answers, in every forward. Its own
router gives the chosen experts their shares, through which it learns. Other agents' answers have no routing of this
agent's engine.
Tokens with unknown routing (vLLM gave up before it read them) are routed by the actor.

Elsewhere: recording (rollout/vllm/routing.py), replay (megatron/model/moe.py).
"""

from collections.abc import Sequence

import numpy as np
import torch

from hacpo_mega.models.families.experts import expert_number_bytes
from hacpo_mega.records import TokenSequence


def routing_type(num_experts: int) -> np.dtype:
    """Integer type that holds the number of an expert, or `unknown_expert`."""
    return np.dtype(f"u{expert_number_bytes(num_experts)}")


def unknown_expert(dtype: np.dtype) -> int:
    """Highest number of the type, which marks unknown routing."""
    return int(np.iinfo(dtype).max)


def fit_rows(rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """First `num_tokens` rows of `rows` [known, layers, experts], filled up with `unknown_expert`."""
    missing = max(0, num_tokens - len(rows))
    fill = np.full((missing, *rows.shape[1:]), unknown_expert(rows.dtype), rows.dtype)
    return np.concatenate([rows[:num_tokens], fill])


def packed_routing(
    prompts: Sequence[TokenSequence], alone: Sequence[TokenSequence], answers: Sequence[TokenSequence], padding: int
) -> torch.Tensor | None:
    """`routing_TLK` of a micro-batch: prompts that several share, sequences alone, answers to the former, padding.

    A shared prompt takes the routing of the first of its answers. None if no sequence has a routing.
    """
    parts = [
        *((sequence, slice(len(sequence.prompt_ids))) for sequence in prompts),
        *((sequence, slice(_last_read(sequence))) for sequence in alone),
        *((sequence, slice(len(sequence.prompt_ids), _last_read(sequence))) for sequence in answers),
    ]
    shapes = {s.routing.shape[1:] for s, _ in parts if s.routing is not None}
    if not shapes:
        return None
    (shape,) = shapes
    rows = [_signed_rows(sequence, part, shape) for sequence, part in parts]
    return torch.from_numpy(np.concatenate([*rows, np.full((padding, *shape), -1, np.int16)]))


def _last_read(sequence: TokenSequence) -> int:
    return len(sequence.prompt_ids) + sequence.num_needed - 1


def _signed_rows(sequence: TokenSequence, part: slice, shape: tuple[int, ...]) -> np.ndarray:
    """Routing as int16 [tokens, layers, experts], -1 where unknown."""
    if sequence.routing is None:
        return np.full((part.stop - (part.start or 0), *shape), -1, np.int16)
    rows = sequence.routing[part]
    return np.where(rows == unknown_expert(rows.dtype), -1, rows.astype(np.int16))
