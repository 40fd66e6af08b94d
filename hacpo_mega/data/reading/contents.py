"""Digests of data files' contents, not names: the first 16 hexadecimal digits of a SHA-256."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from hacpo_mega.data.reading.files import read_records
from hacpo_mega.data.reading.hub_sets import HubSplit
from hacpo_mega.data.reading.saved_folders import data_files


def data_digest(path: Path) -> str:
    """Digests a data file, all data files of a saved folder in order, or the rows of a data set of the Hub."""
    if HubSplit.parse(path) is not None:
        return _rows_digest(path)
    digests = [file_digest(file) for file in data_files(path)]
    return digest_of(digests) if len(digests) > 1 else digests[0]


def file_digest(file: Path) -> str:
    """Digests every byte; read once per process as long as size, time and place on the disk are as they were."""
    state = file.stat()
    return _bytes_digest(file, state.st_size, state.st_mtime_ns, state.st_ino)


def digest_of(value: Any) -> str:
    """Digests a value that JSON can express."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _rows_digest(path: Path) -> str:
    return digest_of([str(record) for _, record in read_records(path)])


@functools.cache
def _bytes_digest(file: Path, *_state: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
