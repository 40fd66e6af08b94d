"""LoRA (arXiv 2106.09685): which matrices of a model get an adapter, and how its two factors lie on ranks.

A matrix W [out, in] that is a target stays as it is and is used as W + alpha / rank * B A: A [rank, in] is the
adapter's `down`, B [out, rank] its `up`. The Hugging Face matrices that one Megatron layer holds fused have an adapter
each; the layer has one parameter of all their downs, stacked, and one of all their ups, whose rows lie as its own do.
In a layer that is split along its output, down is on every rank and up is split; in one that is split along its input,
the reverse; each rank has the factors of its own experts. So both are slots (segments.py), and code that stores, cuts
or gathers parameters need not know of LoRA. Names are peft's. Imports no torch. Elsewhere: modules and merging
(megatron/weights/lora.py, hacpo_kernels.merge_adapter).
"""

import difflib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import Cut, Slot, Source, rank_slots, segments, stage_slots

ALL_LINEAR = "all-linear"
WEIGHT, PREFIX = ".weight", "base_model.model."
# The weights of Megatron's layers that may have an adapter: of attention or what is in its place, of feed-forwards, of
# experts. Not among them: routers, the gate of shared experts, convolutions, numbers per head.
LAYERS = tuple(
    f".{block}{layer}{WEIGHT}"
    for block, layers in {
        "self_attention.": "linear_qkv linear_proj in_proj out_proj q_down q_up kv_down kv_up",
        "mlp.": "linear_fc1 linear_fc2 shared.linear_fc1 shared.linear_fc2 experts.gate_up experts.down",
    }.items()
    for layer in layers.split()
)
# Cut of a layer -> cuts of its down and up; for other layers down is whole, and up is cut as the layer is.
CUTS = {Cut.COLUMNS: (Cut.COLUMNS, Cut.WHOLE), Cut.EXPERTS: (Cut.EXPERTS, Cut.EXPERTS)}
DOWN, UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Lora:
    """LoRA adapters: `targets` are last parts of the names of Hugging Face modules, in the order of a layer."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor on the product of both adapter matrices."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapters of one Megatron layer `module` with weight `base`; their factors are `down` and `up`."""

    module: str
    base: Slot
    down: Slot
    up: Slot


def layer_adapters(architecture: Architecture, lora: Lora) -> Iterator[Adapter]:
    """The adapters of a layer of every kind that the model has."""
    for layer in architecture.kinds(range(architecture.num_layers)):
        yield from adapters(layer, (1,), 1, 0, lora)


def chosen_targets(architecture: Architecture, asked: str | Sequence[str]) -> tuple[str, ...]:
    """The requested targets, in the model's order. ValueError, a line each, for those that match nothing."""
    layers = (stage_slots(layer, (1,), 0) for layer in architecture.kinds(range(architecture.num_layers)))
    slots = (slot for layer in layers for slot in layer if _may_have_adapters(slot, architecture))
    names = (_last(source) for slot in slots for source in slot.sources)
    available = tuple(dict.fromkeys(names))  # all experts have the same
    if asked == ALL_LINEAR:
        return available
    problems = []
    for name in dict.fromkeys(asked):
        if name not in available:
            near = difflib.get_close_matches(name.rpartition(".")[2], available, n=1) or [ALL_LINEAR]
            problems.append(
                f"lora.targets: {name!r} matches nothing in this {architecture.family} model, whose matrices are "
                f"{', '.join(available)}. Nearest: {near[0]!r}"
            )
    if problems:
        raise ValueError("\n".join(problems))
    return tuple(name for name in available if name in asked)


def lora_problems(architecture: Architecture, lora: Lora, *, tp: int) -> Iterator[str]:
    """Reasons why this model cannot have these adapters on `tp` ranks, a line each."""
    problems = (_problems(each, architecture, lora, tp) for each in layer_adapters(architecture, lora))
    yield from dict.fromkeys(itertools.chain.from_iterable(problems))


def _problems(adapter: Adapter, architecture: Architecture, lora: Lora, tp: int) -> Iterator[str]:
    matrices = tuple(dict.fromkeys(map(_last, adapter.base.sources)))
    sides = {_last(source): min(source.shape) for source in adapter.base.sources if _last(source) in lora.targets}
    narrow = min(sides, key=lambda name: sides[name])
    if lora.rank > sides[narrow]:
        yield (
            f"lora.rank ({lora.rank}) is more than the smaller side of {narrow} ({sides[narrow]}). Nearest: "
            f"{sides[narrow]}"
        )
    if adapter.base.cut is Cut.EXPERTS and len(sides) < len(matrices):
        yield (
            f"lora.targets: {' and '.join(matrices)} of an expert are one matrix to transformers, so peft adapts "
            f"both. Nearest: both of {', '.join(matrices)}"
        )
    shards = (segments(adapter.up, architecture, tp=tp, tp_rank=rank) for rank in range(tp))
    shares = {sum(piece.stop - piece.start for piece in shard) for shard in shards}
    if (heads := adapter.base.heads) and len(shares) > 1:
        yield (
            f"lora.targets: tp ({tp}) cuts through the {heads.kv_heads} key/value heads, so ranks have unequal shares "
            f"of {' and '.join(sides)} alone. Nearest: all of {', '.join(matrices)}"
        )


def adapters(
    architecture: Architecture, chunks: tuple[int, ...], pp: int, pp_rank: int, lora: Lora
) -> Iterator[Adapter]:
    """The adapters of a pipeline rank, in a fixed order; arguments as those of `rank_slots`."""
    for slot in rank_slots(architecture, chunks, pp, pp_rank):
        chosen = tuple(n for n, source in enumerate(slot.sources) if _last(source) in lora.targets)
        if chosen and _may_have_adapters(slot, architecture):
            yield _adapter(slot, chosen, lora.rank)


def _adapter(base: Slot, chosen: tuple[int, ...], rank: int) -> Adapter:
    module = base.parameter.removesuffix(WEIGHT)
    sources = [base.sources[number] for number in chosen]
    downs = tuple(Source(_peft_name(source, DOWN), (rank, source.shape[1])) for source in sources)
    ups = tuple(Source(_peft_name(source, UP), (source.shape[0], rank)) for source in sources)
    cut_down, cut_up = CUTS.get(base.cut, (Cut.WHOLE, base.cut))
    takes_all = base.cut is Cut.EXPERTS or chosen == tuple(range(len(base.sources)))
    down = Slot(f"{module}.adapter.down", cut_down, downs)
    up = Slot(f"{module}.adapter.up", cut_up, ups, None if takes_all else chosen, heads=base.heads)
    parts = (replace(part, source=chosen.index(part.source)) for part in base.parts if part.source in chosen)
    return Adapter(module, base, down, replace(up, parts=tuple(parts), groups=base.groups))


def adapter_slots(
    architecture: Architecture, chunks: tuple[int, ...], pp: int, pp_rank: int, lora: Lora
) -> tuple[Slot, ...]:
    """Both factors of every adapter of a pipeline rank."""
    return tuple(slot for each in adapters(architecture, chunks, pp, pp_rank, lora) for slot in (each.down, each.up))


def adapter_sources(architecture: Architecture, lora: Lora) -> tuple[Source, ...]:
    """Every tensor of peft's adapter_model.safetensors, of the whole model."""
    slots = adapter_slots(architecture, (architecture.num_layers,), 1, 0, lora)
    return tuple(source for slot in slots for source in slot.sources)


def adapter_numbers(architecture: Architecture, lora: Lora) -> int:
    """Numbers in all adapters of the model."""
    return sum(math.prod(source.shape) for source in adapter_sources(architecture, lora))


def factor_names(weight: str) -> tuple[str, str]:
    """The names of down and up of the Hugging Face matrix `weight`."""
    return _peft_name(Source(weight, ()), DOWN), _peft_name(Source(weight, ()), UP)


def _peft_name(source: Source, factor: str) -> str:
    return f"{PREFIX}{source.name.removesuffix(WEIGHT)}{factor}"


def _may_have_adapters(slot: Slot, architecture: Architecture) -> bool:
    experts = architecture.traits.experts if slot.cut is Cut.EXPERTS else None
    return slot.parameter.endswith(LAYERS) and (experts is None or experts.adapted)


def _last(source: Source) -> str:
    return source.name.removesuffix(WEIGHT).rpartition(".")[2]
