"""LoRA on a live Megatron model: adapters beside its parallel layers, a frozen base, and merged weights for readers.

A column-parallel layer (split along its output) reads the tokens of a sequence-parallel rank and gathers them: its
adapter projects them to the rank of A first, so the gather is small. A row-parallel layer (split along its input) sums
over ranks and keeps each rank's tokens. Its adapter does the same with the product of its share of A. Either way the
factor that all tensor ranks have, A of the first and B of the second, gets the tokens of its own rank alone, and
Megatron sums its gradient over the ranks as it does a norm's (`sequence_parallel`). A layer that every rank has whole,
for its own tokens, has two such factors.

Elsewhere: the adapted matrices and how factors are cut (models/sharding/lora.py); W + B A in numbers
(hacpo_kernels.merge_adapter).

Shapes: T tokens and t = T / tp of them, R rank, n the adapters of a layer, O and I outputs and inputs of a rank, U of
those outputs the ones that an adapter adds to.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from hacpo_kernels import merge_adapter
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.functional import linear

from hacpo_mega.megatron.model.model import HiddenStateModel
from hacpo_mega.megatron.model.moe import as_experts, expert_product
from hacpo_mega.megatron.weights.names import shard_coordinates
from hacpo_mega.models.sharding.lora import Adapter, Lora, adapters, factor_names
from hacpo_mega.models.sharding.publish_plan import actor_shards
from hacpo_mega.models.sharding.segments import Cut, Rectangle, Segment, Slot, segments, shard_shape


class LayerAdapter(torch.nn.Module):
    """Adapters of one parallel layer; `forward` returns what they add to its output."""

    def __init__(self, down: Parameter, up: Parameter, scale: float, group: ProcessGroup) -> None:
        """`group` is that of tensor parallelism, whose ranks share the tokens of a sequence if there are several."""
        super().__init__()
        self.down, self.up, self.scale, self.group = down, up, scale, group
        self.is_on = True


class ColumnAdapter(LayerAdapter):
    """Adapter of a column-parallel layer: down [n R, I] on every rank, up [U, R] split as the layer is.

    `up` has the rows of the layer that an adapter adds to, in their order.
    """

    def __init__(self, owners_O: Sequence[int | None], *factors: object) -> None:
        """`owners_O` has for every row of the layer the index of its adapter, of n; None: no adapter."""
        super().__init__(*factors)
        rank, device = self.up.shape[1], self.up.device
        places = [place for place, owner in enumerate(owners_O) if owner is not None]
        num_adapters = self.down.shape[0] // rank
        mask = [[float(owners_O[place] == number) for number in range(num_adapters)] for place in places]
        self.mask_Un = None if num_adapters == 1 else torch.tensor(mask, dtype=self.up.dtype, device=device)
        self.places_U = None if len(places) == len(owners_O) else torch.tensor(places, device=device)
        self.num_rows = len(owners_O)
        self.down.sequence_parallel = self.group.size() > 1
        set_tensor_model_parallel_attributes(self.up, True, 0, 1)

    def forward(self, input_t1I: Tensor) -> Tensor:
        """Addition [T, 1, O] to the layer's output, from its input [t, 1, I]."""
        low = linear(input_t1I, self.down) * self.scale
        if self.group.size() > 1:
            low = gather_from_sequence_parallel_region(low, group=self.group)
        return linear(low, self._spread_up())

    def _spread_up(self) -> Tensor:
        """Block matrix [O, n R]: every row of `up` in its adapter's columns, in the layer's order; zeros elsewhere."""
        spread = self.up
        if self.mask_Un is not None:
            spread = (self.up[:, None, :] * self.mask_Un[:, :, None]).flatten(1)
        if self.places_U is not None:
            spread = spread.new_zeros(self.num_rows, spread.shape[1]).index_copy(0, self.places_U, spread)
        return spread


class RowAdapter(LayerAdapter):
    """Adapter of a row-parallel layer: down [R, I] split as the layer is, up [O, R] on every rank."""

    def __init__(self, *factors: object) -> None:
        super().__init__(*factors)
        set_tensor_model_parallel_attributes(self.down, True, 1, 1)
        self.up.sequence_parallel = self.group.size() > 1

    def forward(self, input_T1I: Tensor) -> Tensor:
        """Addition [t, 1, O] to the layer's output, from its input [T, 1, I]."""
        low = linear(input_T1I, self.down) * self.scale
        if self.group.size() > 1:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return linear(low, self.up)


class WholeAdapter(LayerAdapter):
    """Adapter of a layer that every tensor rank has whole, for its own tokens; down [R, I] and up [O, R] are whole."""

    def __init__(self, *factors: object) -> None:
        super().__init__(*factors)
        self.down.sequence_parallel = self.up.sequence_parallel = self.group.size() > 1

    def forward(self, input_t1I: Tensor) -> Tensor:
        """Addition [t, 1, O] to the layer's output, from its input [t, 1, I]."""
        return linear(linear(input_t1I, self.down) * self.scale, self.up)


class ExpertAdapter(LayerAdapter):
    """Adapter of a matrix of a rank's experts: down [e n R, I], up [e O, R], stacked expert by expert."""

    def __init__(self, num_experts: int, *factors: object) -> None:
        super().__init__(*factors)
        self.num_experts = num_experts
        as_experts(self.down), as_experts(self.up)

    def forward(self, rows_MI: Tensor, counts_e: Tensor) -> Tensor:
        """Addition [M, O] to the matrices' products, from M rows [M, I] sorted by expert, counts [e]."""
        low = expert_product(rows_MI, self.down, counts_e) * self.scale
        return expert_product(low, self._spread_up(), counts_e)

    def _spread_up(self) -> Tensor:
        """Block matrices [e O, n R]: every row of `up` in the columns of its own adapter; zeros elsewhere."""
        rank = self.up.shape[1]
        num_adapters = self.down.shape[0] // (self.num_experts * rank)
        if num_adapters == 1:
            return self.up
        up_enoR = self.up.view(self.num_experts, num_adapters, -1, rank)
        is_own_nn = torch.eye(num_adapters, dtype=self.up.dtype, device=self.up.device)
        return (up_enoR[:, :, :, None] * is_own_nn[:, None, :, None]).flatten(3).flatten(0, 2)


def attach_adapters(model: HiddenStateModel, lora: Lora, seed: int) -> None:
    """Freezes the model and adds adapters to its layers, before it is wrapped for data parallelism.

    B is zero, so the model computes the same as before. A is drawn as in peft (uniform up to 1 / sqrt(inputs)), seeded
    by the seed and the name of its matrix, so that it is the same on every layout.
    """
    assert not model.fuses_norms, (
        "TransformerEngine's layers have their norms inside, in front of what an adapter reads"
    )
    model.requires_grad_(False)
    model.lora = lora
    for adapter in _own_adapters(model):
        layer = model.get_submodule(adapter.module)
        layer.adapter = _layer_adapter(adapter, model, lora, seed)
        is_parallel = adapter.base.cut not in (Cut.EXPERTS, Cut.WHOLE)
        layer.register_forward_hook(_add_adapter if is_parallel else _add_to_product)


def _own_adapters(model: HiddenStateModel) -> Iterator[Adapter]:
    pp = model.pg_collection.pp
    return adapters(model.architecture, model.chunks, pp.size(), pp.rank(), model.lora)


def _add_adapter(layer: torch.nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> tuple | None:
    if not layer.adapter.is_on:
        return None
    (given,), (own, bias) = inputs, output
    return own + layer.adapter(given), bias


def _add_to_product(layer: torch.nn.Module, inputs: tuple[Tensor, ...], own: Tensor) -> Tensor | None:
    return own + layer.adapter(*inputs) if layer.adapter.is_on else None


def _layer_adapter(adapter: Adapter, model: HiddenStateModel, lora: Lora, seed: int) -> LayerAdapter:
    architecture, cut = model.architecture, shard_coordinates(model)
    weight = model.get_parameter(adapter.base.parameter)

    def parameter(slot: Slot) -> Parameter:
        shape = shard_shape(slot, architecture, tp=cut["tp"], ep=cut["ep"])
        return Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))

    factors = parameter(adapter.down), parameter(adapter.up), lora.scale, model.pg_collection.tp
    _draw(factors[0], adapter.down, segments(adapter.down, architecture, **cut), seed)
    if adapter.base.cut is Cut.EXPERTS:
        return ExpertAdapter(architecture.num_experts // cut["ep"], *factors)
    if adapter.base.cut in (Cut.COLUMNS, Cut.WHOLE):
        return (RowAdapter if adapter.base.cut is Cut.COLUMNS else WholeAdapter)(*factors)
    whose = {source.name: number for number, source in enumerate(adapter.down.sources)}
    owners_O: list[int | None] = []
    for piece in segments(adapter.base, architecture, **cut):
        down, _ = factor_names(adapter.base.sources[piece.source].name)
        owners_O += [whose.get(down)] * (piece.stop - piece.start)
    return ColumnAdapter(owners_O, *factors)


@torch.no_grad()
def _draw(down: Parameter, slot: Slot, pieces: Sequence[Segment], seed: int) -> None:
    first = 0
    for piece in pieces:
        source, size = slot.sources[piece.source], piece.stop - piece.start
        digest = hashlib.blake2b(f"{seed} {source.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        bound = source.shape[1] ** -0.5
        whole = torch.empty(source.shape).uniform_(-bound, bound, generator=generator)
        down.narrow(slot.dim, first, size).copy_(whole.narrow(slot.dim, piece.start, size))
        first += size


@contextmanager
def adapters_off(model: HiddenStateModel) -> Iterator[None]:
    """Context in which the model computes without adapters: the policy that the run began with."""
    layers = [module for module in model.modules() if isinstance(module, LayerAdapter)]
    try:
        for layer in layers:
            layer.is_on = False
        yield
    finally:
        for layer in layers:
            layer.is_on = True


class HeldWeights:
    """This rank's weights for readers: the model's, with adapters merged."""

    def __init__(self, model: HiddenStateModel) -> None:
        self._parameters = dict(model.named_parameters())
        self._lora = model.lora
        self._shards = partial(actor_shards, architecture=model.architecture, **shard_coordinates(model))
        self._factors: dict[str, list[tuple[Slot, Rectangle]]] = {}
        found = [] if model.lora is None else _own_adapters(model)
        for slot, held in self._shards([slot for each in found for slot in (each.down, each.up)]):
            self._factors.setdefault(held.source.name, []).append((slot, held))

    def shard(self, slot: Slot) -> Tensor:
        """This rank's shard of a parameter of the base, read-only."""
        parameter = self._parameters[slot.parameter].detach()
        if not any(self._adapts(source.name) for source in slot.sources):
            return parameter
        whole = parameter.clone()
        for _, held in self._shards([slot]):
            _view(whole, held).copy_(self.rectangle(slot.parameter, held, held.offsets, held.sizes))
        return whole

    def rectangle(self, parameter: str, held: Rectangle, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Numbers at `offsets`, [*sizes], of a Hugging Face tensor, inside the rectangle `held` of a parameter."""
        weight = _part(_view(self._parameters[parameter].detach(), held), held, offsets, sizes)
        if not self._adapts(held.source.name):
            return weight
        return merge_adapter(weight, *self._factors_of(held, offsets, sizes), self._lora.scale)

    def stack(
        self, parameter: str, held: Sequence[Rectangle], offsets: tuple[int, int], sizes: tuple[int, int]
    ) -> Tensor:
        """The same rectangle of several experts, [experts, *sizes]: a view, or a copy with adapters.

        Their matrices lie at equal distances in one parameter.
        """
        first = _part(_view(self._parameters[parameter].detach(), held[0]), held[0], offsets, sizes)
        step = held[1].start - held[0].start if len(held) > 1 else first.numel()
        weights = first.as_strided((len(held), *sizes), (step, *first.stride()))
        if not self._adapts(held[0].source.name):
            return weights
        ups, downs = zip(*(self._factors_of(each, offsets, sizes) for each in held), strict=True)
        return merge_adapter(weights, torch.stack(ups), torch.stack(downs), self._lora.scale)

    def _factors_of(self, held: Rectangle, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """B [rows, rank] and A [rank, columns] of a rectangle inside `held`."""
        down, up = factor_names(held.source.name)
        up_NR = self._factor(up, (offsets[0], 0), (sizes[0], self._lora.rank))
        return up_NR, self._factor(down, (0, offsets[1]), (self._lora.rank, sizes[1]))

    def _adapts(self, name: str) -> bool:
        return factor_names(name)[0] in self._factors

    def _factor(self, name: str, offsets: tuple[int, int], sizes: tuple[int, int]) -> Tensor:
        for slot, held in self._factors[name]:
            starts = [start - first for start, first in zip(offsets, held.offsets, strict=True)]
            if all(0 <= s <= s + size <= most for s, size, most in zip(starts, sizes, held.sizes, strict=True)):
                return _part(_view(self._parameters[slot.parameter].detach(), held), held, offsets, sizes)
        raise AssertionError(f"{name} at {offsets}, {sizes} is of another rank than its matrix")


def _view(parameter: Tensor, held: Rectangle) -> Tensor:
    """View of a rectangle, [*held.sizes], in a parameter's shard."""
    return parameter.view(-1)[held.start :][: torch.Size(held.sizes).numel()].view(held.sizes)


def _part(tensor: Tensor, held: Rectangle, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start - held.offsets[dim], length)
    return tensor
