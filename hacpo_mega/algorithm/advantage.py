"""Capability-aware advantages: HACPO, eq. 10 (project page and main text) and eq. 50 (appendix and the authors' code).

mu_b[p]      = 1/(N G) sum_j sum_g omega(b, j) R[p, j, g]          agent b's baseline on prompt p
sigma[p]     = sample std of all N G rewards of the prompt
A_b[p, j, g] = (R[p, j, g] - mu_b[p]) / (sigma[p] + eps)
learner k:     own answers A_k;  answers of j: omega(j, k) * A_x with x = j ("source") or k ("learner").

The capability coefficient omega(j, k) is applied here, so the objective never sees capability. The paper's ablations
are the same with omega = 1 in the baseline (Table 2), in the coefficient (Table 3), or in both: naive sharing.

Graded rewards need a correction. The offset d_b[p] = mean R[p] - mu_b[p] does not vanish with sigma[p], so the paper's
formula has no bound where the n = N G rewards of a prompt are nearly equal. Here the advantage is multiplied by the
ratio of the variance to the mean square deviation from the baseline (`variance_shares`):

s_b[p]^2      = sum (R - mu_b)^2 / (n - 1) = sigma^2 + d_b^2 n / (n - 1)
A_b[p, j, g]  = (R[p, j, g] - mu_b[p]) sigma[p] / s_b[p]^2      graded rewards; |A_b| <= sqrt(n - 1) for any of them

This equals the paper's formula where omega is 1, and vanishes as the rewards of a prompt become equal. Rewards of 0 and
1 keep the paper's formula, whose sigma is 0 or at least sqrt(1 / n).

Elsewhere: other methods' advantages (methods.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hacpo_mega.algorithm.capability import capability_ratios
from hacpo_mega.config import AlgorithmConfig

# Rewards of a prompt that differ by no more than this count as equal: a float32 grader rounds at 6e-8, and a weighted
# mean of several rewards adds a few roundings.
REWARD_TOLERANCE = 1e-6


class GroupSpread(NamedTuple):
    """Spread of the judged rewards of each prompt, [P] each.

    count_P      judged answers n      mean_P      of their rewards      deviation_P      sample standard deviation
    uniform_P    bool, whether no two differ by more than REWARD_TOLERANCE
    binary_P     bool, whether each is 0 or 1, within REWARD_TOLERANCE
    """

    count_P: Tensor
    mean_P: Tensor
    deviation_P: Tensor
    uniform_P: Tensor
    binary_P: Tensor


def hacpo_advantages(rewards_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    """Advantage with which `learner` trains on every answer, omega applied. float64 [P, N, G].

    rewards_PNG   [P, N, G], in [0, 1]; NaN marks an unjudged answer: it enters no mean and gets advantage 0
    capability_N  [N], P_hat > 0

    For a method that shares nothing, the group of a prompt is the learner's own G answers, and all others get 0.
    Raises ValueError for shapes that do not fit.
    """
    rewards_PNG = checked_rewards(rewards_PNG, capability_N, learner)
    if not config.shares_answers:
        return own_advantages(rewards_PNG, learner, config)
    return _shared_advantages(rewards_PNG, capability_N.detach().cpu(), learner, config)


def checked_rewards(rewards_PNG: Tensor, capability_N: Tensor, learner: int) -> Tensor:
    """Rewards as float64 on the CPU. ValueError for shapes that do not fit each other."""
    num_agents = rewards_PNG.shape[1] if rewards_PNG.ndim == 3 else -1
    if num_agents < 1 or tuple(capability_N.shape) != (num_agents,) or not 0 <= learner < num_agents:
        raise ValueError(
            f"rewards_PNG must be [P, N, G] with capability_N [N] and 0 <= learner < N, found rewards "
            f"{tuple(rewards_PNG.shape)}, capability {tuple(capability_N.shape)}, learner {learner}"
        )
    return rewards_PNG.detach().to("cpu", torch.float64)


def own_advantages(rewards_PNG: Tensor, agent: int, config: AlgorithmConfig) -> Tensor:
    """Advantage of an agent's answers within the group of its own G answers, as in GRPO and GSPO; 0 for others'.

    float64 [P, N, G].
    """
    advantages_PNG = torch.zeros_like(rewards_PNG)
    own = slice(agent, agent + 1)
    advantages_PNG[:, own] = _shared_advantages(rewards_PNG[:, own], torch.ones(1), 0, config)
    return advantages_PNG


def _shared_advantages(rewards_PNG: Tensor, capability_N: Tensor, learner: int, config: AlgorithmConfig) -> Tensor:
    omega_NN = capability_ratios(capability_N, config.omega_clip)
    ones_NN = torch.ones_like(omega_NN)
    baseline_omega_NN = omega_NN if config.capability_baseline else ones_NN
    loss_omega_NN = omega_NN if config.omega_in_loss else ones_NN
    baseline_PN = joint_baselines(rewards_PNG, baseline_omega_NN, guard=config.baseline_guard)
    if config.cross_baseline == "learner":
        baseline_PN = baseline_PN[:, learner : learner + 1].expand_as(baseline_PN)

    spread = group_spread(rewards_PNG)
    is_zero_PNG = rewards_PNG.isnan()
    if config.uniform_group_is_zero:
        # With omega != 1 the baseline differs from equal rewards, and would make an advantage of them.
        is_zero_PNG = is_zero_PNG | spread.uniform_P[:, None, None]
    scale_P11 = (spread.deviation_P + config.advantage_eps)[:, None, None]
    advantages_PNG = (rewards_PNG - baseline_PN[:, :, None]) / scale_P11
    if config.uniform_group_is_zero:
        advantages_PNG = advantages_PNG * variance_shares(baseline_PN, spread)[:, :, None]
    # omega(k, k) = 1, so the own column is unchanged: one expression for own and cross answers.
    advantages_PNG = loss_omega_NN[:, learner][None, :, None] * advantages_PNG
    return advantages_PNG.masked_fill(is_zero_PNG, 0.0)


def joint_baselines(rewards_PNG: Tensor, omega_NN: Tensor, *, guard: bool) -> Tensor:
    """mu_b[p] of every agent b: mean over judged answers of omega(b, j) R[p, j, g], float64 [P, N].

    With `guard`, a baseline above 1 (no reward can reach it) falls back to the agent's own mean on that prompt.
    """
    sums_PN = rewards_PNG.nan_to_num().sum(dim=2)
    count_P1 = (~rewards_PNG.isnan()).sum(dim=(1, 2))[:, None].clamp(min=1)
    baseline_PN = sums_PN @ omega_NN.T / count_P1
    if guard:
        own_PN = rewards_PNG.nanmean(dim=2).nan_to_num()
        baseline_PN = torch.where(baseline_PN > 1.0, own_PN, baseline_PN)
    return baseline_PN


def variance_shares(baseline_PN: Tensor, spread: GroupSpread) -> Tensor:
    """sigma^2 / s_b^2 of every prompt and baseline b: 1 where rewards are 0 or 1, or where mu_b is their mean. [P, N].

    s_b^2 = sum (R - mu_b)^2 / (n - 1) is at least sigma^2 and at least (R - mu_b)^2 / (n - 1) of every reward, so that
    |R - mu_b| / sigma times this is at most sqrt(n - 1) sigma / s_b <= sqrt(n - 1).
    """
    count_P1, variance_P1 = spread.count_P[:, None], (spread.deviation_P**2)[:, None]
    offset_PN = spread.mean_P[:, None] - baseline_PN
    around_baseline_PN = variance_P1 + offset_PN**2 * count_P1 / (count_P1 - 1).clamp(min=1)
    return (variance_P1 / around_baseline_PN).masked_fill(spread.binary_P[:, None], 1.0)


def group_spread(rewards_PNG: Tensor) -> GroupSpread:
    """Spread of the judged rewards of each prompt, from float64 [P, N, G] with NaN where unjudged."""
    flat_PM = rewards_PNG.flatten(1)
    judged_PM = ~flat_PM.isnan()
    count_P = judged_PM.sum(dim=1)
    mean_P1 = flat_PM.nan_to_num().sum(dim=1, keepdim=True) / count_P[:, None].clamp(min=1)
    squares_P = ((flat_PM - mean_P1).nan_to_num() ** 2).sum(dim=1)
    deviation_P = (squares_P / (count_P - 1).clamp(min=1)).sqrt()
    highest_P = flat_PM.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest_P = flat_PM.nan_to_num(nan=torch.inf).amin(dim=1)
    is_uniform_P = highest_P - lowest_P <= REWARD_TOLERANCE
    is_binary_PM = torch.minimum(flat_PM.abs(), (flat_PM - 1.0).abs()) <= REWARD_TOLERANCE
    return GroupSpread(count_P, mean_P1[:, 0], deviation_P, is_uniform_P, (is_binary_PM | ~judged_PM).all(dim=1))
