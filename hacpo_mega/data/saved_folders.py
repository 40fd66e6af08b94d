"""Folders that `datasets.save_to_disk` has written, read by pyarrow alone: nothing in them runs.

A saved split has state.json, which names its Arrow files in order; a data set of several splits has dataset_dict.json
and a folder for each. Not here: what a row means (files.py, datasets.py).
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc

from hacpo_mega.models.documents import parse_json

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` has written this folder: one split, or a data set of them."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def data_files(path: Path) -> list[Path]:
    """The Arrow files of a saved split, in order; of a file itself. ValueError, one line, where they cannot be told."""
    if not is_saved(path):
        return [path]
    if (path / SPLITS).is_file():
        found = sorted(state.parent for state in path.glob(f"*/{STATE}"))
        names = ", ".join(split.name for split in found)
        raise ValueError(f"is a data set of splits ({names}); give one of them" + (f": {found[0]}" if found else ""))
    try:
        state = parse_json((path / STATE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"has a {STATE} that names no data files ({type(error).__name__}: {error})") from error
    if state.get("_indices_data_files"):
        raise ValueError("is a selection by indices; save it again after flatten_indices()")
    if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"has a {STATE} that names {bad[0]!r}; the data files of a saved folder lie in it")
    return [path / name for name in names]


def saved_batches(folder: Path, num_rows: int) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a saved split, at most `num_rows` at once. ValueError as `data_files`, and what pyarrow raises."""
    for file in data_files(folder):
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                yield from (batch.slice(start, num_rows) for start in range(0, len(batch), num_rows))
