"""`hacpo-mega quickstart`: makes two tiny models, trains them together and reports on them, in the current folder."""

import subprocess
import sys

import typer

from hacpo_mega.cli.start import Overrides
from hacpo_mega.jobs.installed_files import installed_files


def quickstart(
    overrides: Overrides = None,
) -> None:
    """Make two tiny models, train them together and write the report: runs/quickstart, a few minutes on two cores."""
    file = installed_files("configs") / "quickstart.toml"
    for command in ("init", "train"):
        done = subprocess.run([sys.executable, "-P", "-m", "hacpo_mega.cli", command, str(file), *(overrides or [])])
        if done.returncode:
            raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
