"""The file format of an agent's state: rectangles of whole tensors by name, written and read by torch's checkpoints.

A tensor of a checkpoint has the name and the shape that Hugging Face gives it, behind what it is ("param.", "exp_avg.",
"exp_avg_sq."), always float32. Who wrote which rectangle of it is in torch's index (`.metadata`) and matters to nobody:
any other rectangle can be read, so the layout that wrote a checkpoint does not bind the one that reads it, and one
process without a group can read whole weights.
Not here: which rectangles an actor has (sharded_state.py). Imports no Megatron.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hacpo_mega.models.segments import Source

# What is stored of every parameter: the float32 main weight and the moments of Adam, by torch's names.
WEIGHT = "param"
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")


class NotWritten(OSError):
    """The disk has refused a share, and all ranks of the group know: each has this error, none waits for another."""


@dataclass(frozen=True)
class Part:
    """The rectangle of a tensor of `shape` that begins at `offsets`; `data` has its numbers, or gets them."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its place, as torch's planner wants it."""
        return ChunkStorageMetadata(Size(self.offsets), self.data.shape)

    def on_host(self) -> "Part":
        """The same numbers in host memory, where nobody changes them."""
        return replace(self, data=self.data.to("cpu", copy=True))


# The parts that one process has of every stored tensor.
Parts = Mapping[str, Sequence[Part]]


def stored_name(kind: str, tensor: str) -> str:
    """What a checkpoint calls the `kind` (of KINDS) of a Hugging Face tensor."""
    return f"{kind}.{tensor}"


def write_parts(parts: Parts, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes what this process has, synced, into a folder that all see. Collective over `group`; None: over nobody.

    All processes together must have every number of every tensor once: torch refuses a gap and an overlap. NotWritten
    when one cannot write.
    """
    writer = FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=True)
    planner = _WriteParts(flatten_state_dict=False)
    try:
        checkpoint.save(dict(parts), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as failed:  # which torch has told all ranks of the group
        rank, (error, _) = min(failed.failures.items())
        raise NotWritten(f"its rank {rank} could not write: {error}") from failed


class StateReader:
    """A folder that `write_parts` filled. Every process reads for itself what it needs."""

    def __init__(self, folder: Path) -> None:
        self._files = FileSystemReader(str(folder))
        self._index = self._files.read_metadata()
        self._files.set_up_storage_reader(self._index, is_coordinator=False)

    def read(self, parts: Parts) -> None:
        """Fills the data of all parts, on whatever device it is."""
        items = [
            item
            for name, wanted in parts.items()
            for item in create_read_items_for_chunk_list(
                name, self._index.state_dict_metadata[name], [part.chunk for part in wanted]
            )
        ]
        self._files.read_data(LoadPlan(items), _ReadParts(parts)).wait()


def stored_weights(folder: Path, sources: Iterable[Source], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights of a stored state as the run has them, `dtype` being its model's: (name, whole tensor) by name.

    One tensor is in memory at a time. Collective over nothing.
    """
    reader = StateReader(folder)
    for source in sources:
        whole = torch.empty(source.shape)
        reader.read({stored_name(WEIGHT, source.name): [Part(source.shape, (0,) * whole.dim(), whole)]})
        yield source.name, whole.to(dtype)


class _WriteParts(DefaultSavePlanner):
    """torch's planner, which knows whole tensors and its own sharded ones, for our parts."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, part) for name, parts in self.state_dict.items() for part in parts])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _at(self.state_dict[index.fqn], index)


class _ReadParts(DefaultLoadPlanner):
    """torch's planner, as far as a reader of files asks it: where the numbers go."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _at(self._parts[index.fqn], index)


def _at(parts: Sequence[Part], index: MetadataIndex) -> Tensor:
    return next(part.data for part in parts if Size(part.offsets) == index.offset)


def _write_item(name: str, part: Part) -> WriteItem:
    properties = TensorProperties.create_from_tensor(part.data)
    data = TensorWriteData(part.chunk, properties, Size(part.shape))
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)
