"""The command `hacpo-mega experiment`: a grid of runs as a resumable queue, and the table of what they show.

Imports are inside functions, as in cli/app.py: `--help` must answer without torch, and a run's ranks, not the queue,
load the trainer.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo_lab.commands.ranks import experiment_rank, warm_start_rank
from hacpo_mega.cluster.machine.environment import prepare_environment
from hacpo_mega.models.files.visible import say

if TYPE_CHECKING:
    from hacpo_lab.experiments.grid import Grid
    from hacpo_lab.experiments.order import Part


def experiment(
    file: Annotated[Path, typer.Argument(metavar="GRID", help="The experiment's TOML file.")],
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Run nothing: tables and page of the results that are there.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Try at most so many runs now.")] = None,
    part: Annotated[str, typer.Option(help="1/2 here and 2/2 there: this machine's share of the runs.")] = "1/1",
) -> None:
    """Run a grid of methods x seeds x learning rates, resumable, and compare: table, intervals, curves, one JSON."""
    from hacpo_lab.experiments.grid import load_grid
    from hacpo_lab.experiments.order import Part

    grid, share = load_grid(file), Part.parse(part)
    has_failed = False if table_only else _run(grid, limit, share)
    _write(grid)
    if has_failed:
        raise typer.Exit(1)


def _run(grid: "Grid", limit: int | None, part: "Part") -> bool:
    """Runs what is missing; whether any run failed."""
    prepare_environment()
    from hacpo_lab.experiments.campaign import run_campaign

    outcome = run_campaign(grid, experiment_rank, warm_start_rank, limit, part)
    say(f"{outcome.num_made} runs made, {len(outcome.failed)} failed, {outcome.num_missing} of the grid still missing")
    return bool(outcome.failed)


def _write(grid: "Grid") -> None:
    from hacpo_lab.experiments.page import write_evidence
    from hacpo_lab.experiments.trust import read_results, require_agreement

    results, _ = read_results(grid)
    if not results:
        say(f"{grid.results} has no result of this grid yet")
        return
    require_agreement(grid, list(results.values()))
    say("\n".join(str(path) for path in write_evidence(grid, results)))
