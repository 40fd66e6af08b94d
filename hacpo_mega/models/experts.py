"""What a config.json says of a layer's feed-forward, or of the experts in its place. Imports no torch.

Not here: what a family decides by itself (families.py), and how experts are shared by ranks (layout.py, segments.py).
"""

from typing import Any

from hacpo_mega.models.families import EXPERT_COUNTS, Family
from hacpo_mega.models.fields import Fields


def read_feed_forward(fields: Fields, family: Family) -> dict[str, Any]:
    """The fields of an Architecture that say it, by name. ValueError for what no such model has."""
    if family.experts is None:
        return {"ffn_size": fields.count("intermediate_size")}
    unsaid, width = family.unsaid, family.experts.width
    may_normalise = family.experts.may_normalise
    return {
        "ffn_size": 0,
        "num_experts": _num_experts(fields, family),
        "experts_per_token": fields.count("num_experts_per_tok", default=unsaid["num_experts_per_tok"]),
        "expert_ffn": fields.count(width, default=unsaid.get(width)),
        "normalises_experts": fields.flag("norm_topk_prob", default=unsaid["norm_topk_prob"])
        if may_normalise
        else True,
    }


def expert_number_bytes(num_experts: int) -> int:
    """Of the unsigned number that says which expert, and has one more, its highest, for none (samples/routing.py)."""
    return 1 if num_experts < 2**8 else 2


def _num_experts(fields: Fields, family: Family) -> int:
    found = {name: fields.count(name) for name in EXPERT_COUNTS if fields.given.get(name) is not None}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name} = {count}" for name, count in found.items())
        raise ValueError(f"{fields.path}: {said} both say how many experts there are; take the wrong one out")
    return next(iter(found.values()), family.unsaid["num_experts"])
