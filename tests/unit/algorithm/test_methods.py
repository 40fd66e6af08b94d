"""Every method against its own equation: plain Python per answer, float64 autograd per token, nothing of ours.

A case is a cube of rewards, answers of unequal length, and ratios on every side of every border. The reference makes
the advantage of one answer, its loss and its gradient by every token; ours must be those. Borders themselves come
after: exact float64 mean log-probs are handed in there.
"""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hacpo_kernels import SequenceTerms
from method_cases import config_of, cube, judged, sequence_objective

from hacpo_mega.agent.policy_loss import PolicyLoss
from hacpo_mega.algorithm import (
    Judged,
    advantages_of,
    sample_weight,
    token_objective,
)
from hacpo_mega.config import AlgorithmConfig
from hacpo_mega.config.tables.methods import METHODS
from hacpo_mega.records import MicroBatch, Sample

U64, U32 = 2.0**-53, 2.0**-24
ABLATIONS = {
    "hacpo": {},
    "no advantage": {"capability_baseline": False},
    "no omega": {"omega_in_loss": False},
    "alpha 0": {"alpha": 0.0},
    "alpha 3": {"alpha": 3.0},
    "no step": {"delta_step": 0.0},
    "no clip": {"cross_clip": "none"},
    "own clip": {"cross_clip": "own"},
    "authors": {"preset": "authors"},
}


# ---- the reference: one answer at a time


def group_advantage(reward: float, group: list[float]) -> float:
    """(R - mean) / (std + eps) over the judged answers of a group; 0 where all are equal or this one is unjudged."""
    judged = [r for r in group if not math.isnan(r)]
    if math.isnan(reward) or max(judged) - min(judged) <= 1e-6:
        return 0.0
    return (reward - statistics.fmean(judged)) / (statistics.stdev(judged) + 1e-6)


def advantage_of(
    method: str, config: AlgorithmConfig, rewards: list, capability: list, k: int, j: int, g: int
) -> float:
    """Learner k's advantage of answer g of agent j to one prompt, whose rewards are rewards[agent][answer]."""
    reward, everybody = rewards[j][g], [r for group in rewards for r in group]
    if j == k and method in ("grpo", "gspo", "gspo_x2", "sgt", "f_tis"):
        return group_advantage(reward, rewards[k])
    if method in ("grpo", "gspo", "gspo_x2"):
        return 0.0
    if method == "naive":
        return group_advantage(reward, everybody)
    if method == "f_tis":
        return group_advantage(reward, rewards[j])
    if method == "sgt":
        own = [r for r in rewards[k] if not math.isnan(r)]
        return float(bool(own) and max(own) < 1.0 and reward == 1.0)
    return hacpo_advantage_of(config, rewards, capability, k, j, reward)


def hacpo_advantage_of(
    config: AlgorithmConfig, rewards: list, capability: list, k: int, j: int, reward: float
) -> float:
    """Eq. 10 and eq. 50 with the ablations: omega = 1 in the baseline, or in the coefficient."""
    judged = [(a, r) for a, group in enumerate(rewards) for r in group if not math.isnan(r)]
    values = [r for _, r in judged]
    if math.isnan(reward) or max(values) - min(values) <= 1e-6:
        return 0.0

    def omega(a: int, b: int) -> float:
        ratio = capability[a] / capability[b]
        return min(max(ratio, 0.1), 10.0) if config.omega_clip else ratio

    of = j if config.cross_baseline == "source" else k
    weigh = omega if config.capability_baseline else lambda a, b: 1.0
    baseline = sum(weigh(of, a) * r for a, r in judged) / len(judged)
    if config.baseline_guard and baseline > 1.0:
        own = [r for r in rewards[of] if not math.isnan(r)]
        baseline = statistics.fmean(own) if own else 0.0
    coefficient = omega(j, k) if j != k and config.omega_in_loss else 1.0
    if not set(values) <= {0.0, 1.0}:  # graded rewards: the share of the variance in the square about the baseline
        coefficient *= statistics.variance(values) / (sum((r - baseline) ** 2 for r in values) / (len(values) - 1))
    return coefficient * (reward - baseline) / (statistics.stdev(values) + 1e-6)


def loss_of(
    method: str, config: AlgorithmConfig, tokens: torch.Tensor, old: torch.Tensor, A: float, is_own: bool, m: int
) -> torch.Tensor:
    """The loss of one answer. tokens [n] under the learner now, old [n'] under the source when it answered, nats."""
    if method == "grpo":
        r = (tokens - old).exp()
        return -torch.minimum(r * A, r.clamp(1 - config.eps_low, 1 + config.eps_high) * A).mean()
    s = (tokens.mean() - old.mean()).clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()
    if is_own or method == "naive" or config.cross_clip == "own":
        return -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A)
    if method == "sgt":
        return -A * tokens.mean()
    if method == "f_tis":
        diverges = A < 0 and (old.mean() - tokens.mean()).item() > 0.2
        # the weight is no part of the graph: the gradient is the weight times that of the mean log-prob
        return -(0.0 if diverges else min(s.item(), 2.0)) * A * (1.0 + tokens.mean() - tokens.mean().detach())
    if config.cross_clip == "none":
        return -s * s.detach() ** config.alpha * A
    c = s.clamp(min(1.0, 1.0 - config.delta + m * config.delta_step), 1.0)
    return -c * c.detach() ** config.alpha * A


def answers(seed: int, rewards: torch.Tensor, learner: int) -> list[tuple]:
    """(p, j, g, tokens now, tokens of the source) for every judged answer, of 1 to 9 tokens; ratios near every border.

    log s is one of: inside the own clip, outside it, inside the band, far outside on either side, near the limit of
    divergence and near the cap, never within 1e-5 of any of them.
    """
    generator = np.random.default_rng(seed)
    log_ratios = (
        1e-4,
        -1e-4,
        2e-3,
        -2e-3,
        -0.05,
        -0.15,
        -0.19,
        -0.21,
        -0.5,
        0.3,
        math.log(2) - 0.01,
        math.log(2) + 0.01,
    )
    found = []
    for p, j, g in itertools.product(*map(range, rewards.shape)):
        if math.isnan(rewards[p, j, g]) and j != learner:
            continue
        now = -generator.uniform(0.01, 2.0, generator.integers(1, 10))
        length = len(now) if j == learner else generator.integers(1, 10)
        old = -generator.uniform(0.01, 2.0, length)
        shift = now.mean() - old.mean() - generator.choice(log_ratios) * (1 + 0.01 * generator.uniform(-1, 1))
        # an own answer's tokens move each by itself, so that grpo clips some and not others
        by_token = generator.choice([1e-4, -2e-3, 0.1, -0.15, 0.4, -0.5], length)
        old = now - by_token if j == learner else old + shift
        found.append((p, j, g, torch.tensor(now), torch.tensor(old)))
    return found


def expected(method, config, rewards, capability, learner, cases, m) -> tuple[list, list, list]:
    """Advantage, loss and gradient by every token of each case, by the reference."""
    found = []
    for p, j, g, now, old in cases:
        A = advantage_of(method, config, rewards[p].tolist(), capability, learner, j, g)
        tokens = now.clone().requires_grad_()
        loss = loss_of(method, config, tokens, old, A, j == learner, m)
        gradient = torch.autograd.grad(loss, tokens, allow_unused=True)[0] if loss.requires_grad else None
        found.append((A, loss.item(), torch.zeros_like(now) if gradient is None else gradient))
    return tuple(zip(*found))


def check(method: str, config: AlgorithmConfig, num_agents: int, seed: int, m: int) -> None:
    """Our advantages, losses and gradients of one learner's answers are those of the reference."""
    rewards = cube(seed, num_agents)
    capability = np.random.default_rng(seed).uniform(0.2, 0.8, num_agents).tolist()
    learner = seed % num_agents
    cases = [c for c in answers(seed, rewards, learner) if METHODS[method].cross or c[1] == learner]
    advantages, losses, gradients = expected(method, config, rewards, capability, learner, cases, m)

    capability_N = torch.tensor(capability, dtype=torch.float64)
    ours = advantages_of(judged(rewards, capability_N, learner), config)
    # Sums of N G terms of at most omega <= 4, over a deviation of at least .05, twice.
    bound = 64 * num_agents * 16 * U64 / 0.05**2
    for (p, j, g, *_), A in zip(cases, advantages):
        assert ours[p, j, g].item() == pytest.approx(A, abs=bound), (p, j, g)

    advantage = torch.tensor(advantages, dtype=torch.float64)
    is_self = torch.tensor([j == learner for _, j, *_ in cases])
    if method == "grpo":
        starts = torch.tensor([0, *(len(now) for *_, now, _ in cases)]).cumsum(0)
        tokens = torch.cat([now for *_, now, _ in cases]).requires_grad_()
        loss, _ = token_objective(tokens, torch.cat([old for *_, old in cases]), advantage, starts, config)
        token_gradient = torch.autograd.grad(loss.sum(), tokens)[0]
    else:
        means = torch.stack([now.mean() for *_, now, _ in cases])
        sources = torch.stack([old.mean() for *_, old in cases])
        loss, by_mean, _ = sequence_objective(means, sources, advantage, is_self, m, config)
        lengths = torch.tensor([len(now) for *_, now, _ in cases])
        token_gradient = torch.repeat_interleave(by_mean / lengths, lengths)
    # exp, a power and a dozen products of numbers of size one; the mean of 9 tokens is off by as many roundings
    relative = (2 + config.alpha) * 64 * U64
    torch.testing.assert_close(loss, torch.tensor(losses, dtype=torch.float64), rtol=relative, atol=relative)
    torch.testing.assert_close(token_gradient, torch.cat(gradients), rtol=relative, atol=relative)


@pytest.mark.parametrize("num_agents", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("m", [0, 3])
def test_a_method_is_its_equation(method, num_agents, m):
    for seed in range(3):
        check(method, config_of(method), num_agents, seed, m)


def test_sgt_follows_what_the_judge_calls_a_success():
    """Two prompts, graded rewards: the learner failed the first, though it earned most there; the second it did not."""
    rewards = torch.tensor([[[0.7, 0.2], [0.6, 0.1]], [[0.9, 0.2], [0.9, 0.3]]], dtype=torch.float64)
    successes = torch.tensor([[[False, False], [True, False]], [[True, False], [True, False]]])
    config = config_of("sgt", transfer_weight=0.5)
    ours = advantages_of(Judged(rewards, successes, torch.ones(2, dtype=torch.float64), 0), config)
    assert ours[:, 1].tolist() == [[0.5, 0.0], [0.0, 0.0]]
    own = [[group_advantage(r, group) for r in group] for group in rewards[:, 0].tolist()]
    torch.testing.assert_close(ours[:, 0], torch.tensor(own, dtype=torch.float64), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("options", ABLATIONS.values(), ids=ABLATIONS)
@pytest.mark.parametrize("num_agents", [2, 3])
def test_an_ablation_is_its_equation(options, num_agents):
    for seed in range(3):
        check("hacpo", config_of("hacpo", **options), num_agents, seed, m=2)


# ---- through packed tokens, as an update computes it


def micro_batch(samples: list[Sample]) -> MicroBatch:
    starts = torch.tensor([0, *(sample.num_trained for sample in samples)]).cumsum(0).int()
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(none, none, starts, none, none, none, starts, tuple(samples), int(starts[-1]))


@pytest.mark.parametrize("method", METHODS)
def test_an_update_of_packed_tokens_is_the_weighted_sum(method):
    """float32 tokens with the weight of a sample; own answers carry their old log-probs, others' only a mean."""
    config, learner, num_agents, seed = config_of(method), 1, 2, 3
    rewards, capability = cube(seed, num_agents), [0.3, 0.6]
    cases = [c for c in answers(seed, rewards, learner) if METHODS[method].cross or c[1] == learner]
    weight = sample_weight(7, 4, num_agents, config)
    advantages, losses, gradients = expected(method, config, rewards, capability, learner, cases, 1)
    samples = [
        Sample(
            prompt_ids=np.zeros(1, np.int32),
            answer_ids=np.zeros(len(now), np.int32),
            num_trained=len(now),
            source=j,
            is_self=j == learner,
            prompt_index=p,
            rollout_index=g,
            advantage=A,
            source_logprob=np.float32(old.mean()).item(),
            length=float(len(now)),
            old_logprobs=old.float().numpy() if j == learner else None,
        )
        for (p, j, g, now, old), A in zip(cases, advantages)
    ]
    tokens = torch.cat([now for *_, now, _ in cases]).float().requires_grad_()
    loss, report = PolicyLoss(1, weight, config, reference={})(tokens, micro_batch(samples))
    loss.backward()
    # log s is off by the float32 roundings of up to 9 tokens of at most 2.5 nats and of the mean that travelled
    relative = (2 + config.alpha) * 32 * 2.5 * U32
    total = weight * sum(losses)
    assert loss.item() == pytest.approx(total, abs=relative * weight * sum(map(abs, losses)) + weight * U32)
    allowed = relative * weight * max(1.0, max(map(abs, advantages)))
    torch.testing.assert_close(tokens.grad.double(), weight * torch.cat(gradients), rtol=relative, atol=allowed)
    assert isinstance(report.terms, SequenceTerms) and len(report.terms.ratio_B) == len(cases)
    assert report.terms.is_self_B.tolist() == [j == learner for _, j, *_ in cases]
