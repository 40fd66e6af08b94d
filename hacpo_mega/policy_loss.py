"""What one update computes on a micro-batch, and what it reports: the loss of `algorithm/` meets the actor.

Not here: the formulas (algorithm/objective.py) and the forward and backward around them (megatron/actor.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hacpo_kernels import ObjectiveStats
from torch import Tensor

from hacpo_mega.algorithm import PackedSequences, kl_penalty, policy_loss
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.records import MicroBatch, UpdateStats

SampleKey = tuple[int, int, int]  # prompt index, source agent, rollout index


class BatchReport(NamedTuple):
    """What the loss saw of one micro-batch. key_B3 int64 [B, 3] holds a SampleKey per sequence; kl is (sum, count)."""

    key_B3: Tensor
    stats: ObjectiveStats
    kl: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function of one update. `reference` holds token log-probs of the initial policy, where KL needs them."""

    update_index: int
    weight: float
    config: AlgorithmConfig
    reference: Mapping[SampleKey, np.ndarray]

    def __call__(self, token_logprob_R: Tensor, batch: MicroBatch) -> tuple[Tensor, BatchReport]:
        sequences = packed_samples(batch, token_logprob_R.device)
        loss, stats = policy_loss(token_logprob_R, sequences, self.update_index, self.weight, self.config)
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in batch.sequences]
        kl = torch.zeros(2, dtype=torch.float64)
        if self.reference:
            parts = [
                self.reference.get(key, np.zeros(s.num_trained, np.float32)) for key, s in zip(keys, batch.sequences)
            ]
            reference_R = torch.from_numpy(np.concatenate(parts)).to(token_logprob_R.device)
            penalty, kl = kl_penalty(token_logprob_R, reference_R, sequences, self.weight, self.config)
            loss = loss + penalty
        return loss, BatchReport(torch.tensor(keys), stats, kl)


def packed_samples(batch: MicroBatch, device: torch.device) -> PackedSequences:
    """What the objective needs of the samples in a micro-batch, on `device`."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(sample, name) for sample in batch.sequences], dtype=dtype).to(device)

    return PackedSequences(
        row_cu_seqlens_B=batch.row_cu_seqlens_B,
        source_logprob_B=column("source_logprob", torch.float32),
        advantage_B=column("advantage", torch.float32),
        is_self_B=column("is_self", torch.bool),
        length_B=column("length", torch.float32),
    )


def ratios_by_key(result: UpdateStats) -> dict[SampleKey, float]:
    """The ratio (learner over source) of every sample of an update."""
    return {
        tuple(key): ratio
        for report in result.reports
        for key, ratio in zip(report.key_B3.tolist(), report.stats.ratio_B.tolist())
    }
