"""Sampling noise of a step: one hash per (answer's seed, position in the answer, token), for all answers at once.

Exponential races (Gumbel's maximum) as in vLLM. Its CPU kernel makes the noise of a row by hashing a 64-bit number and
the token. vLLM draws that number from a random generator per request, one after the other, 31 bits of each. Here it is
a hash of the answer's seed and its number of tokens. So a token is a function of logits, seed and position alone, not
of the batch, its order, the rank, a preemption or a chunked prompt.
It replaces vLLM's sampler on the first model runner (CPU). The second one, on CUDA, has such noise by itself, from
Triton (tests/unit/rollout/test_v2_sampler.py). Log-probs stay those of the logits that are sampled from.
"""

import hashlib
import struct
from collections.abc import Mapping

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# Weyl's step between the positions of an answer, and the constants of David Stafford's thirteenth mix (SplitMix64).
WEYL_STEP = np.uint64(0xD1342543DE82EF95)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
S27, S30, S31 = np.uint64(27), np.uint64(30), np.uint64(31)


def answer_seed(run_seed: int, step: int, prompt_index: int, rollout_index: int, agent_index: int) -> int:
    """Sampling seed of one answer, in [0, 2^63): a pure function of its place in the run.

    Hashed, so that neighbouring places get unrelated noise: agents that share weights still answer differently, and a
    resumed run answers as the first one did, whatever its layout.
    """
    place = struct.pack("<5q", run_seed, step, prompt_index, rollout_index, agent_index)
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1


def row_keys(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """64-bit key of every row, int64 [R], from the answer's seed (uint64 [R]) and its number of tokens (int64 [R]).

    One-to-one in each of the two, so that two positions of an answer never share their noise.
    """
    key_R = seeds_R.astype(np.uint64) + (positions_R.astype(np.uint64) + np.uint64(1)) * WEYL_STEP
    key_R = (key_R ^ (key_R >> S30)) * MIX_1
    key_R = (key_R ^ (key_R >> S27)) * MIX_2
    return (key_R ^ (key_R >> S31)).view(np.int64)


class RowNoise:
    """Replacement of the sampler's `forward` in vLLM's first model runner, after temperature."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def __call__(
        self,
        logits_RV: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R] and log-probs [R, V], float32. A row without a generator has no seed, and its token is unused."""
        logits_RV = apply_top_k_top_p(logits_RV, k, p).to(torch.float32)
        batch, rows = self._runner.input_batch, len(logits_RV)
        seeds_R, positions_R = np.zeros(rows, np.uint64), np.zeros(rows, np.int64)
        if generators:
            seeded = np.fromiter(generators, np.int64, len(generators))
            seeds_R[seeded] = [generator.initial_seed() for generator in generators.values()]
            positions_R[seeded] = batch.num_tokens_no_spec[seeded] - batch.num_prompt_tokens[seeded]
        keys_R = torch.from_numpy(row_keys(seeds_R, positions_R))
        return torch.ops._C.fused_gumbel_argmax(logits_RV, keys_R), logits_RV.log_softmax(dim=-1)
