"""Megatron-core on a machine without CUDA; with CUDA nothing changes.

Megatron-core names CUDA in many places where it means "this rank's device". `megatron_platform()` maps those names to
the CPU while Megatron code runs, and restores them afterwards: vLLM lives in the same process and must see the real
machine.

Elsewhere: permanent replacements, on every device (patches.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

CPU = torch.device("cpu")
NAMES_A_DEVICE = (str, torch.device)


@contextmanager
def megatron_platform() -> Iterator[None]:
    """Context for Megatron code on this machine's devices; a no-op with CUDA, and inside itself.

    Construction, forward, backward and optimizer of a Megatron model belong inside; vLLM does not.
    """
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        yield
        return
    with ExitStack() as stack:
        for owner, name, value in _replacements():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CudaMeansCpu())
        yield


@contextmanager
def one_group_for_equal_ranks() -> Iterator[None]:
    """Context in which Megatron makes one gloo group for all its names of the same ranks; a no-op with CUDA.

    An actor on two ranks would have ten of them. Each has three threads, one of which wakes a hundred times a second.
    The names are used by one thread, in one order on all their ranks.
    """
    if torch.cuda.is_available():
        yield
        return
    create, made = parallel_state.create_group, {}

    def create_once(ranks: Sequence[int], timeout: timedelta | None = None, **options: Any) -> ProcessGroup:
        key = tuple(ranks), timeout
        if key not in made:
            made[key] = create(ranks, timeout, **options)
        return made[key]

    parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


@contextmanager
def plain_torch() -> Iterator[None]:
    """Suspends the per-call interception of `megatron_platform` for Megatron's layers, which name no device.

    Interception costs more than many torch calls. Names that are replaced stay replaced. A no-op where nothing is
    intercepted.
    """
    if not isinstance(_get_current_function_mode(), _CudaMeansCpu):
        yield
        return
    with _pop_mode_temporarily():
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """Turns the device "cuda" into the CPU in every torch call made while it is active.

    torch suspends it inside backward; functions that Megatron calls there are replaced by name (_replacements).
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        # Thousands of calls a step pass here, and few of them name a device.
        for value in args:
            if isinstance(value, NAMES_A_DEVICE):
                args = tuple(map(_device_on_cpu, args))
                break
        if not kwargs:
            result = func(*args)
        else:
            kwargs = {key: _device_on_cpu(value) for key, value in kwargs.items()}
            # Pinned memory exists only beside an accelerator.
            kwargs.pop("pin_memory", None)
            result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # The distributed optimizer sorts parameters by this string.
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _device_on_cpu(value: Any) -> Any:
    names_cuda = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    return CPU if names_cuda or (isinstance(value, torch.device) and value.type == "cuda") else value


def _current_device() -> torch.device:
    return CPU


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value while the platform is active)."""
    cuda, random = torch.cuda, tensor_parallel.random
    return [
        (cuda, "current_device", _current_device),
        (cuda, "synchronize", _nothing),
        (cuda, "current_stream", _nothing),
        (cuda, "empty_cache", _nothing),
        (cuda, "set_device", _nothing),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "get_rng_state", _rng_state),
        (cuda, "set_rng_state", _set_rng_state),
        (cuda.nvtx, "range_push", _nothing),
        (cuda.nvtx, "range_pop", _nothing),
        (random, "_get_cuda_rng_state", _rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
    ]
