"""Rotary frequencies of a model, and what its cosines and sines are multiplied with.

Sources: transformers.modeling_rope_utils and vllm.model_executor.layers.rotary_embedding. P pairs that turn.
Not here: which kinds there are, and their numbers (models/rope.py).
"""

import math
from typing import Any

import torch

from hacpo_mega.models.architecture import Architecture
from hacpo_mega.models.rope import LinearRope, Llama3Rope, YarnRope

MAGNITUDE_FIELDS = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")


def rope_frequencies(architecture: Architecture) -> torch.Tensor:
    """Rotary frequencies, float32 [P]."""
    theta, rope = architecture.rope_theta, architecture.rope
    frequencies_P = _plain(architecture.rotary_dim, theta)
    match rope:
        case None:
            return frequencies_P
        case LinearRope():
            return frequencies_P / rope.factor
        case Llama3Rope():
            return _llama3(frequencies_P, rope)
        case YarnRope():
            return _yarn(frequencies_P, rope, theta)
    raise ValueError(f"{type(rope).__name__} has no frequencies")


def window_frequencies(architecture: Architecture) -> torch.Tensor:
    """Of layers with a window, where they have their own: float32 [P], else [0]."""
    theta = architecture.window_theta
    return torch.empty(0) if theta is None else _plain(architecture.rotary_dim, theta)


def _plain(size: int, theta: float) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size))


def magnitude_fields(architecture: Architecture) -> dict[str, Any]:
    """Attributes of Megatron's configuration by which its attention multiplies cosines and sines.

    Its concentration factor is (0.1 * mscale * ln(factor) + 1) over the same of mscale_all_dim, which are no fields of
    TransformerConfig. With a factor of e and nothing below it can be any number.
    """
    if not isinstance(architecture.rope, YarnRope):
        return {}
    mscale = 10.0 * (architecture.rope.attention_factor - 1.0)
    return dict(zip(MAGNITUDE_FIELDS, (math.e, mscale, 0.0), strict=True))


def _llama3(frequencies_P: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Keep wavelengths below original/high, divide those above original/low, blend between."""
    turns_P = rope.original_positions * frequencies_P / (2 * math.pi)
    keep_P = ((turns_P - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies_P * (keep_P + (1.0 - keep_P) / rope.factor)


def _yarn(frequencies_P: torch.Tensor, rope: YarnRope, theta: float) -> torch.Tensor:
    """Keep the pairs that turn often, divide those that turn seldom, blend linearly in the number of the pair."""
    num_pairs = len(frequencies_P)

    def pair_that_turns(often: float) -> float:
        return num_pairs * math.log(rope.original_positions / (often * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Clamped to the numbers of a head, not of its pairs, as both libraries do.
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001
    divide_P = ((torch.arange(num_pairs, dtype=torch.float32, device="cpu") - low) / width).clamp(0.0, 1.0)
    return frequencies_P / rope.factor * divide_P + frequencies_P * (1.0 - divide_P)
