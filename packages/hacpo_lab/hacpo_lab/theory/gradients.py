"""Theorem 4.3 in a model small enough to enumerate: does the cross gradient point along the own one?

Theorem 4.3 (arXiv 2603.02604): the gradient from others' answers has a positive inner product with the own gradient.
A policy is a table: on every prompt it draws each of T tokens from a softmax of its own, theta[p, t, v]. All answers,
V^T of them, can be listed, gradients are sums, and d mean log-prob / d theta[t, v] = (1{token_t = v} - pi[t, v]) / T.
Weights and advantages come from the functions that train: sequence_objective, hacpo_advantages, joint_baselines.
Prompts share no parameters, unlike in a network. The gradient is that of a step's first update (m = 0).
Shapes: P prompts, T tokens of V kinds, A = V^T answers, D = T V parameters of a prompt, G sampled answers.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hacpo_lab.theory.world import Estimate
from hacpo_mega.algorithm import capability_ratios, hacpo_advantages, sequence_objective
from hacpo_mega.algorithm.advantage import joint_baselines
from hacpo_mega.config import AlgorithmConfig

NUM_TOKENS, VOCABULARY, NEEDED = 5, 3, 3
# How much better the source is: added to the logit of every right token. "itself" is the learner, sampled once more:
# what the noise of sampling does alone.
SOURCES = {"itself": 0.0, "stronger": 0.7, "weaker": -0.7}
PROMPTS_PER_UPDATE = 64


@dataclass(frozen=True)
class Objective:
    """How a cross answer is weighed: by the paper's band and exponent, or by the ratio alone.

    `config` is the trainer's. Without any clip the weight is s itself: that is the own objective with its clip opened,
    so these answers are given to it as if they were own ones.
    """

    name: str
    config: AlgorithmConfig
    as_own: bool = False


def objectives(cross_baseline: str) -> tuple[Objective, ...]:
    """The band with alpha 1, 0, 3 and with baselines held below 1; no lower bound; no bound at all."""
    return (
        *(
            Objective(f"band, alpha = {alpha:g}", AlgorithmConfig(cross_baseline=cross_baseline, alpha=alpha))
            for alpha in (1.0, 0.0, 3.0)
        ),
        Objective("band, alpha = 1, guard", AlgorithmConfig(cross_baseline=cross_baseline, baseline_guard=True)),
        Objective("s <= 1 only, alpha = 1", AlgorithmConfig(cross_baseline=cross_baseline, delta=1.0)),
        Objective(
            "no clip, alpha = 0",
            AlgorithmConfig(cross_baseline=cross_baseline, eps_low=1 - 1e-9, eps_high=1e12),
            as_own=True,
        ),
    )


@dataclass(frozen=True)
class GradientRow:
    """Own and cross gradient of one learner for one source, objective and distance.

    kl, ratio          KL(source || learner) per token, nats; mean s over the source's answers
    inside             share of the source's answers, by their probability, that have a gradient
    above_one          share of prompts on which the cross answers' baseline, before any guard, is above every reward
    cosine, opposed    exact gradients of a prompt in the limit of many answers: mean cosine, share of negative products
    opposed_below      the same share among the prompts whose baseline is not above 1
    sampled_*          the same with G answers of each agent, over the prompts where neither gradient is 0
    update_*           summed over the 64 prompts of an update of G answers
    """

    source: str
    cross_baseline: str
    objective: str
    distance: float
    kl: Estimate
    ratio: Estimate
    inside: Estimate
    above_one: Estimate
    cosine: Estimate
    opposed: Estimate
    opposed_below: Estimate
    sampled_cosine: Estimate
    sampled_opposed: Estimate
    update_cosine: Estimate
    update_opposed: Estimate


@dataclass(frozen=True)
class GradientSize:
    """How much is computed: prompts with exact gradients, updates of 64 prompts with G sampled answers per agent."""

    num_exact: int
    num_updates: int
    num_rollouts: int
    distances: tuple[float, ...]


class Tables:
    """All answers, which of them are right, and policies over them. An answer is right with 3 of 5 tokens 0."""

    def __init__(self, num_tokens: int = NUM_TOKENS, vocabulary: int = VOCABULARY, needed: int = NEEDED) -> None:
        self.num_tokens, self.vocabulary = num_tokens, vocabulary
        tokens_AT = torch.tensor(list(itertools.product(range(vocabulary), repeat=num_tokens)))
        self.one_hot_AD = torch.nn.functional.one_hot(tokens_AT, vocabulary).flatten(1).double()
        self.reward_A = ((tokens_AT == 0).sum(dim=1) >= needed).double()

    def draw_logits(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Standard normal logits, float64 [P, T, V]."""
        shape = (num_prompts, self.num_tokens, self.vocabulary)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


class Policy:
    """A table policy: its token probabilities, and every answer's log-prob."""

    def __init__(self, tables: Tables, logits_PTV: Tensor) -> None:
        token_logprob_PTV = logits_PTV.log_softmax(dim=2)
        logprob_PA = token_logprob_PTV.flatten(1) @ tables.one_hot_AD.T
        self.token_prob_PD = token_logprob_PTV.exp().flatten(1)
        self.mean_logprob_PA = logprob_PA / tables.num_tokens
        self.prob_PA = logprob_PA.exp()


@dataclass(frozen=True)
class Pair:
    """A learner, a source, and the answers that both sampled."""

    tables: Tables
    learner: Policy
    source: Policy
    answers_P2G: Tensor  # indices of answers; learner's first

    @property
    def expected_rewards_P2(self) -> Tensor:
        """The chance of a right answer, by prompt and agent."""
        return torch.stack([policy.prob_PA @ self.tables.reward_A for policy in (self.learner, self.source)], dim=1)


def draw_pair(tables: Tables, num_prompts: int, num_rollouts: int, distance: float, bonus: float, seed: int) -> Pair:
    """A learner and a source `distance` standard normal logits away, that is better by `bonus` logits a token.

    The same seed draws the same learner and the same direction of parting, so distances can be compared.
    """
    generator = torch.Generator().manual_seed(seed)
    right_V = torch.zeros(tables.vocabulary, dtype=torch.float64)
    right_V[0] = 1.0
    learner_PTV = tables.draw_logits(num_prompts, generator) + right_V
    source_PTV = learner_PTV + distance * tables.draw_logits(num_prompts, generator) + bonus * right_V
    learner, source = Policy(tables, learner_PTV), Policy(tables, source_PTV)
    drawn = [
        torch.multinomial(policy.prob_PA, num_rollouts, replacement=True, generator=generator)
        for policy in (learner, source)
    ]
    return Pair(tables, learner, source, torch.stack(drawn, dim=1))


def expected_gradients(pair: Pair, objective: Objective) -> tuple[Tensor, Tensor]:
    """Ascent directions (own_PD, cross_PD), summed over all answers, in the limit of many answers per agent.

    There the baseline is the one of the expected rewards, to which it is linear, and sigma that of the mixture.
    """
    config, expected_P2 = objective.config, pair.expected_rewards_P2
    omega_22, baseline_P2 = _expected_baselines(pair, config)
    mixed_P1 = expected_P2.mean(dim=1, keepdim=True)
    scale_P1 = (mixed_P1 * (1 - mixed_P1)).sqrt() + config.advantage_eps
    own_PA = (pair.tables.reward_A - baseline_P2[:, :1]) / scale_P1
    cross_PA = omega_22[1, 0] * (pair.tables.reward_A - _cross_baseline(baseline_P2, config)[:, None]) / scale_P1
    every_PA = torch.arange(len(pair.tables.reward_A)).expand_as(own_PA)
    own = _gradient(pair, every_PA, pair.learner, own_PA, objective, weight_PG=pair.learner.prob_PA)
    return own, _gradient(pair, every_PA, pair.source, cross_PA, objective, weight_PG=pair.source.prob_PA)


def _expected_baselines(pair: Pair, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(omega, every agent's baseline on every prompt) of the expected rewards."""
    expected_P2 = pair.expected_rewards_P2
    omega_22 = capability_ratios(expected_P2.mean(dim=0), config.omega_clip)
    return omega_22, joint_baselines(expected_P2[:, :, None], omega_22, config.baseline_guard)


def _cross_baseline(baseline_P2: Tensor, config: AlgorithmConfig) -> Tensor:
    return baseline_P2[:, 1 if config.cross_baseline == "source" else 0]


def sampled_gradients(pair: Pair, objective: Objective) -> tuple[Tensor, Tensor]:
    """Ascent directions (own_PD, cross_PD) of the G answers that each agent sampled on every prompt."""
    rewards_P2G = pair.tables.reward_A[pair.answers_P2G]
    capability_2 = pair.expected_rewards_P2.mean(dim=0)
    advantages_P2G = hacpo_advantages(rewards_P2G, capability_2, 0, objective.config)
    weight_PG = torch.full_like(rewards_P2G[:, 0], 1 / rewards_P2G.shape[2])
    own, cross = (
        _gradient(pair, pair.answers_P2G[:, n], policy, advantages_P2G[:, n], objective, weight_PG)
        for n, policy in enumerate((pair.learner, pair.source))
    )
    return own, cross


def _gradient(
    pair: Pair, answers_PG: Tensor, author: Policy, advantage_PG: Tensor, objective: Objective, weight_PG: Tensor
) -> Tensor:
    """- d sum_g weight_g loss_g / d theta of the learner, [P, D]: sequence_objective's slope times d mean log-prob."""
    _, slope_B, _ = sequence_objective(
        pair.learner.mean_logprob_PA.gather(1, answers_PG).flatten(),
        author.mean_logprob_PA.gather(1, answers_PG).flatten(),
        advantage_PG.flatten(),
        torch.full((answers_PG.numel(),), author is pair.learner or objective.as_own),
        update_index=0,
        config=objective.config,
    )
    pull_PG = -slope_B.reshape(answers_PG.shape) * weight_PG / pair.tables.num_tokens
    pull_PA = torch.zeros_like(author.prob_PA).scatter_add(1, answers_PG, pull_PG)
    return pull_PA @ pair.tables.one_hot_AD - pull_PG.sum(dim=1, keepdim=True) * pair.learner.token_prob_PD


def agreement(own_PD: Tensor, cross_PD: Tensor) -> tuple[Estimate, Estimate]:
    """(mean cosine, share of negative inner products) over the rows where neither gradient is 0."""
    product_P = (own_PD * cross_PD).sum(dim=1)
    lengths_P = own_PD.norm(dim=1) * cross_PD.norm(dim=1)
    speaks_P = lengths_P > 0
    return Estimate.of(product_P[speaks_P] / lengths_P[speaks_P]), Estimate.share(product_P[speaks_P] < 0)


def measure_gradients(size: GradientSize, generator: torch.Generator) -> Iterator[GradientRow]:
    """Every source, distance, baseline and objective."""
    tables = Tables()
    for source, bonus in SOURCES.items():
        seeds = torch.randint(2**31, (2,), generator=generator).tolist()
        for distance in size.distances if source != "itself" else (0.0,):
            exact, sampled = (
                draw_pair(tables, num_prompts, size.num_rollouts, distance, bonus, seed)
                for num_prompts, seed in zip((size.num_exact, size.num_updates * PROMPTS_PER_UPDATE), seeds)
            )
            # To the learner's own answers, drawn again, all objectives and both baselines are the same.
            every = objectives("source")[:1] if source == "itself" else objectives("source") + objectives("learner")
            for objective in every:
                yield _row(exact, sampled, objective, source, distance)


def _row(exact: Pair, sampled: Pair, objective: Objective, source: str, distance: float) -> GradientRow:
    source_PA = exact.source.prob_PA
    log_ratio_PA = exact.learner.mean_logprob_PA - exact.source.mean_logprob_PA
    low = 1 - objective.config.delta
    inside_PA = (log_ratio_PA.exp() >= low) & (log_ratio_PA <= 0) | objective.as_own
    _, baseline_P2 = _expected_baselines(exact, objective.config.model_copy(update={"baseline_guard": False}))
    above_P = _cross_baseline(baseline_P2, objective.config) > 1
    own_PD, cross_PD = expected_gradients(exact, objective)
    cosine, opposed = agreement(own_PD, cross_PD)
    _, opposed_below = agreement(own_PD[~above_P], cross_PD[~above_P])
    own_PD, cross_PD = sampled_gradients(sampled, objective)
    sampled_cosine, sampled_opposed = agreement(own_PD, cross_PD)
    update_cosine, update_opposed = agreement(
        *(gradient_PD.reshape(-1, PROMPTS_PER_UPDATE * gradient_PD.shape[1]) for gradient_PD in (own_PD, cross_PD))
    )
    return GradientRow(
        source=source,
        cross_baseline=objective.config.cross_baseline,
        objective=objective.name,
        distance=distance,
        kl=Estimate.of((source_PA * -log_ratio_PA).sum(dim=1)),
        ratio=Estimate.of((source_PA * log_ratio_PA.exp()).sum(dim=1)),
        inside=Estimate.of((source_PA * inside_PA).sum(dim=1)),
        above_one=Estimate.share(above_P),
        cosine=cosine,
        opposed=opposed,
        opposed_below=opposed_below,
        sampled_cosine=sampled_cosine,
        sampled_opposed=sampled_opposed,
        update_cosine=update_cosine,
        update_opposed=update_opposed,
    )
