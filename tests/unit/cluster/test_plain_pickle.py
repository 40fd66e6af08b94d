"""A pickle from a file or a peer does nothing, whatever Python's own unpickler would do; plain values arrive as sent.

Every attack is first shown to be one.
"""

import io
import os
import pickle
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest
import torch
from hostile_pickles import METADATA, Calls, broken, touching
from hypothesis import strategies
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from hacpo_mega.cluster.patches import PlainUnpickler
from hacpo_mega.cluster.security.plain_pickle import Record, read_plain
from hacpo_mega.megatron.checkpoint.stored_index import NAMES

PLAIN = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats(allow_nan=False)
    | strategies.text() | strategies.binary(),
    lambda inner: strategies.lists(inner)
    | strategies.lists(inner).map(tuple)
    | strategies.dictionaries(strategies.text() | strategies.integers(), inner),
    max_leaves=20,
)  # fmt: skip


def from_peer(data: bytes) -> object:
    return PlainUnpickler(io.BytesIO(data)).load()


@pytest.mark.parametrize("way", touching(Path("file")))
def test_what_python_would_run_is_not_run(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as torch has it; Megatron, where it is imported, has replaced it by one that runs nothing
    monkeypatch.setattr(
        torch.storage, "_load_from_bytes", lambda data: torch.load(io.BytesIO(data), weights_only=False)
    )
    file = tmp_path / "touched"
    attack = touching(file)[way]
    with suppress(Exception):  # which comes after it has done its work
        pickle.loads(attack)
    assert file.exists(), "this is no attack"
    file.unlink()
    for names in (NAMES, frozenset()):
        with pytest.raises(ValueError, match=r"^it (names|calls|is no) [^\n]*$"):
            read_plain(attack, names)
    with pytest.raises(ValueError, match=r"^a process of this job has sent an object that is not taken [^\n]*$"):
        from_peer(attack)
    assert not file.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("what", broken())
def test_what_is_no_plain_value_is_one_line(what: str) -> None:
    before = {kind: dict(vars(kind)) for kind in (Metadata, ChunkStorageMetadata, Record)}
    with pytest.raises(ValueError, match=r"^[ -~]+$"):
        read_plain(broken()[what], NAMES)
    assert {kind: dict(vars(kind)) for kind in before} == before


def test_a_name_is_listed_with_its_module() -> None:
    assert read_plain(pickle.dumps(Metadata({})), NAMES).name == (METADATA, "Metadata")
    with pytest.raises(ValueError, match=r"it names torch\.distributed"):
        read_plain(pickle.dumps(Metadata({})), frozenset([("torch", "distributed.checkpoint.metadata.Metadata")]))


@hypothesis.given(PLAIN, strategies.integers(3, 5))
def test_plain_values_arrive_as_they_were(value: object, protocol: int) -> None:
    found = read_plain(pickle.dumps(value, protocol=protocol))
    assert repr(found) == repr(value)


@hypothesis.given(strategies.binary(max_size=200), strategies.integers(0, 400), strategies.integers(0, 255))
def test_any_bytes_are_a_plain_value_or_refused(noise: bytes, place: int, byte: int) -> None:
    """Noise, and a pickle with one byte changed."""
    whole = bytearray(pickle.dumps(Metadata({"a": [1, 2.0, "x"]}, {"b": torch.Size((3,))}), protocol=4))
    whole[place % len(whole)] = byte
    for data in (noise, b"\x80\x04" + noise, bytes(whole)):
        try:
            read_plain(data, NAMES)
        except ValueError:
            continue


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3, dtype=torch.uint8),
        torch.randn(4).bfloat16(),
        torch.randn(3, 4).t(),
        torch.randn(5, 5)[1:3, ::2],
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
    ],
    ids=["bytes", "bfloat16", "transposed", "strided", "a number", "empty"],
)
def test_a_peers_tensor_arrives_bit_by_bit(tensor: torch.Tensor) -> None:
    """vLLM's all-reduce of its own sends a handle so, on CUDA."""
    (found,) = from_peer(pickle.dumps([tensor]))
    assert torch.equal(found, tensor) and (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())


def test_a_tensor_with_something_in_its_storage_is_none(tmp_path: Path) -> None:
    file = tmp_path / "touched"
    stored = io.BytesIO()
    torch.save(Calls(os.system, f"touch {file}"), stored)
    hostile = Calls(
        torch._utils._rebuild_tensor_v2, Calls(torch.storage._load_from_bytes, stored.getvalue()), 0, (), ()
    )
    with pytest.raises(ValueError, match="it is no tensor"):
        from_peer(pickle.dumps(hostile))
    assert not file.exists()
