"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its sizes, as config.json says. Imports no torch.

Elsewhere: the computation (megatron/model/attention.py), and the scale of its scores with YaRN (rope.py).
"""

from dataclasses import dataclass
from typing import Any

from hacpo_mega.models.families.family import Family
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.fields import MOST, Fields

# Epsilon of latents' norms, whatever `rms_norm_eps` says of the others: as in the models' own code and transformers.
EPSILON = 1e-6


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention.

    query_rank   size of a token's latent of queries; 0: queries are projected from the hidden state
    rank         size of its latent of keys and values
    nope_dim     dimensions of a head's query and key without rotary positions
    rope_dim     those with rotary positions, the last ones; all heads share them in keys
    value_dim    size of a head's value
    """

    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query, and of its key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Numbers of a token in an engine's cache: its latent, and the part of the keys that turns."""
        return self.rank + self.rope_dim


def read_latent(fields: Fields, family: Family, num_heads: int) -> Latent | None:
    """Sizes of a model's latent attention; None for a family without. ValueError for sizes that transformers and vLLM
    would read differently."""
    if not family.latent:
        return None

    def size(name: str, most: str = "head_dim") -> int:
        return fields.count(name, most=MOST[most])

    absent = "q_lora_rank" in fields.given and fields.given["q_lora_rank"] is None  # null: there is none
    latent = Latent(
        query_rank=0 if absent else size("q_lora_rank", "hidden_size"),
        rank=size("kv_lora_rank", "hidden_size"),
        nope_dim=size("qk_nope_head_dim"),
        rope_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
    )
    if latent.value_dim > latent.head_dim:
        raise ValueError(
            f"{fields.path}: v_head_dim ({latent.value_dim}) is more than qk_nope_head_dim + qk_rope_head_dim "
            f"({latent.head_dim}), and kernels take values no longer than keys"
        )
    _require(fields, "head_dim", latent.rope_dim, "qk_rope_head_dim")
    _require(fields, "qk_head_dim", latent.head_dim, "qk_nope_head_dim + qk_rope_head_dim")
    _require(fields, "num_key_value_heads", num_heads, "num_attention_heads")
    return latent


def _require(fields: Fields, name: str, only: Any, of: str) -> None:
    value = fields.given.get(name)
    if value is not None and value != only:
        raise ValueError(f"{fields.path}: {name} = {short(value)} is not supported, only that of {of}, {only}")
