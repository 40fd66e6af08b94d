"""Repairs around vLLM's wake-up from level 2: it leaks memory after an error, and leaves the KV cache uninitialised.

vLLM is passed in, inside its stream guard (engine_stream_guard.py). Not here: when the engine is awake (engine.py,
agent/devices.py).
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch

from hacpo_mega.rollout.vllm.engine_stream_guard import worker_of

WEIGHTS, CACHE = "weights", "kv_cache"


class Memory(enum.Enum):
    """Engine state in device memory: nothing, weights alone, or weights and KV cache."""

    ASLEEP = "asleep"
    WEIGHTS = "weights"
    AWAKE = "awake"


def take_memory(llm: Any, parts: Sequence[str]) -> None:
    """Wakes WEIGHTS, CACHE or both; after an error none of these `parts` is on the device.

    vLLM would count them as asleep then, and would never free what it had mapped before memory ran out.
    """
    try:
        llm.wake_up(tags=list(parts))
    except BaseException:
        worker = worker_of(llm)
        if WEIGHTS in parts:
            worker.sleep_mode_backend.suspend(level=2)  # the worker's own sleep would read the weights' buffers
        else:
            worker.discard(tuple(parts))
        raise


def clear_cache(llm: Any) -> None:
    """Fills the KV cache with zeros, its initial value.

    Woken memory has arbitrary content. Attention gives the unused places of a block, behind a sequence's last token,
    weight zero, and a kernel that multiplies zero by NaN returns NaN.
    """
    with torch.inference_mode():
        for layer in worker_of(llm).model_runner.kv_caches:
            layer.zero_()
