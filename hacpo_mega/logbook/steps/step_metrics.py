"""Metrics of a step's answers, updates and evaluations, by the names that metrics.py lists.

Each function is called by the one rank that owns what it adds, usually the leader of a cell; `add_host` by every rank.
"""

import dataclasses
import resource
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from hacpo_kernels import ObjectiveStats, objective_stats
from torch import Tensor

from hacpo_mega.algorithm import GradientProducts
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.logbook.files.metrics import Metrics
from hacpo_mega.logbook.steps.held_out import ACCURACY, REWARD_MEAN, REWARD_SQUARE
from hacpo_mega.records import (
    DROP_REASONS,
    EVENTS,
    Conversation,
    Judgement,
    Prompt,
    ReencodingCounts,
    Rollout,
    Score,
    Stop,
    Trajectory,
    UpdateStats,
)


def add_answers(metrics: Metrics, name: str, trajectories: Sequence[Trajectory]) -> None:
    """Fresh answers of an agent: reward over judged ones, lengths, stop reasons, verdicts."""
    prefix = f"agent/{name}"
    for trajectory in trajectories:
        if trajectory.is_judged:
            metrics.add(f"{prefix}/reward_mean", trajectory.reward, 1)
        metrics.add(f"{prefix}/answer_tokens_mean", len(trajectory.rollout.token_ids), 1)
        metrics.highest(f"{prefix}/answer_tokens_max", len(trajectory.rollout.token_ids))
        metrics.add(f"{prefix}/truncated", trajectory.rollout.stop is Stop.LENGTH, 1)
        if trajectory.rollout.conversation is not None:
            _add_conversation(metrics, f"{prefix}/conversation", trajectory.rollout.conversation)
        if trajectory.num_scored:
            metrics.add(f"{prefix}/logprob_mean", trajectory.mean_logprob, 1)
    metrics.count(f"{prefix}/num_answers", len(trajectories))
    metrics.count(f"{prefix}/num_unjudged", sum(not trajectory.is_judged for trajectory in trajectories))
    metrics.shares(f"{prefix}/verdict", Counter(trajectory.verdict.name.lower() for trajectory in trajectories))


def _add_conversation(metrics: Metrics, prefix: str, conversation: Conversation) -> None:
    """Own turns and tokens of a conversation, and its events (conversations/player.py)."""
    own = [turn for turn in conversation.turns if turn.is_own and turn.num_tokens]  # not the place of one never said
    metrics.add(f"{prefix}/turns_mean", len(own), 1)
    metrics.highest(f"{prefix}/turns_max", len(own))
    metrics.add(f"{prefix}/own_tokens", sum(turn.num_tokens for turn in own), conversation.num_tokens)
    for event in EVENTS:
        metrics.add(f"{prefix}/{event}_mean", conversation.counts.get(event, 0), 1)
    metrics.add(f"{prefix}/environment_s", conversation.environment_ms / 1000, 1)


def add_advantages(metrics: Metrics, name: str, advantages_PNG: Tensor) -> None:
    """The largest advantage of the answers that an agent trains with, either sign, omega applied."""
    metrics.highest(f"agent/{name}/advantage_max", advantages_PNG.abs().max().item())


def add_engine_gap(
    metrics: Metrics, name: str, scored: Sequence[tuple[Rollout, Score]], *, eos_in_loss: bool = True
) -> None:
    """Adds |engine - trainer| of log-probs on trained tokens of fresh answers, before the first update.

    With d = trainer - engine in nats: mean and maximum of |d|, and the mean of exp(d) - d - 1, which estimates
    KL(engine || trainer) from tokens that the engine drew (k3 of Schulman 2020, never negative).
    """
    trainer = np.concatenate([np.zeros(0), *(score.token_logprobs for _, score in scored)])
    engine = [rollout.trained_logprobs(eos_in_loss)[: len(score.token_logprobs)] for rollout, score in scored]
    difference = trainer - np.concatenate([np.zeros(0), *engine])  # float64, as the zeros are
    if not len(difference):
        return
    prefix = f"agent/{name}"
    metrics.add(f"{prefix}/engine_gap_mean", np.abs(difference).sum(), len(difference))
    metrics.highest(f"{prefix}/engine_gap_max", np.abs(difference).max())
    metrics.add(f"{prefix}/engine_kl", (np.expm1(difference) - difference).sum(), len(difference))


def add_engine_weights(metrics: Metrics, name: str, scores: Sequence[Score], correction: str, cap: float) -> None:
    """Weights of rollout.engine_correction, one a token or one an answer: mean, effective size, share at the cap."""
    if correction in ("none", "ratio"):
        return
    if correction == "token":
        weights = np.concatenate([np.zeros(0), *(score.token_weights for score in scores)])
    else:
        weights = np.array([score.engine_weight for score in scores])
    metrics.add_weights(f"agent/{name}/engine_weight", weights.sum(), np.square(weights).sum(), len(weights))
    # the weights are rounded to fp32, and with them the cap
    metrics.add(f"agent/{name}/engine_weight_truncated", (weights >= np.float32(cap)).sum(), len(weights))


def add_capability(metrics: Metrics, names: Sequence[str], capability_N: Tensor, omega_NN: Tensor) -> None:
    """P_hat of every agent and omega(k, j) = P_hat_k / P_hat_j of every ordered pair, as it was used."""
    for k, learner in enumerate(names):
        metrics.gauge(f"capability/{learner}", capability_N[k].item())
        for j, source in enumerate(names):
            if j != k:
                metrics.gauge(f"omega/{learner}/{source}", omega_NN[k, j].item())


def add_host(metrics: Metrics, name: str, waits: Mapping[str, float], asleep_bytes: int | None) -> None:
    """Adds a rank's host numbers: memory, and seconds of waiting for others, by phase (mean over ranks).

    Host memory is the process's RAM now; device memory is torch's peak since the last step. `asleep_bytes` is
    `held_bytes` as the engine had fallen asleep, None if it never does.
    """
    if asleep_bytes is not None:
        metrics.highest(f"agent/{name}/asleep_bytes", asleep_bytes)
    metrics.highest(f"agent/{name}/rss_bytes", resident_bytes())
    if torch.cuda.is_available():
        metrics.highest(f"agent/{name}/device_bytes", torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    for phase, seconds in waits.items():
        metrics.add(f"agent/{name}/wait/{phase}_s", seconds, 1)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def held_bytes() -> int:
    """Used memory of this rank's device, by any process; on the CPU the process's RAM."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return resident_bytes()


def add_reward_parts(metrics: Metrics, name: str, judgements: Sequence[Judgement]) -> None:
    """Means of the named rewards that fresh answers got, and of other numbers that a grader returned."""
    for judgement in judgements:
        for part, value in judgement.parts:
            metrics.add(f"agent/{name}/reward/{part}", value, 1)


def add_held_out(
    metrics: Metrics, name: str, prompts: Sequence[Prompt], judgements: Sequence[Judgement], *, may_be_graded: bool
) -> None:
    """Judged greedy answers: mean reward over all prompts and over each skill. An unjudged answer is not counted.

    Where a grader `may_be_graded`, the mean square is added, from which the standard error of the mean follows.
    """
    for prompt, judgement in zip(prompts, judgements, strict=True):
        if not judgement.is_judged:
            continue
        for tail in ("", f"/{prompt.skill}") if prompt.skill else ("",):
            mean = REWARD_MEAN if may_be_graded else ACCURACY
            metrics.add(f"agent/{name}/{mean}{tail}", judgement.reward, 1)
            metrics.count(f"agent/{name}/num_evaluated{tail}", 1)
            if may_be_graded:
                metrics.add(f"agent/{name}/{REWARD_SQUARE}{tail}", judgement.reward**2, 1)


class FirstRewards:
    """Rewards of an agent's held-out answers on this rank in the run's first evaluation, to pair later ones with.

    Held-out prompts are the same in all evaluations of a run, so that the gain of each prompt is known: metrics
    held_out_gain and its mean square over num_held_out_pairs prompts that were judged both times.
    """

    def __init__(self) -> None:
        self._rewards: dict[str, float] = {}
        self._kept: dict[str, float] = {}  # of them, those that this cell's checkpoints have

    def state_dict(self) -> dict[str, float]:
        """The rewards that this cell keeps, by the prompts' ids, as plain values."""
        return dict(self._kept)

    def load_state_dicts(self, states: Sequence[Mapping[str, float]], share: slice) -> None:
        """Restores the `state_dict()` of all cells, since other cells share the prompts otherwise; keeps a `share`."""
        self._rewards, self._kept = dict(ChainMap(*states)), dict(ChainMap(*states[share]))

    def compare(
        self, metrics: Metrics, name: str, prompts: Sequence[Prompt], judgements: Sequence[Judgement], step: int
    ) -> None:
        """Keeps the rewards before step 1, and adds the gains of later steps."""
        judged = [(p, j.reward) for p, j in zip(prompts, judgements, strict=True) if j.is_judged]
        if step == 0:
            self._rewards = self._kept = {prompt.id: reward for prompt, reward in judged}
            return
        for prompt, reward in judged:
            if (before := self._rewards.get(prompt.id)) is None:
                continue
            for tail in ("", f"/{prompt.skill}") if prompt.skill else ("",):
                metrics.add(f"agent/{name}/held_out_gain{tail}", reward - before, 1)
                metrics.add(f"agent/{name}/held_out_gain_square{tail}", (reward - before) ** 2, 1)
                metrics.count(f"agent/{name}/num_held_out_pairs{tail}", 1)


def add_reencodings(metrics: Metrics, learner: int, names: Sequence[str], sources: Sequence[ReencodingCounts]) -> None:
    """Adds the outcome of all answers on their way into this learner's samples (samples/learner_view.py).

    `sources` has the counts of every source's answers: together they are `view/`, and of each source that is encoded
    again, how much finer the learner's tokenizer cuts (mean over answers of learner's / source's tokens), and the share
    of answers that read differently afterwards. For every other source whose answers are offered, `view/` below its
    name counts each answer once: as trained, or by the one reason why it is not.
    """
    counts, prefix = sum(sources, start=ReencodingCounts()), f"agent/{names[learner]}/view"
    for field in dataclasses.fields(counts):
        if field.name.startswith("num_"):
            metrics.count(f"{prefix}/{field.name}", getattr(counts, field.name))
    # Tokens of the learner's tokenizer over those of the source's, of the same text.
    metrics.add(f"{prefix}/token_ratio_mean", counts.token_ratio_sum, counts.num_reencoded)
    for source, view in zip(names, sources, strict=True):
        pair = f"agent/{names[learner]}/from/{source}"
        metrics.add(f"{pair}/token_ratio", view.token_ratio_sum, view.num_reencoded)
        metrics.add(f"{pair}/changed", view.num_changed, view.num_compared)
        if source != names[learner] and (offered := view.num_cross + len(view.dropped)):
            reasons = Counter(answer.reason for answer in view.dropped)
            fates = {"answers": offered, "trained": view.num_cross}
            for fate, number in (fates | {reason: reasons[reason] for reason in DROP_REASONS}).items():
                metrics.count(f"{pair}/view/num_{fate}", number)


def add_update(
    metrics: Metrics,
    result: UpdateStats,
    update_index: int,
    learner: int,
    names: Sequence[str],
    config: AlgorithmConfig,
    engine_scores: bool = False,
) -> None:
    """Adds an update's numbers to the metrics: own answers together, others' answers per source.

    Per ordered pair of agents: mean, lowest and highest ratio, shares below, inside and above the band, and mean,
    maximum and effective sample size of the weights s c^alpha. `positive_share`, of own answers and of each source's,
    is sum |w A| over A > 0 by sum |w A| (d loss / d mean log-prob = -w A): what share of all pull on mean log-probs
    comes from answers that are made likelier; the rest makes answers less likely. An answer counts as trained when it
    was run forward and backward, though its weight may be 0. `engine_scores`: old log-probs are the engine's; else the
    actor's, so that own ratios of a step's first update are 1.
    """
    prefix = f"agent/{names[learner]}"
    metrics.add(f"{prefix}/grad_norm", result.grad_norm, 1)
    metrics.highest(f"{prefix}/grad_norm_max", result.grad_norm)
    metrics.add(f"{prefix}/lr", result.lr, 1)
    metrics.count(f"{prefix}/num_microbatches", result.num_microbatches)
    metrics.count(f"{prefix}/num_trained_tokens", result.num_trained)
    metrics.count(f"{prefix}/num_trained_answers", result.num_samples)
    metrics.gauge(f"{prefix}/num_updates", update_index + 1)  # the step's last one is its number
    if result.experts is not None:
        metrics.add(f"{prefix}/fullest_expert_share", result.experts.fullest_share, 1)
        metrics.add(f"{prefix}/expert_entropy", result.experts.entropy, 1)
        if result.experts.changed is not None and update_index == 0:  # later the router has learnt
            metrics.add(f"{prefix}/replay_changed", result.experts.changed, 1)
        for name, loss in (("moe_aux_loss", result.experts.aux_loss), ("moe_z_loss", result.experts.z_loss)):
            if loss is not None:
                metrics.add(f"{prefix}/{name}", loss, 1)
    for report in result.reports:
        stats = objective_stats(report.terms)
        metrics.add(f"{prefix}/self/ratio_mean", *stats.ratio_self.tolist())
        metrics.add(f"{prefix}/self/clipped", *stats.clipped_self.tolist())
        _add_signs(metrics, f"{prefix}/self", stats.gradient_positive_self, stats.gradient_abs_self)
        metrics.count(f"{prefix}/num_nonfinite", stats.nonfinite[0].item())
        # (sum, count) = (cross, cross + own): the share of the squared loss coefficients that others' answers bring
        own, cross = stats.gradient_sq_self[0].item(), stats.gradient_sq_cross[0].item()
        metrics.add(f"{prefix}/cross_coefficient_share", cross, own + cross)
        if config.kl_coef > 0.0:
            metrics.add(f"{prefix}/kl", *report.kl.tolist())
        if update_index == 0 and stats.ratio_self[1] > 0:
            if not engine_scores:
                errors = (abs(end.item() - 1.0) for end in (stats.ratio_self_max, stats.ratio_self_min))
                metrics.highest(f"{prefix}/self/first_ratio_error", max(errors))  # not 0: scoring and learning disagree
            elif not config.is_token_level:
                ratio_B = report.terms.ratio_B[report.terms.is_self_B & report.terms.ratio_B.isfinite()]
                outside_B = (ratio_B < 1.0 - config.eps_low) | (ratio_B > 1.0 + config.eps_high)
                metrics.add(f"{prefix}/self/first_outside", outside_B.sum().item(), len(outside_B))
        source_B = report.key_B3[:, 1]
        for source in sorted(set(source_B.tolist()) - {learner}):
            stats = objective_stats(report.terms.of(source_B == source))
            if stats.ratio_cross[1] > 0:
                _add_cross(metrics, f"{prefix}/from/{names[source]}", stats)


def add_skips(metrics: Metrics, name: str, updates: Sequence[UpdateStats]) -> None:
    """Adds the skipped updates of a step. All cells of an agent skip together: called by its first rank alone."""
    metrics.count(f"agent/{name}/num_skipped_updates", sum(update.skipped for update in updates))


def _add_cross(metrics: Metrics, prefix: str, stats: ObjectiveStats) -> None:
    """Adds the effect of one source's answers, of which there is at least one."""
    metrics.add(f"{prefix}/ratio_mean", *stats.ratio_cross.tolist())
    metrics.lowest(f"{prefix}/ratio_min", stats.ratio_cross_min.item())
    metrics.highest(f"{prefix}/ratio_max", stats.ratio_cross_max.item())
    metrics.add(f"{prefix}/below", *stats.cross_below.tolist())
    metrics.add(f"{prefix}/inside", *stats.cross_inside.tolist())
    metrics.add(f"{prefix}/above", *stats.cross_above.tolist())
    (weight, count), (weight_sq, _) = stats.weight_cross.tolist(), stats.weight_sq_cross.tolist()
    metrics.add_weights(f"{prefix}/weight", weight, weight_sq, count)
    metrics.highest(f"{prefix}/weight_max", stats.weight_cross_max.item())
    _add_signs(metrics, prefix, stats.gradient_positive_cross, stats.gradient_abs_cross)


def _add_signs(metrics: Metrics, prefix: str, positive_2: Tensor, whole_2: Tensor) -> None:
    """(sum, count) pairs of the pull by answers with A > 0, and of all pull, as a share; absent where nothing pulls."""
    metrics.add(f"{prefix}/positive_share", positive_2[0].item(), whole_2[0].item())


def add_diagnosis(metrics: Metrics, products: GradientProducts, learner: int, names: Sequence[str]) -> None:
    """Own and cross gradients of one update, over the whole model and before clipping (Agent.diagnose).

    self/grad_norm, from/<source>/grad_norm   |g_own| and |g_s|
    from/<source>/grad_share                  |g_s| / (|g_own| + sum_j |g_j|): norms, not squares, so that 0.5 means as
                                              long as all others together; with the own share they add up to 1, and they
                                              say nothing about directions
    from/<source>/grad_cosine                 <g_own, g_s> / (|g_own| |g_s|): below 0 the source works against the
                                              learner's own answers (Theorem 4.3 says above); absent where either is 0
    Of several updates of a step, each is the plain mean.
    """
    prefix, total_norm = f"agent/{names[learner]}", sum(products.norms)
    metrics.add(f"{prefix}/self/grad_norm", products.norms[0], 1)
    sources = [name for j, name in enumerate(names) if j != learner]
    for group, source in enumerate(sources, start=1):
        norm, cosine = products.norms[group], products.cosine(group)
        metrics.add(f"{prefix}/from/{source}/grad_norm", norm, 1)
        if total_norm != 0.0:
            metrics.add(f"{prefix}/from/{source}/grad_share", norm / total_norm, 1)
        if cosine is not None:
            metrics.add(f"{prefix}/from/{source}/grad_cosine", cosine, 1)
