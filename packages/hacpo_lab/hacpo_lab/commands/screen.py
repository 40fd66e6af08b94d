"""The command `hacpo-mega screen`: the methods of a grid on the answers of a run, without training.

Imports are inside functions, as in cli/app.py.
"""

from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.models.files.visible import say


def screen(
    file: Annotated[Path, typer.Argument(metavar="GRID", help="The experiment's TOML file.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run whose answers are looked at.")],
    beside: Annotated[str, typer.Option(metavar="METHOD", help="The method to compare with.")] = "naive",
    regime: Annotated[str | None, typer.Option(help="Whose configuration is taken; not given: the first.")] = None,
) -> None:
    """Compare what an experiment's methods would learn from the answers of a run, to see which are worth seeds."""
    from hacpo_lab.experiments.grid import load_grid
    from hacpo_lab.experiments.screen import screen as screened
    from hacpo_lab.experiments.table import markdown_of

    say("\n\n".join(markdown_of(table) for table in screened(load_grid(file), run, beside, regime)))
