"""Capability of every agent and the ratio omega between two of them: HACPO, eq. 9 and the text below it.

P_hat_k = mean over the last K steps of agent k's mean reward in that step;  omega(k, j) = P_hat_k / P_hat_j.

The authors' code uses the success rate instead of the mean reward; with rewards of 0 and 1 they are equal.

Elsewhere: the rewards and their sum over lanes (trainer), the use of omega (advantage.py).
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hacpo_mega.config import AlgorithmConfig


def reward_tally(rewards_PNG: Tensor, successes_PNG: Tensor) -> Tensor:
    """Per agent (sum of rewards, number of successes, number judged) over judged answers, float64 [N, 3].

    rewards_PNG is float64 [P, N, G], NaN where unjudged; successes_PNG is bool: answers that the judge calls correct.
    Tallies of lanes add up to that of the step.
    """
    judged_PNG = ~rewards_PNG.isnan()
    sums_N = rewards_PNG.nan_to_num().sum(dim=(0, 2))
    successes_N = successes_PNG.sum(dim=(0, 2))
    return torch.stack([sums_N, successes_N.double(), judged_PNG.sum(dim=(0, 2)).double()], dim=1)


def skill_tally(rewards_PNG: Tensor, successes_PNG: Tensor, skill_P: Tensor, num_skills: int) -> Tensor:
    """`reward_tally` of the prompts of each skill, float64 [S, N, 3]; `skill_P` is the number of each prompt's."""
    masks = [skill_P == skill for skill in range(num_skills)]
    return torch.stack([reward_tally(rewards_PNG[mask_P], successes_PNG[mask_P]) for mask_P in masks])


class CapabilityTracker:
    """Smoothed capability P_hat of `num_agents` agents over a window of `config.capability_window` steps.

    With `skills`, names in alphabetical order, also that of each agent on the prompts of each skill.
    """

    def __init__(self, num_agents: int, config: AlgorithmConfig, skills: Sequence[str] = ()) -> None:
        self._num_agents = num_agents
        self._config = config
        self.skills = tuple(skills)
        self._by_skill: deque[Tensor] = deque(maxlen=config.capability_window + 1)  # tallies [S, N, 3]
        # One entry more than the window: with capability_includes_current off, the newest one is skipped.
        self._history: deque[Tensor] = deque(maxlen=config.capability_window + 1)

    def update(self, mean_reward_N: Tensor, success_rate_N: Tensor) -> None:
        """Adds one step. float64 [N] each; NaN where an agent had no judged answer in this step.

        Raises ValueError for a wrong shape.
        """
        metric_N = mean_reward_N if self._config.capability_metric == "mean_reward" else success_rate_N
        if tuple(metric_N.shape) != (self._num_agents,):
            raise ValueError(
                f"capability needs one number for each of {self._num_agents} agents, found {tuple(metric_N.shape)}"
            )
        metric_N = metric_N.detach().to("cpu", torch.float64)
        if self._config.capability_floor_per_step:
            metric_N = metric_N.clamp(min=self._config.capability_floor)
        self._history.append(metric_N)

    def add(self, tally_N3: Tensor) -> None:
        """Adds one step by its `reward_tally` [N, 3], summed over all lanes."""
        reward_N, successes_N, judged_N = tally_N3.unbind(dim=1)
        self.update(reward_N / judged_N, successes_N / judged_N)

    def add_skills(self, tally_SN3: Tensor) -> None:
        """Adds one step by its `skill_tally` [S, N, 3], summed over all lanes."""
        self._by_skill.append(tally_SN3)

    def skill_values(self) -> tuple[Tensor, Tensor]:
        """Capability by skill and the number of judged answers that it is the mean of, float64 [N, S] each.

        The mean over all answers of the window; NaN without any.
        """
        steps, shape = self._windowed(self._by_skill), (len(self.skills), self._num_agents, 3)
        reward_SN, successes_SN, judged_SN = sum(steps, torch.zeros(shape, dtype=torch.float64)).unbind(dim=2)
        earned_SN = reward_SN if self._config.capability_metric == "mean_reward" else successes_SN
        return (earned_SN / judged_SN).T, judged_SN.T

    def values(self) -> Tensor:
        """P_hat, float64 [N], at least `capability_floor`.

        Before any step it is all ones (every omega is 1). An agent without a judged answer in the window gets the mean
        of the others, which is neutral.
        """
        steps = self._windowed(self._history)
        if not steps:
            return torch.ones(self._num_agents, dtype=torch.float64)
        # The mean of the steps' means (eq. 9), not of all answers: a step with many unjudged answers weighs as others.
        capability_N = torch.stack(steps).nanmean(dim=0)
        unknown_N = capability_N.isnan()
        if unknown_N.all():
            return torch.ones(self._num_agents, dtype=torch.float64)
        capability_N = torch.where(unknown_N, capability_N.nanmean(), capability_N)
        return capability_N.clamp(min=self._config.capability_floor)

    def _windowed(self, history: Iterable[Tensor]) -> list[Tensor]:
        steps = list(history)
        return steps[-self._config.capability_window :] if self._config.capability_includes_current else steps[:-1]

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Window as plain numbers, oldest step first; exact, since a float64 survives JSON."""
        by_skill = {
            f"skill/{name}": [step[s].flatten().tolist() for step in self._by_skill]
            for s, name in enumerate(self.skills)
        }
        return {"history": [step.tolist() for step in self._history]} | by_skill

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Restores `state_dict()`. Raises ValueError if it has another number of agents.

        A skill that the state lacks begins with an empty window.
        """
        for step in state["history"]:
            if len(step) != self._num_agents:
                raise ValueError(f"capability state holds {len(step)} agents, this run has {self._num_agents}")
        self._history.clear()
        self._history.extend(torch.tensor(step, dtype=torch.float64) for step in state["history"])
        windows = [state.get(f"skill/{name}", []) for name in self.skills]
        num_steps, zeros = max(map(len, windows), default=0), [0.0] * self._num_agents * 3
        self._by_skill.clear()
        for step in range(num_steps):
            rows = [window[step] if window else zeros for window in windows]
            self._by_skill.append(torch.tensor(rows, dtype=torch.float64).reshape(len(rows), self._num_agents, 3))


def capability_ratios(capability_N: Tensor, omega_clip: tuple[float, float] | None) -> Tensor:
    """omega_NN[k, j] = P_hat_k / P_hat_j, clipped to `omega_clip` when given. float64 [N, N]."""
    omega_NN = capability_N.double()[:, None] / capability_N.double()[None, :]
    return omega_NN if omega_clip is None else omega_NN.clamp(*omega_clip)
