"""The fate of others' answers on their way to a learner, read from a step's metrics: does any of them teach it?

Every answer of a source is counted once: it gives the learner a gradient, lies outside the band, or was left out for
one reason of samples/learner_view.py. Elsewhere: the warning (alarms.py).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

# Reasons, as people read them. The first three say nothing about sharing: such an answer teaches nobody, its own agent
# neither.
WORDS = {
    "zero_advantage": "advantage 0",
    "unjudged": "unjudged",
    "no_token": "without a trained token",
    "outside_band": "outside the band",
    "too_long": "too long",
    "undecodable": "undecodable",
    "unencodable": "unencodable",
    "changed": "changed by re-encoding",
    "control_tokens": "with control tokens",
    "no_thinking": "without the thinking that the prompt opens",
    "not_finite": "without a finite log-prob",
}
# Below this share of so many usable answers or more, a source teaches its learner next to nothing.
MIN_SHARE, MIN_USABLE = 0.05, 8
TEACH_NOBODY = ("zero_advantage", "unjudged", "no_token")


@dataclass(frozen=True)
class Fates:
    """Outcome counts of a source's answers: `reached` gave a gradient, `lost` says why the others did not."""

    reached: int
    lost: Mapping[str, int]

    @property
    def answers(self) -> int:
        """All that the source gave."""
        return self.reached + sum(self.lost.values())

    @property
    def usable(self) -> int:
        """Answers that would teach: judged, with an advantage other than 0."""
        return self.answers - sum(self.lost.get(reason, 0) for reason in TEACH_NOBODY)

    @property
    def share(self) -> float | None:
        """The share of the usable answers that gave a gradient; None where there is none."""
        return self.reached / self.usable if self.usable else None

    @property
    def is_lost(self) -> bool:
        """True if next to none reached it, and there are enough to say so."""
        return self.usable >= MIN_USABLE and self.reached < MIN_SHARE * self.usable

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Reasons why usable answers were lost, the most frequent first."""
        return sorted(
            ((reason, n) for reason, n in self.lost.items() if n and reason not in TEACH_NOBODY),
            key=lambda pair: (-pair[1], pair[0]),
        )

    def __str__(self) -> str:
        parts = [f"{number:,} {WORDS.get(reason, reason.replace('_', ' '))}" for reason, number in self.reasons]
        if idle := self.answers - self.usable:
            parts.append(f"{idle:,} with advantage 0, unjudged or empty, which is no loss")
        return ", ".join(parts)

    @classmethod
    def total(cls, parts: Iterable["Fates"]) -> Self:
        """Adds up several steps or sources."""
        parts = list(parts)
        reasons = dict.fromkeys(reason for fates in parts for reason in fates.lost)
        return cls(
            sum(fates.reached for fates in parts),
            {reason: sum(fates.lost.get(reason, 0) for fates in parts) for reason in reasons},
        )


def fates_of(values: Mapping[str, float], learner: str, source: str) -> Fates | None:
    """The fates of a step's answers of `source` for `learner`; None if none was offered, or nobody counted."""
    pair = f"agent/{learner}/from/{source}"
    view = f"{pair}/view/num_"
    if not {f"{view}answers", f"{view}trained"} <= values.keys():
        return None
    trained = values[f"{view}trained"]
    inside = trained * values.get(f"{pair}/inside", 0.0)
    reached = round(inside) if math.isfinite(inside) else 0
    lost = {
        name.removeprefix(view): round(number)
        for name, number in values.items()
        if name.startswith(view) and name not in (f"{view}answers", f"{view}trained")
    }
    return Fates(reached, lost | {"outside_band": round(trained) - reached})


def fates_of_learner(values: Mapping[str, float], learner: str, names: Iterable[str]) -> Fates | None:
    """The fates of a step's answers of all sources together, as `fates_of`."""
    of_sources = [fates for source in names if source != learner and (fates := fates_of(values, learner, source))]
    return Fates.total(of_sources) if of_sources else None
