"""Checks of which results may be in one table: same code, same configuration, same models and prompts.

Differences are taken seed by seed, so the runs of one seed need the same warm starts. Another seed may have others, as
another machine makes them; the tables name them. A begun seed is not finished with other warm starts.
Every complaint is one line that names the file, what was found, what was expected, and what to do.
"""

import os
from collections.abc import Iterator, Mapping, Sequence

from hacpo_lab.experiments.grid import Cell, Grid, config_of_cell, warm_starts_of
from hacpo_lab.experiments.identity import Identity, folder_digest, identity_of
from hacpo_lab.experiments.order import EVERYTHING, Part, pending_cells
from hacpo_lab.experiments.result import Result, read_packed, read_result
from hacpo_mega.config import Config
from hacpo_mega.config.checks.input_checks import missing_models
from hacpo_mega.models.files.links import require_inside

Setting = tuple[str, str]  # (regime, method)


def read_results(grid: Grid) -> tuple[dict[Cell, Result], list[str]]:
    """The grid's results by cell, packed or each in its file, and the names of files that belong to no run of it.

    ValueError for a broken file or line.
    """
    require_inside(grid.results, grid.results)
    results, others, complaints = {}, [], []

    def add(result: Result, name: str) -> None:
        if _is_of(grid, result.cell):
            results.setdefault(result.cell, result)
        else:
            others.append(name)

    # Files before runs.jsonl: a machine that packs results at this moment removes a file once it is in there.
    for path in sorted(grid.results.glob("[!.]*.json")):
        try:
            add(read_result(path), path.name)
        except ValueError as problem:
            if os.path.lexists(path):
                complaints.append(str(problem))
    for result in read_packed(grid.results):
        if isinstance(result, ValueError):
            complaints.append(str(result))
        else:
            add(result, result.cell.name)
    if complaints:
        raise ValueError("\n".join(complaints))
    return results, others


def check_cells(grid: Grid) -> dict[Setting, Config]:
    """Loads the configuration of every cell; those of one (regime, method) differ in seed and rate alone.

    ValueError with every complaint of every cell, each said once.
    """
    configs: dict[Setting, Config] = {}
    complaints: dict[str, list[str]] = {}
    for cell in _every_cell(grid):
        try:
            config = config_of_cell(grid, cell, grid.work_dir / "running" / cell.name / "run")
            lines = [f"{grid.regimes[cell.regime].config}: {line}" for line in _unfit(grid, config)]
        except ValueError as error:
            lines = str(error).split("\n")
        else:
            configs[cell.regime, cell.method] = config
        for line in lines:
            complaints.setdefault(line, []).append(f"regimes.{cell.regime} with methods.{cell.method}")
    if complaints:
        raise ValueError("\n".join(f"{_where(cells)}: {line}" for line, cells in complaints.items()))
    return configs


def check_identities(configs: Mapping[Setting, Config]) -> dict[Setting, Identity]:
    """The digests of every (regime, method). ValueError when methods of a regime begin or are measured differently."""
    identities: dict[Setting, Identity] = {}
    complaints: dict[str, list[str]] = {}
    for (regime, method), config in configs.items():
        identity = identities[regime, method] = identity_of(config)
        first = next(setting for setting in identities if setting[0] == regime)
        for what, found, expected in _shared_differences(identity, identities[first]):
            complaints.setdefault(f"{regime} {what}", []).append(
                f"regimes.{regime}: {what} of methods.{method} ({found}) and methods.{first[1]} ({expected}) differ; "
                "what they are trained from and measured on must be the same, so set it for the regime"
            )
    _refuse(complaints)
    return identities


def require_same(
    grid: Grid,
    results: Mapping[Cell, Result],
    identities: Mapping[Setting, Identity],
    commit: str | None,
    part: Part = EVERYTHING,
) -> None:
    """ValueError for results that this source and this grid would not make again: one line per kind of difference.

    Warm starts are checked only for the seeds of which this machine's part lacks runs: a finished seed, and one that
    another machine runs, may have begun from others.
    """
    complaints: dict[str, list[str]] = {}
    unfinished = _unfinished_seeds(grid, results, part)
    for cell, result in results.items():
        expected = identities[cell.regime, cell.method]
        differences = [("commit", result.commit, commit)] if result.commit != commit else []
        if result.identity.config != expected.config:
            differences.append(("configuration", result.identity.config, expected.config))
        differences += _held_out_difference(result.identity, expected)
        if (cell.regime, cell.seed) in unfinished:
            differences += _warm_start_differences(result.identity.models, _models_here(grid, cell, expected))
        for what, found, wanted in differences:
            complaints.setdefault(what, []).append(
                f"{grid.results / cell.name}.json: {what} {found}, expected {wanted}; {_remedy(what)}, give another "
                "results folder, or make the table of what is there with --table-only"
            )
    _refuse(complaints)


def require_agreement(grid: Grid, results: Sequence[Result]) -> None:
    """ValueError for two results of one regime that must not be in one table, whatever the present source is."""
    complaints: dict[str, list[str]] = {}
    first_of_regime: dict[str, Result] = {}
    first_of_seed: dict[tuple[str, int], Result] = {}
    first_of_method: dict[Setting, Result] = {}
    for result in results:
        first = first_of_regime.setdefault(result.regime, result)
        of_seed = first_of_seed.setdefault((result.regime, result.seed), result)
        of_method = first_of_method.setdefault((result.regime, result.method), result)
        differences = [("commit", result.commit, first.commit, first)] if result.commit != first.commit else []
        differences += [(*found, first) for found in _held_out_difference(result.identity, first.identity)]
        starts = result.identity.models, of_seed.identity.models
        differences += [(*found, of_seed) for found in _warm_start_differences(*starts)]
        if result.final is not None and first.final is not None and result.final.prompts != first.final.prompts:
            differences.append(("test set", result.final.prompts, first.final.prompts, first))
        if result.identity.config != of_method.identity.config:
            differences.append(("configuration", result.identity.config, of_method.identity.config, of_method))
        for what, found, wanted, other in differences:
            complaints.setdefault(what, []).append(
                f"{grid.results / result.cell.name}.json: {what} {found}, but {wanted} in {other.cell.name}.json; "
                "one table needs results of one source: move those of the other to a folder of their own"
            )
    _refuse(complaints)


def seeds_begun_elsewhere(
    grid: Grid, results: Mapping[Cell, Result], identities: Mapping[Setting, Identity]
) -> list[int]:
    """The seeds of results that began from other warm starts than those on this machine."""
    return sorted(
        {
            cell.seed
            for cell, result in results.items()
            if result.identity.models != _models_here(grid, cell, identities[cell.regime, cell.method])
        }
    )


def _models_here(grid: Grid, cell: Cell, expected: Identity) -> dict[str, str]:
    """Digests of the models that a cell begins from: a seed's own, or those of the regime."""
    own = warm_starts_of(grid, cell)
    return {name: folder_digest(folder) if folder.is_dir() else "absent" for name, folder in own.items()} or (
        expected.models
    )


def _refuse(complaints: Mapping[str, list[str]]) -> None:
    """ValueError with the first complaint of every kind, and how many more there are of it; nothing without any."""
    if complaints:
        more = [f" ({len(lines) - 1} more like it)" if len(lines) > 1 else "" for lines in complaints.values()]
        raise ValueError("\n".join(lines[0] + end for lines, end in zip(complaints.values(), more)))


def _is_of(grid: Grid, cell: Cell) -> bool:
    if cell.regime not in grid.regimes or cell.method not in grid.methods_of(cell.regime):
        return False
    seeds = grid.tuning_seeds if cell.stage == "tuning" else grid.seeds_of(cell.method)
    return cell.seed in seeds and cell.learning_rate in grid.possible_rates()


def _every_cell(grid: Grid) -> Iterator[Cell]:
    """Every (regime, method, rate) with one seed: no configuration is wrong because of its seed."""
    for regime in grid.regimes:
        for method in grid.methods_of(regime):
            for rate in grid.learning_rates:
                yield Cell(regime, method, rate, grid.seeds[0], "reported")


def _unfit(grid: Grid, config: Config) -> Iterator[str]:
    """Reasons for which a run cannot be compared, or cannot start."""
    if config.evaluation.every_steps == 0:
        yield "evaluation.every_steps is 0: a run of an experiment needs evaluations to draw a curve of. Nearest: 1"
    if not config.evaluation.files and config.data.generator is None:
        yield "evaluation.files is not given: a run of an experiment needs held-out prompts"
    if grid.warm_starts is None:
        yield from missing_models(config)
    elif plain := [agent.name for agent in config.agents if agent.init is None]:
        yield f"agents.{plain[0]} has no init table, so no seed can have a model of its own: leave warm_starts out"


def _unfinished_seeds(grid: Grid, results: Mapping[Cell, Result], part: Part) -> set[tuple[str, int]]:
    """(regime, seed) of the missing runs of a part; every reported seed of a regime that is still being tuned."""
    scores = {cell: result.score for cell, result in results.items()}
    in_tuning = {cell.regime for cell in pending_cells(grid, scores) if cell.stage == "tuning"}
    waiting = {(regime, seed) for regime in in_tuning for seed in grid.seeds if part.has_seed(grid, seed)}
    return waiting | {(cell.regime, cell.seed) for cell in pending_cells(grid, scores, part)}


Difference = tuple[str, str, str]  # (what, found, expected)


def _shared_differences(found: Identity, expected: Identity) -> list[Difference]:
    """The differences between the digests that all methods share."""
    return [*_held_out_difference(found, expected), *_warm_start_differences(found.models, expected.models)]


def _held_out_difference(found: Identity, expected: Identity) -> list[Difference]:
    is_same = found.held_out == expected.held_out
    return [] if is_same else [("held-out data", found.held_out, expected.held_out)]


def _warm_start_differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[Difference]:
    different = []
    for name in sorted(found.keys() | expected.keys()):
        pair = found.get(name, "absent"), expected.get(name, "absent")
        if pair[0] != pair[1]:
            different.append((f"warm start of {name}", *pair))
    return different


def _remedy(what: str) -> str:
    if what == "commit":
        return "check that commit out"
    if what.startswith("warm start"):
        return "copy the model folder from where the results were made"
    return "undo the change"


def _where(cells: list[str]) -> str:
    others = len(dict.fromkeys(cells)) - 1
    return cells[0] + (f" (and {others} more)" if others else "")
