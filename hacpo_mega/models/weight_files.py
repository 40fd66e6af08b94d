"""The tensors of a Hugging Face folder by the headers of its safetensors files. Reads no weights, imports no torch.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, offsets of
its bytes behind the header), and the bytes. Not here: which tensors a model has (segments.py).
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacpo_mega.models.documents import one_line, parse_json
from hacpo_mega.models.folder import read_config, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
# Buffers that some folders store although they follow from the configuration.
DERIVED = "rotary_emb.inv_freq"
HEAD = "lm_head.weight"
# A router's bias: for the choice of experts alone, of no gradient, and float32 in folders and engines of any type.
CORRECTION = "e_score_correction_bias"
# How many layers a folder may have behind the last one, which predict further tokens: the older field, the newer.
PREDICTS = ("num_nextn_predict_layers", "num_mtp_layers")
BYTES_OF = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # the types in which weights are read
MAX_HEADER_BYTES = 100 * 2**20  # the format's own bound

BLOCK_BYTES = 64 * 2**10
WHOLE_BYTES = 64 * 2**20
NUM_BLOCKS = 1000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says; `file` is a name in the folder, `dtype` the format's, as "BF16"."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name, from its index or its single file.

    ValueError, a line per problem: no safetensors, an index that names what is not there, a file that is broken or cut
    short.
    """
    index = read_json(folder / INDEX).get("weight_map")
    if index is None and not (folder / SINGLE).is_file():
        raise ValueError(_no_safetensors(folder))
    if index is not None and not _is_map_of_names(index):
        raise ValueError(f"{folder / INDEX}: weight_map must name a file for every tensor")
    tensors, problems = {}, []
    for file in [SINGLE] if index is None else sorted(set(index.values())):
        wanted = None if index is None else {name for name, holder in index.items() if holder == file}
        try:
            header = read_header(folder / file)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        if lost := sorted((wanted or set()) - header.keys()):
            problems.append(f"{folder / file} lacks {len(lost)} tensors that {INDEX} looks for there: {some(lost)}")
        found = header if wanted is None else {name: header[name] for name in wanted & header.keys()}
        tensors.update(found)
    if problems:
        raise ValueError("\n".join(problems))
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. ValueError, one line, when it is missing, broken or cut short."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist, but {INDEX} names it: copy it from the model's source")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{file} is empty, cut short or no safetensors file ({size} bytes): copy it again")
        try:
            header = parse_json(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _stored(file.name, entry) for name, entry in header.items()}
            places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has a broken header and is no safetensors file: copy it again") from error
    end = max((stop for _, stop, _ in places), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{file} has {size} bytes, its header says {8 + length + end}: copy it again, it is cut short")
    for (_, stop, one), (start, _, other) in itertools.pairwise([(0, 0, "the header"), *places]):
        if start != stop:
            raise ValueError(
                f"{file}: the bytes of {one_line(other)} begin at {start}, where those of {one_line(one)} end at "
                f"{stop}: copy it again, it is no safetensors file"
            )
    return tensors


def weight_problems(folder: Path, wanted: Mapping[str, tuple[int, ...]], *, family: str, tied: bool) -> list[str]:
    """What keeps the tensors of a folder from being exactly `wanted` (name -> shape), a line each, by headers alone.

    A tied folder may keep its head: it is the embedding, by the configuration's word.
    """
    try:
        tensors = stored_tensors(folder)
    except ValueError as problems:
        return str(problems).splitlines()
    problems = []
    if missing := sorted(wanted.keys() - tensors.keys()):
        problems.append(f"{folder} lacks {len(missing)} tensors of this {family} model: {some(missing)}")
    extra = extra_layers(read_json(folder / "config.json"))
    if unknown := sorted(weight_names(tensors, tied=tied, extra=extra) - wanted.keys()):
        problems.append(f"{folder} has {len(unknown)} tensors unknown to {family}: {some(unknown)}")
    for name, shape in wanted.items():
        stored = tensors.get(name)
        if stored is not None and stored.shape != shape:
            problems.append(f"{folder / stored.file}: {name} has shape {stored.shape}; config.json says {shape}")
        if stored is not None and stored.dtype not in BYTES_OF:
            known = ", ".join(BYTES_OF)
            problems.append(
                f"{folder / stored.file}: {name} is stored as {one_line(stored.dtype)}; expected one of {known}"
            )
    return problems


def weight_names(tensors: Iterable[str], *, tied: bool, extra: tuple[str, ...] = ()) -> set[str]:
    """The names among a folder's tensors that are weights of their own: no derived buffer, no head of a tied model, and
    none of its `extra_layers`."""
    own = (name for name in tensors if not name.endswith(DERIVED) and not name.startswith(extra))
    return {name for name in own if not (tied and name == HEAD)}


def extra_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of tensors begin that predict further tokens: they lie behind the last layer, and are not used."""
    first, counts = config.get("num_hidden_layers"), [config.get(name) or 0 for name in PREDICTS]
    if any(type(count) is not int or not 0 <= count < 100 for count in counts) or type(first) is not int:
        return ()
    return tuple(f"model.layers.{first + number}." for number in range(max(counts)))


def without_extra_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model without these layers."""
    return {name: 0 if name in PREDICTS else value for name, value in config.items()}


def published_names(folder: Path) -> frozenset[str]:
    """The weights that a publish must bring; empty when the folder has none (nothing can be checked then)."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return frozenset()
    config = read_config(folder)
    tied, extra = bool(config.get("tie_word_embeddings")), extra_layers(config)
    return frozenset(weight_names(stored_tensors(folder), tied=tied, extra=extra))


def weights_fingerprint(folder: Path) -> str:
    """A hash of config.json and of the safetensors: another checkpoint at the same path is another model.

    Of a file over 64 MiB it reads the head and 1,000 blocks at even distance: a step of training changes weights
    everywhere, and reading 100 GB on every rank would take minutes. ValueError for a folder without safetensors.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(_no_safetensors(folder))
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            stride = BLOCK_BYTES if size <= WHOLE_BYTES else size // NUM_BLOCKS
            for start in range(0, size, stride):
                stream.seek(start)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


def some(names: list[str]) -> str:
    """The first three of many names."""
    return ", ".join(map(one_line, names[:3])) + (", ..." if len(names) > 3 else "")


def _stored(file: str, entry: Mapping[str, Any]) -> StoredTensor:
    """One entry of a header. ValueError when its bytes are not those of its shape."""
    start, end = entry["data_offsets"]
    tensor = StoredTensor(file, entry["dtype"], tuple(entry["shape"]))
    numbers = (start, end, *tensor.shape)
    if not isinstance(tensor.dtype, str) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError("a tensor has no type, or a place or a shape that is none")
    if tensor.dtype in BYTES_OF and end - start != math.prod(tensor.shape) * BYTES_OF[tensor.dtype]:
        raise ValueError("a tensor's bytes are not those of its shape")
    return tensor


def _is_map_of_names(index: Any) -> bool:
    """Whether it is name -> file name; a path would lead out of the folder."""
    return isinstance(index, dict) and all(isinstance(f, str) and f == Path(f).name for f in index.values())


def _no_safetensors(folder: Path) -> str:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds its weights as pickles ({some(pickles)}), which can run code when read; "
            "convert it to safetensors (save_pretrained of a current transformers does)"
        )
    return f"{folder} holds no safetensors ({SINGLE} or {INDEX}): give a Hugging Face folder, such as RUN/agents/NAME"
