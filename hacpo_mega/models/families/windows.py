"""Sliding windows: the layers that have one, and its length, as config.json says. Imports no torch.

A window of w is the token itself and the w - 1 before it, in transformers as in vLLM.
"""

from pathlib import Path

from hacpo_mega.models.families.delta_net import LINEAR
from hacpo_mega.models.families.family import Family
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.fields import Fields

FULL, WINDOWED = "full_attention", "sliding_attention"


def read_windows(path: Path, fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of every layer, None for full attention; empty if no layer has one. ValueError for an invalid
    window."""
    kinds = fields.given.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"{path}: layer_types must be a list, found {short(kinds)}")
    known = (FULL, WINDOWED) if family.windows in ("some", "pattern") else (FULL,)
    known += () if family.delta_net is None else (LINEAR,)
    if other := [kind for kind in kinds if kind not in known]:
        only = " and ".join(map(repr, known))
        raise ValueError(f"{path}: layer_types has {short(other[0])}, which is not supported, only {only}")
    if family.windows == "none":
        return ()
    # An explicit null means no window; a missing field means the family's default.
    window = fields.given.get("sliding_window", family.defaults.get("sliding_window"))
    if family.windows == "pattern":
        period = family.defaults["sliding_window_pattern"]
        pattern = [WINDOWED if (layer + 1) % period else FULL for layer in range(num_layers)]
        if window is None or kinds not in ([], pattern):
            found = "no sliding_window" if window is None else f"layer_types {short(kinds)}"
            raise ValueError(
                f"{path}: {found} is not supported with {family.model_type}: vLLM gives layers a window by number, "
                f"all but each {period}nd"
            )
        kinds = pattern
    if window is None and (family.windows == "all" or WINDOWED not in kinds):
        return ()
    if type(window) is not int or window < 1:
        raise ValueError(f"{path}: sliding_window must be an integer of at least 1, found {short(window)}")
    if family.windows == "all":
        if kinds:
            raise ValueError(
                f"{path}: layer_types beside a sliding_window is not supported with {family.model_type}, whose layers "
                "all have it. Nearest: without layer_types, or sliding_window = null"
            )
        return (window,) * num_layers
    if not kinds:
        period = fields.count("sliding_window_pattern")
        kinds = [WINDOWED if (layer + 1) % period else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"{path}: layer_types has {len(kinds)} entries; num_hidden_layers is {num_layers}")
    return tuple(window if kind == WINDOWED else None for kind in kinds)
