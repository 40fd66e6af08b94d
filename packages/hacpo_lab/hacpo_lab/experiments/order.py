"""The order of a grid's runs, and the learning rate that a method's tuning runs chose. Pure functions.

`scores` has, for every finished cell, the accuracy at the end of its run, mean over all agents.
A regime's tuning runs come first, method by method; then its reported seeds, every method on the first before any on
the second, so that a queue that is cut short leaves whole pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Self

from hacpo_lab.experiments.comparison import SAME
from hacpo_lab.experiments.grid import Cell, Grid, next_rate

Scores = Mapping[Cell, float]
NO_SCORES: Scores = MappingProxyType({})


@dataclass(frozen=True)
class Part:
    """The share of one of several machines: number `index` (from 0) of `total`."""

    index: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "1/2", the first of two. ValueError for anything else."""
        index, slash, total = text.partition("/")
        if not (slash and index.isdecimal() and total.isdecimal() and 1 <= int(index) <= int(total)):
            raise ValueError(
                f"--part {text!r}: expected NUMBER/TOTAL, for example 1/2 on one machine and 2/2 on another"
            )
        return cls(int(index) - 1, int(total))

    def has(self, grid: Grid, cell: Cell) -> bool:
        """Tells whether a cell is this machine's: cells that are compared with each other are never divided.

        Tuning runs go by method, so that all rates of a method are tried on one machine; reported runs by seed.
        """
        if cell.stage == "tuning":
            return list(grid.methods).index(cell.method) % self.total == self.index
        return self.has_seed(grid, cell.seed)

    def has_seed(self, grid: Grid, seed: int) -> bool:
        """Tells whether the reported runs of a seed are this machine's."""
        return list(grid.seeds).index(seed) % self.total == self.index


EVERYTHING = Part(0, 1)


@dataclass(frozen=True)
class Tuned:
    """The rate of a method in a regime: that with the best mean over the tuning seeds, the smallest of equal ones.

    `mean_scores` has every rate that was tried, in order of size; empty when the grid has a single rate. The rate is at
    an `edge` of them where the grid's `further_rates` were not enough.
    """

    learning_rate: float
    mean_scores: Mapping[float, float]

    @property
    def edge(self) -> str | None:
        """ "lowest" or "highest" if the rate is that of the tried ones: a better one may lie beyond. Else None."""
        if len(self.mean_scores) < 2:
            return None
        rates = list(self.mean_scores)
        return {rates[0]: "lowest", rates[-1]: "highest"}.get(self.learning_rate)


def tuning_cells(grid: Grid, regime: str, method: str, scores: Scores = NO_SCORES) -> list[Cell]:
    """The runs that choose a method's rate, every rate on every tuning seed, as far as the rates are known by now.

    Empty for a method that takes another's rate.
    """
    if grid.methods[method].learning_rate_of is not None or len(grid.learning_rates) == 1:
        return []
    rates = tried_rates(grid, regime, method, scores)
    return [Cell(regime, method, rate, seed, "tuning") for rate in rates for seed in grid.tuning_seeds]


def tried_rates(grid: Grid, regime: str, method: str, scores: Scores) -> list[float]:
    """The rates that a method is tried with, in order of size: the grid's, and others while the best is at an end."""
    rates = sorted(grid.learning_rates)
    for _ in range(grid.further_rates):
        means = _mean_scores(grid, regime, method, rates, scores)
        if means is None:
            break
        best = _best(means)
        end, inner = (rates[0], rates[1]) if best == rates[0] else (rates[-1], rates[-2])
        if best != end or (further := next_rate(end, inner)) > 1.0:
            break
        rates = sorted([*rates, further])
    return rates


def _mean_scores(
    grid: Grid, regime: str, method: str, rates: Sequence[float], scores: Scores
) -> dict[float, float] | None:
    """Score of every rate, mean over the tuning seeds; None while a run is missing."""
    cells = {rate: [Cell(regime, method, rate, seed, "tuning") for seed in grid.tuning_seeds] for rate in rates}
    if not all(cell in scores for of_rate in cells.values() for cell in of_rate):
        return None
    return {rate: fmean(scores[cell] for cell in of_rate) for rate, of_rate in cells.items()}


def _best(means: Mapping[float, float]) -> float:
    most = max(means.values())
    return min(rate for rate, mean in means.items() if mean >= most - SAME)


def tuned(grid: Grid, regime: str, method: str, scores: Scores) -> Tuned | None:
    """The tuned rate of a method; None while a run that chooses it is missing."""
    if len(grid.learning_rates) == 1:
        return Tuned(grid.learning_rates[0], {})
    method = grid.tuned_as(method)
    means = _mean_scores(grid, regime, method, tried_rates(grid, regime, method, scores), scores)
    return None if means is None else Tuned(_best(means), means)


def reported_cells(grid: Grid, regime: str, scores: Scores) -> list[Cell]:
    """The reported runs of the methods whose rate is known, seed by seed."""
    rates = {method: tuned(grid, regime, method, scores) for method in grid.methods_of(regime)}
    return [
        Cell(regime, method, rate.learning_rate, seed, "reported")
        for seed in grid.seeds
        for method, rate in rates.items()
        if rate is not None and seed in grid.seeds_of(method)
    ]


def known_cells(grid: Grid, scores: Scores) -> Iterator[Cell]:
    """All runs of a grid that are known by now, in order; later ones depend on scores of these."""
    for regime in grid.regimes:
        for method in grid.methods_of(regime):
            yield from tuning_cells(grid, regime, method, scores)
        yield from reported_cells(grid, regime, scores)


def pending_cells(grid: Grid, scores: Scores, part: Part = EVERYTHING) -> list[Cell]:
    """The cells that this machine can run next, in order."""
    return [cell for cell in known_cells(grid, scores) if cell not in scores and part.has(grid, cell)]


def num_cells(grid: Grid, scores: Scores = NO_SCORES) -> int:
    """Number of runs of the whole grid, as far as the rates to try are known by now."""
    return sum(
        len(tuning_cells(grid, regime, method, scores)) + len(grid.seeds_of(method))
        for regime in grid.regimes
        for method in grid.methods_of(regime)
    )


def num_done(grid: Grid, scores: Scores) -> int:
    """Number of finished runs of the grid; a reported run at a rate other than the tuned one does not count."""
    return sum(cell in scores for cell in known_cells(grid, scores))
