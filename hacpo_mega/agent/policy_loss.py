"""The loss of one optimizer update on a micro-batch, and its report, between `algorithm/` and actor.

The equations are in algorithm/objective.py, and their arithmetic in kernels/hacpo_kernels/reference.py. The forward and
backward passes around them are in megatron/actor.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hacpo_kernels import SequenceTerms, packed_objective
from torch import Tensor

from hacpo_mega.algorithm import (
    PackedAnswers,
    has_autograd_objective,
    kl_penalty,
    mean_logprobs,
    objective_bounds,
    objective_loss,
    objective_of,
    scale_gradient,
    token_objective,
)
from hacpo_mega.cluster.machine.device import send
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.records import MicroBatch, Rollout, Sample, Score, UpdateStats

SampleKey = tuple[int, int, int]  # prompt index, source agent, rollout index


class BatchReport(NamedTuple):
    """Report of the loss on one micro-batch of B sequences.

    key_B3             int64 [B, 3], a SampleKey per sequence
    terms              what the host counts for the statistics (step_metrics.py), at no cost for the device
    kl                 (sum, count)
    token_logprob_R    log-probs of all trained tokens; None unless the run logs tokens or this update scores
    num_rows_B         how many of these each sequence has; likewise
    mean_logprob_B     the scores, fp32 nats [B], if this update scores
    """

    key_B3: Tensor
    terms: SequenceTerms
    kl: Tensor
    token_logprob_R: Tensor | None = None
    num_rows_B: Tensor | None = None
    mean_logprob_B: Tensor | None = None


REPORTS = (BatchReport, SequenceTerms)  # classes of reports that the last pipeline stage sends to the others


class SampleColumns(NamedTuple):
    """Per-sample inputs of the objective besides the tokens: float32 and bool, [B] each."""

    source_logprob_B: Tensor
    advantage_B: Tensor
    is_self_B: Tensor
    length_B: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Loss function of one update.

    reference        token log-probs of the initial policy, where KL needs them
    keeps_tokens     whether the report has the log-prob of every token
    step, num_steps  the current step, from 1, and the last one, for objectives of the user's
    """

    update_index: int
    weight: float
    config: AlgorithmConfig
    reference: Mapping[SampleKey, np.ndarray]
    keeps_tokens: bool = False
    step: int = 1
    num_steps: int = 1

    def __call__(self, token_logprob_R: Tensor, batch: MicroBatch) -> tuple[Tensor, BatchReport]:
        """Sum of the losses of packed sequences, each times `weight` (algorithm.sample_weight), and the report."""
        samples = sample_columns(batch.sequences, token_logprob_R.device)
        mean_B = self._missing_scores(token_logprob_R, batch)
        if mean_B is not None:
            samples = samples._replace(source_logprob_B=mean_B)
        weighted_R, cu_seqlens = weighted_by_token(token_logprob_R, batch.sequences), batch.row_cu_seqlens_B
        if has_autograd_objective(self.config):
            answers = self._packed_answers(weighted_R, samples, batch)
            loss_B, terms = objective_loss(answers, objective_of(self.config), self.config)
            loss_B = loss_B.to(token_logprob_R.dtype)
        elif self.config.is_token_level:
            old_R = self._old_logprobs(token_logprob_R, batch.sequences)
            loss_B, terms = token_objective(weighted_R, old_R, samples.advantage_B, cu_seqlens, self.config)
        else:
            loss_B, _, terms = packed_objective(
                weighted_R,
                cu_seqlens,
                samples.source_logprob_B,
                samples.advantage_B,
                samples.is_self_B,
                update_index=self.update_index,
                bounds=objective_bounds(self.config),
                length=samples.length_B,
            )
        loss = loss_B.sum() * self.weight
        keys = [(sample.prompt_index, sample.source, sample.rollout_index) for sample in batch.sequences]
        kl = torch.zeros(2, dtype=torch.float64)
        if self.reference:
            # Samples whose KL does not count have no reference: zeros stand in, and kl_penalty leaves them out.
            parts = [
                self.reference.get(key, np.zeros(s.num_trained, np.float32)) for key, s in zip(keys, batch.sequences)
            ]
            reference_R = _concatenated(parts, token_logprob_R.device)
            rows = (cu_seqlens, samples.is_self_B)
            penalty, kl = kl_penalty(token_logprob_R, reference_R, *rows, self.weight, self.config)
            loss = loss + penalty
        report = BatchReport(torch.tensor(keys), terms, kl, mean_logprob_B=mean_B)
        if self.keeps_tokens or mean_B is not None:
            tokens_R, num_rows_B = token_logprob_R.detach(), cu_seqlens.diff()
            report = report._replace(token_logprob_R=tokens_R, num_rows_B=num_rows_B)
        return loss, report

    def _missing_scores(self, token_logprob_R: Tensor, batch: MicroBatch) -> Tensor | None:
        """Mean log-probs of own answers that were not scored before, fp32 [B]; None if all were.

        Equal to what `Actor.score` would have computed: nothing was learnt since, so the ratio is exactly 1.
        """
        is_scored = {sample.source_logprob is not None for sample in batch.sequences}
        if is_scored == {True}:
            return None
        # Own answers are packed by themselves, and a later update's policy did not sample them.
        assert is_scored == {False} and self.update_index == 0, (is_scored, self.update_index)
        return mean_logprobs(token_logprob_R.detach(), batch.row_cu_seqlens_B)

    def _packed_answers(self, logprob_R: Tensor, samples: SampleColumns, batch: MicroBatch) -> PackedAnswers:
        """Input of an objective without a kernel."""
        device, bound = logprob_R.device, self.config.log_ratio_clamp
        starts_B1 = batch.row_cu_seqlens_B.to(device, torch.int64, non_blocking=True)
        origins = [(sample.source, sample.prompt_index) for sample in batch.sequences]
        (origins_B2,) = send((torch.tensor(origins, dtype=torch.int64),), device)
        old_R, logprob_R = self._old_logprobs(logprob_R, batch.sequences).double(), logprob_R.double()
        length_B = samples.length_B.double()
        exact_B = torch.segment_reduce(logprob_R, "sum", offsets=starts_B1) / length_B
        # The value is rounded to fp32, as source_logprob was: an unchanged policy has a ratio of exactly 1.
        mean_B = exact_B + (exact_B.float() - exact_B).detach()
        return PackedAnswers(
            logprob_R=logprob_R,
            old_logprob_R=old_R,
            starts_B1=starts_B1,
            log_ratio_B=(mean_B - samples.source_logprob_B.double()).clamp(-bound, bound),
            advantage_B=samples.advantage_B.double(),
            is_self_B=samples.is_self_B,
            source_B=origins_B2[:, 0],
            prompt_B=origins_B2[:, 1],
            length_B=length_B,
            update_index=self.update_index,
            step=self.step,
            num_steps=self.num_steps,
        )

    def _old_logprobs(self, token_logprob_R: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Log-prob of each trained token before the step's first update, [R]; in that update, the current one.

        NaN for others' answers whose tokens the learner does not share with their source.
        """
        if samples[0].source_logprob is None:
            return token_logprob_R.detach()
        old = (np.full(s.num_trained, np.nan) if s.old_logprobs is None else s.old_logprobs for s in samples)
        return _concatenated([values.astype(np.float32, copy=False) for values in old], token_logprob_R.device)


def weighted_by_token(token_logprob_R: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Returns the same log-probs [R], with gradients scaled by the samples' `token_weights`, if there are any."""
    if all(sample.token_weights is None for sample in samples):
        return token_logprob_R
    parts = [np.ones(s.num_trained, np.float32) if s.token_weights is None else s.token_weights for s in samples]
    return scale_gradient(token_logprob_R, _concatenated(parts, token_logprob_R.device))


def _concatenated(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Numbers of all samples, end to end, on `device`."""
    return send((torch.from_numpy(np.concatenate(parts)),), device)[0]


def sample_columns(samples: Sequence[Sample], device: torch.device) -> SampleColumns:
    """Columns of `samples`, in their order, on `device`; NaN where a sample has no source_logprob."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values = (getattr(sample, name) for sample in samples)
        return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype)

    numbers = (column(name, torch.float32) for name in ("source_logprob", "advantage", "length"))
    source_logprob_B, advantage_B, length_B, is_self_B = send((*numbers, column("is_self", torch.bool)), device)
    return SampleColumns(source_logprob_B, advantage_B, is_self_B, length_B)


def ratios_by_key(update: UpdateStats) -> dict[SampleKey, float]:
    """Ratio (learner over source) of every sample of an update."""
    return {
        tuple(key): ratio
        for report in update.reports
        for key, ratio in zip(report.key_B3.tolist(), report.terms.ratio_B.tolist())
    }


def outside_band(update: UpdateStats) -> list[SampleKey]:
    """Others' answers of an update that have no gradient: their weight is 0."""
    keys: list[SampleKey] = []
    for report in update.reports:
        terms = report.terms
        is_outside_B = ~terms.is_self_B & (terms.weight_B == 0) & terms.ratio_B.isfinite()
        keys += map(tuple, report.key_B3[is_outside_B].tolist())
    return keys


def own_token_logprobs(updates: Iterable[UpdateStats], agent: int) -> dict[tuple[int, int], np.ndarray]:
    """Token log-probs of an agent's own answers in the update that trained them, by (prompt index, rollout index).

    float32 nats. The updates' reports must keep tokens.
    """
    logprobs = {}
    for report in (report for update in updates for report in update.reports):
        if report.token_logprob_R is None:
            continue
        parts = report.token_logprob_R.split(report.num_rows_B.tolist())
        for (prompt, source, rollout), part in zip(report.key_B3.tolist(), parts, strict=True):
            if source == agent:
                logprobs[prompt, rollout] = part.numpy()
    return logprobs


def scores_of_update(update: UpdateStats) -> dict[tuple[int, int], Score]:
    """Scores of the own answers that an update has scored, by (prompt index, rollout index)."""
    scores = {}
    for report in update.reports:
        if report.mean_logprob_B is None:
            continue
        parts = report.token_logprob_R.split(report.num_rows_B.tolist())
        for (prompt, _, rollout), mean, part in zip(report.key_B3.tolist(), report.mean_logprob_B.tolist(), parts):
            scores[prompt, rollout] = Score(mean, part.numpy())
    return scores


def own_scores(rollouts: Sequence[Rollout], first: UpdateStats, agent: int) -> list[Score | None]:
    """Scores of a cell's answers from the token log-probs in the report of a step's `first` update; None without."""
    logprobs = own_token_logprobs([first], agent)
    by_rollout = (logprobs.get((rollout.prompt_index, rollout.rollout_index)) for rollout in rollouts)
    return [None if tokens is None else Score(float(tokens.mean()), tokens) for tokens in by_rollout]


def complete_scores(
    rollouts: Sequence[Rollout], scores: Sequence[Score | None], updates: Sequence[UpdateStats]
) -> list[Score | None]:
    """Completes a cell's `scores` with those that the step's first update has computed."""
    computed = scores_of_update(updates[0])
    return [
        computed.get((rollout.prompt_index, rollout.rollout_index)) if score is None else score
        for rollout, score in zip(rollouts, scores, strict=True)
    ]
