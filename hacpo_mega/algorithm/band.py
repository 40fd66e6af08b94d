"""Calibrated band (beyond the paper, `band = "calibrated"`): lower end of the band of others' answers, per source.

The paper fixes 1 - delta for every pair and run. But the factor by which a source finds its own answers likelier than a
learner does depends on both models and on the length of answers. Here the lower end follows the observed ratios:

    low_j  <-  smoothing low_j + (1 - smoothing) q_j,
    q_j = the (1 - band_share) quantile of the ratios s <= 1 of source j's useful answers in the step

An answer is useful if its advantage is positive. The stepwise clip then raises the end as usual: low_j(m) = min(1,
low_j + m delta_step). Before any observation it is 1 - delta, and a step without useful answers leaves it unchanged. It
never depends on the answers that it is applied to.

Not here: the objective inside the band (objective.py).
"""

from torch import Tensor

from hacpo_mega.config import AlgorithmConfig


class BandTracker:
    """Lower end of the band for each of `num_agents` sources of one learner. Equal on all ranks of the learner."""

    def __init__(self, num_agents: int, config: AlgorithmConfig) -> None:
        self._share, self._smoothing = config.band_share, config.band_smoothing
        self._low_N = [1.0 - config.delta] * num_agents

    def update(self, source: int, ratio_B: Tensor) -> None:
        """Adds a step: the ratios [B] of the useful answers of `source`, over the whole agent, in any order.

        ValueError for a ratio that is not a finite number.
        """
        if not ratio_B.isfinite().all():
            raise ValueError(
                f"ratios of source {source} must be finite, found {ratio_B[~ratio_B.isfinite()][:3].tolist()}"
            )
        inside = ratio_B[ratio_B <= 1.0].double().sort().values
        if len(inside):
            # an observed ratio, whatever the number of answers: at least the share lies at or above it
            asked = inside[int((1.0 - self._share) * (len(inside) - 1))].item()
            self._low_N[source] = self._smoothing * self._low_N[source] + (1.0 - self._smoothing) * asked

    def values(self) -> list[float]:
        """low_j of every source, [N]; the learner's own entry is never read."""
        return list(self._low_N)

    def state_dict(self) -> dict[str, list[float]]:
        """Lower ends as plain numbers; exact, since a float64 survives JSON."""
        return {"low": list(self._low_N)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restores `state_dict()`. Raises ValueError if it has another number of agents."""
        if len(state["low"]) != len(self._low_N):
            raise ValueError(f"band state holds {len(state['low'])} agents, this run has {len(self._low_N)}")
        self._low_N = list(state["low"])
