"""Tensors that a live engine multiplies with, part by part, under their Hugging Face names.

An engine keeps its shard of every tensor, several of them fused into one (qkv_proj, gate_up_proj). The layer's own
attributes say which part of the published tensor that is, not the loader that put it there, so that a loader that cuts
wrongly is found too. On the CPU linear layers hold a packed copy that cannot be read: it is multiplied with the unit
matrix, and sums of one number and zeros are exact; experts are unpacked (expert_weights.py).

Elsewhere: the comparison (agent/weight_sync.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from hacpo_mega.models.sharding.shards import STAR, Shard
from hacpo_mega.rollout.weights.expert_weights import expert_halves, experts_problem, holds_experts, interleaves_gate_up
from hacpo_mega.rollout.weights.parts import loaded_tensors

EMBEDDING, HEAD_LAYER = "model.embed_tokens", "lm_head"
ABSORBED = "W_UK_T", "W_UV"  # of attention with latents, made of its layer `kv_b_proj`
SINKS = "sinks"  # of attention (gpt-oss)


@dataclass(frozen=True)
class Cut:
    """An engine's part of a published tensor: `size` from `start` on in `dim`, at `offset` of the engine's tensor."""

    dim: int
    start: int
    size: int
    offset: int = 0


@dataclass(frozen=True)
class HeldPart:
    """An engine's part of a published tensor, or of the stack of all experts (models/sharding/shards.py).

    read        returns the engine's tensor, which may hold parts of others too
    is_packed   whether it is read through a product, which is exact for finite numbers alone
    """

    name: str
    cut: Cut
    read: Callable[[], Tensor]
    is_packed: bool

    def shard(self, shape: Sequence[int]) -> Shard:
        """The part as a rectangle of the published tensor of this shape."""
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[self.cut.dim], sizes[self.cut.dim] = self.cut.start, self.cut.size
        return Shard(self.name, tuple(offsets), tuple(sizes))

    def view(self, rectangle: Shard) -> Tensor:
        """Numbers of a rectangle of the published tensor, which lies in the part: a view [*rectangle.sizes]."""
        held = self.read()
        for dim, (start, size) in enumerate(zip(rectangle.offsets, rectangle.sizes, strict=True)):
            shift = self.cut.offset - self.cut.start if dim == self.cut.dim else 0
            held = held.narrow(dim, start + shift, size)
        return held


def held_parts(model: nn.Module, fused: Mapping[str, Sequence[str]], tied: bool) -> Iterator[HeldPart]:
    """Parts of every tensor that the engine has, layer by layer.

    fused   layer name -> the matrices that it fuses: {"gate_up_proj": ["gate_proj", "up_proj"]}
    tied    whether the output layer is the embedding
    """
    seen: set[nn.Module] = set()
    shares_keys = _shares_keys(model)
    # A tied output layer may be the embedding itself, under a second name; the router of experts has two names, too.
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, last = path.rpartition(".")
        if module in seen and path != HEAD_LAYER:
            continue
        seen.add(module)
        if hasattr(module, "A_log"):
            yield from _held_delta_net(module, path)
            seen.add(module.conv1d)
            continue
        if holds_experts(module):
            yield from _held_experts(module, parent)
            continue
        if absorbs(module):
            yield _held_latents(module, path.partition(".mla_attn.")[0])
            continue
        names = [f"{parent}.{name}" for name in fused[last]] if last in fused else [path]
        if path in shares_keys:
            names[-1] = names[-2]  # its values are keys
        if tied and path == HEAD_LAYER:
            names = [EMBEDDING]
        for kind, parameter in loaded_tensors(module):
            is_packed = kind == "weight" and hasattr(module, "cpu_linear") and not is_embedding(module, path)
            read = cache(partial(_unpacked, module)) if is_packed else lambda parameter=parameter: parameter
            read = partial(_sinks, module) if kind == SINKS else read
            cuts = _cuts(module, len(names), kind, parameter)
            # One published tensor may be several of the engine's parts: some folders hold matrices fused, too.
            for name, cut in zip(names[:1] * (len(cuts) - len(names)) + names, cuts, strict=True):
                yield HeldPart(f"{name}.{kind}", cut, read, is_packed)


def absorbs(module: nn.Module) -> bool:
    """True for attention with latents, which multiplies with parts of its layer `kv_b_proj` while it answers."""
    return all(hasattr(module, name) for name in ABSORBED)


def _shares_keys(model: nn.Module) -> set[str]:
    """Paths of fused projections whose values have no matrix of their own."""
    config = getattr(model, "config", None)
    attentions = model.named_modules() if getattr(config, "attention_k_eq_v", False) else ()
    return {f"{path}.qkv_proj" for path, module in attentions if getattr(module, "is_sliding", None) is False}


def is_embedding(module: nn.Module, path: str) -> bool:
    """True for the layer of the embedding: of those cut by the vocabulary, the one that is no head."""
    return hasattr(module, "shard_indices") and path != HEAD_LAYER


def _held_experts(module: nn.Module, parent: str) -> Iterator[HeldPart]:
    """Parts of every expert, all of which the engine has; none if its kernel holds them in another form."""
    if experts_problem(module.quant_method):
        return
    halves = cache(lambda: expert_halves(module))
    names = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    size = module.intermediate_size_per_partition
    for number, name in enumerate(names):
        cut = Cut(2 if number == 2 else 1, module.moe_config.tp_rank * size, size)
        yield HeldPart(f"{parent}.{STAR}.{name}.weight", cut, lambda number=number: halves()[number], is_packed=False)
    if not getattr(module.moe_config, "has_bias", False):
        return
    assert interleaves_gate_up(module), parent
    rank = module.moe_config.tp_rank
    hidden = 0 if rank else module.w2_bias.shape[1]  # the first rank alone adds the bias of down
    reads = (lambda: module.w13_bias[:, 0::2]), (lambda: module.w13_bias[:, 1::2]), (lambda: module.w2_bias)
    for name, cut, bias in zip(names, [Cut(1, rank * size, size)] * 2 + [Cut(1, 0, hidden)], reads, strict=True):
        yield HeldPart(f"{parent}.{STAR}.{name}.bias", cut, bias, is_packed=False)


def _held_latents(module: nn.Module, attention: str) -> HeldPart:
    """A rank's rows of `kv_b_proj`, read from the two matrices that attention makes of them (ABSORBED)."""
    rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)

    def read() -> Tensor:
        both = torch.cat([module.W_UK_T, module.W_UV.transpose(1, 2)], dim=1)  # [heads, numbers of both, rank]
        return both.flatten(0, 1)

    cut = Cut(0, module.kv_b_proj.tp_rank * rows, rows)
    return HeldPart(f"{attention}.kv_b_proj.weight", cut, cache(read), is_packed=False)


def _held_delta_net(module: nn.Module, path: str) -> Iterator[HeldPart]:
    """Parts of a gated delta net that are no linear layer: rows of its convolution, and its two vectors over heads."""
    rank, start, offset = module.tp_rank, 0, 0
    for rows in (module.key_dim, module.key_dim, module.value_dim):
        size = rows // module.tp_size
        cut = Cut(0, start + size * rank, size, offset)
        yield HeldPart(f"{path}.conv1d.weight", cut, lambda: module.conv1d.weight, is_packed=False)
        start, offset = start + rows, offset + size
    for kind, parameter in module.named_parameters(recurse=False):
        cut = Cut(0, len(parameter) * rank, len(parameter))
        yield HeldPart(f"{path}.{kind}", cut, lambda parameter=parameter: parameter, is_packed=False)


def _sinks(module: nn.Module) -> Tensor:
    return module.attn.impl.sinks.to(module.sinks.dtype)  # the float32 copy that FlashInfer multiplies with


def _cuts(module: nn.Module, num_names: int, kind: str, parameter: Tensor) -> list[Cut]:
    """Cuts of the published tensors that a layer's parameter holds, from vLLM's attributes of the layer."""
    if kind == SINKS:  # attention's projection knows its rank
        return [Cut(0, module.qkv_proj.tp_rank * len(parameter), len(parameter))]
    if hasattr(module, "weight_shard_rank"):  # a norm over all heads that is cut
        return [Cut(0, module.weight_shard_rank * len(parameter), len(parameter))]
    if hasattr(module, "shard_indices"):
        rows = module.shard_indices
        return [Cut(0, rows.org_vocab_start_index, rows.num_org_elements)]
    if num_names > 1 or hasattr(module, "output_sizes"):
        cuts, offset, start, matrices = [], 0, 0, _rows_of_fused(module)
        for number, (size, shard, num_rows) in enumerate(matrices):
            # With fewer names than matrices, the tensor of the first name holds the first few matrices end to end.
            start = start if number <= len(matrices) - num_names else 0
            cuts.append(Cut(0, start + size * shard, size, offset))
            offset += size
            start += num_rows
        return cuts
    if kind == "weight" and hasattr(module, "input_size_per_partition"):
        if module.input_size_per_partition == module.input_size:  # cut by its outputs, or not at all
            rows = module.output_size_per_partition
            return [Cut(0, module.tp_rank * rows, rows)]
        return [Cut(1, module.tp_rank * module.input_size_per_partition, module.input_size_per_partition)]
    # A layer that every rank has whole may hold its parameter packed, without rows.
    return [Cut(0, 0, getattr(module, "output_size", len(parameter)))]


def _rows_of_fused(module: nn.Module) -> list[tuple[int, int, int]]:
    """(the engine's rows, their shard number, rows in all) of every matrix in a fused one.

    Key and value heads may be on several ranks each.
    """
    if not hasattr(module, "num_kv_head_replicas"):
        return [(size // module.tp_size, module.tp_rank, size) for size in module.output_sizes]
    size, shard = module.head_size, module.tp_rank // module.num_kv_head_replicas
    keys = module.num_kv_heads * size, shard, module.total_num_kv_heads * size
    return [(module.num_heads * size, module.tp_rank, module.total_num_heads * size), keys, keys]


def _unpacked(module: nn.Module) -> Tensor:
    """Weight [out, in] of a layer that holds it packed."""
    # An embedding's, a split layer's, and that of a layer that every rank has whole.
    names = ("embedding_dim", "input_size_per_partition", "input_size")
    size = next(getattr(module, name) for name in names if hasattr(module, name))
    unit = torch.eye(size, dtype=module.params_dtype)
    return module.cpu_linear(unit, module.weight, None).T
