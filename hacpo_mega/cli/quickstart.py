"""`hacpo-mega quickstart`: makes two tiny models, trains them together and reports on them, in the current folder."""

import subprocess
import sys

import typer

from hacpo_mega.cli.start import Overrides
from hacpo_mega.config import load_config
from hacpo_mega.jobs.installed_files import installed_files


def quickstart(
    overrides: Overrides = None,
) -> None:
    """Make two tiny models, train them together and write the report: runs/quickstart, a few minutes on two cores."""
    file = installed_files("configs") / "quickstart.toml"
    run_dir = load_config(file, overrides or []).run_dir
    config = [str(file), *(overrides or [])]
    for command in (["init", *config], ["train", *config], ["report", str(run_dir)]):
        done = subprocess.run([sys.executable, "-m", "hacpo_mega.cli", *command])
        if done.returncode:
            raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
