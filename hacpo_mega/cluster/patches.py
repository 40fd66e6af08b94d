"""Names of other libraries that this process replaces for good: one record each, applied at one place a library.

Every library has its table: torch's is here, Megatron's in megatron/patches.py, vLLM's in rollout/vllm/patches.py.
tests/unit/cluster/test_patches.py holds owner, name and signature of each to the pinned version, so that a new version
that changes one fails there.

One patch of torch replaces its unpickler of peers' objects. This project sends bytes of a stated layout. Its libraries
send objects by `all_gather_object` and the like: Megatron the keys of its parameter groups, vLLM names and handles of
shared memory, and numbers and settings that it has measured. torch unpickles them, so whoever poses as a rank could run
code in all the others. PlainUnpickler reads plain values and tensors, nothing that runs. Elsewhere: vLLM's message
queue, which is never made, and names that are replaced while a block runs (megatron/model/platform.py,
rollout/vllm/host_process.py).
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d

from hacpo_mega.cluster.groups.lone_groups import Gloo
from hacpo_mega.cluster.security.plain_pickle import Names, Record, read_plain

REBUILD, HOOKS = ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")
# torch's, and what Megatron replaces it with where it is imported
LOADS = (("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes"))
TENSOR: Names = frozenset((REBUILD, *LOADS, HOOKS))


@dataclass(frozen=True)
class Patch:
    """One name of a library and its replacement.

    owner   the library's module or class
    name    attribute of the owner; absent is fine
    ours    what takes its place; with `wraps` a function that makes it from the library's own
    why     the reason
    """

    owner: Any
    name: str
    ours: Any
    why: str
    wraps: bool = False

    def original(self) -> Any:
        """The library's own attribute of that name, also after the patch; None where it has none."""
        return _ORIGINALS.get((self.owner, self.name), getattr(self.owner, self.name, None))


class PlainUnpickler:
    """The replacement that torch calls instead of pickle.Unpickler."""

    def __init__(self, file: io.BytesIO) -> None:
        self._data = file.read()

    def load(self) -> Any:
        """The object. ValueError, which ends the job, for anything but plain values and tensors."""
        parts: list[Record] = []
        try:
            value = read_plain(self._data, TENSOR, partial(_tensor, parts))
            if parts:
                raise ValueError("it is a part of a tensor")
            return value
        except ValueError as error:
            raise ValueError(
                f"a process of this job has sent an object that is not taken from a peer: {error}. Numbers, texts, "
                "lists, tables and tensors are"
            ) from error


_ORIGINALS: dict[tuple[Any, str], Any] = {}

TORCH = (
    Patch(distributed_c10d, "_unpickler", PlainUnpickler, "a peer's object is plain values and tensors, never code"),
    Patch(distributed_c10d, "ProcessGroupGloo", Gloo, "groups of one rank are one group: each has threads and sockets"),
)


def apply_patches(patches: Iterable[Patch]) -> None:
    """Replaces each name, once in a process."""
    for patch in patches:
        if (patch.owner, patch.name) not in _ORIGINALS:
            original = _ORIGINALS[patch.owner, patch.name] = patch.original()
            setattr(patch.owner, patch.name, patch.ours(original) if patch.wraps else patch.ours)


def _tensor(parts: list[Record], record: Record) -> torch.Tensor | Record:
    """A tensor on the CPU, as torch pickles one: its storage by torch.save, and where in it the numbers lie.

    `parts` collects the records that belong to a tensor still to come.
    """
    if record.name != REBUILD:
        parts.append(record)
        return record
    parts[:] = [part for part in parts if not any(part is argument for argument in record.arguments)]
    try:
        storage, offset, shape, strides = record.arguments[:4]
        (saved,) = storage.arguments
        if storage.name not in LOADS or {type(number) for number in (offset, *shape, *strides)} - {int}:
            raise ValueError("it is no tensor")
        whole = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        return torch.empty(0, dtype=whole.dtype).set_(whole._untyped_storage, offset, shape, strides)
    except Exception as error:  # torch raises many kinds for bytes that a stranger made
        raise ValueError(f"it is no tensor ({type(error).__name__})") from error
