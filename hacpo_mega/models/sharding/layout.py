"""Parallel layouts that a model can have, decided here alone: `hacpo-mega check` and the model builder call it.

A layout cuts every layer into tp shards, the layers into pp stages and the tokens of a micro-batch into cp parts, whose
ranks share the heads of attention. Experts stay whole: ep of the tp x cp ranks of a stage share them, or all of these
of several cells, a block, and each rank brings its own tokens. engine_tp is the tensor parallelism of vLLM.
Every problem is a line with the numbers and the nearest valid value. Imports no torch and no Megatron.
Elsewhere: how a parameter is cut (segments.py), and how many cells and ranks there are (cluster/rank_map.py).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.delta_net import DeltaNet

# Megatron's names for the layers of the first and the last pipeline stage.
FIRST_STAGE, LAST_STAGE = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
# And for the chunks of every pipeline stage (a virtual pipeline).
VIRTUAL = "virtual_pipeline_model_parallel_size"

# vLLM's kernel of experts on the CPU takes multiples of this number (its `output_alignment`).
CPU_EXPERTS = 32
# And its kernel of gated delta nets on the CPU, for bfloat16, heads of these sizes.
CPU_DELTA = (64, 128)


@dataclass(frozen=True)
class Layout:
    """Ranks of one cell. first_layers and last_layers: layers of those stages where the stages are not all equal.

    `engine_tp` None: there is no engine to consider. `rollout`: ranks that only answer, if any. `vpp`: chunks of a
    stage, not adjacent. `cells`: those of the agent; a block of them shares experts.
    """

    tp: int = 1
    pp: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    engine_tp: int | None = None
    cp: int = 1
    ep: int = 1
    rollout: int | None = None
    vpp: int = 1
    cells: int = 1

    @classmethod
    def of(
        cls,
        tp: int,
        pp: int,
        megatron: Mapping[str, Any],
        engine_tp: int | None = None,
        cp: int = 1,
        ep: int = 1,
        rollout: int | None = None,
        cells: int = 1,
    ) -> "Layout":
        """The layout of an agent with the Megatron fields `megatron`. ValueError for layers that are no number."""
        for key in (FIRST_STAGE, LAST_STAGE, VIRTUAL):
            if type(megatron.get(key)) not in (int, type(None)):
                raise ValueError(f"megatron.{key} must be an integer, found {megatron[key]!r}")
        vpp = 1 if megatron.get(VIRTUAL) is None else megatron[VIRTUAL]
        return cls(tp, pp, megatron.get(FIRST_STAGE), megatron.get(LAST_STAGE), engine_tp, cp, ep, rollout, vpp, cells)

    @property
    def cell_size(self) -> int:
        """Ranks of one replica of the model."""
        return self.tp * self.cp * self.pp

    @property
    def block_cells(self) -> int:
        """Number of neighbouring cells whose ranks share experts; 1 if ep ranks of one cell do."""
        return block_cells(self.ep, self.tp, self.cp)

    def product(self) -> str:
        """The arithmetic of a cell's ranks in words: "tp x pp (2 x 2 = 4)", with cp if there is any."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        named = {name: size for name, size in sizes.items() if name != "cp" or size > 1}
        return f"{' x '.join(named)} ({' x '.join(map(str, named.values()))} = {self.cell_size})"


def block_cells(ep: int, tp: int, cp: int) -> int:
    """Cells of tp x cp ranks for each stage over which `ep` ranks lie."""
    return max(1, ep // (tp * cp))


def layout_problems(
    architecture: Architecture,
    layout: Layout,
    *,
    max_positions: int | None = None,
    engine_head_sizes: Collection[int] | None = None,
) -> list[str]:
    """Reasons why the model cannot have this layout, a line each; empty if it can.

    max_positions       tokens of the longest prompt and answer together
    engine_head_sizes   sizes of heads, or of latents, that vLLM's attention on the CPU supports; None: it is on CUDA
    """
    tensor_problems = _tensor_problems(architecture, layout)
    problems = [*(tensor_problems or _context_problems(architecture, layout))]
    problems += _expert_problems(architecture, layout)
    pipeline_problems = list(_pipeline_problems(architecture.num_layers, layout))
    problems += pipeline_problems or _chunk_problems(architecture.num_layers, layout)
    # An engine over the whole cell has the ranks of tp: its problems are reported for tp, with one advice.
    follows_tp = layout.engine_tp == layout.cell_size and not layout.rollout
    if layout.engine_tp is not None and not (tensor_problems and follows_tp):
        problems += _engine_problems(architecture, layout, layout.engine_tp, engine_head_sizes)
    if max_positions is not None and max_positions > architecture.max_positions:
        problems.append(
            f"the longest prompt with its answer ({max_positions} tokens) is beyond the {architecture.max_positions} "
            f"positions of this {architecture.family} model; shorten one. Nearest: {architecture.max_positions}"
        )
    return problems


def stage_layers(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Layers of every pipeline stage, as Megatron deals them out; only for a layout without problems."""
    given = [layers for layers in (layout.first_layers, layout.last_layers) if layers is not None]
    others = layout.pp - len(given)
    each = (num_layers - sum(given)) // others if others > 0 else 0
    first = each if layout.first_layers is None else layout.first_layers
    last = each if layout.last_layers is None else layout.last_layers
    return (num_layers,) if layout.pp == 1 else (first, *[each] * (layout.pp - 2), last)


def chunk_layers(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Layers of every chunk, in the order of the model: number n is of stage n % pp. Without vpp a stage is one."""
    stages = stage_layers(num_layers, layout)
    return stages if layout.vpp == 1 else (stages[0] // layout.vpp,) * (layout.pp * layout.vpp)


def chunk_ranges(num_layers: int, layout: Layout, stage: int) -> list[range]:
    """The layers of every chunk of a pipeline stage, by their numbers in the model."""
    chunks = chunk_layers(num_layers, layout)
    firsts = [sum(chunks[:number]) for number in range(len(chunks))]
    return [range(firsts[n], firsts[n] + chunks[n]) for n in range(stage, len(chunks), layout.pp)]


def chunks_in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches in flight: forwards of a chunk before a pipeline stage's first backward, and one more.

    With one chunk a stage: as many as stages from it to the end. With several: two for each stage after it, and before
    these a round of the pipeline for every chunk but the last (arXiv 2104.04473; Megatron's get_pp_rank_microbatches).
    """
    later = layout.pp - stage - 1
    return later + 1 if layout.vpp == 1 else 2 * later + (layout.vpp - 1) * layout.pp + 1


def head_size_problem(size: int | None, known: Collection[int], *, has_latents: bool) -> str | None:
    """Message about a size of heads, or of latents, that vLLM's attention does not support; None if it does."""
    if size is None or size in known:
        return None
    named, sizes = "kv_lora_rank + qk_rope_head_dim" if has_latents else "head_dim", ", ".join(map(str, sorted(known)))
    return f"{named} {size}: vLLM's attention on CPU knows {sizes}. Nearest: {_nearest(size, known)}"


def delta_problem(delta: DeltaNet | None) -> str | None:
    """The sentence for heads of gated delta nets that the engine on the CPU does not know in bfloat16, if they are."""
    if delta is None or (delta.key_dim == delta.value_dim and delta.key_dim in CPU_DELTA):
        return None
    known = " or ".join(map(str, CPU_DELTA))
    return (
        f"linear_key_head_dim {delta.key_dim} and linear_value_head_dim {delta.value_dim}: vLLM's gated delta nets on "
        f"CPU know {known} for both in bfloat16. Nearest: dtype = 'float32'"
    )


def _tensor_problems(architecture: Architecture, layout: Layout) -> list[str]:
    # Megatron cuts query, key and value as one matrix, also through a key/value head that ranks share.
    queries = architecture.num_heads * (2 if architecture.gated else 1)
    divided = {}
    for heads, where in zip(architecture.kinds_of_heads, ("", " in layers without a window"), strict=False):
        words = f"the model's {{}} rows of query, key and value together{where}"
        divided[words] = (queries + (1 + heads.has_values) * heads.kv_heads) * heads.size
    if architecture.traits.whole_qk_norm:
        divided["the model's {} key/value heads, which have one norm together"] = architecture.num_kv_heads
    return _sharing_problems(architecture, "tp", layout.tp, divided)


def _context_problems(architecture: Architecture, layout: Layout) -> list[str]:
    """Reasons why cp ranks cannot share the heads of a tensor rank; its tp must be one that the model can have.

    With more ranks than key/value heads, each head goes to several.
    """
    heads, tp = architecture.num_heads, layout.tp
    if layout.cp > 1 and architecture.delta_net is not None:
        return [
            f"cp ({layout.cp}): gated delta nets, as {architecture.family} has, need whole sequences. Nearest: cp = 1"
        ]

    def fits(cp: int) -> bool:
        return heads % (tp * cp) == 0 and all(_divides(each.kv_heads, tp * cp) for each in architecture.kinds_of_heads)

    if fits(layout.cp):
        return []
    nearest = _nearest(layout.cp, [cp for cp in range(1, heads // tp + 1) if fits(cp)])
    kv_heads = " and ".join(str(each.kv_heads) for each in architecture.kinds_of_heads)
    return [
        f"cp ({layout.cp}): tp x cp ({tp} x {layout.cp} = {tp * layout.cp}) must divide the model's {heads} attention "
        f"heads, and its {kv_heads} key/value heads or be a multiple of them. Nearest: cp = {nearest}"
    ]


def _expert_problems(architecture: Architecture, layout: Layout) -> Iterator[str]:
    """Reasons why ep ranks cannot share the experts of a layer."""
    ranks, experts, ep, cells = layout.tp * layout.cp, architecture.num_experts, layout.ep, layout.cells

    def fits(ep: int) -> bool:
        """True if ep ranks fit within a cell, or over equal blocks of its agent's cells."""
        return experts % ep == 0 and (ranks % ep == 0 or (ep % ranks == 0 and cells % (ep // ranks) == 0))

    if not experts and ep > 1:
        yield f"ep ({ep}): a {architecture.family} model has no experts to share. Nearest: ep = 1"
    elif experts and not fits(ep):
        over = f", or be that times a divisor of the agent's {cells} cells" if cells > 1 else ""
        yield (
            f"ep ({ep}) must divide tp x cp ({layout.tp} x {layout.cp} = {ranks}), whose ranks share the experts{over}"
            f", and the model's {experts} experts. Nearest: ep = "
            f"{_nearest(ep, [n for n in range(1, ranks * cells + 1) if fits(n)])}"
        )


def _engine_problems(
    architecture: Architecture, layout: Layout, engine_tp: int, head_sizes: Collection[int] | None
) -> list[str]:
    words = f"rollout_gpus ({layout.rollout})" if layout.rollout else layout.product()
    divided = {words: layout.rollout or layout.cell_size}
    if architecture.has_experts:
        divided["the model's {} columns of an expert"] = architecture.expert_ffn
    problems = _sharing_problems(architecture, "engine_tp", engine_tp, divided)
    if head_sizes is None:
        return problems
    has_latents = architecture.latent is not None
    sizes = [architecture.cached_dim] if has_latents else [heads.size for heads in architecture.kinds_of_heads]
    for size in sizes:
        if problem := head_size_problem(size, head_sizes, has_latents=has_latents):
            problems.append(problem)
    if architecture.has_experts and architecture.hidden_size % CPU_EXPERTS:
        near = max(1, round(architecture.hidden_size / CPU_EXPERTS)) * CPU_EXPERTS
        problems.append(
            f"hidden_size {architecture.hidden_size}: vLLM's experts on CPU take multiples of {CPU_EXPERTS}. "
            f"Nearest: {near}"
        )
    width = architecture.expert_ffn // engine_tp
    if architecture.has_experts and architecture.traits.experts.biased and width % CPU_EXPERTS:
        near = max(1, round(width / CPU_EXPERTS)) * CPU_EXPERTS * engine_tp
        problems.append(
            f"intermediate_size {architecture.expert_ffn}: of a rank's share (engine_tp {engine_tp}) vLLM's experts "
            f"on CPU with gate and up in turn take multiples of {CPU_EXPERTS}. Nearest: {near}"
        )
    return problems


def _sharing_problems(architecture: Architecture, key: str, ranks: int, sizes: Mapping[str, int]) -> list[str]:
    """Reasons why `ranks` cannot share every layer: what Megatron and vLLM both divide, and `sizes` (words -> size).

    With more ranks than key/value heads, each head is copied to several.
    """
    heads, kinds = architecture.num_heads, architecture.kinds_of_heads
    divided = {
        "the model's {} attention heads": heads,
        "the model's {} feed-forward columns": architecture.ffn_size,
        "the model's {} columns of shared experts": architecture.shared_ffn,
        **sizes,
    }
    if architecture.delta_net is not None:
        divided["the model's {} key heads of gated delta nets"] = architecture.delta_net.key_heads

    def fits(n: int) -> bool:
        return all(_divides(each.kv_heads, n) for each in kinds) and not any(size % n for size in divided.values())

    valid = [n for n in range(1, heads + 1) if fits(n)]
    nearest = f"Nearest: {key} = {_nearest(ranks, valid)}"
    problems = [
        f"{key} ({ranks}) must divide {words.format(size)}. {nearest}"
        for words, size in divided.items()
        if size % ranks
    ]
    return problems + [
        f"{key} ({ranks}) must divide the model's {each.kv_heads} key/value heads or be a multiple of them. {nearest}"
        for each in kinds
        if not _divides(each.kv_heads, ranks)
    ]


def _divides(kv_heads: int, ranks: int) -> bool:
    """True if one number divides the other: ranks have equally many heads, or heads equally many ranks."""
    return max(kv_heads, ranks) % min(kv_heads, ranks) == 0


def _pipeline_problems(num_layers: int, layout: Layout) -> Iterator[str]:
    pp, given = layout.pp, {FIRST_STAGE: layout.first_layers, LAST_STAGE: layout.last_layers}
    named = {key: layers for key, layers in given.items() if layers is not None}
    if pp > num_layers:
        yield f"pp ({pp}) is more than the model's {num_layers} layers. Nearest: pp = {num_layers}"
    elif pp == 1:
        for key, layers in named.items():
            if layers != num_layers:
                yield f"megatron.{key} = {layers}: with pp = 1 the only stage has all {num_layers} layers; remove it"
    elif named:
        yield from _uneven_problems(num_layers, pp, named)
    elif num_layers % pp:
        nearest = _nearest(pp, [n for n in range(1, num_layers + 1) if num_layers % n == 0])
        yield (
            f"pp ({pp}) must divide the model's {num_layers} layers, unless megatron.{FIRST_STAGE} or {LAST_STAGE} "
            f"says how many a stage has. Nearest: pp = {nearest}"
        )


def _chunk_problems(num_layers: int, layout: Layout) -> Iterator[str]:
    """Reasons why the stages cannot have several chunks; the pipeline itself must be one that the model can have."""
    pp, vpp = layout.pp, layout.vpp
    if vpp == 1:
        return
    if layout.first_layers is not None or layout.last_layers is not None:
        yield f"megatron.{VIRTUAL} ({vpp}) deals equal chunks to equal stages: remove {FIRST_STAGE} and {LAST_STAGE}"
    elif pp < 3:
        why = ": of two stages each is before and after the other, and Megatron would cross their messages"
        found = f"found {pp}{why if pp == 2 else ''}"
        yield f"megatron.{VIRTUAL} ({vpp}) needs pp >= 3, {found}. Nearest: {VIRTUAL} = 1"
    elif vpp < 1 or (num_layers // pp) % vpp:
        valid = [n for n in range(1, num_layers // pp + 1) if (num_layers // pp) % n == 0]
        yield (
            f"megatron.{VIRTUAL} ({vpp}) must divide the {num_layers // pp} layers of a stage. "
            f"Nearest: {VIRTUAL} = {_nearest(vpp, valid)}"
        )


def _uneven_problems(num_layers: int, pp: int, named: Mapping[str, int]) -> Iterator[str]:
    """Every stage has a layer; stages without a given number share the rest equally."""

    def fits(*layers: int) -> bool:
        others, rest = pp - len(layers), num_layers - sum(layers)
        return min(layers) >= 1 and (rest == 0 if others == 0 else rest >= others and rest % others == 0)

    if fits(*named.values()):
        return
    says = " and ".join(f"megatron.{key} = {layers}" for key, layers in named.items())
    # The last of several named stages is moved, and the others stay as they are.
    *kept, layers = named.values()
    valid = [candidate for candidate in range(1, num_layers) if fits(*kept, candidate)]
    hint = f"Nearest: {list(named)[-1]} = {_nearest(layers, valid)}" if valid else f"Remove {' and '.join(named)}"
    yield (
        f"{says} leaves {num_layers - sum(named.values())} of the model's {num_layers} layers to {pp - len(named)} "
        f"other stages (pp = {pp}); every stage needs a layer, and those others equally many. {hint}"
    )


def _nearest(value: int, among: Collection[int]) -> int:
    return min(among, key=lambda candidate: (abs(candidate - value), candidate))
