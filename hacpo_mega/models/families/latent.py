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

    query_rank   numbers of a token's latent of queries; 0: these come from the token itself
    rank         of its latent of keys and values
    plain_dim    numbers of a head's query, and of its key, that do not turn with the position
    turned_dim   those that do, the last ones; of keys all heads have the same
    value_dim    numbers of a head's value
    """

    query_rank: int
    rank: int
    plain_dim: int
    turned_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query, and of its key."""
        return self.plain_dim + self.turned_dim

    @property
    def cached(self) -> int:
        """Numbers of a token in an engine's cache: its latent, and the part of the keys that turns."""
        return self.rank + self.turned_dim


def read_latent(fields: Fields, family: Family, num_heads: int) -> Latent | None:
    """The latents of a model; None for a family without. ValueError for sizes that transformers and vLLM would read
    differently."""
    if not family.latent:
        return None

    def size(name: str, most: str = "head_dim") -> int:
        return fields.count(name, most=MOST[most])

    absent = "q_lora_rank" in fields.given and fields.given["q_lora_rank"] is None  # null: there is none
    found = Latent(
        query_rank=0 if absent else size("q_lora_rank", "hidden_size"),
        rank=size("kv_lora_rank", "hidden_size"),
        plain_dim=size("qk_nope_head_dim"),
        turned_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
    )
    if found.value_dim > found.head_dim:
        raise ValueError(
            f"{fields.path}: v_head_dim ({found.value_dim}) is more than qk_nope_head_dim + qk_rope_head_dim "
            f"({found.head_dim}), and kernels take values no longer than keys"
        )
    _require(fields, "head_dim", found.turned_dim, "qk_rope_head_dim")
    _require(fields, "qk_head_dim", found.head_dim, "qk_nope_head_dim + qk_rope_head_dim")
    _require(fields, "num_key_value_heads", num_heads, "num_attention_heads")
    return found


def _require(fields: Fields, name: str, only: Any, of: str) -> None:
    found = fields.given.get(name)
    if found is not None and found != only:
        raise ValueError(f"{fields.path}: {name} = {short(found)} is not supported, only that of {of}, {only}")
