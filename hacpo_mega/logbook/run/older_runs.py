"""Older content of a run's folder, and moving it out of the way. Imports no torch."""

import os
from pathlib import Path

from hacpo_mega.config.checks.run_dirs import contents, require_displaceable

# Files that a job writes there before and while its ranks run: no run by themselves.
OF_THE_JOB = ("slurm", "logs/attempt*")


def move_aside(path: Path) -> Path | None:
    """Renames an older run's folder to the first free of `path.1`, `path.2`, ...; the job's own files come back.

    If `path` is a link, its target is renamed, and the link leads to the folder that is made there next. Returns the
    new name, None if nothing was there. ValueError for a folder that is no run of this program, or cannot be moved. The
    caller holds the folder's RunLock.
    """
    path = Path(os.path.realpath(path))
    require_displaceable(path)
    if not contents(path):
        return None
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    try:
        path.rename(aside)
    except OSError as error:  # mounted there, or a file system that does not rename folders
        raise ValueError(
            f"run_dir {path} cannot be moved to {aside} ({error.strerror}): move it, or give another"
        ) from error
    for moved in (moved for pattern in OF_THE_JOB for moved in aside.glob(pattern)):
        back = path / moved.relative_to(aside)
        back.parent.mkdir(parents=True, exist_ok=True)
        moved.rename(back)
    return aside
