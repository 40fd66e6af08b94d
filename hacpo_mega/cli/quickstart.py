"""`hacpo-mega quickstart`: makes two tiny models, trains them together and reports on them, in the current folder."""

import signal
import subprocess
import sys

import typer

from hacpo_mega.cli.start import Overrides
from hacpo_mega.jobs.installed_files import installed_files
from hacpo_mega.jobs.local import CHECKPOINT_SIGNALS, END_SIGNALS


def quickstart(overrides: Overrides = None) -> None:
    """Make two tiny models, train them together and write the report: runs/quickstart, a few minutes on two cores."""
    file = installed_files("configs") / "quickstart.toml"
    for command in ("init", "train"):
        if code := _run(command, str(file), *(overrides or [])):
            raise typer.Exit(code)


def _run(*words: str) -> int:
    """Exit code of `hacpo-mega WORDS` in a process of its own, which is sent every signal that this one gets."""
    process = subprocess.Popen([sys.executable, "-P", "-m", "hacpo_mega.cli", *words])
    for number in (*CHECKPOINT_SIGNALS, *END_SIGNALS):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    return code if code >= 0 else 128 - code  # ended by a signal: 128 and its number, as in a shell
