"""Requests of the actor to a device, counted without one: launches, allocations, copies, and waits of the host.

    python tests/unit/megatron/host_work.py [LAYERS]   Markdown: update and score of one micro-batch, for two depths

The real actor runs in bf16 on the CPU with its real numbers. Which of its tensors a GPU would have is followed: the
model's and the optimizer's, what is sent to the device, and what is computed of any of these. An operation of such
tensors is a launch, unless it is a view; one whose result the host must know is a wait. An operation with one
kernel on CUDA and none on the CPU (attention, norms, rotations, gated activations, the fused head) is a part of its
own, counted as the CPU's operations for it; its backward is counted with everybody's.
Not covered: how long any of it takes, and what vLLM asks.
"""

import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.extend(str(Path(__file__).resolve().parents[2] / "support" / folder) for folder in ("", "cases"))

import torch
from actor_cases import make_actor, objective, one_rank, random_samples
from tiny_models import make_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hacpo_mega.megatron import actor as actors
from hacpo_mega.megatron.actor import Actor
from hacpo_mega.megatron.model import attention, layers, linear, rope
from hacpo_mega.megatron.model.model import unwrapped
from hacpo_mega.megatron.train import schedule

# Their results' sizes or values are the host's to know.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")
MAKES_NOTHING = ("_unsafe_view", "lift_fresh", "_reshape_alias")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass
class Asked:
    """Requests of one part of the work; `waits` by where in the source the host waits."""

    launches: int = 0
    allocations: int = 0
    uploads: int = 0
    collectives: int = 0
    waits: Counter = field(default_factory=Counter)
    names: Counter = field(default_factory=Counter)

    @property
    def num_waits(self) -> int:
        return sum(self.waits.values())


class HostWork:
    """Counts what is asked inside `recording`, by the `part` that is under way."""

    def __init__(self, *things: Any) -> None:
        """`things` are what lies on the device from the start: modules and tensors."""
        self.asked: dict[str, Asked] = {}
        self._part, self._makes, self.phase = ["other"], False, ""
        self._there: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for thing in things:
            for tensor in [*thing.parameters(), *thing.buffers()] if isinstance(thing, torch.nn.Module) else [thing]:
                self.put(tensor)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which lies on the device from now on."""
        self._there[tensor.untyped_storage()] = True
        return tensor

    def has(self, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.untyped_storage() in self._there

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._part.append(name)
        try:
            yield
        finally:
            self._part.pop()

    def inside(self, name: str, function: Callable) -> Callable:
        """The function as a part of its own, of the phase that is under way."""

        def called(*arguments: Any, **options: Any) -> Any:
            with self.part(f"{self.phase}: {name}"):
                return function(*arguments, **options)

        return called

    @property
    def now(self) -> Asked:
        return self.asked.setdefault(self._part[-1], Asked())

    @contextmanager
    def recording(self) -> Iterator["HostWork"]:
        with _Calls(self), _Operations(self):
            yield self

    def waits(self) -> None:
        self.now.waits[_where()] += 1


class _Calls(TorchFunctionMode):
    """Copies between host and device, of which a CPU sees nothing."""

    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, work = kwargs or {}, self.work
        if func is torch.tensor:  # of a list of numbers that lie there: each is waited for
            for leaf in tree_leaves(args[0]):
                if work.has(leaf):
                    work.waits()
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and work.has(args[0]):
            work.waits()
        target = kwargs.get("device", args[1] if func is torch.Tensor.to and len(args) > 1 else None)
        if func is torch.tensor and isinstance(target, torch.device):  # made on the host, then sent as below
            work.now.uploads += 1
            work.waits()
            return work.put(func(*args, **kwargs))
        if work.has(args[0] if args else None) and (func is torch.Tensor.cpu or target == "cpu"):
            work.waits()
            with torch._C.DisableTorchFunctionSubclass(), torch.utils._python_dispatch._disable_current_modes():
                return func(args[0].detach().clone(), *args[1:], **kwargs)
        if not isinstance(target, torch.device):
            return func(*args, **kwargs)
        if func is torch.Tensor.to and not work.has(args[0]):
            work.now.uploads += 1
            if not kwargs.get("non_blocking"):  # cudaMemcpyAsync out of pageable memory, and a wait for the stream
                work.waits()
            return work.put(func(args[0], *args[1:], **kwargs | {"copy": True}))
        before, work._makes = work._makes, True
        try:
            return func(*args, **kwargs)
        finally:
            work._makes = before


class _Operations(TorchDispatchMode):
    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        work, kwargs = self.work, kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        answer = func(*args, **kwargs)
        there = [tensor for tensor in given if work.has(tensor)]
        if not there and (given or not work._makes):
            return answer
        name, asked = func.overloadpacket.__name__, work.now
        if func.namespace.startswith("c10d"):
            asked.collectives += 1
            return answer
        known = {tensor.untyped_storage()._cdata for tensor in given}
        made = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
        fresh = {tensor.untyped_storage()._cdata: tensor for tensor in made}
        fresh = [tensor for data, tensor in fresh.items() if data not in known]
        asked.allocations += len(fresh)
        for tensor in fresh:
            work.put(tensor)
        is_mask = name in ("index", "index_put_") and any(
            tensor.dtype is torch.bool for tensor in args[1] if tensor is not None
        )
        is_size_unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in WAITS or is_mask or is_size_unknown:
            work.waits()
        elif name not in EMPTY and name not in MAKES_NOTHING and not func.is_view:
            asked.launches += 1
            asked.names[name] += 1
        return answer


def _where() -> str:
    """The line of ours or of Megatron that waits."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.endswith("/megatron/model/platform.py") or "/tests/" in frame.filename:
            continue
        for package in ("hacpo_mega", "hacpo_kernels", "megatron"):
            _, found, path = frame.filename.rpartition(f"/{package}/")
            if found:
                return f"{package}/{path}: {frame.name}: {frame.line}"
    return "elsewhere"


def record_actor(folder: Path) -> dict[str, Asked]:
    """Requests of an actor of one rank, by part: score and update of one micro-batch. Inside a process group of one."""
    actor = make_actor(folder, dtype=torch.bfloat16, max_tokens_per_microbatch=8192)
    samples = [replace(sample, source_logprob=-5.0) for sample in random_samples(2, seed=3) if sample.is_self]
    actor.optimizer.make_moments()
    for part in actor.optimizer.parts:
        for group in part.optimizer.param_groups:
            group["foreach"], group["fused"] = True, False  # as torch chooses on CUDA
    work = HostWork(actor.model.module, *_of_optimizer(actor), unwrapped(actor.model).rope_P)
    with ExitStack() as stack:
        for owner, name, called in [
            (attention, "_attend_in_groups", "attention"),
            (rope, "rotate_heads", "rotations"),
            (linear, "gated_activation", "activations"),
            (actors, "linear_logprob", "head"),
            (layers, "rms_norm", "norms"),
            (actor.optimizer, "step", "optimizer"),
            (schedule, "finalize_model_grads", "reduction"),
            (schedule, "forward_packed", "layers"),
        ]:
            stack.enter_context(mock.patch.object(owner, name, work.inside(called, getattr(owner, name))))
        stack.enter_context(work.recording())
        work.phase = "score"
        work.inside("the rest", actor.score)(samples)
        work.phase = "learn"
        work.inside("loss and backward", actor.learn)(samples, objective)
    return work.asked


def _of_optimizer(actor: Actor) -> Iterator[torch.Tensor]:
    for buffer in actor.model.buffers:
        yield from (buffer.param_data, buffer.grad_data)
    for part in actor.optimizer.parts:
        yield from (tensor for group in part.shard_fp32_from_float16_groups for tensor in group)
        yield from (tensor for state in part.optimizer.state.values() for tensor in state.values() if tensor.dim())


def main(num_layers: int) -> None:
    found = {}
    with tempfile.TemporaryDirectory() as root, one_rank():
        for depth in (num_layers, 2 * num_layers):
            folder = make_model(Path(root) / str(depth), "qwen3", num_layers=depth, dtype=torch.bfloat16)
            found[depth] = record_actor(folder)
    print("| part | launches | of a layer | allocations | of a layer | uploads | collectives | waits |")
    print("|---|---|---|---|---|---|---|---|")
    few, many = found.values()
    for name, asked in few.items():
        more = many[name]
        layer = [(getattr(more, kind) - getattr(asked, kind)) / num_layers for kind in ("launches", "allocations")]
        numbers = (
            asked.launches,
            layer[0],
            asked.allocations,
            layer[1],
            asked.uploads,
            asked.collectives,
            asked.num_waits,
        )
        print(f"| {name} | {' | '.join(f'{number:g}' for number in numbers)} |")
    for name, asked in few.items():
        for where, times in asked.waits.items():
            print(f"{name}: waits {times} x {where}")
        if "-v" in sys.argv:
            print(name, asked.names.most_common(30))


if __name__ == "__main__":
    main(2)
