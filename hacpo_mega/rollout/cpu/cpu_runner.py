"""What vLLM's first model runner, which is there alone on the CPU, does otherwise than vLLM has it.

The second one draws by row itself, and its kernels take experts as they are loaded. It gets vLLM's runner handed in.
"""

from collections.abc import Callable
from typing import Any

import torch

from hacpo_mega.rollout.vllm.row_noise import RowNoise
from hacpo_mega.rollout.weights.expert_weights import pack_at_every_load


def adapt_to_cpu(runner: Any, keep_most_likely: Callable[..., torch.Tensor]) -> None:
    """Packs experts at every load, and draws answers by their seeds alone; `keep_most_likely` as RowNoise has it."""
    pack_at_every_load(runner.get_model())
    runner.sampler.topk_topp_sampler.forward = RowNoise(runner, keep_most_likely)
