"""Megatron-core on a machine without CUDA, and the parallel groups of one agent.

Megatron-core names CUDA in many places where it means "this rank's device". `megatron_platform()` maps those names to
the CPU while Megatron code runs, and restores them afterwards: vLLM lives in the same process and must see the real
machine. With CUDA nothing changes. Not here: which rank does what (place.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

CPU = torch.device("cpu")
NAMES_A_DEVICE = (str, torch.device)

# A cell's ranks are neighbours: rank = cell * (tp * cp * pp) + (pp_rank * cp + cp_rank) * tp + tp_rank.
RANK_ORDER = "tp-cp-ep-pp-dp"


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


def initialize_parallel(
    tp: int, pp: int, seed: int, timeout_s: float = 1800.0, *, cp: int = 1, ep: int | None = None
) -> None:
    """Creates Megatron's groups over the current default process group (one agent's world), and its random streams.

    Rank order is RANK_ORDER; data parallelism takes the rest of the world. `ep` ranks share a layer's experts, those of
    one cell or of several neighbouring ones; None means no experts. `timeout_s` bounds every collective of these
    groups. Raises ValueError if tp * cp * pp does not divide the world. Gloo twins of the groups are not made:
    optimizers take `use_gloo_process_groups=False`.
    """
    world_size = dist.get_world_size()
    if world_size % (cell := tp * cp * pp):
        raise ValueError(f"tp * cp * pp = {tp} * {cp} * {pp} = {cell} does not divide the agent's {world_size} ranks")
    with megatron_platform():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            # Megatron lays out experts, too: as wide, their pipelines have the ranks of these. See `_share_experts`.
            expert_model_parallel_size=cp,
            order=RANK_ORDER,
            distributed_timeout_minutes=timeout_s / 60.0,  # a timedelta is made of it, which takes parts of minutes
            create_gloo_process_groups=False,
        )
        if ep is not None:
            _share_experts(tp * cp, pp, ep, timedelta(seconds=timeout_s))
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _share_experts(ranks: int, pp: int, ep: int, timeout: timedelta) -> None:
    """Replaces Megatron's expert groups by groups in which `ep` ranks of a stage share experts.

    Megatron's order of ranks spreads experts over exactly all ranks of a stage of a cell. Here every `ep` neighbours
    share them, among the ranks that the stage has in all cells, `ranks` in each. Ranks with the same experts, in this
    cell and in others, sum their gradients and share their optimizer.
    """
    names, cells = parallel_state, range(0, dist.get_world_size(), ranks * pp)
    for stage in range(pp):
        line = [cell + stage * ranks + place for cell in cells for place in range(ranks)]
        for share in (line[first : first + ep] for first in range(0, len(line), ep)):
            group = names.create_group(share, timeout=timeout, group_desc="EXPERT_MODEL_PARALLEL_GROUP")
            if dist.get_rank() in share:
                names._EXPERT_MODEL_PARALLEL_GROUP, names._EXPERT_MODEL_PARALLEL_RANKS = group, share
                names._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = group
        for same in (line[place::ep] for place in range(ep)):
            group = names.create_group(same, timeout=timeout, group_desc="EXPERT_DATA_PARALLEL_GROUP")
            if dist.get_rank() in same:
                names._EXPERT_DATA_PARALLEL_GROUP = names._INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = group


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
            answer = func(*args)
        else:
            kwargs = {key: _device_on_cpu(value) for key, value in kwargs.items()}
            # Pinned memory exists only beside an accelerator.
            kwargs.pop("pin_memory", None)
            answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            # The distributed optimizer sorts parameters by this string.
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


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
