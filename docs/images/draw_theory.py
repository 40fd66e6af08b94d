"""Draws docs/images/theory.png: where Theorems 4.1 and 4.3 of HACPO (arXiv 2603.02604) hold.

    python docs/images/draw_theory.py

Prints the exact numbers of docs/measurements/theory.md, too: an omega that is known leaves (G + 1)^2 outcomes of a
prompt, which are all enumerated. What estimates omega, and random policies, are simulated.

Omega, baselines and objective are the functions that train.
Left, Theorem 4.1: the mean of R - mu over own answers is 0 when omega is the ratio of expected rewards; here omega is
estimated over a window of K steps. A weak and a strong agent answer prompts of three difficulties, rewards are
Bernoulli, bars are two standard errors. Right, Theorem 4.3: the cross gradient points along the own one. A policy is a
table, softmax(theta[t, v]) for each of five tokens, so that all answers are summed exactly; an answer is right with
three tokens 0. The source is `distance` random logits away from the learner, and better by .7 on every right token.
Shapes: R replications, P prompts, N agents, G answers, L difficulties; T tokens of V kinds, A = V^T answers; O outcomes
of a prompt of any difficulty, each with its probability.
"""

import itertools
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from hacpo_kernels import objective_from_mean
from torch import Tensor

from hacpo_mega.algorithm import CapabilityTracker, capability_ratios, hacpo_advantages, objective_bounds
from hacpo_mega.algorithm.advantage import joint_baselines
from hacpo_mega.config import AlgorithmConfig

HERE = Path(__file__).parent
# In logits, and logits a step: agents weak and strong, of which the weak one improves four times as fast.
ABILITY_N, SPEED_N = torch.tensor([[-1.0, 0.7], [0.02, 0.005]], dtype=torch.float64)
DIFFICULTY_L = torch.tensor([-2.0, 0.0, 2.0]).double()
REPLICATIONS, PROMPTS, ANSWERS = 1500, 16, 8
WINDOWS = (1, 5, 20, 100)
BLUE, ORANGE, GREEN = "#3b6fb6", "#d98032", "#1f9d6b"

TOKENS, KINDS, RIGHT = 5, 3, 3
ANSWERS_AT = torch.tensor(list(itertools.product(range(KINDS), repeat=TOKENS)))
REWARD_A = ((ANSWERS_AT == 0).sum(dim=1) >= RIGHT).double()
NUM_TABLES, DISTANCES, BONUS = 512, (0.0, 0.25, 0.5, 1.0, 2.0), 0.7
SETTINGS = {
    "the paper's": ({}, BLUE),
    "baseline_guard": ({"baseline_guard": True}, ORANGE),
    'cross_baseline = "learner"': ({"cross_baseline": "learner"}, GREEN),
}


def outcomes() -> tuple[Tensor, Tensor]:
    """Rewards [O, N, G] of every outcome, right answers first, and their chances [L, O], of sum 1 / L at each level."""
    right_ON = torch.tensor(list(itertools.product(range(ANSWERS + 1), repeat=2)))
    rewards_ONG = (torch.arange(ANSWERS) < right_ON[:, :, None]).double()
    success_LN = torch.sigmoid(ABILITY_N - DIFFICULTY_L[:, None])
    binomial_LON = torch.distributions.Binomial(ANSWERS, success_LN[:, None]).log_prob(right_ON.double()).exp()
    return rewards_ONG, binomial_LON.prod(dim=2) / len(DIFFICULTY_L)


def exact_numbers(options: dict[str, Any], *, knows_omega: bool = True) -> dict[str, list[float]]:
    """Means of omega (R - mu) and of the advantage, and the variance of the advantage over that of the plain group.

    Four numbers each: weak learner on its own answers, on the strong agent's, strong learner on the weak agent's, on
    its own. `knows_omega`: the ratio of expected rewards, else 1.
    """
    rewards_ONG, chance_LO = outcomes()
    chance_O = chance_LO.sum(dim=0)
    expected_N = torch.sigmoid(ABILITY_N - DIFFICULTY_L[:, None]).mean(dim=0)
    config, plain = AlgorithmConfig(**options), AlgorithmConfig(method="naive")
    capability_N = expected_N if knows_omega else torch.ones(2).double()
    omega_NN = capability_ratios(capability_N, config.omega_clip)
    mu_ON = joint_baselines(rewards_ONG, omega_NN, guard=config.baseline_guard)
    found: dict[str, list[float]] = {"R - mu": [], "advantage": [], "variance": []}
    for learner, source in itertools.product(range(2), repeat=2):
        of = learner if config.cross_baseline == "learner" else source
        surplus_OG = omega_NN[source, learner] * (rewards_ONG[:, source] - mu_ON[:, of, None])
        found["R - mu"].append((chance_O @ surplus_OG.mean(dim=1)).item())
        ours, other = (hacpo_advantages(rewards_ONG, capability_N, learner, c)[:, source] for c in (config, plain))
        found["advantage"].append((chance_O @ ours.mean(dim=1)).item())
        found["variance"].append((variance(ours, chance_O) / variance(other, chance_O)).item())
    return found


def variance(advantage_OG: Tensor, chance_O: Tensor) -> Tensor:
    """Variance of one answer's advantage."""
    return chance_O @ advantage_OG.square().mean(dim=1) - (chance_O @ advantage_OG.mean(dim=1)) ** 2


def exact_by_difficulty() -> dict[str, list[float]]:
    """E[R - mu] of each agent's own answers under the oracle, and the chance that its baseline is above 1, [L] each."""
    rewards_ONG, chance_LO = outcomes()
    expected_N = torch.sigmoid(ABILITY_N - DIFFICULTY_L[:, None]).mean(dim=0)
    mu_ON = joint_baselines(rewards_ONG, capability_ratios(expected_N, None), guard=False)
    chance_LO = chance_LO * len(DIFFICULTY_L)
    surplus_LN = chance_LO @ (rewards_ONG.mean(dim=2) - mu_ON)
    above_LN = chance_LO @ (mu_ON > 1.0 + 1e-12).double()
    return {
        f"{name} {what}": values_LN[:, n].tolist()
        for n, name in enumerate(("weak", "strong"))
        for what, values_LN in (("R - mu", surplus_LN), ("mu > 1", above_LN))
    }


EXACT = {
    "oracle": ({}, True),
    "omega = 1": ({}, False),
    "oracle, authors": ({"preset": "authors"}, True),
}


def print_exact() -> None:
    """The tables of docs/measurements/theory.md that are exact."""
    for name, (options, knows_omega) in EXACT.items():
        for what, values in exact_numbers(options, knows_omega=knows_omega).items():
            print(f"{name}: {what}: {', '.join(f'{value:.4f}' for value in values)}")
    for what, values in exact_by_difficulty().items():
        print(f"oracle, {what}: {', '.join(f'{value:.4f}' for value in values)} (easy, medium, hard)")


def drawn_step(age: int, generator: torch.Generator) -> Tensor:
    """Rewards [R, P, N, G] of a step `age` steps ago."""
    success_LN = torch.sigmoid(ABILITY_N - age * SPEED_N - DIFFICULTY_L[:, None])
    level_RP = torch.randint(len(DIFFICULTY_L), (REPLICATIONS, PROMPTS), generator=generator)
    return torch.bernoulli(success_LN[level_RP][..., None].expand(-1, -1, -1, ANSWERS), generator=generator)


def bias(history_RN: list[Tensor], rewards_RPNG: Tensor, window: int, with_current: bool) -> tuple[float, float]:
    """The strong agent's mean R - mu on its own answers, and the standard error."""
    config = AlgorithmConfig(capability_window=window, capability_includes_current=with_current)
    tracker = CapabilityTracker(history_RN[0].numel(), config)  # of every replication, agent by agent
    for mean_RN in [*history_RN, rewards_RPNG.mean(dim=(1, 3))]:
        tracker.update(mean_RN.flatten(), mean_RN.flatten())
    capability_RN = tracker.values().reshape(history_RN[0].shape)
    omega_RNN = torch.vmap(lambda capability_N: capability_ratios(capability_N, config.omega_clip))(capability_RN)
    mu_RPN = torch.vmap(lambda rewards, omega: joint_baselines(rewards, omega, guard=False))(rewards_RPNG, omega_RNN)
    surplus_R = (rewards_RPNG.mean(dim=(1, 3)) - mu_RPN.mean(dim=1))[:, -1]
    return surplus_R.mean().item(), surplus_R.std().item() / REPLICATIONS**0.5


def draw_bias(axis: plt.Axes, generator: torch.Generator) -> None:
    """Theorem 4.1."""
    rewards_RPNG = drawn_step(0, generator)
    for agents, colour in (("stationary", BLUE), ("improving", ORANGE)):
        ages = range(max(WINDOWS), 0, -1)
        history = [drawn_step(age * (agents == "improving"), generator).mean(dim=(1, 3)) for age in ages]
        for with_current, style in ((True, "-"), (False, "--")):
            found = [bias(history, rewards_RPNG, window, with_current) for window in WINDOWS]
            means, errors = zip(*found)
            label = f"{agents}, {'with' if with_current else 'without'} the current step"
            bars = [2 * error for error in errors]
            axis.errorbar(WINDOWS, means, yerr=bars, color=colour, linestyle=style, marker="o", ms=3, label=label)
    axis.axhline(0, color="#20242a", linewidth=0.8)
    axis.set(xscale="log", xlabel="K, steps", title="E[R - mu], own answers of the strong agent")
    axis.set_xticks(WINDOWS, [str(window) for window in WINDOWS])
    axis.minorticks_off()


def gradient(
    theta_PTV: Tensor, author_PTV: Tensor, advantage_PA: Tensor, is_own: bool, config: AlgorithmConfig
) -> Tensor:
    """The learner's ascent direction [P, T V] from all answers of an author, each by the author's probability."""
    theta_PTV = theta_PTV.clone().requires_grad_()
    learner_PA, author_PA = mean_logprobs(theta_PTV), mean_logprobs(author_PTV)
    _, slope_B, _ = objective_from_mean(
        learner_PA.detach().flatten(),
        author_PA.flatten(),
        advantage_PA.flatten(),
        torch.full((learner_PA.numel(),), is_own),
        update_index=0,
        bounds=objective_bounds(config),
    )
    pull = -(slope_B.reshape(learner_PA.shape) * (TOKENS * author_PA).exp() * learner_PA).sum()
    return torch.autograd.grad(pull, theta_PTV)[0].flatten(1)


def mean_logprobs(theta_PTV: Tensor) -> Tensor:
    """Mean log-prob of every answer [P, A], nats per token."""
    of_token_PTV = theta_PTV.log_softmax(dim=2)
    return of_token_PTV[:, torch.arange(TOKENS), ANSWERS_AT].mean(dim=2)


def share_opposed(distance: float, config: AlgorithmConfig, generator: torch.Generator) -> float:
    """The share of prompts on which the cross gradient of a stronger source has a negative product with the own one."""
    drawn_PTV = torch.randn((2, NUM_TABLES, TOKENS, KINDS), generator=generator, dtype=torch.float64)
    right_V = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    learner_PTV = drawn_PTV[0] + right_V
    source_PTV = learner_PTV + distance * drawn_PTV[1] + BONUS * right_V
    policies = (learner_PTV, source_PTV)
    expected_PN = torch.stack([(TOKENS * mean_logprobs(each)).exp() @ REWARD_A for each in policies], dim=1)
    omega_NN = capability_ratios(expected_PN.mean(dim=0), config.omega_clip)
    mu_PN = joint_baselines(expected_PN[:, :, None], omega_NN, guard=config.baseline_guard)
    cross_mu_P = mu_PN[:, 1 if config.cross_baseline == "source" else 0]
    own_PD = gradient(learner_PTV, learner_PTV, REWARD_A - mu_PN[:, :1], True, config)
    cross_PA = omega_NN[1, 0] * (REWARD_A - cross_mu_P[:, None])
    cross_PD = gradient(learner_PTV, source_PTV, cross_PA, False, config)
    return ((own_PD * cross_PD).sum(dim=1) < 0).double().mean().item()


def draw_opposed(axis: plt.Axes) -> None:
    """Theorem 4.3. The same policies under every setting."""
    for label, (options, colour) in SETTINGS.items():
        config = AlgorithmConfig(**options)
        shares = [share_opposed(distance, config, torch.Generator().manual_seed(0)) for distance in DISTANCES]
        axis.plot(DISTANCES, [100 * share for share in shares], color=colour, marker="o", ms=3, label=label)
    axis.set(xlabel="distance of the policies, logits", title="Prompts whose cross gradient opposes the own, %")
    axis.set_ylim(bottom=0)


def main() -> None:
    """Draws the picture and writes it beside this file; prints the exact numbers."""
    print_exact()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.4), dpi=150, layout="constrained")
    draw_bias(axes[0], torch.Generator().manual_seed(0))
    draw_opposed(axes[1])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(9)
        axis.legend(frameon=False, fontsize=7.5)
    figure.savefig(HERE / "theory.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
