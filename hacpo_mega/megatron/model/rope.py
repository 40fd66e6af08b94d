"""Rotary positions: frequencies of a model, cosines and sines of a micro-batch, and their application in attention;
attention whose queries, keys and values are made otherwise than Megatron's.

Cosines and sines are made once a micro-batch for all layers. Megatron's own function would make them twice in every
layer, and keep them for backward.
Sources: transformers.modeling_rope_utils and vllm.model_executor.layers.rotary_embedding.
Shapes: T tokens, N heads of size D, P rotary pairs.

Elsewhere: the kinds of scaling and their numbers (models/families/rope.py).
"""

import math
from copy import copy

import torch
from hacpo_kernels import rotate_heads
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from torch.nn.functional import rms_norm

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.heads import Heads
from hacpo_mega.models.families.rope import LinearRope, Llama3Rope, ProportionalRope, YarnRope


def rope_frequencies(architecture: Architecture) -> torch.Tensor:
    """Rotary frequencies, float32 [P]."""
    theta, rope = architecture.rope_theta, architecture.rope
    frequencies_P = _plain(architecture.full_rotary_dim, theta)
    match rope:
        case None:
            return frequencies_P
        case LinearRope():
            return frequencies_P / rope.factor
        case Llama3Rope():
            return _llama3(frequencies_P, rope)
        case YarnRope():
            return _yarn(frequencies_P, rope, theta)
        case ProportionalRope():
            frequencies_P[int(len(frequencies_P) * rope.share) :] = 0.0
            return frequencies_P
    raise ValueError(f"{type(rope).__name__} has no frequencies")


def window_frequencies(architecture: Architecture) -> torch.Tensor:
    """Rotary frequencies of layers with a window, if they have their own: float32 [P], else [0]."""
    theta = architecture.window_theta
    return torch.empty(0) if theta is None else _plain(architecture.rotary_dim, theta)


def _plain(size: int, theta: float) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size))


def rope_magnitude(architecture: Architecture) -> float:
    """Factor of cosines and sines; not for layers that have frequencies of their own."""
    return architecture.rope.attention_factor if isinstance(architecture.rope, YarnRope) else 1.0


def query_scales(positions_T: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """Factors [T, 1] of queries at positions [T], where they grow with the position (YarnRope)."""
    passed_T = torch.floor(positions_T / architecture.rope.original_positions)
    return 1 + architecture.query_beta * torch.log(1 + passed_T)[:, None]


def cosines_and_sines(
    positions_T: torch.Tensor, frequencies_P: torch.Tensor, magnitude: float | torch.Tensor, config: TransformerConfig
) -> torch.Tensor:
    """Cosines, then sines, of positions [T] and frequencies [P]: [T, 4P] in the dtype of the model.

    `magnitude` is a factor on both, one for all or of every position [T, 1]. Both numbers of a pair turn by the same
    angle: neighbours, or one from each half.
    """
    angles_TP = torch.outer(positions_T, frequencies_P)
    angles = angles_TP.repeat_interleave(2, dim=-1) if config.rotary_interleaved else angles_TP.repeat(1, 2)
    both = ((function(angles) * magnitude).to(config.params_dtype) for function in (torch.cos, torch.sin))
    return torch.cat([*both], dim=-1)


def rotate(tensor_TND: torch.Tensor, turns: torch.Tensor, config: TransformerConfig, **_unused: object) -> torch.Tensor:
    """Queries or keys [T, N, D], rotated by `cosines_and_sines` [T, 1, 1, 4P]; dimensions beyond 2P stay unchanged.

    Equals Megatron's apply_rotary_pos_emb with a token's own angle: on the CPU to the last bit; on CUDA one kernel
    computes in float32 and rounds once.
    """
    return rotate_heads(tensor_TND, turns.flatten(1), interleaved=config.rotary_interleaved)


def _llama3(frequencies_P: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Keeps wavelengths below original/high, divides those above original/low, blends between."""
    turns_P = rope.original_positions * frequencies_P / (2 * math.pi)
    keep_P = ((turns_P - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies_P * (keep_P + (1.0 - keep_P) / rope.factor)


def _yarn(frequencies_P: torch.Tensor, rope: YarnRope, theta: float) -> torch.Tensor:
    """Keeps the pairs that turn often, divides those that turn seldom, blends linearly in the pair's index."""
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


class TwoRopes(SelfAttention):
    """Megatron's self-attention for models whose layers with a window have rotary angles of their own."""

    def __init__(self, *place: object, angles: tuple[int, int], **options: object) -> None:
        """`angles`: start and end of its numbers in a row of cosines and sines."""
        super().__init__(*place, **options)
        self.own = slice(*angles)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, rotary_pos_emb: torch.Tensor, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same as Megatron's, from cosines and sines of both kinds [T, 1, 1, 4P + 4P], those for windows last."""
        mine = rotary_pos_emb[..., self.own]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=mine, **options)


class OwnHeads(TwoRopes):
    """TwoRopes whose layers have key/value heads of two kinds, and normalised values (Gemma 4).

    Where values have no projection, a value is its key before norm and rotation.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, heads: Heads, **options: object
    ) -> None:
        config = copy(config)
        config.kv_channels, config.num_query_groups = heads.size, heads.kv_heads
        super().__init__(config, submodules, **options)
        self.has_values = heads.has_values

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *_none: object, **_never: object
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, 1, N, D], keys and values [T, 1, K, D] of this rank, all of them normalised.

        As in Megatron, the projection holds each group's queries, its key and, if any, its value. If there are more
        ranks than groups, they gather it, and share one's queries.
        """
        mixed = self.linear_qkv(hidden_states)[0]
        groups, ranks, rank = self.config.num_query_groups, self.tp_group.size(), self.tp_group.rank()
        sharing = max(1, ranks // groups)
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
            mixed = mixed.chunk(groups, dim=-1)[rank // sharing]
        size = self.hidden_size_per_attention_head
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, size))
        queries = mixed.shape[-2] - 1 - self.has_values
        query, key, value = mixed[..., :queries, :], mixed[..., queries, :], mixed[..., -1, :]
        query = query.flatten(-3, -2).chunk(sharing, dim=-2)[rank % sharing]
        return self.q_layernorm(query), self.k_layernorm(key), rms_norm(value, (size,), eps=self.q_layernorm.eps)


class QueriesAndKeys:
    """Megatron's fused projection without the rows of values, in its constructor's form."""

    def __new__(
        cls, size: int, rows: int, *, linear: type, config: TransformerConfig, **options: object
    ) -> torch.nn.Module:
        """Returns the linear itself; `rows` are those with values."""
        return linear(size, rows - config.kv_channels * config.num_query_groups, config=config, **options)


class WithoutRope(SelfAttention):
    """Megatron's self-attention for layers whose queries and keys do not turn."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, rotary_pos_emb: torch.Tensor, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same as Megatron's, without the angles [T, 1, 1, 4P] of other layers."""
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **options)


class ScaledQueries(SelfAttention):
    """Megatron's self-attention for models whose queries grow with their position: a rotation scales them, too."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, rotary_pos_emb: torch.Tensor, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same as Megatron's, from cosines and sines of keys, then of queries [T, 1, 1, 8P]."""
        of_keys, of_queries = rotary_pos_emb.chunk(2, dim=-1)
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=(of_queries, of_keys), **options)
