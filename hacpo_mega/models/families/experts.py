"""The feed-forward of a layer, or the experts in its place, as config.json describes them. Imports no torch.

Elsewhere: what a family decides by itself (families.py), how a token's experts are chosen (megatron/model/router.py),
and how experts are shared by ranks (layout.py, segments.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.fields import MOST, Fields

SHARED_FIELDS = {
    "num_groups": "n_group",
    "groups_per_token": "topk_group",
    "routed_scale": "routed_scaling_factor",
    "shared_ffn": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
}
DENSE_KINDS = "mlp_layer_types"
# Norms of a layer with experts beside its feed-forward, Megatron's names -> those of a folder: before and after the
# feed-forward, before and after the experts.
BESIDE_NORMS = {
    "shared_norm": "pre_feedforward_layernorm",
    "shared_output_norm": "post_feedforward_layernorm_1",
    "norm": "pre_feedforward_layernorm_2",
    "output_norm": "post_feedforward_layernorm_2",
}


@dataclass(frozen=True)
class Experts:
    """The experts of a family: a router that sends each token to a few of them.

    block           name of the experts' module in folders, beside a layer's attention; empty: it is the layer itself
    gate, up, down  names of an expert's matrices in folders, BLOCK.experts.NUMBER.gate.weight
    width           field of config.json with the width of an expert
    may_normalise   whether `norm_topk_prob` decides if the weights of a token's experts are made to add up to 1; else
                    they are
    counts          fields with the number of experts: transformers 5 writes the second for all families
    per_token       field with the number of experts of a token
    switch          field that decides whether a model has experts; None: all models of the family have
    correction      name of the bias of sigmoid scores in the choice of experts, as in DeepSeek-V3 (arXiv 2412.19437);
                    None: scores are a softmax, without a bias
    shared          name of the experts that all tokens go to; a family with them may also limit the choice to groups of
                    experts and have dense first layers; None: none of these
    shared_gate     name of the row whose sigmoid weighs a token's output of shared experts; None: there is no such row
    config_names    fields of an Architecture about shared experts, groups and dense layers -> names in config.json; its
                    shared_ffn counts experts or, with a gate, columns
    dense_kinds     whether `mlp_layer_types` names the layers that are dense; without it the first one is
    router          name of the router's matrix in folders
    biased          as gpt-oss: router and experts have biases, and folders stack those of all experts, gate and up
                    interleaved (weight_files.py)
    adapted         whether peft has a layer for them, and so they may have adapters (LoRA)
    beside          as Gemma 4: the layer keeps its feed-forward, as `shared`, beside the experts; both have their own
                    norms, the router reads the residual through a third, and every expert has a factor
    """

    block: str
    gate: str
    up: str
    down: str
    width: str
    may_normalise: bool
    counts: tuple[str, ...] = ("num_experts", "num_local_experts")
    per_token: str = "num_experts_per_tok"
    switch: str | None = None
    correction: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    config_names: Mapping[str, str] = field(default_factory=lambda: SHARED_FIELDS)
    dense_kinds: bool = False
    router: str = "gate"
    biased: bool = False
    adapted: bool = True
    beside: bool = False

    @property
    def fields(self) -> frozenset[str]:
        """Fields of config.json about experts."""
        names = {*self.counts, self.per_token, self.width, *((self.switch,) if self.switch is not None else ())}
        names |= {"norm_topk_prob"} if self.may_normalise else set()
        names |= {DENSE_KINDS} if self.dense_kinds else set()
        return frozenset(names | {*self.config_names.values()} if self.shared is not None else names)


def read_feed_forward(fields: Fields, experts: Experts | None) -> dict[str, Any]:
    """The fields of an Architecture about experts, by name. ValueError for values that no such model has."""
    if experts is None or not _has_experts(fields, experts):
        return {"ffn_size": fields.count("intermediate_size", most=MOST["ffn_size"])}
    width = fields.count(experts.width, most=MOST["expert_ffn"])
    sizes = {
        "ffn_size": 0,
        "num_experts": _num_experts(fields, experts),
        "experts_per_token": fields.count(experts.per_token),
        "expert_ffn": width,
        "normalises_experts": not experts.may_normalise or fields.flag("norm_topk_prob"),
    }
    if experts.shared is None:
        return sizes
    names = experts.config_names
    shared = fields.count(names["shared_ffn"], most=MOST["shared_ffn"])
    sizes |= {name: fields.count(names[name]) for name in ("num_groups", "groups_per_token") if name in names}
    sizes["shared_ffn"] = shared if experts.shared_gate is not None or experts.beside else width * shared
    if (key := names.get("routed_scale")) is not None:
        sizes["routed_scale"] = fields.positive(key)
    if "dense_layers" in names and (dense_layers := _dense_layers(fields, experts)):
        sizes |= {"dense_layers": dense_layers, "ffn_size": fields.count("intermediate_size", most=MOST["ffn_size"])}
    return sizes


def _has_experts(fields: Fields, experts: Experts) -> bool:
    """True if this model has experts. ValueError where transformers, which reads the switch, and vLLM, which reads
    their number, would run two models."""
    if experts.switch is None:
        return True
    is_on, count = fields.flag(experts.switch, default=False), experts.counts[0]
    if is_on != (fields.given.get(count) is not None):
        raise ValueError(
            f"{fields.path}: {experts.switch} = {short(is_on)} and {count} = {short(fields.given.get(count))}: "
            "transformers reads the first and vLLM the second, and they would run two models; a model with experts has "
            "true and their number, another false and null"
        )
    return is_on


def _dense_layers(fields: Fields, experts: Experts) -> int:
    """Number of dense layers, the first ones. ValueError where vLLM, which reads it, and transformers, which reads each
    layer's kind where the family has that field, would disagree."""
    key = experts.config_names["dense_layers"]
    number = fields.count(key, least=0)
    kinds, num_layers = fields.given.get(DENSE_KINDS), fields.count("num_hidden_layers")
    if not experts.dense_kinds:
        return number
    if kinds is None and number == fields.defaults[key]:
        return number
    if fields.given.get(key) is None and isinstance(kinds, list):
        number = kinds.count("dense")
    if kinds != ["dense"] * number + ["sparse"] * (num_layers - number):
        raise ValueError(
            f"{fields.path}: {DENSE_KINDS} must be {number} times 'dense', as {key} says, then 'sparse', "
            f"{num_layers} in all, found {short(kinds)}"
        )
    return number


def expert_number_bytes(num_experts: int) -> int:
    """Bytes of an unsigned expert number, whose highest value stands for no expert (samples/routing.py)."""
    return 1 if num_experts < 2**8 else 2


def _num_experts(fields: Fields, experts: Experts) -> int:
    counts = {
        name: fields.count(name, most=MOST["num_experts"])
        for name in experts.counts
        if fields.given.get(name) is not None
    }
    if len(set(counts.values())) > 1:
        both = " and ".join(f"{name} = {count}" for name, count in counts.items())
        raise ValueError(f"{fields.path}: {both} both say how many experts there are; take the wrong one out")
    return next(iter(counts.values()), fields.defaults.get("num_experts", 0))


def routing_problem(
    num_experts: int, per_token: int, num_groups: int, groups_per_token: int, *, key: str
) -> str | None:
    """Reason why no token can have so many experts in so many groups, None if it can. `key` is named for per_token."""
    if per_token > num_experts:
        return f"{key} is {per_token}, and there are {num_experts} experts; a token goes to each of its experts once"
    size = num_experts // num_groups
    if num_groups > 1 and (num_experts % num_groups or size < 2):
        return f"n_group ({num_groups}) must divide the {num_experts} experts into groups of two or more"
    if not groups_per_token <= num_groups:
        return f"topk_group is {groups_per_token}, and there are {num_groups} groups of experts (n_group)"
    if per_token > groups_per_token * size:
        return f"{key} is {per_token}, and topk_group groups have {groups_per_token * size} experts"
    return None
