"""The command line: one file per family of commands. `main` is the entry point."""

from hacpo_mega.cli.app import main

__all__ = ["main"]
