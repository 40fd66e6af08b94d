"""Folders that `datasets.save_to_disk` has written, read by pyarrow alone: nothing in them runs.

A saved split has state.json, which names its Arrow files in order; a data set of several splits has dataset_dict.json
and a folder for each. Not here: what a row means (files.py, datasets.py).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc

from hacpo_mega.models.files.documents import parse_json

DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # of MessageHeader in Message.fbs
STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """True if `save_to_disk` has written this folder: one split, or a data set of them."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def data_files(path: Path) -> list[Path]:
    """The Arrow files of a saved split, or of a file itself, in order. ValueError, one line, if they are unclear."""
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
        _require_plain(file)
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                yield from (batch.slice(start, num_rows) for start in range(0, len(batch), num_rows))


def _require_plain(file: Path) -> None:
    """ValueError for compressed buffers: `save_to_disk` writes none, and a few kilobytes could fill the memory."""
    with pyarrow.memory_map(str(file)) as source:
        messages = pyarrow.ipc.MessageReader.open_stream(source)
        try:
            is_compressed = any(_is_compressed(message.metadata.to_pybytes()) for message in messages)
        except (struct.error, IndexError) as error:
            raise ValueError(f"holds no Arrow stream: {error}") from error
    if is_compressed:
        raise ValueError("holds compressed Arrow data, which save_to_disk does not write; save it again")


def _is_compressed(message: bytes) -> bool:
    """True if a message of Arrow's stream format has a compressed body (Message.fbs: RecordBatch.compression)."""
    (root,) = struct.unpack_from("<I", message, 0)
    kind, header = _field(message, root, 1), _field(message, root, 2)
    if kind is None or header is None or message[kind] not in (DICTIONARY_BATCH, RECORD_BATCH):
        return False
    batch = _table(message, header)
    if message[kind] == DICTIONARY_BATCH:
        data = _field(message, batch, 1)
        batch = batch if data is None else _table(message, data)
    return _field(message, batch, 3) is not None


def _field(message: bytes, table: int, number: int) -> int | None:
    """Offset of a field in a flatbuffer's table; None for one that is absent."""
    names = table - struct.unpack_from("<i", message, table)[0]
    (size,) = struct.unpack_from("<H", message, names)
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", message, names + place)[0] if place < size else 0
    return table + offset if offset else None


def _table(message: bytes, place: int) -> int:
    return place + struct.unpack_from("<I", message, place)[0]
