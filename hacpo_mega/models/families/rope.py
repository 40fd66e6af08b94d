"""Rotary positions: the kinds of scaling, a record each, as config.json asks for them.

A kind is here only where transformers (modeling_rope_utils) and vLLM (layers.rotary_embedding) compute the same with
it. They do not with "dynamic" (vLLM scales by the longest sequence that may come, transformers by the one at hand) and
"longrope" (vLLM takes the long factors by the engine's limit, transformers by the sequence). Imports no torch.
Elsewhere: the frequencies themselves (megatron/model/rope.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacpo_mega.models.families.family import Family
from hacpo_mega.models.families.windows import FULL, WINDOWED
from hacpo_mega.models.files.documents import one_line, short
from hacpo_mega.models.files.fields import Fields

# Keys that a rope table of any kind may have.
COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Further keys of a rope table whose family scales its queries; transformers does not read the second.
_QUERY_KEYS = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})


@dataclass(frozen=True)
class LinearRope:
    """Positions are divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary scaling of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071).

    beta_fast, beta_slow   rotations over the original positions above which frequencies stay, below which they shrink
    attention_factor       factor on cosines and sines
    truncate               whether the edges of the blend are moved to whole pairs
    query_beta             a query at position p is multiplied with 1 + query_beta * log(1 + floor(p / original
                           positions)), as in Llama 4; 0: it is not
    score_factor           factor on attention scores, as in DeepSeek-V2
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    query_beta: float = 0.0
    score_factor: float = 1.0

    @property
    def reach(self) -> int:
        """Positions for which vLLM has angles."""
        return int(self.original_positions * self.factor)


@dataclass(frozen=True)
class ProportionalRope:
    """Pairs are those of a head that is rotated whole, and only the first `share` of them are rotated (Gemma 4)."""

    share: float


Rope = LinearRope | Llama3Rope | YarnRope | ProportionalRope


def read_rope(path: Path, fields: Fields, family: Family) -> dict[str, Any]:
    """The fields of an Architecture about rotary angles, by name.

    Layers with a window have no scaling where they have a theta of their own.
    transformers 5 keeps all in rope_parameters, older folders in rope_theta, rope_scaling and partial_rotary_factor.
    ValueError for a kind that the family cannot have here, by name, and for a field that the kind does not know.
    """
    table, older = fields.table("rope_parameters"), fields.table("rope_scaling")
    if older.given and table.given and older.given != table.given:
        raise ValueError(
            f"{path}: rope_parameters {short(table.given)} and rope_scaling {short(older.given)} are two descriptions, "
            "of which transformers takes the second. Nearest: all of it in rope_parameters, and no rope_scaling"
        )
    if family.two_ropes and table.given and not table.given.keys() & {FULL, WINDOWED}:
        raise ValueError(
            f"{path}: rope_parameters of {family.model_type} has a table for {FULL!r} and {WINDOWED!r} each"
        )
    if family.two_ropes and not table.given:
        _refuse_ignored(path, older, family)
    table = table if table.given else older
    table = table if table.given else Fields(path, family.defaults.get("rope_parameters", {}))
    window_theta = _window_theta(path, fields, table, family) if family.two_ropes else None
    if family.two_ropes and (FULL in table.given or WINDOWED in table.given):
        table = table.table(FULL)
    theta = _first_with(table, fields, "rope_theta").positive("rope_theta", default=10_000.0)
    default_share = family.rotary_share
    if family.reads_rotary_dim and fields.given.get("rotary_dim") is not None:
        default_share = fields.count("rotary_dim") / fields.count("head_dim")
    share = _first_with(table, fields, "partial_rotary_factor").positive("partial_rotary_factor", default=default_share)
    kind = _kind(path, table)
    share = family.rotary_share if kind == "proportional" else share  # ProportionalRope has the table's share
    if share != family.rotary_share and not family.may_rotate_a_part:
        raise ValueError(f"{path}: partial_rotary_factor = {short(share)} is not supported with {family.model_type}")
    if kind not in family.rope_kinds:
        raise ValueError(
            f"{path}: rope type {short(kind)} is not supported with {family.model_type}; "
            f"supported are {', '.join(family.rope_kinds)}"
        )
    known, read = KINDS[kind]
    known = (known - family.rope_lacks) | family.rope_ignores | (_QUERY_KEYS if family.scales_queries else frozenset())
    if unknown := sorted(key for key, value in table.given.items() if value is not None and key not in known | COMMON):
        raise ValueError(
            f"{path}: {one_line(unknown[0])} = {short(table.given[unknown[0]])} is no field of rope type {kind!r} that "
            "is known here, so the model may compute other angles; if it does not, take it out of config.json"
        )
    rope = read(table)
    if family.scales_queries and isinstance(rope, YarnRope):
        is_scaled = table.given.get("llama_4_scaling_beta") != 0
        rope = replace(rope, query_beta=table.positive("llama_4_scaling_beta") if is_scaled else 0.0)
    if family.latent and isinstance(rope, YarnRope):
        rope = replace(rope, score_factor=_score_factor(table, rope.factor))
    return {"rope_theta": theta, "rope": rope, "rotary_share": share, "window_theta": window_theta}


def read_nope_layers(path: Path, fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Layers without rotary positions: 0 in `no_rope_layers` or, without that, every `no_rope_layer_interval`-th."""
    if not family.skips_rope:
        return ()
    every = fields.count("no_rope_layer_interval")
    flags = fields.given.get("no_rope_layers") or [int((layer + 1) % every > 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise ValueError(f"{path}: no_rope_layers must be a list of {num_layers} times 0 or 1, found {short(flags)}")
    return tuple(layer for layer, has_rope in enumerate(flags) if not has_rope)


def _kind(path: Path, table: Fields) -> Any:
    """The kind of scaling by either of its names. ValueError for two kinds, which vLLM refuses."""
    kind, older = table.given.get("rope_type"), table.given.get("type")
    if kind and older and kind != older:
        raise ValueError(f"{path}: rope_type {short(kind)} and type {short(older)} are two rope types; write the first")
    return kind or older or "default"


def _refuse_ignored(path: Path, older: Fields, family: Family) -> None:
    """ValueError for keys that transformers ignores in the `rope_scaling` of a family with two kinds of layers.

    It merges `rope_scaling` into the table of one kind alone.
    """
    is_named = older.given.get("rope_type") or older.given.get("type") in (None, "default")
    if ignored := [key for key in (FULL, WINDOWED, *(() if is_named else ("type",))) if key in older.given]:
        raise ValueError(
            f"{path}: transformers passes over {ignored[0]} = {short(older.given[ignored[0]])} in rope_scaling of "
            f"{family.model_type}; write rope_parameters, with a table and its rope_type for both kinds of layers"
        )


def _window_theta(path: Path, fields: Fields, table: Fields, family: Family) -> float:
    """The base of layers with a window: in a table of their own or, in older folders, in a field."""
    window = table.table(WINDOWED)
    kind = _kind(path, window)
    if unknown := sorted(key for key, value in window.given.items() if value is not None and key not in COMMON):
        raise ValueError(f"{path}: {one_line(unknown[0])} of layers with a window is not supported")
    if kind != "default" or window.given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: rope type {short(kind)} of layers with a window is not supported, only 'default'")
    local = fields.positive("rope_local_base_freq", default=family.defaults["window_theta"])
    return window.positive("rope_theta", default=local)


def _score_factor(table: Fields, factor: float) -> float:
    """Factor on scores: the square of the factor that `mscale_all_dim` means for queries and for keys.

    ValueError for fields that vLLM's class for latent attention ignores, and for one of `mscale` and `mscale_all_dim`
    alone.
    """
    scales = [table.given.get(name) or 0.0 for name in ("mscale", "mscale_all_dim")]
    if any(scales) and not all(scales):
        raise ValueError(
            f"{table.path}: mscale and mscale_all_dim of rope type 'yarn' must both be given or neither, found "
            f"{short(scales[0])} and {short(scales[1])}: transformers and vLLM would compute different angles"
        )
    for name, only in (("attention_factor", None), ("truncate", True)):
        if table.given.get(name) not in (None, only):
            raise ValueError(
                f"{table.path}: {name} = {short(table.given[name])} of rope type 'yarn' is not supported with latents "
                "of attention: vLLM passes over it"
            )
    return (0.1 * table.positive("mscale_all_dim") * math.log(factor) + 1.0) ** 2 if all(scales) else 1.0


def _first_with(table: Fields, fields: Fields, name: str) -> Fields:
    return table if table.given.get(name) is not None else fields


def _linear(table: Fields) -> LinearRope:
    if type(table.given.get("factor")) is int:
        raise ValueError(f"{table.path}: factor of rope type 'linear' must have a decimal point, which vLLM asks for")
    return LinearRope(table.at_least_one("factor"))


def _llama3(table: Fields) -> Llama3Rope:
    return Llama3Rope(
        factor=table.positive("factor"),
        low_freq_factor=table.positive("low_freq_factor"),
        high_freq_factor=table.positive("high_freq_factor"),
        original_positions=table.count("original_max_position_embeddings"),
    )


def _yarn(table: Fields) -> YarnRope:
    factor = table.at_least_one("factor")
    # Both libraries read the two fields together or not at all.
    scales = [table.given.get(name) for name in ("mscale", "mscale_all_dim")]
    mscale, all_dim = [table.positive(name) for name in ("mscale", "mscale_all_dim")] if all(scales) else (1.0, 0.0)
    default_factor = (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0)
    return YarnRope(
        factor=factor,
        original_positions=table.count("original_max_position_embeddings"),
        beta_fast=table.positive("beta_fast", default=32.0),
        beta_slow=table.positive("beta_slow", default=1.0),
        attention_factor=table.positive("attention_factor", default=default_factor),
        truncate=table.flag("truncate", default=True),
    )


def _proportional(table: Fields) -> ProportionalRope:
    share = table.positive("partial_rotary_factor", default=1.0)
    if share > 1.0:
        raise ValueError(f"{table.path}: partial_rotary_factor must be at most 1, found {short(share)}")
    return ProportionalRope(share)


# kind -> the fields of its table, and the function that reads them
KINDS: Mapping[str, tuple[frozenset[str], Callable[[Fields], Rope | None]]] = {
    "default": (frozenset(), lambda _: None),
    "linear": (frozenset({"factor"}), _linear),
    "proportional": (frozenset(), _proportional),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        _llama3,
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"})
        # attn_factor (DeepSeek-R1-0528-Qwen3-8B) is llama.cpp's; transformers and vLLM pass over it.
        | {"mscale", "mscale_all_dim", "truncate", "attn_factor"},
        _yarn,
    ),
}
