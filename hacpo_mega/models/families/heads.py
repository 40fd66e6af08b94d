"""Key/value heads of a layer: those of layers without a window may differ, as config.json says. Imports no torch.

Gemma 4: there they are fewer and larger, and a value is its key before norm and rotation. Elsewhere: the computation
(megatron/model/rope.py), and the windows themselves (windows.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacpo_mega.models.families.family import Family
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.fields import MOST, Fields

# Field in which transformers 5 writes the heads of these layers, by layer number.
BY_LAYER = "per_layer_config"
SIZE, NUMBER = "head_dim", "num_key_value_heads"


@dataclass(frozen=True)
class Heads:
    """Key/value heads of an attention layer: their number, the size of every head, whether values have a projection of
    their own (else a value is its key)."""

    kv_heads: int
    size: int
    has_values: bool = True


def read_heads(
    path: Path, fields: Fields, family: Family, windows: Sequence[int | None], window_heads: tuple[int, int]
) -> Heads | None:
    """The heads of layers without a window; None for a family in which all layers have equal heads.

    window_heads   number and size of key/value heads of layers with a window
    Raises ValueError for layers that have neither, and for a model whose last layer has a window.
    """
    if not family.full_heads:
        return None
    if windows and windows[-1] is not None:
        raise ValueError(
            f"{path}: the last of layer_types is a layer with a window, and transformers would make it full_attention; "
            "write that"
        )
    shares_keys = fields.flag("attention_k_eq_v", default=False)
    kv_heads, size = window_heads
    if fields.given.get(BY_LAYER) is None:
        if shares_keys:
            kv_heads = fields.count("num_global_key_value_heads", default=kv_heads, most=MOST["num_kv_heads"])
        size = fields.count("global_head_dim", most=MOST["head_dim"])
        return Heads(kv_heads, size, has_values=not shares_keys)
    table = fields.table(BY_LAYER)
    full = [layer for layer, window in enumerate(windows) if window is None]
    by_layer = {str(layer): table.given.get(str(layer)) or {} for layer in full}
    first = next(iter(by_layer.values()))
    unknown = first.keys() - {SIZE, NUMBER} or table.given.keys() - by_layer.keys()
    if unknown or any(other != first for other in by_layer.values()):
        raise ValueError(
            f"{path}: {BY_LAYER} must give all layers of full_attention the same {SIZE} and {NUMBER}, and no other "
            f"layer any, found {short(table.given)}"
        )
    full_fields = Fields(path, first)
    kv_heads = full_fields.count(NUMBER, default=kv_heads, most=MOST["num_kv_heads"])
    return Heads(kv_heads, full_fields.count(SIZE, default=size, most=MOST["head_dim"]), has_values=not shares_keys)
