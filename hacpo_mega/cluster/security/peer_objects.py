"""Messages between processes in torch's object collectives: plain values and tensors, nothing that runs.

This project sends bytes of a stated layout. Its libraries send objects by `all_gather_object` and the like: Megatron
the keys of its parameter groups, vLLM names of shared memory and handles of it, numbers and settings it has measured.
torch unpickles them; who speaks as a rank would run code in all the others. A patch (cluster/patches.py) puts the
reader below in the place where torch does, for all of them.
Not here: vLLM's message queue, which is never made (rollout/vllm/host_process.py).
"""

import io
from functools import partial
from typing import Any

import torch

from hacpo_mega.cluster.security.plain_pickle import Names, Record, read_plain

REBUILD, LOAD, HOOKS = (
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
)
TENSOR: Names = frozenset((REBUILD, LOAD, HOOKS))


class PlainUnpickler:
    """The replacement that torch calls instead of pickle.Unpickler."""

    def __init__(self, file: io.BytesIO) -> None:
        self._data = file.read()

    def load(self) -> Any:
        """The object. ValueError, which ends the job, for any other type than those above."""
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


def _tensor(parts: list[Record], record: Record) -> torch.Tensor | Record:
    """A tensor on the CPU, as torch pickles one: its storage by torch.save, and where in it the numbers lie.

    `parts` are those of tensors that still follow.
    """
    if record.name != REBUILD:
        parts.append(record)
        return record
    parts[:] = [part for part in parts if not any(part is argument for argument in record.arguments)]
    try:
        storage, offset, shape, strides = record.arguments[:4]
        (saved,) = storage.arguments
        if storage.name != LOAD or {type(number) for number in (offset, *shape, *strides)} - {int}:
            raise ValueError("it is no tensor")
        found = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        return torch.empty(0, dtype=found.dtype).set_(found._untyped_storage, offset, shape, strides)
    except Exception as error:  # of bytes from a stranger, whatever they make torch complain of
        raise ValueError(f"it is no tensor ({type(error).__name__})") from error
