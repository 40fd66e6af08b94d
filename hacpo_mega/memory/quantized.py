"""Bytes that vLLM keeps of a matrix that it quantizes on loading: its numbers and their scales. Imports no torch.

The kinds are those of vLLM 0.32 that need no quantized folder (`_ONLINE_SHORTHANDS` of its configuration). Embedding
and head stay as they are.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import Cut, Slot, shard_shape, stage_slots

FLOAT32 = 4
# Rows and columns that share a scale of the kind by blocks.
BLOCK = 128
# By the value of vLLM's `quantization`: bytes of a matrix of (rows, columns).
KINDS: Mapping[str, Callable[[int, int], int]] = {
    "fp8": lambda rows, columns: rows * columns + FLOAT32,
    "fp8_per_tensor": lambda rows, columns: rows * columns + FLOAT32,
    "fp8_per_channel": lambda rows, columns: rows * (columns + FLOAT32),
    "fp8_per_block": lambda rows, columns: rows * columns + FLOAT32 * -(-rows // BLOCK) * -(-columns // BLOCK),
    "mxfp8": lambda rows, columns: rows * (columns + columns // 32),
    "mxfp4": lambda rows, columns: rows * (columns // 2 + columns // 32),
}


def quantization_of(vllm: Mapping[str, Any]) -> str | None:
    """The one of KINDS that the engine arguments ask for; None where they ask for none that is known here."""
    kind = vllm.get("quantization")
    return kind if kind in KINDS else None


@functools.cache  # advice asks again and again
def saved_bytes(architecture: Architecture, tp: int, kind: str, itemsize: int) -> int:
    """Bytes that quantization saves on an engine's rank of `tp`, against weights of `itemsize` bytes each."""
    return sum(
        rows * columns * itemsize - KINDS[kind](rows, columns)
        for slot in stage_slots(architecture, (architecture.num_layers,), 0)
        for rows, columns in _matrices(slot, architecture, tp)
    )


def largest_matrix(architecture: Architecture, tp: int) -> int:
    """Numbers of the largest quantized matrix on a rank of `tp`."""
    slots = stage_slots(architecture, (architecture.num_layers,), 0)
    return max(math.prod(matrix) for slot in slots for matrix in _matrices(slot, architecture, tp))


def _matrices(slot: Slot, architecture: Architecture, tp: int) -> list[tuple[int, int]]:
    """(rows, columns) of each matrix in a rank's shard of a parameter; none if it is not quantized."""
    if slot.cut is Cut.EXPERTS:
        # Gate and up, which read the hidden state, are cut by rows, down by columns.
        shapes = (source.shape for source in slot.sources)
        return [(r // tp, c) if c == architecture.hidden_size else (r, c // tp) for r, c in shapes]
    if slot.cut not in (Cut.QKV, Cut.COLUMNS, Cut.GATE_UP) or len(slot.sources[0].shape) == 1:
        return []
    return [tuple(shard_shape(slot, architecture, tp=tp))]
