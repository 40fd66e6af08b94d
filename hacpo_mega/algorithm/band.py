"""A band that fits (beyond the paper, `band = "calibrated"`): where the band of others' answers begins, per source.

The paper fixes 1 - delta for every pair and run, but how much likelier a source finds its own answers than a learner
does depends on both models and on the length of answers. Here the lower end follows the ratios that were seen:

    low_j  <-  smoothing low_j + (1 - smoothing) q_j,
    q_j = the (1 - band_share) quantile of the ratios s <= 1 of source j's useful answers in the step

An answer is useful where its advantage is positive: it shows the learner something. The stepwise clip then raises the
end as ever: low_j(m) = min(1, low_j + m delta_step). Before anything was seen it is 1 - delta, and a step without such
an answer leaves it as it is. It never looks at the answers that it is applied to.
Not here: the objective inside the band (objective.py).
"""

from torch import Tensor

from hacpo_mega.config import AlgorithmConfig


class BandTracker:
    """Where the band begins for each of `num_agents` sources of one learner. Equal on all ranks of the learner."""

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
        """The lower ends as plain numbers; exact, since a float64 survives JSON."""
        return {"low": list(self._low_N)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restores `state_dict()`. Raises ValueError when it is of another number of agents."""
        if len(state["low"]) != len(self._low_N):
            raise ValueError(f"band state holds {len(state['low'])} agents, this run has {len(self._low_N)}")
        self._low_N = list(state["low"])
