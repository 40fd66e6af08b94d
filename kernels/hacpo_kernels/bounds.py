"""Parameters of the objective, as one record from the configuration to the kernel."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

CrossObjective = Literal["band", "own", "truncated", "likelihood"]


@dataclass(frozen=True)
class Bounds:
    """Bounds of the ratio s in the loss (HACPO, arXiv 2603.02604), and the objective of others' answers.

    eps_low, eps_high   own answers: s is clipped to [1 - eps_low, 1 + eps_high] (eq. 47)
    log_ratio_clamp     |log s| is clamped to this many nats before exp, against overflow; no gradient of s beyond it
    cross               the objective of others' answers:
        band            HACPO's (eq. 50): c^alpha A with s clipped to [low(m), high], no gradient outside
        own             that of own answers
        truncated       F-TIS (arXiv 2605.22537): min(s, ratio_cap) A; none where A < 0 and log s < -divergence_limit
        likelihood      A times the mean log-prob, without a ratio, as SGT does (arXiv 2605.07244)
    delta, delta_step   band: its lower end low(m) at the m-th update of a step
    high                band: its upper end; 1 in the paper, infinite without a clip
    alpha               band: exponent of the importance weight
    ratio_cap           truncated: upper end of the weight
    divergence_limit    truncated: nats per token by which an answer of negative advantage may be less likely under the
                        learner than under its source

    There are no defaults: they could contradict the configuration.
    Raises ValueError for a number that is below 0 or NaN, and for an unknown objective.
    """

    eps_low: float
    eps_high: float
    log_ratio_clamp: float
    cross: CrossObjective
    delta: float
    delta_step: float
    high: float
    alpha: float
    ratio_cap: float
    divergence_limit: float

    def __post_init__(self) -> None:
        if self.cross not in get_args(CrossObjective):
            raise ValueError(f"cross is {self.cross!r}; expected one of {', '.join(get_args(CrossObjective))}")
        for name, value in dataclasses.asdict(self).items():
            if name != "cross" and not value >= 0:  # written so that NaN fails too
                raise ValueError(f"{name} is {value}; expected a number of 0 or more")

    @property
    def own_low(self) -> float:
        """Lower end of the clip on own answers."""
        return 1.0 - self.eps_low

    @property
    def own_high(self) -> float:
        """Upper end of the clip on own answers."""
        return 1.0 + self.eps_high

    def low(self, update_index: int) -> float:
        """low(m) = min(1, 1 - delta + m delta_step): lower end of the band of others' answers.

        It tightens with every update m = 0, 1, ... of a step.
        """
        return min(1.0, 1.0 - self.delta + update_index * self.delta_step)
