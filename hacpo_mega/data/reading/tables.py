"""Tables of rows, as they are stored: Parquet files, folders that `datasets.save_to_disk` has written, sets of the Hub.

A saved split has state.json, which names its Arrow files in order; a data set of several splits has dataset_dict.json
and a folder for each. pyarrow alone reads them: nothing in them runs. The unpacked size of a file on disk is bounded.
A set of the Hub has a name, hub:ORG/NAME@REVISION/CONFIG/SPLIT, and is read by the library `datasets`, an extra that is
imported only here. The launcher downloads one into the library's cache, from which all ranks read it: they are offline.
With SPLIT:ROWS the first rows are streamed, and the cache keeps these alone. Builders of plain files alone read it: no
script, no image, nothing that is unpickled. Elsewhere: what a row means (files.py, datasets.py).
"""

import hashlib
import importlib
import importlib.util
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from hacpo_mega.models.files.documents import one_line, parse_json
from hacpo_mega.models.files.replacing import replacing

# Packed text takes a tenth of its size; mere repetition, a thousandth.
MAX_TIMES_UNPACKED = 200
ALWAYS_UNPACKED_BYTES = 64 * 2**20
TOO_LARGE = f"the file unpacks to more than {MAX_TIMES_UNPACKED} times its size; nothing is read from here on"
NUM_ROWS = 16  # that are unpacked at once
ROW_BYTES = 64  # of a row of a table beside its values: a column without any costs a file nothing
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # of MessageHeader in Message.fbs
STATE, SPLITS = "state.json", "dataset_dict.json"
HUB = "hub:"
HUB_SPELLING = "hub:ORG/NAME[@REVISION]/[CONFIG/]SPLIT, or SPLIT[:ROWS] for its first rows"
PART = r"\w[\w.-]{0,95}"
HUB_NAME = re.compile(
    rf"hub:(?P<repo>{PART}/{PART})(?:@(?P<revision>{PART}))?(?:/(?P<config>{PART}))?/(?P<split>\w+)"
    r"(?:\[:(?P<num_first>[1-9]\d{0,8})\])?",
    re.ASCII,
)
KINDS = ("parquet", "json", "csv", "arrow", "text", "cache")  # the last: what one of the others has written
BUILDERS = frozenset(f"datasets.packaged_modules.{kind}.{kind}" for kind in KINDS)


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set; `revision` is a commit, tag or branch, None the newest, `config` None the only one.

    `num_first` limits it to so many rows from its start; None: all.
    """

    repo: str
    split: str
    config: str | None = None
    revision: str | None = None
    num_first: int | None = None

    @classmethod
    def parse(cls, path: Path) -> Self | None:
        """The data set that a path such as hub:openai/gsm8k/main/train names; None for a file. ValueError for half a
        name."""
        if not str(path).startswith(HUB):
            return None
        found = HUB_NAME.fullmatch(str(path))
        if found is None or ".." in str(path):
            raise ValueError(f"is no data set of the Hub; write {HUB_SPELLING}, such as hub:openai/gsm8k/main/train")
        num_first = found["num_first"] and int(found["num_first"])
        return cls(found["repo"], found["split"], found["config"], found["revision"], num_first)

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """Its rows as they are stored, at most NUM_ROWS at once. ValueError, one line, if they cannot be loaded."""
        if importlib.util.find_spec("datasets") is None:
            raise ValueError("needs the library datasets, which is not installed here; `pip install 'datasets>=4'`")
        library = importlib.import_module("datasets")
        library.disable_progress_bars()
        try:
            if self.num_first is None:
                builder = self._builder(library)
                builder.download_and_prepare()
                tables = builder.as_dataset(self.split).with_format("arrow").iter(NUM_ROWS)
            else:
                tables = pyarrow.parquet.ParquetFile(self._first_rows(library)).iter_batches(NUM_ROWS)
        except Exception as error:  # whatever the library, the network and its file formats raise
            reason = one_line(str(error).partition("\n")[0]) or type(error).__name__
            hint = "`hacpo-mega check CONFIG --data` downloads it, on a machine with network and the same HF_HOME"
            raise ValueError(f"cannot be loaded ({reason}); {hint}") from error
        for table in tables:
            yield from table.to_batches() if self.num_first is None else (table,)

    def _builder(self, library: Any) -> Any:
        """The library's builder for this data set. ValueError unless it is one of BUILDERS."""
        builder = library.load_dataset_builder(self.repo, self.config, revision=self.revision)
        # a data set with configurations has a builder class derived from one of them
        if not {kind.__module__ for kind in type(builder).__mro__} & BUILDERS:
            raise ValueError(f"{type(builder).__name__} is no reader of tables or lines")
        return builder

    def _first_rows(self, library: Any) -> Path:
        """The file of its first rows in the library's cache, the newest without a network; made if missing.

        Every commit has its own, so that ranks which cannot ask for the newest read what their launcher has read.
        """
        folder = Path(library.config.HF_DATASETS_CACHE, "hacpo_mega", hashlib.sha256(repr(self).encode()).hexdigest())
        kept = sorted(folder.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
        try:
            builder = self._builder(library)
        except Exception:  # without a network the cached rows serve, as they do for a whole data set
            if not kept:
                raise
            return kept[-1]
        file = folder / f"{builder.hash}.parquet"
        if not file.is_file():
            tables, num_read = [], 0
            for table in builder.as_streaming_dataset(self.split).with_format("arrow").iter(NUM_ROWS):
                tables.append(table)
                num_read += len(table)
                if num_read >= self.num_first:
                    break
            rows = pyarrow.concat_tables(tables, promote_options="permissive").slice(0, self.num_first)
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(file) as stream:
                pyarrow.parquet.write_table(rows, stream)
        return file


def stored_batches(file: Path) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a Parquet file, a saved folder or a data set of the Hub, in parts of at most NUM_ROWS.

    ValueError, one line, for what is none, and for more than the bytes on disk may unpack to; also what pyarrow raises.
    """
    if (split := HubSplit.parse(file)) is not None:
        yield from split.batches()
    elif is_saved(file):
        packed_bytes = sum(part.stat().st_size for part in data_files(file))
        yield from _bounded(_saved_batches(file), packed_bytes)
    else:
        packed_bytes = file.stat().st_size
        with pyarrow.parquet.ParquetFile(file) as table:
            _require_small_groups(table, packed_bytes)
            yield from _bounded(table.iter_batches(batch_size=NUM_ROWS), packed_bytes)


def most_unpacked(packed_bytes: int) -> int:
    """Bytes that a packed file of this size may unpack to."""
    return max(ALWAYS_UNPACKED_BYTES, MAX_TIMES_UNPACKED * packed_bytes)


def _bounded(batches: Iterable[pyarrow.RecordBatch], packed_bytes: int) -> Iterator[pyarrow.RecordBatch]:
    """The batches of a file of that size; ValueError if they exceed `most_unpacked`.

    One text that two billion rows share, in a dictionary or a run, and a column of nulls take a file nothing.
    """
    left = most_unpacked(packed_bytes)
    for batch in batches:
        left -= num_bytes(batch) + ROW_BYTES * len(batch)
        if left < 0:
            raise ValueError(TOO_LARGE)
        yield batch


def num_bytes(batch: pyarrow.RecordBatch) -> int:
    """Bytes of a batch. A dictionary, which all batches of a group share, counts with the values that this one uses."""
    columns = (
        column.dictionary.take(column.indices.unique()) if pyarrow.types.is_dictionary(column.type) else column
        for column in batch.columns
    )
    return sum(column.nbytes for column in columns)


def _require_small_groups(table: pyarrow.parquet.ParquetFile, packed_bytes: int) -> None:
    """ValueError for a group of rows that would unpack to more than `most_unpacked`, as its pages may."""
    groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
    sizes = (group.column(k).total_uncompressed_size for group in groups for k in range(group.num_columns))
    if (largest := max(sizes, default=0)) > most_unpacked(packed_bytes):
        raise ValueError(
            f"one column of a row group unpacks to {largest:,} bytes, more than {MAX_TIMES_UNPACKED} times the file's "
            "size; nothing is read"
        )


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


def _saved_batches(folder: Path) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a saved split, at most NUM_ROWS at once. ValueError as `data_files`, and what pyarrow raises."""
    for file in data_files(folder):
        _require_plain(file)
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                yield from (batch.slice(start, NUM_ROWS) for start in range(0, len(batch), NUM_ROWS))


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
    vtable = table - struct.unpack_from("<i", message, table)[0]
    (size,) = struct.unpack_from("<H", message, vtable)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", message, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else None


def _table(message: bytes, place: int) -> int:
    """Offset of the table to which the field at `place` points."""
    return place + struct.unpack_from("<I", message, place)[0]
