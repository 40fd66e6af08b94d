"""What a step's answers, updates and evaluations add to the metrics, by the names that metrics.py lists.

Each function is called by the one rank that owns what it adds, usually the leader of a cell.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from hacpo_kernels import ObjectiveStats
from torch import Tensor

from hacpo_mega.algorithm import capability_ratios, cross_band
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.metrics import Metrics
from hacpo_mega.records import Judgement, Prompt, Stop, Trajectory, UpdateStats, ViewCounts


def add_answers(metrics: Metrics, name: str, trajectories: Sequence[Trajectory]) -> None:
    """Fresh answers of an agent: reward over judged ones, lengths, how they ended, what the judge said."""
    prefix = f"agent/{name}"
    for trajectory in trajectories:
        if trajectory.is_judged:
            metrics.add(f"{prefix}/reward_mean", trajectory.reward, 1)
        metrics.add(f"{prefix}/answer_tokens_mean", len(trajectory.rollout.token_ids), 1)
        metrics.add(f"{prefix}/truncated", trajectory.rollout.stop is Stop.LENGTH, 1)
        metrics.add(f"{prefix}/logprob_mean", trajectory.mean_logprob, 1)
    metrics.count(f"{prefix}/num_answers", len(trajectories))
    metrics.count(f"{prefix}/num_unjudged", sum(not trajectory.is_judged for trajectory in trajectories))
    for verdict, number in sorted(Counter(trajectory.verdict for trajectory in trajectories).items()):
        metrics.add(f"{prefix}/verdict/{verdict.name.lower()}", number, len(trajectories))


def add_capability(metrics: Metrics, names: Sequence[str], capability_N: Tensor, config: AlgorithmConfig) -> None:
    """P_hat of every agent and omega(k, j) = P_hat_k / P_hat_j of every ordered pair."""
    omega_NN = capability_ratios(capability_N, config.omega_clip)
    for k, learner in enumerate(names):
        metrics.gauge(f"capability/{learner}", capability_N[k].item())
        for j, source in enumerate(names):
            if j != k:
                metrics.gauge(f"omega/{learner}/{source}", omega_NN[k, j].item())


def add_accuracy(metrics: Metrics, name: str, prompts: Sequence[Prompt], judgements: Sequence[Judgement]) -> None:
    """Judged greedy answers: accuracy over all prompts and over each skill. An unjudged answer is not counted."""
    for prompt, judgement in zip(prompts, judgements, strict=True):
        if not judgement.is_judged:
            continue
        for tail in ("", f"/{prompt.skill}") if prompt.skill else ("",):
            metrics.add(f"agent/{name}/accuracy{tail}", judgement.reward, 1)
            metrics.count(f"agent/{name}/num_evaluated{tail}", 1)


def add_view(metrics: Metrics, name: str, counts: ViewCounts) -> None:
    """What became of all answers on their way into this learner's samples (samples/learner_view.py)."""
    prefix = f"agent/{name}/view"
    for field in dataclasses.fields(counts):
        if field.name.startswith("num_"):
            metrics.count(f"{prefix}/{field.name}", getattr(counts, field.name))
    # How much finer the learner's tokenizer cuts the same text than the source's.
    metrics.add(f"{prefix}/token_ratio_mean", counts.token_ratio_sum, counts.num_reencoded)


def add_update(
    metrics: Metrics,
    result: UpdateStats,
    update_index: int,
    learner: int,
    names: Sequence[str],
    config: AlgorithmConfig,
) -> None:
    """Adds what one update did to the metrics: own answers together, others' answers per source.

    Per ordered pair of agents: mean, lowest and highest ratio, shares below, inside and above the band, and the
    effective sample size of the weights s c^alpha.
    """
    prefix = f"agent/{names[learner]}"
    metrics.add(f"{prefix}/grad_norm", result.grad_norm, 1)
    metrics.add(f"{prefix}/lr", result.lr, 1)
    metrics.count(f"{prefix}/num_skipped_updates", int(result.skipped))
    metrics.count(f"{prefix}/num_microbatches", result.num_microbatches)
    metrics.count(f"{prefix}/num_trained_tokens", result.num_trained)
    low = cross_band(update_index, config)
    for report in result.reports:
        stats = report.stats
        for name in ("ratio", "clipped"):
            pair = getattr(stats, f"{name}_self")
            metrics.add(f"{prefix}/self/{'ratio_mean' if name == 'ratio' else name}", *pair.tolist())
        metrics.count(f"{prefix}/num_nonfinite", stats.nonfinite[0].item())
        # (sum, count) = (cross, cross + own): the share of the squared loss coefficients that others' answers bring
        own, cross = stats.gradient_sq_self[0].item(), stats.gradient_sq_cross[0].item()
        metrics.add(f"{prefix}/cross_coefficient_share", cross, own + cross)
        if config.kl_coef > 0.0:
            metrics.add(f"{prefix}/kl", *report.kl.tolist())
        if update_index == 0 and stats.ratio_self[1] > 0:
            metrics.highest(f"{prefix}/self/first_ratio_error", _error_of_one(stats))
        for source in sorted(set(report.key_B3[:, 1].tolist()) - {learner}):
            ratio_B = stats.ratio_B[report.key_B3[:, 1] == source]
            _add_cross(metrics, f"{prefix}/from/{names[source]}", ratio_B[ratio_B.isfinite()], low, config.alpha)


def _error_of_one(stats: ObjectiveStats) -> float:
    """How far the own ratios of a first update are from exactly 1: not 0 means scoring and learning disagree."""
    return max(abs(stats.ratio_self_max.item() - 1.0), abs(stats.ratio_self_min.item() - 1.0))


def _add_cross(metrics: Metrics, prefix: str, ratio_B: Tensor, low: float, alpha: float) -> None:
    if len(ratio_B) == 0:
        return
    count = len(ratio_B)
    below_B, above_B = ratio_B < low, ratio_B > 1.0
    inside_B = ~below_B & ~above_B
    weight_B = torch.where(inside_B, ratio_B ** (1.0 + alpha), 0.0)
    metrics.add(f"{prefix}/ratio_mean", ratio_B.sum().item(), count)
    metrics.lowest(f"{prefix}/ratio_min", ratio_B.min().item())
    metrics.highest(f"{prefix}/ratio_max", ratio_B.max().item())
    for name, where_B in (("below", below_B), ("inside", inside_B), ("above", above_B)):
        metrics.add(f"{prefix}/{name}", where_B.sum().item(), count)
    metrics.add_weights(f"{prefix}/weight", weight_B.sum().item(), weight_B.square().sum().item(), count)
