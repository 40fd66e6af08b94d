"""Engine arguments where the user's `agents.vllm` says nothing: on the CPU, on CUDA, on a device that agents share.

Pure; not here: the arguments that the project decides (engine.py) and what the user wrote.
"""

from typing import Any

# vLLM's own defaults take most of the memory, and the actor lives here too; on CPU it would also compile for half a
# minute what a small model does not need. Prompts are read whole there: after a part of one vLLM rewinds the request's
# random generator, and those of torch on CPU cannot be ("does not use offset").
ON_CPU = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 * 2**20,
    "max_num_seqs": 512,
    "enable_chunked_prefill": False,
}
ENGINES_SHARE_OF_DEVICE = 0.5


def engine_defaults(
    *, on_cuda: bool, tensor_parallel_size: int, visible_devices: int, agents_on_device: int
) -> dict[str, Any]:
    """vLLM engine arguments.

    `visible_devices` are those that this process sees, `agents_on_device` the agents with an engine on its device.
    The half of a device that engines may have is of all its engines together: vLLM's share counts only its own memory.
    """
    if not on_cuda:
        return dict(ON_CPU)
    defaults = {
        "gpu_memory_utilization": ENGINES_SHARE_OF_DEVICE / agents_on_device,
        # vLLM would fuse it on Hopper and later where nvcc and ninja are on PATH, by compiling at the start: what an
        # engine computes would depend on the shell that started it.
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
    }
    if visible_devices == 1 and tensor_parallel_size > 1:
        # Its peers' devices are asked for by number, which a process that is shown only its own cannot.
        defaults["disable_custom_all_reduce"] = True
    return defaults
