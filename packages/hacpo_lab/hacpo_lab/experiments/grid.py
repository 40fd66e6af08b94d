"""The file of an experiment: a grid of regimes x methods x seeds x learning rates, checked before anything starts.

A regime is a configuration that all methods share; a method is a list of overrides. Imports no torch.
Elsewhere: which run comes when (order.py).
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from hacpo_mega.config import Config, load_config
from hacpo_mega.config.load import readable_problems
from hacpo_mega.config.tables.section import FilePath, Flag, Section
from hacpo_mega.models.files.documents import toml_file

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Rate = Annotated[float, Field(strict=True, gt=0.0, le=1.0)]
Stage = Literal["tuning", "reported"]
NAME_MAX, PID_DIGITS = 255, 7

# Overrides that the grid itself gives to every run.
OWN_KEYS = re.compile(r"(run_dir|seed|agents\.[^.]+\.optimizer\.lr)=")
OWN_MODEL = re.compile(r"agents\.[^.]+\.model=")


class Regime(Section):
    """A setting in which all methods are compared: same models, same data, same held-out prompts."""

    config: FilePath
    """TOML file of a run, relative to the current folder."""
    set: tuple[str, ...] = ()
    """Overrides key=value of that file, for every method."""


class Method(Section):
    """One way to train, as overrides of a regime's configuration."""

    set: tuple[str, ...] = ()
    """Overrides key=value, after those of the regime."""
    about: str = ""
    """A description in a few words, for the reader of the table."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    """The seeds of the grid that it runs on; not given: all."""
    learning_rate_of: Name | None = None
    """The method whose tuned learning rate it takes instead of being tuned itself, as an ablation does."""
    regimes: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """The regimes it runs in; not given: all."""


class Grid(Section):
    """A whole experiment. Read it with `load_grid`."""

    results: FilePath
    """Folder with one small JSON file per finished run; copy files between machines to share the work."""
    work_dir: FilePath
    """Folder of running and failed runs, of the table, the curves and the page."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    """Seeds of the runs that are reported."""
    tuning_seeds: tuple[Seed, ...] = ()
    """Seeds of the runs that choose the learning rate, none of them reported."""
    learning_rates: Annotated[tuple[Rate, ...], Field(min_length=1)]
    """Rates that every method is tried with on every tuning seed; a single one is taken without a trial."""
    further_rates: Annotated[int, Field(strict=True, ge=0, le=9)] = 0
    """Most rates that are tried, at the same ratio, beyond the end at which a method's best one lies, until it lies
    inside."""
    reference: Name | None = None
    """The method that the others are compared with, seed by seed; not given: the first."""
    warm_starts: FilePath | None = None
    """Folder of models, REGIME/seed-SEED/AGENT, made as `init` makes them where they are missing: every seed has warm
    starts of its own. Not given: the models that a regime's file names, for all seeds."""
    keep_runs: Flag = False
    """Tells whether a finished run's folder is kept (work_dir/runs) beside its small file."""
    regimes: Annotated[dict[Name, Regime], Field(min_length=1)]
    """The settings, by name."""
    methods: Annotated[dict[Name, Method], Field(min_length=1)]
    """The ways to train, by name, in the order of the table."""

    @property
    def reference_method(self) -> str:
        return self.reference or next(iter(self.methods))

    def methods_of(self, regime: str) -> list[str]:
        """The methods that run in a regime, in the order of the file."""
        return [name for name, method in self.methods.items() if method.regimes is None or regime in method.regimes]

    def seeds_of(self, method: str) -> tuple[int, ...]:
        """The reported seeds of a method, in the order of the grid."""
        own = self.methods[method].seeds
        return self.seeds if own is None else tuple(seed for seed in self.seeds if seed in own)

    def possible_rates(self) -> list[float]:
        """The rates that a run may have: those given, and those that may be tried beyond them, in order of size."""
        rates = sorted(self.learning_rates)
        for _ in range(self.further_rates if len(rates) > 1 else 0):
            rates = [next_rate(rates[0], rates[1]), *rates, next_rate(rates[-1], rates[-2])]
        return [rate for rate in rates if rate <= 1.0]

    def tuned_as(self, method: str) -> str:
        """The method whose tuning runs choose this one's learning rate: itself, unless it says another."""
        return self.methods[method].learning_rate_of or method


def next_rate(end: float, inner: float) -> float:
    """The rate beyond the end of a bracket at the ratio of its last two, to two digits."""
    return float(f"{end * end / inner:.2g}")


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    regime: str
    method: str
    learning_rate: float
    seed: int
    stage: Stage

    @property
    def name(self) -> str:
        """The name of the run and of its file: no two cells of a grid share one, since no seed serves both stages."""
        return f"{self.regime}.{self.method}.lr-{self.learning_rate!r}.seed-{self.seed}"


def load_grid(path: Path) -> Grid:
    """Reads an experiment. ValueError with one line per problem; looks at no other file."""
    table = toml_file(path, "the path of an experiment's TOML")
    if "agents" in table:
        use = f"hacpo-mega train {shlex.quote(str(path))}"
        raise ValueError(f"{path}: a run's configuration, no experiment's grid: use {use}")
    try:
        grid = Grid.model_validate(table)
    except ValidationError as error:
        lines = readable_problems(error, table, Grid)
        raise ValueError("\n".join(f"{path}: {line}" for line in lines)) from error
    checks = (_seed_problems, _method_problems, _reserved_overrides, _folder_problems, _name_problems)
    if problems := [problem for check in checks for problem in check(grid)]:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return grid


def overrides_of(grid: Grid, cell: Cell) -> list[str]:
    """The overrides of a cell to its regime's file, except the run folder; of two to one key the later holds."""
    given = (*grid.regimes[cell.regime].set, *grid.methods[cell.method].set)
    models = [f"agents.{agent}.model={str(folder)!r}" for agent, folder in warm_starts_of(grid, cell).items()]
    return [*given, *models, f"seed={cell.seed}", f"agents.*.optimizer.lr={cell.learning_rate!r}"]


def warm_starts_of(grid: Grid, cell: Cell) -> dict[str, Path]:
    """The folder of every agent's own model for a seed, by agent; none where all seeds begin from the same models."""
    if grid.warm_starts is None:
        return {}
    agents = toml_file(grid.regimes[cell.regime].config, "the configuration of a regime").get("agents", ())
    names = [str(agent.get("name")) for agent in agents if isinstance(agent, dict)]
    return {name: grid.warm_starts / cell.regime / f"seed-{cell.seed}" / name for name in names}


def config_of_cell(grid: Grid, cell: Cell, run_dir: Path) -> Config:
    """The checked configuration of a cell. ValueError with one line per problem."""
    # A run that fails is made again from its start, so its checkpoints would never be read.
    further = [f"run_dir={str(run_dir)!r}", "checkpoint.every_steps=0", "checkpoint.every_minutes=0.0"]
    return load_config(grid.regimes[cell.regime].config, [*overrides_of(grid, cell), *further])


def _folder_problems(grid: Grid) -> Iterator[str]:
    """The folders that an experiment writes, where a file is in the way."""
    for key, folder in (("results", grid.results), ("work_dir", grid.work_dir)):
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        if file is not None:
            yield f"{key}: {folder} cannot be a folder, since {file} is a file. Nearest: {file}.{key}"


def _seed_problems(grid: Grid) -> Iterator[str]:
    for key in ("seeds", "tuning_seeds", "learning_rates"):
        values = getattr(grid, key)
        if repeated := _repeated(values):
            yield f"{key}: {repeated} is listed more than once. Nearest: {list(dict.fromkeys(values))}"
    if both := [seed for seed in grid.tuning_seeds if seed in grid.seeds]:
        yield f"tuning_seeds: {both} are also in seeds; a seed that chose the learning rate must not be reported"
    if len(grid.learning_rates) > 1 and not grid.tuning_seeds:
        yield f"learning_rates has {len(grid.learning_rates)} values, so tuning_seeds needs at least one seed"


def _method_problems(grid: Grid) -> Iterator[str]:
    if grid.reference_method not in grid.methods:
        yield f"reference {grid.reference!r} is none of the methods: {', '.join(grid.methods)}"
    for regime in grid.regimes:
        if grid.reference_method in grid.methods and grid.reference_method not in grid.methods_of(regime):
            yield f"reference {grid.reference_method!r} does not run in regimes.{regime}: nothing to compare with there"
    for name, method in grid.methods.items():
        key = f"methods.{name}"
        if unknown := [regime for regime in method.regimes or () if regime not in grid.regimes]:
            yield f"{key}.regimes: {unknown} unknown; there are: {', '.join(grid.regimes)}"
        if strange := [seed for seed in method.seeds or () if seed not in grid.seeds]:
            yield f"{key}.seeds: {strange} are none of the grid's seeds {list(grid.seeds)}"
        if repeated := _repeated(method.seeds or ()):
            yield f"{key}.seeds: {repeated} is listed more than once. Nearest: {list(dict.fromkeys(method.seeds))}"
        yield from (f"{key}.{line}" for line in _rate_problems(grid, name, method.learning_rate_of))


def _rate_problems(grid: Grid, name: str, other: str | None) -> Iterator[str]:
    if other is None:
        return
    tuned = [known for known, method in grid.methods.items() if method.learning_rate_of is None]
    if other not in tuned:
        yield f"learning_rate_of {other!r} is no method that is tuned itself; there are: {', '.join(tuned)}"
        return
    for regime in grid.regimes:
        if name in grid.methods_of(regime) and other not in grid.methods_of(regime):
            yield f"learning_rate_of {other!r}: that method does not run in regimes.{regime}, where this one does"


def _reserved_overrides(grid: Grid) -> Iterator[str]:
    tables = [(f"regimes.{name}", regime.set) for name, regime in grid.regimes.items()]
    tables += [(f"methods.{name}", method.set) for name, method in grid.methods.items()]
    for key, overrides in tables:
        for override in overrides:
            if found := OWN_KEYS.match(override):
                yield f"{key}.set: {override!r}: {found[1]} is set by the grid (seeds, learning_rates, work_dir)"
            if grid.warm_starts is not None and OWN_MODEL.match(override):
                yield f"{key}.set: {override!r}: models are those of warm_starts; leave one of the two out"


def _name_problems(grid: Grid) -> Iterator[str]:
    """Names that make a run's folder or file longer than a file system takes."""
    rate, seed = max(map(repr, grid.possible_rates()), key=len), max((*grid.seeds, *grid.tuning_seeds))
    for regime in grid.regimes:
        for method in grid.methods_of(regime):
            name = f".{Cell(regime, method, float(rate), seed, 'reported').name}.json.{'9' * PID_DIGITS}.tmp"
            if len(name) > NAME_MAX:
                yield (
                    f"regimes.{regime} with methods.{method}: names of {len(regime)} and {len(method)} characters "
                    f"make one of {len(name)} in results, and a file system takes {NAME_MAX}. Nearest: "
                    f"{len(name) - NAME_MAX} characters less"
                )


def _repeated(values: Sequence[float]) -> str:
    return ", ".join(str(value) for value in dict.fromkeys(values) if values.count(value) > 1)
