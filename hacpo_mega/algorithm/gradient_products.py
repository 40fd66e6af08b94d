"""Gradients of groups of samples, as norms and angles: does a source pull where own answers do? (Theorem 4.3)"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientProducts:
    """Norms and angles of the gradients g_0, g_1, ... of groups of an update's samples, over the whole model.

    squares     <g_i, g_i> of every group
    products    <g_0, g_i> of every group, the first with itself included
    """

    squares: tuple[float, ...]
    products: tuple[float, ...]

    @property
    def norms(self) -> tuple[float, ...]:
        """|g_i|, before clipping."""
        return tuple(map(math.sqrt, self.squares))

    def cosine(self, group: int) -> float | None:
        """Cosine of the angle between g_0 and g_i; None if one of them is 0, NaN if one is not finite."""
        first, other = self.norms[0], self.norms[group]
        return None if 0.0 in (first, other) else self.products[group] / first / other
