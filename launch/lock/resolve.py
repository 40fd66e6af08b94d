"""Resolves both lock files on every Python that they serve, by what the indexes say of each package.

    make locks

Asks uv for wheels alone. A lock resolves where its packages can be had together and are what they ask for, no more and
no fewer. Of the CPU lock, torch is set aside, whose build no index but PyTorch's has, and what check.py leaves out and
accepts. Prints a line for each and exits with 1 if one does not resolve. UV_INDEX and UV_FIND_LINKS name other indexes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from check import ACCEPTED, LEFT_OUT, PYTHONS, read_lock

LOCKS = [Path(__file__).with_name(name) for name in ("cpu.txt", "cuda.txt")]
# The oldest glibc that all wheels are for: llguidance has none for 2.28.
PLATFORM = "x86_64-manylinux_2_31"


def set_aside(lock: Path) -> list[str]:
    """Overrides for uv that keep packages from its judgement: no package, or this version whatever others ask for."""
    if lock.stem != "cpu":
        return []
    nowhere = [f"{name}; python_version < '3'" for name in ("torch", *LEFT_OUT)]
    return [*nowhere, *(f"{asked}=={version}" for _, asked, version in ACCEPTED)]


def problem(lock: Path, python: str) -> str | None:
    """Why a lock does not resolve on a Python; None where it does."""
    with tempfile.TemporaryDirectory() as folder:
        overrides, found = Path(folder, "overrides.txt"), Path(folder, "found.txt")
        overrides.write_text("\n".join(set_aside(lock)), encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", lock, "--override", overrides, "--output-file", found]
        options = ["--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:", "--no-annotate"]
        done = subprocess.run([*command, *options, "--quiet"], capture_output=True, text=True)
        if done.returncode:
            return " ".join(done.stderr.split())
        differing = read_lock(found).items() ^ read_lock(lock).items()
    aside = {line.partition(";")[0] for line in set_aside(lock) if ";" in line}
    names = sorted({name for name, _ in differing} - aside)
    return f"not the same packages: {', '.join(names)}" if names else None


def main() -> int:
    """0 when every lock resolves on every Python."""
    found = {(lock.name, python): problem(lock, python) for lock in LOCKS for python in PYTHONS}
    for (name, python), why in found.items():
        print(f"{'FAILED' if why else 'ok    '}  {name} on Python {python}{f': {why}' if why else ''}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
