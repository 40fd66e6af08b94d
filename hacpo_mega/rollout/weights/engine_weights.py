"""In-place update of a live vLLM's weights, part by part.

On CUDA a parameter is stored as it was loaded: its parts are written in place. On the CPU vLLM packs the weight of a
linear layer after loading and keeps no other copy: the layer gets a new shard, and packs it as at the start. Experts
are packed when both of their tensors have arrived (expert_weights.py). Attention with latents recomputes the two
matrices that it makes of a layer's weight (absorbs). Attention with sinks renews FlashInfer's float32 copy of them.
A layer that quantizes what it loads, as `vllm = { quantization = "fp8_per_tensor" }` asks for, gets its shard in the
plain form too, and quantizes it in place, as it would have done from a folder at the start. Some kinds reduce the
largest number over the ranks of an engine, so all ranks have to reach a layer, in one order (Receiver).
Tensors whose loaders could not be followed (parts.py) go through vLLM's own loaders, as full tensors.

vLLM alone decides the scales of quantized weights.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    inplace,
    layerwise,
)

from hacpo_mega.models.files.stacked_experts import joined_experts
from hacpo_mega.models.files.weight_files import HEAD, stacks_experts
from hacpo_mega.models.sharding.shards import Shard
from hacpo_mega.rollout.vllm.host_process import replaced
from hacpo_mega.rollout.weights.expert_weights import experts_problem, packs_experts, take_experts
from hacpo_mega.rollout.weights.held_weights import EMBEDDING, SINKS, absorbs, is_embedding
from hacpo_mega.rollout.weights.parts import Part, Recording, record, stacked_parts

# Methods of layers that hold weights as they load them, but for the CPU's packing.
PLAIN = UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod


@contextmanager
def without_reload_warnings() -> Iterator[None]:
    """Silences vLLM on layers and parameters that were not loaded, or that wait for others."""
    with replaced(layerwise.logger, "disabled", True), replaced(inplace.logger, "disabled", True):
        yield


class EngineWeights:
    """Parameters of a live model that are written part by part.

    parts   in writing order, experts' matrices stacked; a part's number is its place here
    """

    @classmethod
    def recorded(
        cls, model: nn.Module, published: Mapping[str, tuple[int, ...]], config: ModelConfig
    ) -> "EngineWeights":
        """Records what vLLM's loaders do with the `published` tensors (name -> shape); `config` is the model's."""

        def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
            model.load_weights(joined_experts(tensors) if stacks_experts(published) else tensors)

        with without_reload_warnings():
            initialize_layerwise_reload(model)
            try:
                recording = record(model, published, config.dtype, load)
            finally:
                finalize_layerwise_reload(model, config)
        return cls(model, recording, config)

    def __init__(self, model: nn.Module, recording: Recording, config: ModelConfig) -> None:
        """Tensors whose layer holds them in an unknown form move to `recording`'s fallback, each with the reason."""
        self._modules = dict(model.named_modules())
        self._shapes, self._config = recording.shapes, config
        self._unpacked: dict[str, dict[str, Tensor]] = defaultdict(dict)  # experts of which a tensor is missing
        by_path = defaultdict(list)
        for part in recording.parts:
            by_path[part.path].append(part)
        for path, parts in by_path.items():
            if reason := self._problem(path, parts):
                recording.use_fallback([part.shard.name for part in parts], reason)
        self._recording = recording
        self.parts = stacked_parts(recording.parts)
        self._packed = _packed_by_weight(model)
        self._absorbing = {id(module.kv_b_proj): module for module in model.modules() if absorbs(module)}

    @property
    def fallback(self) -> Mapping[str, str]:
        """Published tensors that are not written part by part, and why."""
        return self._recording.fallback

    @property
    def quantized(self) -> Set[str]:
        """Published tensors that layers quantize."""
        return {part.shard.name for part in self.parts if self.quantizes(part.path)}

    def converted_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(vLLM's name, tensor) of the layers that quantize, or keep weights in a form of their own."""
        for path, module in self._modules.items():
            method = getattr(module, "quant_method", None)
            if method is not None and (not isinstance(method, PLAIN) or experts_problem(method)):
                for name, parameter in module.named_parameters(recurse=False):
                    yield f"{path}.{name}", parameter.detach()

    def use_fallback(self, reasons: Mapping[str, str]) -> None:
        """Moves these tensors, and others of the same layers, to the fallback."""
        for name, reason in reasons.items():
            self._recording.use_fallback([name], reason)
        self.parts = stacked_parts(self._recording.parts)

    def _problem(self, path: tuple[str, str], parts: list[Part]) -> str | None:
        """Reason why a parameter cannot be written part by part; None if it can."""
        module, shape = self._modules[path[0]], self._shapes[path]
        method, live = getattr(module, "quant_method", None), getattr(module, path[1])
        quantizes = self.quantizes(path)
        if method is not None and not isinstance(method, (*PLAIN, OnlineLinearBase)):
            return f"its layer may hold it in another form ({type(method).__name__})"
        if problem := experts_problem(method):
            return problem
        if not (_is_packed(module, live) or quantizes) and (live.shape != shape or not live.is_contiguous()):
            return f"its layer holds it as {tuple(live.shape)}, and loads it as {tuple(shape)}"
        if hasattr(module, "_cpu_unpacked_conv_weight"):
            return "its layer holds it packed"
        end = 0
        for part in sorted(parts, key=lambda part: part.offset):
            sizes = part.shard.sizes
            if part.offset != end or part.strides != tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))):
                return "its parts do not lie end to end"
            end += part.shard.size
        # A padded vocabulary has rows that stand for no token.
        return None if end == shape.numel() or hasattr(module, "shard_indices") else "its loader leaves gaps"

    def quantizes(self, path: tuple[str, str]) -> bool:
        """True if a layer quantizes what it loads into this parameter."""
        method = getattr(self._modules[path[0]], "quant_method", None)
        return path[1] == "weight" and isinstance(method, OnlineLinearBase)

    def destination(self, path: tuple[str, str], dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Tensor into which the parts of a parameter are written, and whether it is a new one."""
        live = getattr(self._modules[path[0]], path[1])
        if not (_is_packed(self._modules[path[0]], live) or self.quantizes(path)):
            return live.detach(), False
        return torch.empty(self._shapes[path], dtype=dtype, device=live.device), True

    def finish(self, path: tuple[str, str], tensor: Tensor, num_written: int, *, is_new: bool) -> None:
        """Installs a parameter: `num_written` numbers of `tensor` [any shape] are written, the rest becomes zero.

        Collective over the engine if the layer quantizes.
        """
        module = self._modules[path[0]]
        if self.quantizes(path):
            _quantize(module, tensor, self._config)
        else:
            self._install(path, tensor, num_written, is_new=is_new)
        attention = module.attn if path[1] == SINKS else self._absorbing.get(id(module))
        if attention is not None:
            attention.process_weights_after_loading(self._config.dtype)

    def _install(self, path: tuple[str, str], tensor: Tensor, num_written: int, *, is_new: bool) -> None:
        layer, parameter = path
        module = self._modules[layer]
        tensor.view(-1)[num_written:].zero_()
        if packs_experts(module):
            both = self._unpacked[layer]
            both[parameter] = tensor
            if len(both) == 2:
                take_experts(module, self._unpacked.pop(layer))
            return
        packed = self._packed.get(id(getattr(module, parameter)), []) if not is_new else [module]
        if is_new:
            setattr(module, parameter, nn.Parameter(tensor, requires_grad=False))
        for holder in packed:
            holder.quant_method.process_weights_after_loading(holder)


class Receiver:
    """Receiving side of one weight sync: gives out views of parts, and counts what is written there."""

    def __init__(self, weights: EngineWeights, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        """`load` takes full tensors by name: those of the fallback, all of a layer in one call."""
        self._weights, self.load = weights, load
        self._left: dict[tuple[str, str], int] = defaultdict(int)
        # Tensors that quantizing layers still wait for, in an order that all ranks of the engine share.
        self._unsettled: dict[tuple[str, str], set[str]] = defaultdict(set)
        for part in weights.parts:
            self._left[part.path] += part.shard.size
            if weights.quantizes(part.path):
                self._unsettled[part.path].add(part.shard.name)
        self._sizes = dict(self._left)
        self._open: dict[tuple[str, str], tuple[Tensor, bool]] = {}

    def view(self, number: int, rectangle: Shard, dtype: torch.dtype) -> Tensor:
        """Destination of `rectangle`, published in `dtype`, inside part `number`: a view [*rectangle.sizes]."""
        part = self._weights.parts[number]
        if part.path not in self._open:
            self._open[part.path] = self._weights.destination(part.path, dtype)
        return part.view(self._open[part.path][0], rectangle)

    def wrote(self, number: int, size: int) -> None:
        """Counts `size` written numbers of a part; with the last one of a parameter, its layer takes it.

        A layer that quantizes takes it when all ranks of the cell have theirs: `settled`.
        """
        path = self._weights.parts[number].path
        self._left[path] -= size
        assert self._left[path] >= 0, f"{path} was written twice"
        if self._left[path] == 0 and path not in self._unsettled:
            self._finish(path)

    def settled(self, names: Set[str]) -> None:
        """Notes that all ranks of the cell have all parts of these tensors. Collective over the engine."""
        for path, waits_for in list(self._unsettled.items()):
            waits_for -= names
            if not waits_for:
                del self._unsettled[path]
                self._finish(path)

    def _finish(self, path: tuple[str, str]) -> None:
        tensor, is_new = self._open.pop(path)
        self._weights.finish(path, tensor, self._sizes[path], is_new=is_new)

    @property
    def missing(self) -> list[str]:
        """Parameters with parts that were not written."""
        return [".".join(path) for path, left in self._left.items() if left or path in self._unsettled]


def _quantize(module: nn.Module, tensor: Tensor, config: ModelConfig) -> None:
    """Quantizes the weight `tensor` [out, in] into a layer. Collective over the engine."""
    with without_reload_warnings():
        initialize_layerwise_reload(module)
        parameter, loader = module.weight, module.weight.weight_loader
        parameter.weight_loader = _load_shard
        layerwise.initialize_online_processing(module)  # quantizes as soon as the loader below has brought all
        try:
            parameter.weight_loader(parameter, tensor)
        finally:
            finalize_layerwise_reload(module, config)
            parameter.weight_loader = loader  # vLLM keeps the parameter on the meta device for the next time


def _load_shard(param: Tensor, loaded_weight: Tensor) -> None:
    """Weight loader in vLLM's form for a tensor that already is this rank's shard."""
    param.data.copy_(loaded_weight)


def _is_packed(module: nn.Module, live: Tensor) -> bool:
    """True if the layer holds this parameter packed."""
    return packs_experts(module) or (live.numel() == 0 and hasattr(module, "cpu_linear"))


def _packed_by_weight(model: nn.Module) -> Mapping[int, list[nn.Module]]:
    """Layers that multiply with a packed copy of a weight beside it, by the weight.

    An embedding has a packed copy too; it is used where the embedding is the head, under that name or in a layer of its
    own.
    """
    layers: dict[int, list[nn.Module]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        is_packed = hasattr(module, "cpu_linear") and not is_embedding(module, path)
        if is_packed and weight.numel() and module not in layers[id(weight)]:
            layers[id(weight)].append(module)
    return layers


def noting_names(
    weights: Iterable[tuple[str, Tensor]], given: set[str], *, packs_head: bool
) -> Iterator[tuple[str, Tensor]]:
    """Passes on full tensors for vLLM's loaders, and adds their names to `given`.

    With `packs_head` the output layer has a packed copy of the embedding, which gets the embedding too. Experts of a
    family that stacks them have gate and up as one there (stacked_experts.py).
    """
    for name, tensor in weights:
        given.add(name)
        yield name, tensor
        if packs_head and name == f"{EMBEDDING}.weight":
            yield HEAD, tensor


def noting_sinks(weights: Iterable[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Passes on tensors, and keeps a copy of attention sinks in `sinks`."""
    for name, tensor in weights:
        if name.endswith(f".{SINKS}"):
            sinks[name.replace(".self_attn.", ".attn.")] = tensor.clone()
        yield name, tensor


def take_sinks(model: nn.Module, sinks: Mapping[str, Tensor]) -> None:
    """Writes the attention sinks, vLLM's name -> sinks of all heads [N].

    A reload alone would keep the old ones: gpt-oss's loader copies them into a parameter that the reload has put aside.
    """
    for name, sinks_N in sinks.items():
        module = model.get_submodule(name.rpartition(".")[0])
        shard = module.sinks.data
        shard.copy_(sinks_N[module.qkv_proj.tp_rank * len(shard) :][: len(shard)])
        module.attn.process_weights_after_loading(shard.dtype)  # renews the kernel's copy


def require_names(given: Set[str], expected: Set[str]) -> None:
    """ValueError if the given tensors are not those of the model folder, if that has any.

    vLLM only logs missing tensors and keeps their old values: half a weight sync must not pass as one.
    """
    missing, unknown = expected - given, given - expected - {HEAD}
    if expected and (missing or unknown):
        raise ValueError(
            f"published weights do not fit the model folder: {len(missing)} missing {sorted(missing)[:4]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:4]}"
        )
