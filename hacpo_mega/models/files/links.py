"""Links in a folder that another person may have made, such as a run: none that leads out of it is followed.

A folder that the user names may itself be reached by links, and so may a model of the Hugging Face cache, whose files
are links to `blobs` of the same model. Hard links cannot be told from files. Imports no torch.
"""

import os
from pathlib import Path

from hacpo_mega.models.files.hub import HubModel

COPY = "If it is yours, copy what it leads to into its place, or name that place itself"
TRUST = "--trust follows it, if you trust the maker of this run"
RUN_FILES = ("starts.jsonl", "metrics.jsonl")  # one of them lies beside the config.toml of a run


def require_inside(root: Path, *places: Path, advice: str = COPY) -> None:
    """ValueError, one line that ends with `advice`, where a place is outside `root`, or a link below it leads there.

    Likewise for a pipe, which would be waited for, and for a device. A missing path inside `root` passes.
    """
    real = Path(os.path.realpath(root))
    waiting, seen = [str(place) for place in places], set()
    while waiting:
        path = waiting.pop()
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file() and not target.is_dir():
            raise ValueError(f"{path} is a pipe or a device, not a file")
        if not target.is_relative_to(real):
            raise ValueError(
                f"{path} leads out of {root}, to {target}: no link is followed out of a folder that another may have "
                f"made. {advice}"
            )
        if target not in seen and target.is_dir():
            seen.add(target)
            waiting += _links_and_folders(path)


def require_inside_its_run(path: Path) -> None:
    """`require_inside` for a path in a run, by its name or by its target; any other path passes."""
    for named in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        if (run := run_above(Path(named))) is not None:
            require_inside(run, path)


def require_own_model(folder: Path, run_dir: Path) -> None:
    """`require_inside` for the model folder that a stored run names: links stay in the run, else in the model."""
    runs = os.path.abspath(run_dir), os.path.realpath(run_dir)
    if any(Path(os.path.abspath(folder)).is_relative_to(run) for run in runs):
        root = run_dir
    else:  # a snapshot's files are links to `blobs`, two folders up
        root = folder if HubModel.of_snapshot(folder) is None else folder.parent.parent
    require_inside(root, folder, advice=TRUST)


def run_above(path: Path) -> Path | None:
    """The nearest folder at or above an absolute path that is a run by the names in it; None without one."""
    for folder in (path, *path.parents):
        if os.path.lexists(folder / "config.toml") and any(os.path.lexists(folder / name) for name in RUN_FILES):
            return folder
    return None


def _links_and_folders(folder: str) -> list[str]:
    """Entries of a folder that are no plain files. ValueError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if not entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:  # a run removes its old checkpoints
        return []
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}): give a folder that you may read") from error
