"""What vLLM leaves undone when it wakes from level 2: memory that an error has left behind, and a cache unwritten.

Not here: what is awake when (engine.py, agent/devices.py). It gets vLLM handed in, inside its door (engine_door.py).
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch

from hacpo_mega.rollout.vllm.engine_door import worker_of

WEIGHTS, CACHE = "weights", "kv_cache"


class Memory(enum.Enum):
    """What of the engine is in device memory: nothing, the weights alone, or weights and key-value cache."""

    ASLEEP = "asleep"
    WEIGHTS = "weights"
    AWAKE = "awake"


def take_memory(llm: Any, parts: Sequence[str]) -> None:
    """Wakes WEIGHTS, CACHE or both; after an error the device has none of these `parts`.

    vLLM would count them as asleep then, so that nothing ever freed what it had mapped before there was no more memory.
    """
    try:
        llm.wake_up(tags=list(parts))
    except BaseException:
        worker = worker_of(llm)
        if WEIGHTS in parts:
            worker.sleep_mode_backend.suspend(level=2)  # not the worker's own sleep, which reads the weights' buffers
        else:
            worker.discard(tuple(parts))
        raise


def clear_cache(llm: Any) -> None:
    """Fills the key-value cache with zeros, as it was made.

    Woken memory holds whatever the driver gives, other tensors among it. Attention gives the places behind a sequence's
    last token, which a block has room for, the weight zero, and zero times NaN is NaN in a kernel that multiplies them.
    """
    with torch.inference_mode():
        for layer in worker_of(llm).model_runner.kv_caches:
            layer.zero_()
