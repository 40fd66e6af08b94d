"""Message of a pipeline's last stage to the others about an update, as bytes: JSON, and the numbers of each tensor.

Numbers, texts, lists, tuples, tensors, and named tuples of the classes that the receiver expects; every bit arrives.

Not here: sender and receiver (schedule.py).
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from hacpo_mega.cluster.groups.tree import as_tensor, join, split

DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}


def to_bytes(thing: Any) -> bytes:
    """Encodes the message. TypeError for anything else than the above."""
    tensors: list[bytes] = []
    return join([json.dumps(_described(thing, tensors)).encode(), *tensors])


def from_bytes(message: bytes, records: Sequence[type]) -> Any:
    """Inverse of `to_bytes`; `records` are the classes of named tuples that may be in it, by their names."""
    text, *tensors = split(message)
    return _read(json.loads(text), iter(tensors), {record.__name__: record for record in records})


def _described(thing: Any, tensors: list[bytes]) -> Any:
    if isinstance(thing, torch.Tensor):
        tensors.append(thing.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": str(thing.dtype), "shape": list(thing.shape)}
    if isinstance(thing, tuple | list):
        entries = [_described(entry, tensors) for entry in thing]
        return {"of": type(thing).__name__, "entries": entries}
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    raise TypeError(f"a report of a loss holds a {type(thing).__name__}, which no message of a stage does")


def _read(described: Any, tensors: Any, records: dict[str, type]) -> Any:
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        numbers = as_tensor(next(tensors)).view(DTYPES[described["tensor"]])
        return numbers.reshape(described["shape"])
    entries = [_read(entry, tensors, records) for entry in described["entries"]]
    kind = described["of"]
    return entries if kind == "list" else tuple(entries) if kind == "tuple" else records[kind](*entries)
