"""Router replay (R3, arXiv 2510.11370): the experts that an engine has sent each token to, as they come with an answer.

Engine and actor round differently, and where two experts are about as likely they choose differently: then they are two
models. So the actor takes the engine's choice for the agent's own answers, in every forward of them, and gives the
chosen experts shares by its own router, which learns by these. Another agent's answers no engine of this one has read.
Of a token that nobody can say it of (one that vLLM gave up before it had read it) the actor's router decides.
Not here: who writes it down (rollout/vllm/routing.py) and who follows it (megatron/model/moe.py).
"""

from collections.abc import Sequence

import numpy as np
import torch

from hacpo_mega.models.families.experts import expert_number_bytes
from hacpo_mega.records import TokenSequence


def routing_type(num_experts: int) -> np.dtype:
    """What holds the number of an expert, or `unknown`."""
    return np.dtype(f"u{expert_number_bytes(num_experts)}")


def unknown(kind: np.dtype) -> int:
    """The highest number of a type, which is of no expert: nobody knows."""
    return int(np.iinfo(kind).max)


def fitted(rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """Of `num_tokens`, the first ones as `rows` [known, layers, experts] have them; nobody knows the rest."""
    missing = max(0, num_tokens - len(rows))
    fill = np.full((missing, *rows.shape[1:]), unknown(rows.dtype), rows.dtype)
    return np.concatenate([rows[:num_tokens], fill])


def packed_routing(
    prompts: Sequence[TokenSequence], alone: Sequence[TokenSequence], answers: Sequence[TokenSequence], padding: int
) -> torch.Tensor | None:
    """`routing_TLK` of a micro-batch: prompts that several share, sequences alone, answers to the former, padding.

    A shared prompt goes where it went with the first of its answers. None where no sequence says anything.
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
    rows = [_signed(sequence, part, shape) for sequence, part in parts]
    return torch.from_numpy(np.concatenate([*rows, np.full((padding, *shape), -1, np.int16)]))


def _last_read(sequence: TokenSequence) -> int:
    return len(sequence.prompt_ids) + sequence.num_trained - 1


def _signed(sequence: TokenSequence, part: slice, shape: tuple[int, ...]) -> np.ndarray:
    """int16, -1 where nobody knows."""
    if sequence.routing is None:
        return np.full((part.stop - (part.start or 0), *shape), -1, np.int16)
    rows = sequence.routing[part]
    return np.where(rows == unknown(rows.dtype), -1, rows.astype(np.int16))
