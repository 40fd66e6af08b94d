"""Changes to vLLM's first model runner, the only one on the CPU.

The second runner needs none: its noise is per row already, and its kernels read experts as they are loaded. vLLM's
runner is passed in.
"""

from collections.abc import Callable
from typing import Any

import torch

from hacpo_mega.rollout.vllm.row_noise import RowNoise
from hacpo_mega.rollout.weights.expert_weights import pack_at_every_load


def adapt_to_cpu(runner: Any, keep_most_likely: Callable[..., torch.Tensor]) -> None:
    """Packs experts at every load, and draws answers by their seeds alone; for `keep_most_likely` see RowNoise."""
    pack_at_every_load(runner.get_model())
    runner.sampler.topk_topp_sampler.forward = RowNoise(runner, keep_most_likely)
