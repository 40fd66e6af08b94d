"""The six numbers that bound the objective, as one record from the configuration to the kernel."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """How far a ratio s may carry the loss (HACPO, arXiv 2603.02604).

    eps_low, eps_high   own answers: s is clipped to [1 - eps_low, 1 + eps_high] (eq. 47)
    delta, delta_step   others' answers: s is clipped to [low(m), 1] at the m-th update of a step (eq. 50)
    alpha               exponent of the importance weight of others' answers (eq. 50)
    log_ratio_clamp     |log s| is held to this many nats before exp, against overflow; beyond it nothing is learned

    There are no defaults: a kernel that chose one would contradict a configuration sooner or later.
    Raises ValueError for a number that is below 0 or NaN.
    """

    eps_low: float
    eps_high: float
    delta: float
    delta_step: float
    alpha: float
    log_ratio_clamp: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value >= 0:  # written so that NaN fails too
                raise ValueError(f"{name} is {value}; expected a number of 0 or more")

    @property
    def own_low(self) -> float:
        """The lower end of the clip on own answers."""
        return 1.0 - self.eps_low

    @property
    def own_high(self) -> float:
        """The upper end of the clip on own answers."""
        return 1.0 + self.eps_high

    def low(self, update_index: int) -> float:
        """low(m) = min(1, 1 - delta + m delta_step): the lower end of the band of others' answers, which tightens with
        every update m = 0, 1, ... of a step. Its upper end is 1."""
        return min(1.0, 1.0 - self.delta + update_index * self.delta_step)
