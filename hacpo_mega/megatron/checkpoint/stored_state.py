"""File format of an agent's state: rectangles of whole tensors by name, written and read by torch's checkpoints.

A tensor of a checkpoint has the name and shape of the Hugging Face tensor, after a prefix for its kind ("param.",
"exp_avg.", "exp_avg_sq."), always float32. torch's index (`.metadata`) records which file holds which rectangle. Any
other rectangle can be read, so the layout that wrote a checkpoint does not bind the one that reads it, and a single
process can read whole weights.

Elsewhere: which rectangles an actor has (sharded_state.py). Imports no Megatron.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from hacpo_kernels import merge_adapter
from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from hacpo_mega.cluster.groups.tree import gather_at_head, share_bytes
from hacpo_mega.megatron.checkpoint.stored_index import INDEX, read_index
from hacpo_mega.megatron.weights.hf_reader import FolderReader, dtype_of
from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.lora import Lora, adapter_sources, factor_names
from hacpo_mega.models.sharding.segments import Source, all_sources

# Stored for every parameter: the float32 main weight and the moments of Adam, by torch's names.
WEIGHT = "param"
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")


class NotWritten(OSError):
    """A rank could not write its share. Every rank of the group raises this, so none waits for another."""


@dataclass(frozen=True)
class Part:
    """Rectangle of a tensor of `shape` that begins at `offsets`; `data` [*sizes] is written from, or read into."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The rectangle in the form of torch's planner."""
        return ChunkStorageMetadata(Size(self.offsets), self.data.shape)

    def on_host(self) -> "Part":
        """Copies the numbers to host memory, where they do not change."""
        return replace(self, data=self.data.to("cpu", copy=True))


# The parts that one process has of every stored tensor.
Parts = Mapping[str, Sequence[Part]]
# A part on disk, as ranks exchange it in JSON: name, shape, offsets, sizes, offset in the file, bytes.
Written = tuple[str, Sequence[int], Sequence[int], Sequence[int], int, int]


def stored_name(kind: str, tensor: str) -> str:
    """Name in a checkpoint of the `kind` (of KINDS) of a Hugging Face tensor."""
    return f"{kind}.{tensor}"


def write_parts(parts: Parts, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes this process's parts, synced, into a shared folder. Collective over `group`; None: a single process.

    All processes together must have every number of every tensor once: torch refuses a gap and an overlap. NotWritten
    if one cannot write.
    """
    # torch's own save would exchange plans and results as pickles.
    rank = 0 if group is None else group.rank()
    writer = FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=True)
    writer.fs = _ExistingFolder()
    try:
        report = {"written": _write_share(writer, parts, rank)}
    except Exception as error:  # of any kind: the others wait for a message
        report = {"error": str(error) or type(error).__name__}
    message = json.dumps(report).encode()
    messages = [message] if group is None else gather_at_head(group, message)
    refusal = _finish(writer, messages) if rank == 0 else None
    if group is not None:
        refusal = json.loads(share_bytes(group, json.dumps(refusal).encode()))
    if refusal is not None:
        raise NotWritten(refusal)


class _ExistingFolder(FileSystem):
    """File system that makes no folder: if the run's folder disappears while it writes, none may take its place."""

    def mkdir(self, _path: str | os.PathLike) -> None:
        """Does nothing: the caller has made the checkpoint's folder."""


def _write_share(writer: FileSystemWriter, parts: Parts, rank: int) -> list[Written]:
    """Writes this process's file; returns its parts in the order of the file."""
    planner = _WriteParts(flatten_state_dict=False)
    planner.set_up_planner(dict(parts))
    # This only sets the file's name: `_finish` writes the one index of all ranks.
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = planner.finish_plan(writer.prepare_local_plan(planner.create_local_plan()))
    results = {result.index: result.storage_data for result in writer.write_data(plan, planner).wait()}
    written = []
    for name, part in ((name, part) for name, own in parts.items() for part in own):
        place = results[MetadataIndex(name, part.offsets)]
        written.append((name, part.shape, part.offsets, tuple(part.data.shape), place.offset, place.length))
    return written


def _finish(writer: FileSystemWriter, messages: Sequence[bytes]) -> str | None:
    """Writes the index of all processes' parts, in the order of ranks; returns the refusal if one could not write."""
    reports = [json.loads(message) for message in messages]
    for rank, report in enumerate(reports):
        if "error" in report:
            return f"its rank {rank} could not write: {report['error']}"
    plans, results = [], []
    for rank, report in enumerate(reports):
        plans.append(SavePlan([_write_item(name, *where[:3]) for name, *where in report["written"]]))
        results.append([_result(f"__{rank}_0.distcp", *written) for written in report["written"]])
    try:
        _, index = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
        writer.set_up_storage_writer(True)
        writer.finish(index, results)
    except Exception as error:  # of any kind: the others wait for a message
        return f"its rank 0 could not write: {error}"
    return None


class StateReader:
    """Reader of a folder that `write_parts` filled. Every process reads for itself what it needs.

    ValueError for an index that names other things than a state's, or does not fit its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = FileSystemReader(str(folder))
        self._index = read_index(folder)
        self._files.set_up_storage_reader(self._index, is_coordinator=False)

    def read(self, parts: Parts) -> None:
        """Fills the data of all parts, on any device."""
        items = [item for name, wanted in parts.items() for part in wanted for item in self._items(name, part)]
        try:
            self._files.read_data(LoadPlan(items), _ReadParts(parts)).wait()
        except OSError:
            raise
        except Exception as error:  # torch's readers raise many kinds for files that do not fit their index
            line = " ".join(str(error).split())[:200]
            raise ValueError(f"{self._folder} is damaged: its files are not what {INDEX} says ({line})") from error

    def _items(self, name: str, part: Part) -> list[ReadItem]:
        """Read requests of a part. ValueError unless the index has this tensor, in this shape, and all of the part."""
        stored = self._index.state_dict_metadata.get(name)
        if stored is None or tuple(stored.size) != part.shape:
            found = "not there" if stored is None else f"{list(stored.size)} there"
            raise ValueError(f"{self._folder / INDEX}: {name} should be {list(part.shape)} and is {found}")
        items = create_read_items_for_chunk_list(name, stored, [part.chunk])
        if sum(item.lengths.numel() for item in items) != part.data.numel():
            raise ValueError(f"{self._folder / INDEX} does not have every number of {name} once")
        return items


def stored_weights(folder: Path, sources: Iterable[Source], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Weights of a stored state, rounded to the run's `dtype`: (name, whole tensor) by name.

    One tensor is in memory at a time. Not collective.
    """
    reader = StateReader(folder)
    for source in sources:
        whole = torch.empty(source.shape)
        reader.read({stored_name(WEIGHT, source.name): [Part(source.shape, (0,) * whole.dim(), whole)]})
        yield source.name, whole.to(dtype_of(source.name, dtype))


def model_weights(state: Path, base: Path, lora: Lora | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the model by name; `base` is the folder that its run began with, `dtype` the run's.

    One tensor is in memory at a time, and all adapters. Not collective.
    """
    architecture = Architecture.from_folder(base)
    sources = all_sources(architecture)
    if lora is None:
        yield from stored_weights(state, sources, dtype)
        return
    factors = dict(stored_weights(state, adapter_sources(architecture, lora), dtype))
    with ExitStack() as stack:
        reader = FolderReader(base, stack)
        for source in sources:
            weight = reader.read(source, 0, source.shape[0], dim=0).to(dtype_of(source.name, dtype))
            down, up = factor_names(source.name)
            if down in factors:
                weight = merge_adapter(weight, factors[up], factors[down], lora.scale)
            yield source.name, weight


class _WriteParts(DefaultSavePlanner):
    """Adapter of torch's save planner, which knows whole tensors and its own sharded ones, to our parts."""

    def create_local_plan(self) -> SavePlan:
        assert all(part.data.dtype == torch.float32 for parts in self.state_dict.values() for part in parts)
        return SavePlan(
            [
                _write_item(name, part.shape, part.offsets, tuple(part.data.shape))
                for name, parts in self.state_dict.items()
                for part in parts
            ]
        )

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _at(self.state_dict[index.fqn], index)


class _ReadParts(DefaultLoadPlanner):
    """Adapter of torch's load planner: destination of the numbers."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _at(self._parts[index.fqn], index)


def _at(parts: Sequence[Part], index: MetadataIndex) -> Tensor:
    return next(part.data for part in parts if Size(part.offsets) == index.offset)


def _write_item(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(Size(offsets), Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), Size(shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _result(
    file: str, name: str, _shape: Sequence[int], offsets: Sequence[int], _sizes: Sequence[int], offset: int, length: int
) -> WriteResult:
    return WriteResult(MetadataIndex(name, offsets), length, _StorageInfo(file, offset, length))
