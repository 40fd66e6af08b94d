"""Gated delta nets: the layers that have one in the place of attention, and its sizes, as config.json says.

Gated DeltaNet (arXiv 2412.06464): a state per head, which decays and takes a token's value at its key. Imports no
torch. Elsewhere: the computation (megatron/model/delta_net.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.models.families.family import DELTA_FIELDS, DELTA_INTERVAL, Family
from hacpo_mega.models.files.fields import MOST, Fields

LINEAR = "linear_attention"


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net: heads of queries and of keys, each shared by equally many heads of values.

    width   tokens that the causal convolution before it reads
    Raises ValueError for heads that cannot be shared evenly.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of linear_num_key_heads "
                f"({self.key_heads})"
            )

    @property
    def value_rows(self) -> int:
        """Rows of all values, and of their gates."""
        return self.value_heads * self.value_dim

    @property
    def mixed_rows(self) -> int:
        """Rows of queries, keys and values together, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.value_rows

    @property
    def projected_rows(self) -> int:
        """Rows of all that is projected from a token: those, gates of values, two numbers per head of values."""
        return self.mixed_rows + self.value_rows + 2 * self.value_heads

    @property
    def state(self) -> int:
        """Numbers in the states of all heads."""
        return self.value_heads * self.key_dim * self.value_dim


def read_delta_net(path: Path, fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """The fields of an Architecture about delta nets, by name; none for a family without.

    ValueError for an invalid list of layers; its entries are checked where windows are (windows.py).
    """
    if family.delta_net is None:
        return {}
    every = fields.count(DELTA_INTERVAL, default=4)
    kinds = fields.given.get("layer_types")
    layers = [kind == LINEAR for kind in kinds] if kinds else [(n + 1) % every > 0 for n in range(num_layers)]
    if len(layers) != num_layers:
        raise ValueError(f"{path}: layer_types has {len(layers)} entries; num_hidden_layers is {num_layers}")
    sizes = {size: fields.count(name, most=MOST["head_dim"]) for name, size in DELTA_FIELDS.items()}
    return {"delta_net": DeltaNet(**sizes), "delta_layers": tuple(layers)}
