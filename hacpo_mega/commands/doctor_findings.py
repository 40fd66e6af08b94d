"""Findings of `hacpo-mega doctor` from differences between log-probs, the worst of all ranks, and their table.

Not here: where the log-probs come from (doctor.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Difference of a token's log-prob, nats, and the share of tokens that must be within it. bf16 keeps 8 bits of a weight
# and of a logit: of thousands of tokens a rare one is off by much in a healthy model, and is no finding.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.5}
SHARE_WITHIN = {torch.float32: 1.0, torch.bfloat16: 0.99}


@dataclass(frozen=True)
class Finding:
    """One comparison of log-probs of the same tokens, on one rank.

    `within`, the difference (nats) that SHARE_WITHIN of the tokens stay below, must not be beyond `bound`; with
    `must_differ` the largest one must be.
    """

    agent: str
    what: str
    dtype: str
    num_tokens: int
    largest: float
    within: float
    mean: float
    bound: float
    must_differ: bool = False

    @property
    def is_good(self) -> bool:
        """False for a NaN, too."""
        return self.largest > self.bound if self.must_differ else self.within <= self.bound


def finding_of(
    agent: str, what: str, dtype: torch.dtype, difference_T: np.ndarray, bound: float, must_differ: bool = False
) -> Finding:
    """The finding of the differences (nats, absolute) of T tokens' log-probs in an actor of `dtype`."""
    return Finding(
        agent,
        what,
        str(dtype).removeprefix("torch."),
        len(difference_T),
        float(difference_T.max()),
        float(np.quantile(difference_T, SHARE_WITHIN[dtype])),
        float(difference_T.mean()),
        bound,
        must_differ,
    )


def worst_of(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per agent and comparison: the worst rank's."""
    worst: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        known = worst.get((finding.agent, finding.what))
        if known is None or _badness(finding) > _badness(known):
            worst[finding.agent, finding.what] = finding
    return list(worst.values())


def _badness(finding: Finding) -> float:
    if np.isnan(finding.largest):
        return np.inf
    return -finding.largest if finding.must_differ else finding.within


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, a line each."""
    columns = f"{'tokens':>7} {'largest':>9} {'within':>9} {'mean':>9}  bound"
    head = f"{'agent':16} {'log-probs (nats)':32} {'dtype':9} {columns}"
    return "\n".join([head, *map(_line, findings)])


def _line(found: Finding) -> str:
    numbers = f"{found.num_tokens:7d} {found.largest:9.2e} {found.within:9.2e} {found.mean:9.2e}"
    verdict = f"{'>' if found.must_differ else '<='} {found.bound:g}  {'ok' if found.is_good else 'BAD'}"
    return f"{found.agent:16} {found.what:32} {found.dtype:9} {numbers}  {verdict}"
