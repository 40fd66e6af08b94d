"""Theorem 4.1 on simulated rewards: what an omega of K steps does to HACPO's baseline, bias and variance.

Theorem 4.1 (arXiv 2603.02604): E[A_k] = 0 over agent k's own answers when omega(k, j) = E[R_k] / E[R_j] and omega does
not depend on the rewards of this step (Assumption D.1). Measured here with the functions that train: CapabilityTracker,
capability_ratios, joint_baselines, hacpo_advantages; many replications at once through torch.vmap.
Not here: the world (world.py), gradients (gradients.py), tables (theory.py).
Shapes: R replications, P prompts, N agents, G answers, L levels of difficulty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hacpo_lab.theory.world import Estimate, Size, World, draw_history, draw_rewards
from hacpo_mega.algorithm import CapabilityTracker, capability_ratios, hacpo_advantages
from hacpo_mega.algorithm.advantage import joint_baselines
from hacpo_mega.config import AlgorithmConfig

WINDOWS = (1, 5, 20, 100)
PRESETS = ("paper", "authors")


@dataclass(frozen=True)
class Omega:
    """Where omega comes from: the true expectations, nowhere (every omega 1), or the last `window` steps."""

    origin: str  # oracle, one, window
    window: int = 0
    includes_current: bool = False

    def __str__(self) -> str:
        if self.origin != "window":
            return {"oracle": "oracle", "one": "omega = 1"}[self.origin]
        return f"K = {self.window} {'with' if self.includes_current else 'without'} current"


ORACLE, ONE = Omega("oracle"), Omega("one")
ESTIMATED = tuple(Omega("window", window, current) for current in (True, False) for window in WINDOWS)


@dataclass(frozen=True)
class OmegaRow:
    """One learner on one source's answers, under one omega. `learner == source` are own answers.

    numerator       mean of R - mu, times omega(source, learner) on others' answers; in reward
    advantage       mean of the advantage the trainer uses
    variance        its variance over answers, over that of the same learner's under omega = 1 (plain group advantage)
    added_error     mean square difference from the oracle's advantage, over the same variance
    """

    agents: str  # "stationary" or "improving"; "either" for an omega that looks at no history
    omega: str
    window: int
    includes_current: bool
    preset: str
    learner: str
    source: str
    numerator: Estimate
    advantage: Estimate
    variance: Estimate
    added_error: Estimate


@dataclass(frozen=True)
class RatioRow:
    """E[omega_hat] / omega - 1 of the last agent over the first, stationary agents, current step left out.

    paper, authors    measured under the preset's bounds of omega
    predicted         second-order expansion: Var(P_hat_j) / P_j^2 - Cov(P_hat_k, P_hat_j) / (P_k P_j)
    unrewarded        share of windows in which the denominator's P_hat is at its floor
    """

    num_prompts: int
    window: int
    paper: Estimate
    authors: Estimate
    predicted: float
    unrewarded: Estimate


@dataclass(frozen=True)
class PromptRow:
    """Own answers to prompts of one difficulty under the oracle's omega and the paper's preset.

    expected     the numerator's exact mean, p_k(d) - 1/N sum_j omega(k, j) p_j(d)
    above_one    share of prompts whose baseline is above 1, so that even a right answer is worse than it
    """

    agent: str
    difficulty: float
    success: float
    expected: float
    numerator: Estimate
    advantage: Estimate
    above_one: Estimate


@dataclass(frozen=True)
class LearnerAnswers:
    """One learner on one source's answers: the numerator's mean per replication, and all M = P G advantages."""

    numerator_R: Tensor
    advantage_RM: Tensor


@dataclass(frozen=True)
class _Scene:
    """The step that every omega is held against, the steps before it, and noise of known expectation 0."""

    world: World
    rewards_RPNG: Tensor
    histories: dict[str, list[Tensor]]  # by OmegaRow.agents: mean rewards [R, N] of each step, oldest first
    controls_RN: Tensor


def measure_omegas(world: World, size: Size, omegas: Sequence[Omega], generator: torch.Generator) -> list[OmegaRow]:
    """Every omega under both presets. The current step is the same throughout; only its history differs.

    A step is unbiased under the oracle, so its deviation there is noise that the other omegas share: it is subtracted
    from theirs by regression (the oracle's own rows are left as they are).
    """
    rewards_RPNG, _ = draw_rewards(world, size, generator)
    longest = max((omega.window for omega in omegas), default=0)
    histories = {"either": []}
    for agents in ("stationary", "improving"):
        histories[agents] = draw_history(world, size, longest, agents == "improving", generator)
    paper = AlgorithmConfig()
    oracle_RN = _capability(ORACLE, world, [], rewards_RPNG, paper)
    noise = [answers.numerator_R for (k, j), answers in learner_answers(rewards_RPNG, oracle_RN, paper) if k == j]
    scene = _Scene(world, rewards_RPNG, histories, torch.stack(noise, dim=1))
    return [row for preset in PRESETS for row in _rows(scene, preset, omegas)]


def _rows(scene: _Scene, preset: str, omegas: Sequence[Omega]) -> Iterator[OmegaRow]:
    names = scene.world.names
    plain, exact = (dict(_seen(scene, omega, "either", preset)) for omega in (ONE, ORACLE))
    for agents in scene.histories:
        for omega in omegas:
            if (omega.origin == "window") == (agents == "either"):
                continue
            for (k, j), answers in _seen(scene, omega, agents, preset):
                controls = () if omega == ORACLE else (scene.controls_RN,)
                variance, added_error = _spread(
                    answers.advantage_RM, plain[k, j].advantage_RM, exact[k, j].advantage_RM
                )
                yield OmegaRow(
                    agents=agents,
                    omega=str(omega),
                    window=omega.window,
                    includes_current=omega.includes_current,
                    preset=preset,
                    learner=names[k],
                    source=names[j],
                    numerator=Estimate.of(answers.numerator_R, *controls),
                    advantage=Estimate.of(answers.advantage_RM.mean(dim=1)),
                    variance=variance,
                    added_error=added_error,
                )


def _seen(scene: _Scene, omega: Omega, agents: str, preset: str) -> Iterator[tuple[tuple[int, int], LearnerAnswers]]:
    config = _with_window(AlgorithmConfig(preset=preset), omega)
    capability_RN = _capability(omega, scene.world, scene.histories[agents], scene.rewards_RPNG, config)
    return learner_answers(scene.rewards_RPNG, capability_RN, config)


def _with_window(config: AlgorithmConfig, omega: Omega) -> AlgorithmConfig:
    if omega.origin != "window":
        return config
    window = {"capability_window": omega.window, "capability_includes_current": omega.includes_current}
    return AlgorithmConfig(preset=config.preset, **window)


def _capability(
    omega: Omega, world: World, history: list[Tensor], rewards_RPNG: Tensor, config: AlgorithmConfig
) -> Tensor:
    """P_hat of every agent in every replication, float64 [R, N]."""
    num_replications, _, num_agents, _ = rewards_RPNG.shape
    if omega.origin == "oracle":
        return world.capability_N().expand(num_replications, num_agents)
    if omega.origin == "one":
        return torch.ones(num_replications, num_agents, dtype=torch.float64)
    return track_capability([*history, rewards_RPNG.mean(dim=(1, 3))], config)


def track_capability(means_RN: Sequence[Tensor], config: AlgorithmConfig) -> Tensor:
    """P_hat after the steps with these mean rewards, oldest first; [R, N].

    The tracker treats every agent by itself, so R replications of N agents are R N agents to it. Rewards are 0 or 1,
    so the mean reward and the positive rate are the same number.
    """
    shape = means_RN[0].shape
    tracker = CapabilityTracker(shape.numel(), config)
    for mean_RN in means_RN:
        tracker.update(mean_RN.flatten(), mean_RN.flatten())
    return tracker.values().reshape(shape)


def learner_answers(
    rewards_RPNG: Tensor, capability_RN: Tensor, config: AlgorithmConfig
) -> Iterator[tuple[tuple[int, int], LearnerAnswers]]:
    """((learner, source), their numerators and advantages) for every pair of agents."""
    num_agents = rewards_RPNG.shape[2]
    omega_RNN = torch.vmap(lambda capability_N: capability_ratios(capability_N, config.omega_clip))(capability_RN)
    baseline_RPN = torch.vmap(lambda rewards, omega: joint_baselines(rewards, omega, config.baseline_guard))(
        rewards_RPNG, omega_RNN
    )
    surplus_RNN = rewards_RPNG.mean(dim=(1, 3))[:, :, None] - baseline_RPN.mean(dim=1)[:, None, :]  # [source, baseline]
    for learner in range(num_agents):
        advantages_RPNG = replicated_advantages(rewards_RPNG, capability_RN, learner, config)
        for source in range(num_agents):
            measured_by = source if config.cross_baseline == "source" else learner
            numerator_R = omega_RNN[:, source, learner] * surplus_RNN[:, source, measured_by]
            yield (learner, source), LearnerAnswers(numerator_R, advantages_RPNG[:, :, source].flatten(1))


def replicated_advantages(rewards_RPNG: Tensor, capability_RN: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """`hacpo_advantages` of every replication, each with its own capability. float64 [R, P, N, G]."""
    return torch.vmap(lambda rewards, capability: hacpo_advantages(rewards, capability, learner, config))(
        rewards_RPNG, capability_RN
    )


def _spread(advantage_RM: Tensor, plain_RM: Tensor, exact_RM: Tensor) -> tuple[Estimate, Estimate]:
    """(variance over the plain advantage's, mean square error over it), both as ratios of means over replications."""
    plain_R, added_R = _variance_parts(plain_RM), ((advantage_RM - exact_RM) ** 2).mean(dim=1)
    return _ratio(_variance_parts(advantage_RM), plain_R), _ratio(added_R, plain_R)


def _variance_parts(values_RM: Tensor) -> Tensor:
    """Per-replication values whose mean is the variance of all, linear in the moments, so that it has an error."""
    mean = values_RM.mean()
    return (values_RM**2).mean(dim=1) - 2 * mean * values_RM.mean(dim=1) + mean**2


def _ratio(above_R: Tensor, below_R: Tensor) -> Estimate:
    ratio = above_R.mean() / below_R.mean()
    deviation = Estimate.of((above_R - ratio * below_R) / below_R.mean())
    return replace(deviation, mean=ratio.item())


def measure_ratios(
    world: World, size: Size, nums_prompts: Sequence[int], windows: Sequence[int], generator: torch.Generator
) -> list[RatioRow]:
    """How far the mean of the estimated omega lies from the true one, since E[1 / P_hat] > 1 / E[P_hat]."""
    rows = []
    truth_N = world.capability_N()
    for num_prompts in nums_prompts:
        here = replace(size, num_prompts=num_prompts)
        history = draw_history(world, here, max(windows), False, generator)
        for window in windows:
            relative_by_preset = {}
            for preset in PRESETS:
                config = AlgorithmConfig(preset=preset, capability_window=window)
                capability_RN = track_capability(history, config)
                omega_RNN = torch.vmap(lambda capability, clip=config.omega_clip: capability_ratios(capability, clip))(
                    capability_RN
                )
                relative_by_preset[preset] = Estimate.of(omega_RNN[:, -1, 0] / (truth_N[-1] / truth_N[0]) - 1)
            rows.append(
                RatioRow(
                    num_prompts=num_prompts,
                    window=window,
                    predicted=_second_order(world, here) / window,
                    unrewarded=Estimate.share(capability_RN[:, 0] <= config.capability_floor),
                    **relative_by_preset,
                )
            )
    return rows


def _second_order(world: World, size: Size) -> float:
    """Relative bias of omega_hat(last, first) from one step, to second order in the noise of the mean rewards."""
    success_LN = world.success_LN()
    below_L, above_L = success_LN[:, 0], success_LN[:, -1]
    answers = (below_L * (1 - below_L)).mean() / size.num_rollouts
    variance = (below_L.var(correction=0) + answers) / size.num_prompts
    covariance = ((below_L * above_L).mean() - below_L.mean() * above_L.mean()) / size.num_prompts
    return (variance / below_L.mean() ** 2 - covariance / (below_L.mean() * above_L.mean())).item()


def measure_prompts(world: World, size: Size, generator: torch.Generator) -> list[PromptRow]:
    """The bias by difficulty: omega is one number for all prompts, while chances of success vary by prompt."""
    config = AlgorithmConfig()
    rewards_RPNG, level_RP = draw_rewards(world, size, generator)
    # With one capability for all, replications are nothing but more prompts.
    rewards_QNG, level_Q = rewards_RPNG.flatten(0, 1), level_RP.flatten()
    omega_NN = capability_ratios(world.capability_N(), config.omega_clip)
    baseline_QN = joint_baselines(rewards_QNG, omega_NN, config.baseline_guard)
    success_LN = world.success_LN()
    expected_LN = success_LN - success_LN @ omega_NN.T / len(world.names)
    rows = []
    for agent, name in enumerate(world.names):
        advantage_Q = hacpo_advantages(rewards_QNG, world.capability_N(), agent, config)[:, agent].mean(dim=1)
        numerator_Q = rewards_QNG[:, agent].mean(dim=1) - baseline_QN[:, agent]
        for level, difficulty in enumerate(world.difficulties):
            rows.append(
                PromptRow(
                    agent=name,
                    difficulty=difficulty,
                    success=success_LN[level, agent].item(),
                    expected=expected_LN[level, agent].item(),
                    numerator=Estimate.of(numerator_Q[level_Q == level]),
                    advantage=Estimate.of(advantage_Q[level_Q == level]),
                    above_one=Estimate.share(baseline_QN[level_Q == level, agent] > 1),
                )
            )
    return rows
