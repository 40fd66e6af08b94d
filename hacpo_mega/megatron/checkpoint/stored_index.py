"""torch's index of a stored state, the file `.metadata`: file and offset of every rectangle of every tensor.

torch pickles it, and unpickling in Python can execute anything; here it is read as plain values (plain_pickle.py) and
taken key by key. A forged index can hold wrong numbers, and nothing else.

Elsewhere: reading and writing tensors (stored_state.py). Imports no Megatron.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hacpo_mega.cluster.security.plain_pickle import Name, Record, read_plain

INDEX = ".metadata"
SHARD = re.compile(r"__\d+_\d+\.distcp")  # in the folder of the index, and nowhere else
PLACE = "torch.distributed.checkpoint"
SIZE, FLOAT32 = ("torch", "Size"), ("torch", "float32")
WHOLE, TENSOR, PROPERTIES, CHUNK, ITEM = (
    (f"{PLACE}.metadata", name)
    for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
)
STORED = (f"{PLACE}.filesystem", "_StorageInfo")
# Further entries of an index, which are ignored: its writer, and tensor properties that are equal for all.
UNREAD = (
    (f"{PLACE}.metadata", "StorageMeta"),
    (f"{PLACE}.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
)
NAMES = frozenset((SIZE, FLOAT32, WHOLE, TENSOR, PROPERTIES, CHUNK, ITEM, STORED, *UNREAD))


def read_index(folder: Path) -> Metadata:
    """Index of a folder that `write_parts` filled. ValueError, which names the file, for anything else."""
    file = folder / INDEX
    data = file.read_bytes()
    try:
        state = _state(read_plain(data, NAMES), WHOLE)
        tensors = {_text(name): _tensor(found) for name, found in _table(state["state_dict_metadata"]).items()}
        places = {_item(item): _place(found) for item, found in _table(state["storage_data"]).items()}
    except KeyError as error:
        raise ValueError(f"{file} is no index of a stored state: {error} is missing in it") from error
    except ValueError as error:
        raise ValueError(f"{file} is no index of a stored state: {error}. Nothing of it was run") from error
    return Metadata(tensors, storage_data=places)


def _tensor(record: Any) -> TensorStorageMetadata:
    state = _state(record, TENSOR)
    chunks = state["chunks"]
    if type(chunks) is not list:
        raise ValueError("the pieces of a tensor are no list")
    properties = _made(state["properties"], PROPERTIES).state
    dtype = properties[0] if type(properties) is tuple and properties else None
    if type(dtype) is not Record or dtype.is_made or dtype.name != FLOAT32:
        raise ValueError("a tensor of it is not float32")
    return TensorStorageMetadata(TensorProperties(torch.float32), _size(state["size"]), [_chunk(c) for c in chunks])


def _chunk(record: Any) -> ChunkStorageMetadata:
    state = _state(record, CHUNK)
    return ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))


def _item(record: Any) -> MetadataIndex:
    state = _state(record, ITEM)
    return MetadataIndex(_text(state["fqn"]), _size(state["offset"]))


def _place(record: Any) -> _StorageInfo:
    state = _state(record, STORED)
    file = _text(state["relative_path"])
    if not SHARD.fullmatch(file) or state.get("transform_descriptors") is not None:
        raise ValueError(f"it leads to {file[:80]!r}, which is no file of a stored state")
    return _StorageInfo(file, _count(state["offset"]), _count(state["length"]))


def _made(record: Any, name: Name) -> Record:
    if type(record) is not Record or not record.is_made or record.name != name:
        raise ValueError(f"where a {name[1]} belongs there is another thing")
    return record


def _state(record: Any, name: Name) -> dict[Any, Any]:
    return _table(_made(record, name).state)


def _table(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError("where a table belongs there is another thing")
    return value


def _size(record: Any) -> Size:
    match _made(record, SIZE).arguments:
        case (tuple() as numbers,):
            return Size(map(_count, numbers))
    raise ValueError("a size of it is no list of numbers")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a number of it is no count")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a name of it is no text")
    return value
