"""What lies at a run's folder from before, and how it gets out of the way. Imports no torch."""

from pathlib import Path

# What a job writes there before its ranks begin, and goes on writing: no run by itself.
OF_THE_JOB = ("slurm", "logs/attempt*")


def move_aside(path: Path) -> None:
    """Renames an older run's folder to the first free of `path.1`, `path.2`, ...; the job's own files come back."""
    names = {pattern.partition("/")[0] for pattern in OF_THE_JOB}
    if not path.exists() or {entry.name for entry in path.iterdir()} <= names:
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    for found in (found for pattern in OF_THE_JOB for found in aside.glob(pattern)):
        back = path / found.relative_to(aside)
        back.parent.mkdir(parents=True, exist_ok=True)
        found.rename(back)
