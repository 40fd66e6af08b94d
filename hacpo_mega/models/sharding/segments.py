"""Megatron parameters <-> Hugging Face tensors: names, and the arithmetic of fused and sharded matrices.

One idea carries both directions. A rank's shard of a Megatron parameter is a list of segments, each a range of rows (or
columns) of one Hugging Face tensor, laid end to end. Loading reads the segments; resharding writes them back.
Matrices of the experts of a rank lie one below the other in one parameter, as torch's grouped product wants them.
Fused shards: linear_qkv interleaves query, key and value heads by key/value group; linear_fc1 is gate then up.
Imports no torch and no Megatron, so that a plan can be made where neither is. Elsewhere: tensors (megatron/).
"""

import enum
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.families.experts import BESIDE_NORMS
from hacpo_mega.models.families.heads import Heads
from hacpo_mega.models.files.weight_files import EMBEDDING, HEAD, LAYER_SCALE

# vLLM's padding of a vocabulary, so that actor and engine over equally many ranks cut it at the same rows.
VOCAB_MULTIPLE = 64


class Cut(enum.Enum):
    """Partition of a parameter, made of Hugging Face tensors, over tensor-parallel ranks."""

    WHOLE = "replicated on every rank"
    COLUMNS = "split along the input dimension"
    ROWS = "split along the output dimension"
    GATE_UP = "gate and up fused, each split along the output dimension"
    QKV = "query, key and value fused by key/value group, split along the output dimension"
    VOCAB = "rows of the vocabulary, padded"
    HEADS = "rows of heads, several parts fused, each split along the output dimension"
    EXPERTS = "matrices of whole experts, one below the other, each expert on one rank of ep"


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: name and full shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Rows (or columns) start:stop of the source number `source` of a slot."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a Hugging Face tensor that is contiguous in a flattened shard, from its `start`."""

    source: Source
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class HeadRows:
    """A part of a slot of heads: of every group of heads so many `rows` of a source, from `start` on, `step` apart."""

    source: int
    start: int
    rows: int
    step: int


@dataclass(frozen=True)
class Slot:
    """A Megatron parameter of one pipeline stage, and the Hugging Face tensors it is made of.

    matrices   numbers of a fused cut's matrices that the slot has, one per source; None: all
    parts      parts of a cut by heads, in the order of the parameter; groups: number of groups of heads
    heads      key/value heads of the layer, for a fused query, key and value
    """

    parameter: str
    cut: Cut
    sources: tuple[Source, ...]
    matrices: tuple[int, ...] | None = None
    parts: tuple[HeadRows, ...] = ()
    groups: int = 0
    heads: Heads | None = None

    @property
    def dim(self) -> int:
        """The dimension along which segments are laid end to end."""
        return 1 if self.cut is Cut.COLUMNS else 0


def stage_slots(architecture: Architecture, stages: tuple[int, ...], pp_rank: int) -> tuple[Slot, ...]:
    """The slots of pipeline stage `pp_rank`, in a fixed order; `stages` has the layers of every stage (stage_layers).

    The embedding that a tied model keeps a second time on its last stage is a slot of both stages.
    """
    first, last = pp_rank == 0, pp_rank == len(stages) - 1
    offset, table = sum(stages[:pp_rank]), (architecture.vocab_size, architecture.hidden_size)
    slots = [Slot("embedding.word_embeddings.weight", Cut.VOCAB, (Source(EMBEDDING, table),))] if first else []
    for local in range(stages[pp_rank]):
        slots += _layer_slots(architecture, local, local + offset)
    if last:
        slots.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", architecture.hidden_size))
        if not (architecture.tied and first):
            head = Source(EMBEDDING if architecture.tied else HEAD, table)
            slots.append(Slot("output_layer.weight", Cut.VOCAB, (head,)))
    return tuple(slots)


def rank_slots(architecture: Architecture, chunks: tuple[int, ...], pp: int, pp_rank: int) -> tuple[Slot, ...]:
    """The slots of a pipeline rank that has every pp-th of the chunks (chunk_layers), in a fixed order.

    Its first chunk holds the others as `later` (megatron/model/model.py), and so their parameters.
    """
    own = range(pp_rank, len(chunks), pp)
    prefixes = ["", *(f"later.{number}." for number in range(len(own) - 1))]
    return tuple(
        replace(slot, parameter=f"{prefix}{slot.parameter}")
        for prefix, chunk in zip(prefixes, own, strict=True)
        for slot in stage_slots(architecture, chunks, chunk)
    )


def all_sources(architecture: Architecture) -> Iterator[Source]:
    """Every Hugging Face tensor of the whole model, each once, in a fixed order."""
    slots = stage_slots(architecture, (architecture.num_layers,), 0)
    yield from dict.fromkeys(source for slot in slots for source in slot.sources)


def _layer_slots(architecture: Architecture, local: int, layer: int) -> list[Slot]:
    """Parameters of layer number `local` of the stage, which is the model's number `layer`."""
    megatron, hugging = f"decoder.layers.{local}.", f"model.layers.{layer}."
    hidden, traits, attention = architecture.hidden_size, architecture.traits, f"{megatron}self_attention."
    norms = {
        ours: _whole(f"{megatron}{ours}.weight", f"{hugging}{theirs}.weight", hidden)
        for ours, theirs in traits.norms.items()
    }
    has_experts = architecture.has_experts_in(layer)
    if has_experts and traits.experts.beside:  # BESIDE_NORMS replace this one
        del norms["pre_mlp_layernorm"]
    slots = [norms.pop("input_layernorm")] if "input_layernorm" in norms else []
    if architecture.has_delta_net_in(layer):
        slots += _delta_slots(architecture, attention, f"{hugging}linear_attn.")
    elif architecture.latent is not None:
        slots += _latent_slots(architecture, attention, f"{hugging}self_attn.")
    else:
        slots += _attention_slots(architecture, architecture.heads_in(layer), attention, f"{hugging}self_attn.")
    slots += norms.values()
    if traits.scaled_layers:
        slots.append(_whole(f"{megatron}mlp_bda.scale", f"{hugging}{LAYER_SCALE}", 1))
    if has_experts:
        return slots + _expert_slots(architecture, megatron, hugging)
    return slots + _feed_forward_slots(architecture, f"{megatron}mlp.", f"{hugging}mlp.", architecture.ffn_size)


def _attention_slots(architecture: Architecture, heads: Heads, attention: str, self_attn: str) -> list[Slot]:
    hidden, traits = architecture.hidden_size, architecture.traits
    query_rows, kv_rows = architecture.num_heads * heads.size, heads.kv_heads * heads.size
    stored_rows = query_rows * 2 if architecture.gated else query_rows
    qkv, slots = {"q_proj": stored_rows, "k_proj": kv_rows, **({"v_proj": kv_rows} if heads.has_values else {})}, []
    weight = _fused(architecture, self_attn, "weight", qkv, "qkv_proj", hidden)
    slots.append(Slot(f"{attention}linear_qkv.weight", Cut.QKV, weight, heads=heads))
    if architecture.qkv_bias:
        bias = _fused(architecture, self_attn, "bias", qkv, "qkv_proj")
        slots.append(Slot(f"{attention}linear_qkv.bias", Cut.QKV, bias, heads=heads))
    if architecture.qk_norm:
        cut = Cut.ROWS if traits.whole_qk_norm else Cut.WHOLE
        for name, rows in (("q", query_rows), ("k", kv_rows)):
            source = Source(f"{self_attn}{name}_norm.weight", (rows if cut is Cut.ROWS else heads.size,))
            slots.append(Slot(f"{attention}{name}_layernorm.weight", cut, (source,)))
    if traits.sinks:
        sinks = Source(f"{self_attn}sinks", (architecture.num_heads,))
        parts = _below(architecture.num_heads, 0, 1)
        by_heads = Slot(
            f"{attention}core_attention.sinks", Cut.HEADS, (sinks,), parts=parts, groups=architecture.num_heads
        )
        slots.append(by_heads)
    slots.append(_columns(f"{attention}linear_proj.weight", f"{self_attn}o_proj.weight", hidden, query_rows))
    if architecture.output_bias:
        slots.append(_whole(f"{attention}linear_proj.bias", f"{self_attn}o_proj.bias", hidden))
    return slots


def _latent_slots(architecture: Architecture, megatron: str, hugging: str) -> list[Slot]:
    """Down projections to latents, which every rank has whole, and up projections, which are split by heads."""
    latent, hidden, heads = architecture.latent, architecture.hidden_size, architecture.num_heads
    assert latent is not None, architecture.family

    def by_heads(name: str, theirs: str, rows: int, columns: int) -> Slot:
        source = Source(f"{hugging}{theirs}.weight", (heads * rows, columns))
        return Slot(f"{megatron}{name}.weight", Cut.HEADS, (source,), parts=_below(heads, 0, rows), groups=heads)

    def whole(name: str, theirs: str, *shape: int) -> Slot:
        return Slot(f"{megatron}{name}.weight", Cut.WHOLE, (Source(f"{hugging}{theirs}.weight", shape),))

    if latent.query_rank:
        slots = [
            whole("q_down", "q_a_proj", latent.query_rank, hidden),
            whole("q_norm", "q_a_layernorm", latent.query_rank),
            by_heads("q_up", "q_b_proj", latent.head_dim, latent.query_rank),
        ]
    else:
        slots = [by_heads("q_up", "q_proj", latent.head_dim, hidden)]
    return [
        *slots,
        whole("kv_down", "kv_a_proj_with_mqa", latent.cached, hidden),
        whole("kv_norm", "kv_a_layernorm", latent.rank),
        by_heads("kv_up", "kv_b_proj", latent.nope_dim + latent.value_dim, latent.rank),
        _columns(f"{megatron}linear_proj.weight", f"{hugging}o_proj.weight", hidden, heads * latent.value_dim),
    ]


def _delta_slots(architecture: Architecture, megatron: str, hugging: str) -> list[Slot]:
    """A gated delta net: queries, keys, values, their gates, and both numbers per head, a part each of one matrix."""
    delta, hidden = architecture.delta_net, architecture.hidden_size
    assert delta is not None, architecture.family
    key, value, two = delta.key_dim, delta.value_rows // delta.key_heads, delta.value_heads // delta.key_heads
    mixed = _below(delta.key_heads, 0, key, key, value)
    if architecture.traits.delta_net == "apart":
        rows = {"qkv": delta.mixed_rows, "z": delta.value_rows, "b": delta.value_heads, "a": delta.value_heads}
        parts = mixed + tuple(HeadRows(n, 0, each, each) for n, each in enumerate((value, two, two), start=1))
    else:
        rows = {"qkvz": delta.mixed_rows + delta.value_rows, "ba": 2 * delta.value_heads}
        parts = _beside(0, key, key, value, value) + _beside(1, two, two)
    projections = tuple(Source(f"{hugging}in_proj_{name}.weight", (size, hidden)) for name, size in rows.items())
    convolution = Source(f"{hugging}conv1d.weight", (delta.mixed_rows, 1, delta.width))

    def by_heads(name: str, sources: tuple[Source, ...], parts: tuple[HeadRows, ...]) -> Slot:
        return Slot(f"{megatron}{name}", Cut.HEADS, sources, parts=parts, groups=delta.key_heads)

    vectors = (
        by_heads(name, (Source(f"{hugging}{name}", (delta.value_heads,)),), _beside(0, two))
        for name in ("dt_bias", "A_log")
    )
    return [
        by_heads("in_proj.weight", projections, parts),
        by_heads("conv1d.weight", (convolution,), mixed),
        *vectors,
        _whole(f"{megatron}norm.weight", f"{hugging}norm.weight", delta.value_dim),
        _columns(f"{megatron}out_proj.weight", f"{hugging}out_proj.weight", hidden, delta.value_rows),
    ]


def _below(groups: int, source: int, *rows: int) -> tuple[HeadRows, ...]:
    """Parts of a source that lie one below the other, each with all of its heads."""
    starts = itertools.accumulate(rows[:-1], initial=0)
    return tuple(HeadRows(source, start * groups, each, each) for start, each in zip(starts, rows, strict=True))


def _beside(source: int, *rows: int) -> tuple[HeadRows, ...]:
    """Parts of a source in which each group of heads has its rows of every part, group after group."""
    starts = itertools.accumulate(rows[:-1], initial=0)
    return tuple(HeadRows(source, start, each, sum(rows)) for start, each in zip(starts, rows, strict=True))


def _feed_forward_slots(architecture: Architecture, megatron: str, hugging: str, ffn: int) -> list[Slot]:
    hidden, halves = architecture.hidden_size, {"gate_proj": ffn, "up_proj": ffn}
    gate_up = _fused(architecture, hugging, "weight", halves, "gate_up_proj", hidden)
    return [
        Slot(f"{megatron}linear_fc1.weight", Cut.GATE_UP, gate_up),
        _columns(f"{megatron}linear_fc2.weight", f"{hugging}down_proj.weight", hidden, ffn),
    ]


def _expert_slots(architecture: Architecture, megatron: str, hugging: str) -> list[Slot]:
    """The router, and the experts' matrices: gate and up of the first expert, of the second, and so on; so down."""
    hidden, width, named = architecture.hidden_size, architecture.expert_ffn, architecture.traits.experts
    assert named is not None, architecture.family
    block = f"{hugging}{named.block}." if named.block else hugging

    def of_all(*parts: str, kind: str = "weight", shape: tuple[int, ...]) -> tuple[Source, ...]:
        pairs = itertools.product(range(architecture.num_experts), parts)
        return tuple(Source(f"{block}experts.{expert}.{part}.{kind}", shape) for expert, part in pairs)

    experts, halves = f"{megatron}mlp.experts.", (named.gate, named.up)
    router = Source(f"{block}{named.router}.weight", (architecture.num_experts, hidden))
    slots = [
        Slot(f"{megatron}mlp.router.weight", Cut.WHOLE, (router,)),
        Slot(f"{experts}gate_up.weight", Cut.EXPERTS, of_all(*halves, shape=(width, hidden))),
        Slot(f"{experts}down.weight", Cut.EXPERTS, of_all(named.down, shape=(hidden, width))),
    ]
    if named.biased:
        logits = f"{megatron}mlp.router.logit_bias", f"{block}{named.router}.bias", architecture.num_experts
        slots += [
            _whole(*logits),
            Slot(f"{experts}gate_up.bias", Cut.EXPERTS, of_all(*halves, kind="bias", shape=(width,))),
            Slot(f"{experts}down.bias", Cut.EXPERTS, of_all(named.down, kind="bias", shape=(hidden,))),
        ]
    if named.correction is not None:
        slots.append(_whole(f"{megatron}mlp.router.bias", f"{block}{named.correction}", architecture.num_experts))
    if named.shared is not None:
        shared = f"{megatron}mlp.shared.", f"{block}{named.shared}.", architecture.shared_ffn
        slots += _feed_forward_slots(architecture, *shared)
    if named.shared_gate is not None:
        gate = Source(f"{block}{named.shared_gate}.weight", (1, hidden))
        slots.append(Slot(f"{megatron}mlp.shared_gate.weight", Cut.WHOLE, (gate,)))
    if named.beside:
        norms = BESIDE_NORMS.items()
        slots += [_whole(f"{megatron}mlp.{ours}.weight", f"{block}{theirs}.weight", hidden) for ours, theirs in norms]
        slots.append(_whole(f"{megatron}mlp.router.norm.weight", f"{block}router.scale", hidden))
        factors = f"{megatron}mlp.router.factors", f"{block}router.per_expert_scale", architecture.num_experts
        slots.append(_whole(*factors))
    return slots


def _fused(
    architecture: Architecture, prefix: str, kind: str, parts: dict[str, int], name: str, *columns: int
) -> tuple[Source, ...]:
    """Matrices of so many rows, or the one of this `name` as which the family's folders hold them."""
    stored = {name: sum(parts.values())} if name in architecture.traits.stored_fused else parts
    return tuple(Source(f"{prefix}{part}.{kind}", (rows, *columns)) for part, rows in stored.items())


def _whole(parameter: str, name: str, size: int) -> Slot:
    return Slot(parameter, Cut.WHOLE, (Source(name, (size,)),))


def _columns(parameter: str, name: str, rows: int, columns: int) -> Slot:
    return Slot(parameter, Cut.COLUMNS, (Source(name, (rows, columns)),))


def segments(
    slot: Slot, architecture: Architecture, *, tp: int, tp_rank: int, ep: int = 1, ep_rank: int = 0
) -> tuple[Segment, ...]:
    """Slices that make up the shard of a rank, in order; a vocabulary shard may be padded after them.

    tp, tp_rank   how many ranks share a parameter that is no expert's, and which of them it is
    ep, ep_rank   the same of the experts
    """
    size = slot.sources[0].shape[slot.dim]
    if slot.cut is Cut.WHOLE:
        return tuple(Segment(number, 0, source.shape[0]) for number, source in enumerate(slot.sources))
    if slot.cut is Cut.VOCAB:
        rows = padded_vocab_size(size, tp) // tp
        start, stop = (min(edge * rows, size) for edge in (tp_rank, tp_rank + 1))
        return (Segment(0, start, stop),)
    if slot.cut is Cut.QKV:
        assert slot.heads is not None, slot.parameter
        query_rows, kv_rows = architecture.num_heads * slot.heads.size, slot.heads.kv_heads * slot.heads.size
        pieces = _rank_share(_fused_qkv(architecture, slot.heads), tp=tp, tp_rank=tp_rank)
        return _in_sources(pieces, slot, (query_rows, kv_rows, kv_rows))
    if slot.cut is Cut.GATE_UP:
        rows = gate_rows(slot)
        share = rows // tp
        pieces = tuple(Segment(half, tp_rank * share, (tp_rank + 1) * share) for half in range(2))
        return _in_sources(pieces, slot, (rows, rows))
    if slot.cut is Cut.HEADS:
        return tuple(_head_rows(slot, tp=tp, tp_rank=tp_rank))
    if slot.cut is Cut.EXPERTS:
        share = len(slot.sources) // ep
        return tuple(Segment(source, 0, size) for source in range(ep_rank * share, (ep_rank + 1) * share))
    share = size // tp
    return (Segment(0, tp_rank * share, (tp_rank + 1) * share),)


def _head_rows(slot: Slot, *, tp: int, tp_rank: int) -> Iterator[Segment]:
    """The rank's heads of every part; those that lie end to end are one segment."""
    first, last = slot.groups * tp_rank // tp, slot.groups * (tp_rank + 1) // tp
    for part in slot.parts:
        if part.rows == part.step:
            yield Segment(part.source, part.start + first * part.step, part.start + last * part.step)
            continue
        for group in range(first, last):
            start = part.start + group * part.step
            yield Segment(part.source, start, start + part.rows)


def group_rows(slot: Slot, *, tp: int, tp_rank: int) -> tuple[Segment, ...]:
    """The rank's rows of a slot of heads as an engine has them: the parts of a group that lie side by side as one."""
    first, last = slot.groups * tp_rank // tp, slot.groups * (tp_rank + 1) // tp
    beside = {part.source: part.step for part in slot.parts if part.rows < part.step}
    if beside:
        return tuple(Segment(source, first * step, last * step) for source, step in beside.items())
    return tuple(_head_rows(slot, tp=tp, tp_rank=tp_rank))


def rectangles(
    slot: Slot,
    architecture: Architecture,
    *,
    tp: int,
    tp_rank: int,
    ep: int = 1,
    ep_rank: int = 0,
    start: int,
    stop: int,
) -> Iterator[Rectangle]:
    """Rectangles that the numbers start:stop of a rank's flattened shard cover; padding of the vocabulary is in none.

    Data parallelism cuts the optimizer's state wherever it likes: a part of a row, whole rows, a part of a row.
    """
    rows, *columns = shard_shape(slot, architecture, tp=tp, ep=ep)
    width, first = math.prod(columns), 0
    for piece in segments(slot, architecture, tp=tp, tp_rank=tp_rank, ep=ep, ep_rank=ep_rank):
        # Columns are cut for every row alike, and all that a rank has of them is one segment.
        size = rows if slot.dim else piece.stop - piece.start
        row_shift, column_shift = (0, piece.start) if slot.dim else (piece.start - first, 0)
        low, high = max(start, first * width), min(stop, (first + size) * width)
        while low < high:
            row, column = divmod(low, width)
            whole = column == 0 and high - low >= width
            sizes = ((high - low) // width, width) if whole else (1, min(width - column, high - low))
            offsets = (row + row_shift, column + column_shift)
            # A convolution's tensor has a dimension of one between rows and columns; a norm's has rows alone.
            flat = [(offsets[0], sizes[0]), *[(0, 1)] * (len(columns) - 1), (offsets[1], sizes[1])][: 1 + len(columns)]
            yield Rectangle(slot.sources[piece.source], *(tuple(numbers) for numbers in zip(*flat, strict=True)), low)
            low += math.prod(sizes)
        first += size


def shard_shape(slot: Slot, architecture: Architecture, *, tp: int, ep: int = 1) -> tuple[int, ...]:
    """The shape of the Megatron parameter on every rank that shares it."""
    size = sum(piece.stop - piece.start for piece in segments(slot, architecture, tp=tp, tp_rank=0, ep=ep))
    if slot.cut is Cut.VOCAB:
        size = padded_vocab_size(architecture.vocab_size, tp) // tp
    shape = list(slot.sources[0].shape)
    shape[slot.dim] = size
    return tuple(shape)


def gate_rows(slot: Slot) -> int:
    """Rows of each matrix of a slot of gate and up, which may have one of them or both."""
    return sum(source.shape[0] for source in slot.sources) // (2 if slot.matrices is None else len(slot.matrices))


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks; rows from vocab_size on are padding."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-vocab_size // multiple) * multiple


def _fused_qkv(architecture: Architecture, heads: Heads) -> list[Segment]:
    """The whole fused projection: for each key/value group its query heads, its key head, its value head if any."""
    size, per_group = heads.size, architecture.num_heads // heads.kv_heads
    fused = []
    for group in range(heads.kv_heads):
        if architecture.gated:  # a folder has the gate of every head after its query
            starts = [2 * size * head for head in range(group * per_group, (group + 1) * per_group)]
            fused += [Segment(0, start + gate, start + gate + size) for gate in (0, size) for start in starts]
        else:
            fused.append(Segment(0, group * per_group * size, (group + 1) * per_group * size))
        fused += [Segment(source, group * size, (group + 1) * size) for source in range(1, 2 + heads.has_values)]
    return fused


def _in_sources(pieces: tuple[Segment, ...], slot: Slot, rows: tuple[int, ...]) -> tuple[Segment, ...]:
    """Segments of fused matrices as segments of the slot's sources.

    The slot may have some of the matrices alone, or its folder may hold them all, of so many `rows`, in one tensor.
    """
    if (kept := slot.matrices) is not None:
        return tuple(replace(piece, source=kept.index(piece.source)) for piece in pieces if piece.source in kept)
    if len(slot.sources) > 1:
        return pieces
    starts = tuple(itertools.accumulate(rows[:-1], initial=0))
    return tuple(Segment(0, piece.start + starts[piece.source], piece.stop + starts[piece.source]) for piece in pieces)


def _rank_share(fused: list[Segment], *, tp: int, tp_rank: int) -> tuple[Segment, ...]:
    """The rank's equal share of a fused list; with more ranks than key/value groups it may cut through a head."""
    total = sum(piece.stop - piece.start for piece in fused)
    low, high = total * tp_rank // tp, total * (tp_rank + 1) // tp
    inside, position = [], 0
    for piece in fused:
        start = piece.start + max(low - position, 0)
        position += piece.stop - piece.start
        stop = piece.stop - max(position - high, 0)
        if start < stop:
            inside.append(Segment(piece.source, start, stop))
    return tuple(inside)
