"""Default vLLM engine arguments: on the CPU, on CUDA, on a device that agents share.

Pure. Not here: defaults that the memory budget needs too (config/checks/device_memory.py), arguments that the project
decides (engine.py), the user's own.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacpo_mega.config.checks.device_memory import CPU_DEFAULTS, CUDA_DEFAULTS
from hacpo_mega.config.checks.pass_through import RETURNS_ROUTING
from hacpo_mega.models.files.folder import head_size
from hacpo_mega.models.sharding.layout import head_size_problem

BLOCK = 16  # tokens of the key-value cache, on the CPU


def engine_defaults(
    *,
    on_cuda: bool,
    tensor_parallel_size: int,
    visible_devices: int,
    agents_on_device: int,
    timeout_s: float,
    expandable_segments: bool = False,
) -> dict[str, Any]:
    """Default vLLM engine arguments.

    visible_devices       devices that this process sees
    agents_on_device      agents with an engine on its device; they share the half of it that engines may have, since
                          vLLM's share counts only its own memory
    timeout_s             bound on the engine's own collectives
    expandable_segments   whether the user has set this in torch's allocator
    """
    # vLLM's own are 600 s with NCCL and 1800 s with gloo, however long a rank has to wait for the others.
    waits = dict.fromkeys(("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"), math.ceil(timeout_s))
    if not on_cuda:
        return CPU_DEFAULTS | waits
    defaults = waits | {
        "gpu_memory_utilization": CUDA_DEFAULTS["gpu_memory_utilization"] / agents_on_device,
        # vLLM's 1024 of large devices is more than it captures graphs for, and takes 4 bytes x vocabulary for each.
        "max_num_seqs": CUDA_DEFAULTS["max_num_seqs"],
        # vLLM would fuse it on Hopper and later where nvcc and ninja are on PATH, by compiling at the start: what an
        # engine computes would depend on the shell that started it.
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
        # Else graphs would stay on the device while the actor learns. vLLM brings them back when the engine wakes.
        "sleep_mode_offload_cudagraph": True,
    }
    if tensor_parallel_size > 1 and (visible_devices == 1 or expandable_segments):
        # vLLM's custom all-reduce asks for its peers' devices by number, which fails in a process that sees only its
        # own. It also shares its graphs' buffers by cudaIpcGetMemHandle, which crashes on an expandable segment.
        defaults["disable_custom_all_reduce"] = True
    return defaults


def cpu_attention(model: Path, backend: Any, dtype_bytes: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks of 16 tokens for vLLM's CPU attention, `backend`, with 4-byte numbers.

    Answers share only whole blocks of their prompt, and the kernel that writes keys spreads a token's numbers over the
    block: with vLLM's 128, eight answers read 20 tokens each, and a write touches as many pages as a head has numbers.
    The kernels take 16 (`vec16`), though the backend names multiples of 32 only; those of other number types (AMX, fp8)
    do not.
    ValueError for a head size that vLLM's attention would refuse only at the first answer.
    """
    head_dim, known = head_size(model), backend.get_supported_head_sizes()
    if head_dim is not None and head_dim not in known:
        raise ValueError(f"{model}: {head_size_problem(head_dim, known)}")
    if dtype_bytes != 4 or "kv_cache_dtype" in options:
        return {}
    multiple_of = type(backend.get_supported_kernel_block_sizes()[0])
    backend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [multiple_of(BLOCK)])
    return {"block_size": BLOCK}


def free_options(options: Mapping[str, Any], *, on_cuda: bool) -> tuple[dict[str, Any], bool]:
    """The user's engine arguments for vLLM, and whether answers have a routing, an argument on CUDA only."""
    told = {key: value for key, value in options.items() if on_cuda or key != RETURNS_ROUTING}
    return told, options.get(RETURNS_ROUTING, False)
