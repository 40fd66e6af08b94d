"""The simulated world of `hacpo-mega theory`: agents, prompts and Bernoulli rewards whose expectations are known.

Agent k solves a prompt of difficulty d with probability sigmoid(ability_k - d). Difficulties are few and equally
frequent, so every expectation over prompts is a finite sum. Not here: what the algorithm makes of the rewards.
Shapes: R replications, P prompts, N agents, G answers, L levels of difficulty.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A simulated number and its standard error, both in the unit of what was measured."""

    mean: float
    error: float

    @classmethod
    def of(cls, values_R: Tensor, controls_RC: Tensor | None = None) -> Self:
        """The mean of independent values and its standard error; NaN without values.

        `controls_RC` are variables of known expectation 0: the part of the noise that they explain is subtracted. The
        coefficients are fitted on the same values, which biases the mean by O(1 / R), far below its error.
        """
        if controls_RC is not None:
            centred_RC = controls_RC - controls_RC.mean(dim=0)
            # gelsd, since a control may be 0 throughout, or another one times a number.
            fit = torch.linalg.lstsq(centred_RC, (values_R - values_R.mean())[:, None], driver="gelsd")
            values_R = values_R - (controls_RC @ fit.solution)[:, 0]
        return cls(values_R.mean().item(), values_R.std().item() / math.sqrt(max(1, len(values_R))))

    @classmethod
    def share(cls, hits: Tensor) -> Self:
        """A share of independent cases. Its error is that of the Agresti-Coull interval: not 0 when none was hit."""
        count = max(1, len(hits))
        middle = (hits.sum().item() + 2) / (count + 4)
        return cls(hits.double().mean().item(), math.sqrt(middle * (1 - middle) / (count + 4)))


@dataclass(frozen=True)
class World:
    """Agents and prompts; abilities and difficulties in logits, speeds in logits per training step."""

    names: tuple[str, ...]
    abilities: tuple[float, ...]
    speeds: tuple[float, ...]
    difficulties: tuple[float, ...]

    def success_LN(self, age: int = 0) -> Tensor:
        """Probability of a right answer `age` steps ago, by difficulty and agent. float64 [L, N]."""
        ability_N = torch.tensor(self.abilities, dtype=torch.float64)
        speed_N = torch.tensor(self.speeds, dtype=torch.float64)
        difficulty_L = torch.tensor(self.difficulties, dtype=torch.float64)
        return torch.sigmoid(ability_N - age * speed_N - difficulty_L[:, None])

    def capability_N(self) -> Tensor:
        """The expected reward of every agent now: what the oracle's omega is made of. float64 [N]."""
        return self.success_LN().mean(dim=0)


@dataclass(frozen=True)
class Size:
    """How much is simulated: independent replications of a step of P prompts with G answers of every agent."""

    num_replications: int
    num_prompts: int
    num_rollouts: int


def draw_rewards(world: World, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One step per replication: (rewards_RPNG float64, level_RP int64 of the prompts' difficulties)."""
    shape = (size.num_replications, size.num_prompts)
    level_RP = torch.randint(len(world.difficulties), shape, generator=generator)
    success_RPNG = world.success_LN()[level_RP][..., None].expand(-1, -1, -1, size.num_rollouts)
    return torch.bernoulli(success_RPNG, generator=generator), level_RP


def draw_history(
    world: World, size: Size, num_steps: int, is_improving: bool, generator: torch.Generator
) -> list[Tensor]:
    """Mean rewards [R, N] of the `num_steps` steps before the current one, oldest first.

    Drawn as counts: how many prompts of a step have each difficulty, then how many of their answers are right.
    """
    return [
        _step_means(world.success_LN(age if is_improving else 0), size, generator) for age in range(num_steps, 0, -1)
    ]


def _step_means(success_LN: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    num_levels, num_agents = success_LN.shape
    left_R1 = torch.full((size.num_replications, 1), float(size.num_prompts), dtype=torch.float64)
    right_RN = torch.zeros(size.num_replications, num_agents, dtype=torch.float64)
    for level in range(num_levels):
        # The prompts not yet given a level fall on this one with equal chances for all that remain.
        chance_R1 = torch.full_like(left_R1, 1 / (num_levels - level))
        here_R1 = torch.binomial(left_R1, chance_R1, generator=generator)
        answers_RN = (here_R1 * size.num_rollouts).expand(-1, num_agents).contiguous()
        right_RN += torch.binomial(answers_RN, success_LN[level].expand_as(answers_RN), generator=generator)
        left_R1 = left_R1 - here_R1
    return right_RN / (size.num_prompts * size.num_rollouts)
