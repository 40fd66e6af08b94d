"""What one update computes on a micro-batch, and what it reports: the loss of `algorithm/` meets the actor.

Not here: the formulas (algorithm/objective.py) and the forward and backward around them (megatron/actor.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hacpo_kernels import SequenceTerms, packed_objective
from torch import Tensor

from hacpo_mega.algorithm import kl_penalty, objective_bounds
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.records import MicroBatch, UpdateStats

SampleKey = tuple[int, int, int]  # prompt index, source agent, rollout index


class BatchReport(NamedTuple):
    """What the loss saw of one micro-batch. key_B3 int64 [B, 3] holds a SampleKey per sequence; kl is (sum, count).

    The terms travel to the host as they are and are counted there (step_metrics.py), so that counting costs the device
    nothing and can be done over any group of samples.
    """

    key_B3: Tensor
    terms: SequenceTerms
    kl: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function of one update. `reference` holds token log-probs of the initial policy, where KL needs them."""

    update_index: int
    weight: float
    config: AlgorithmConfig
    reference: Mapping[SampleKey, np.ndarray]

    def __call__(self, token_logprob_R: Tensor, batch: MicroBatch) -> tuple[Tensor, BatchReport]:
        """The sum of the losses of packed sequences, each times `weight` (algorithm.sample_weight), and its report."""
        loss_B, _, terms = packed_objective(
            token_logprob_R,
            batch.row_cu_seqlens_B,
            batch.source_logprob_B,
            batch.advantage_B,
            batch.is_self_B,
            update_index=self.update_index,
            bounds=objective_bounds(self.config),
            length=batch.length_B,
        )
        loss = loss_B.sum() * self.weight
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in batch.samples]
        kl = torch.zeros(2, dtype=torch.float64)
        if self.reference:
            # Samples whose KL does not count have no reference: zeros stand in, and kl_penalty leaves them out.
            parts = [
                self.reference.get(key, np.zeros(s.num_trained, np.float32)) for key, s in zip(keys, batch.samples)
            ]
            reference_R = torch.from_numpy(np.concatenate(parts)).to(token_logprob_R.device)
            rows = (batch.row_cu_seqlens_B, batch.is_self_B)
            penalty, kl = kl_penalty(token_logprob_R, reference_R, *rows, self.weight, self.config)
            loss = loss + penalty
        return loss, BatchReport(torch.tensor(keys), terms, kl)


def ratios_by_key(result: UpdateStats) -> dict[SampleKey, float]:
    """The ratio (learner over source) of every sample of an update."""
    return {
        tuple(key): ratio
        for report in result.reports
        for key, ratio in zip(report.key_B3.tolist(), report.terms.ratio_B.tolist())
    }
