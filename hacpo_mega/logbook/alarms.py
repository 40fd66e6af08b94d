"""What a person is told once when a number leaves the range in which training makes sense."""

from collections.abc import Iterator, Sequence

from torch import Tensor

# The bounds of the authors' code (`omega_clip` of the preset "authors").
OMEGA_LOW, OMEGA_HIGH = 0.1, 10.0


class OmegaAlarm:
    """Says once for every ordered pair of agents that its capability ratio omega (eq. 9) has left [0.1, 10].

    An agent without a single reward has P_hat = capability_floor, so the others' omega and with it advantages grow
    without bound: as the paper defines them, and useless to learn from.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._told: set[tuple[int, int]] = set()

    def warnings(self, omega_NN: Tensor) -> Iterator[str]:
        """A line for every pair (k, j) whose omega_NN[k, j] is outside for the first time."""
        outside_NN = (omega_NN < OMEGA_LOW) | (omega_NN > OMEGA_HIGH)
        for k, j in outside_NN.nonzero().tolist():
            if (k, j) in self._told:
                continue
            self._told.add((k, j))
            yield (
                f"warning: omega({self._names[k]}, {self._names[j]}) is {omega_NN[k, j].item():.3g}, outside "
                f"[{OMEGA_LOW:g}, {OMEGA_HIGH:g}]: advantages are scaled by it. Set algorithm.omega_clip = "
                f"[{OMEGA_LOW:g}, {OMEGA_HIGH:g}], or start from agents that both solve some of the prompts"
            )


class JudgeAlarm:
    """Says what a grader failed at when it fails for the first time, and again only for another error.

    A grader that always fails would otherwise train nothing, in silence: its answers enter no mean.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warnings(self, num_unjudged: int, num_answers: int, first_error: str | None) -> Iterator[str]:
        """A line when `first_error` is a new one; the numbers are those of the same answers."""
        if first_error is None or first_error in self._told:
            return
        self._told.add(first_error)
        yield f"warning: {num_unjudged} of {num_answers} answers unjudged; the grader's first error: {first_error}"
