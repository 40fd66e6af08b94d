"""The tensors of a Hugging Face folder by the headers of its safetensors files. Imports no torch.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, offsets of
its bytes behind the header), and the bytes. A folder has several readers, and is refused where they would take
different weights from it:

    training        the tensors that the index names, each from its file; model.safetensors without an index
    vLLM 0.32       all tensors of the files that the index names; without an index those of every *.safetensors
    transformers 5  model.safetensors where there is one, else all tensors of the files that the index names; with peft
                    installed an adapter on top
    all             the embedding as the head of a tied model; vLLM overwrites both with a head that is stored

Files that all pass over are no problem: pickles beside safetensors, Mistral's consolidated.safetensors beside an index.
Elsewhere: which tensors a model has (segments.py).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hacpo_mega.models.files.documents import one_line
from hacpo_mega.models.files.folder import (
    MERGE,
    PREDICTS,
    adapter_files,
    has_tower,
    of_base,
    read_config,
    read_json,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth")
# Buffers that some folders store although they follow from the configuration.
DERIVED = "rotary_emb.inv_freq"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Names of the text model's tensors in image checkpoints of transformers 4 and 5 -> in the text model itself.
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "lm_head.": "lm_head.",
}
# Names of a router's bias in most families, and in Hy3. It takes part in the choice of experts alone, has no gradient,
# and is float32 in folders and engines of any type.
CORRECTION, EXPERT_BIAS = "e_score_correction_bias", "expert_bias"
# A number of a layer that its output is multiplied with, which is not trained.
LAYER_SCALE = "layer_scalar"
# Prefix of multi-token prediction layers that are not numbered after the model's own.
MTP_PREFIX = "mtp."
# Last names of stacks of experts (stacked_experts.py), and the matrices of an expert that are in them.
GATE_UP, DOWN = "gate_up_proj", "down_proj"
_IN_STACK = {GATE_UP: ("gate_proj", "up_proj"), DOWN: (DOWN,)}
_STACK = re.compile(r"(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_IN_LAYER = re.compile(r"model\.layers\.\d+\.experts\.")
# Rows and columns of a block of fp8 numbers that have one scale, and the ending of the names of these.
FP8_BLOCK, FP8_SCALES = 128, "_scale_inv"
BYTES_OF = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # the types in which weights are read

COMPARED_BYTES = 2**24  # at once
BLOCK_BYTES = 64 * 2**10
WHOLE_BYTES = 64 * 2**20
NUM_BLOCKS = 1000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place and header; `file` is a name in the folder, `dtype` the format's, as "BF16".

    `name` is the one in the file. Its bytes are those from `start` to `stop` of the file.
    In a stack of experts (stacked_experts.py), `shape` is the shape of a matrix of expert number `expert`. With a
    `half` this matrix is every second row, from 0 or 1 on, or, in a `plain` stack, the upper or the lower half.
    `scales` are those of a stack in MXFP4, or of a matrix in fp8.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    expert: int | None = None
    half: int | None = None
    plain: bool = False
    scales: "StoredTensor | None" = None

    @property
    def is_packed(self) -> bool:
        """True if the file holds it in another form (stacked_experts.py)."""
        return self.expert is not None or self.scales is not None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's text model by name; an image checkpoint has them under others, beside its tower's.

    ValueError as `all_tensors`.
    """
    tensors, packing = _unstacked(all_tensors(folder)), read_json(folder / "config.json").get("quantization_config")
    if isinstance(packing, dict) and packing.get("quant_method") == "fp8":
        tensors = _with_scales(tensors)
    if not has_tower(folder):
        return tensors
    return {name: stored for key, stored in tensors.items() if (name := text_name(key)) is not None}


def _with_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with fp8 matrices as bfloat16, each with the scales of its blocks, which are no tensors any more."""
    joined = dict(tensors)
    for name, stored in tensors.items():
        scales = tensors.get(f"{name}{FP8_SCALES}")
        blocks = tuple(-(-size // FP8_BLOCK) for size in stored.shape)
        if stored.dtype == "F8_E4M3" and scales is not None and scales.shape == blocks:
            joined[name] = replace(stored, dtype="BF16", scales=joined.pop(scales.name))
    return joined


def _unstacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with the matrices and biases of every expert in place of stacks.

    Stacks with biases are gpt-oss's, others are plain. A tensor without the dimensions of a stack stays as it is.
    """
    unstacked: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        block, _, last = name.rpartition(".")
        plain = f"{block}.{GATE_UP}_bias" not in tensors
        match = _STACK.fullmatch(last) if not plain or (last in _IN_STACK and block.endswith(".experts")) else None
        base, kind = match.groups(default="") if match is not None else ("", "")
        scales = tensors.get(f"{block}.{base}_scales") if kind == "_blocks" else None
        fits = scales is None if kind != "_blocks" else scales is not None and scales.shape == stored.shape[:-1]
        if match is None or len(stored.shape) != _DIMENSIONS[kind] or not fits:
            unstacked[name] = stored
        elif kind != "_scales":
            unstacked |= _members(block, base, replace(stored, plain=plain, scales=scales))
    return unstacked


def _members(block: str, base: str, stack: StoredTensor) -> dict[str, StoredTensor]:
    """The matrices or biases of the experts of a stack."""
    (count, *sizes), is_packed = stack.shape, stack.scales is not None
    sizes = sizes if stack.plain else [sizes[0], 32 * sizes[1]] if is_packed else sizes[::-1]
    rows, *columns = sizes
    parts, kind = _IN_STACK[base], "weight" if columns else "bias"
    whole = replace(stack, dtype="BF16" if is_packed else stack.dtype, shape=(rows // len(parts), *columns))
    return {
        f"{block}.{expert}.{part}.{kind}": replace(whole, expert=expert, half=half if len(parts) > 1 else None)
        for expert in range(count)
        for half, part in enumerate(parts)
    }


def stacks_experts(names: Iterable[str]) -> bool:
    """True if tensors by these names are those of a model whose folders stack experts, which have biases."""
    return any((parsed := parse_expert(name)) is not None and parsed[3] for name in names)


def stacks_plainly(names: Iterable[str]) -> bool:
    """True if tensors by these names are those of a model whose folders all have plain stacks: its experts lie in the
    layer itself (Gemma 4)."""
    return any(_IN_LAYER.match(name) is not None for name in names)


def parse_expert(name: str) -> tuple[str, str, str, str] | None:
    """(block, number, matrix, ending of a stack's name) of an expert's tensor; None for another name."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (*match.groups()[:3], "_bias" if match[4] == "bias" else "")


def tower_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of an image checkpoint that are none of its text model: its vision tower, which stays as it is."""
    tensors = all_tensors(folder) if has_tower(folder) else {}
    return {name: stored for name, stored in tensors.items() if text_name(name) is None}


def text_name(stored: str) -> str | None:
    """The name of a text model's tensor that an image checkpoint holds as `stored`; None for one of its tower."""
    for prefix, text_prefix in TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return text_prefix + stored.removeprefix(prefix)
    return None


def all_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by the names in its files, from its index or its single file.

    ValueError, a line per problem: no safetensors, an index that names what is not there, a file that is broken or cut
    short, a folder from which another reader would take other weights.
    """
    index = read_json(folder / INDEX).get("weight_map")
    has_index = (folder / INDEX).is_file()
    if not has_index and not (folder / SINGLE).is_file():
        raise ValueError(_no_safetensors(folder))
    if has_index and not _is_map_of_names(index):
        raise ValueError(f"{folder / INDEX}: weight_map must name a file for every tensor")
    tensors, problems = {}, [*_read_otherwise(folder, None if index is None else set(index.values()))]
    extra_names = extra_layers(read_json(folder / "config.json"))
    for file in [SINGLE] if index is None else sorted(set(index.values())):
        wanted = None if index is None else {name for name, holder in index.items() if holder == file}
        try:
            header = read_header(folder / file)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        if lost := sorted((wanted or set()) - header.keys()):
            problems.append(f"{folder / file} lacks {len(lost)} tensors that {INDEX} looks for there: {some(lost)}")
        unnamed = weight_names(header.keys() - (wanted or header.keys()), tied=False, extra=extra_names)
        problems += _against_index(folder / file, unnamed, index or {})
        tensors |= header if wanted is None else {name: header[name] for name in wanted & header.keys()}
    if problems:
        raise ValueError("\n".join(problems))
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. ValueError, one line, when it is missing, broken or cut short."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist, but {INDEX} names it: copy it from the model's source")
    try:
        with safe_open(file, framework="np"), file.open("rb") as stream:  # it compares sizes, types, shapes and places
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file ({one_line(str(error))}): copy it again") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + length + edge for edge in entry["data_offsets"])
        tensors[name] = StoredTensor(file.name, name, entry["dtype"], tuple(entry["shape"]), start, stop)
    return tensors


def weight_problems(folder: Path, wanted: Mapping[str, tuple[int, ...]], *, family: str, tied: bool) -> list[str]:
    """Differences between the tensors of a folder and `wanted` (name -> shape), a line each, by headers alone.

    A tied folder may keep its head: `head_problem` compares it.
    """
    try:
        tensors = stored_tensors(folder)
    except ValueError as problems:
        return str(problems).splitlines()
    problems = []
    if has_tower(folder) and not tower_tensors(folder):
        problems.append(
            f"{folder} has a text_config and no tensor of a vision tower, which its export would lack: copy the folder "
            "again, or make text_config its config.json"
        )
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


def head_problem(folder: Path, *, tied: bool) -> str | None:
    """A line when a tied folder stores a head that is not its embedding, byte by byte; None also where none is stored.

    Reads both, a part at a time: the configuration ties the head to the embedding, but vLLM loads what is stored.
    ValueError as `stored_tensors`.
    """
    tensors = stored_tensors(folder) if tied else {}
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None or embedding is None or _are_equal(folder, head, embedding):
        return None
    return (
        f"{folder / head.file}: {HEAD} differs from {EMBEDDING}, and tie_word_embeddings of config.json says that they "
        "are one: training takes the embedding, vLLM the stored head. Take the head out of the file, or set "
        "tie_word_embeddings to false"
    )


def require_one_reading(folder: Path, *, tied: bool) -> None:
    """ValueError, a line per problem, for a folder from which different readers would take different weights."""
    stored_tensors(folder)
    if problem := head_problem(folder, tied=tied):
        raise ValueError(problem)


def _are_equal(folder: Path, one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with (folder / one.file).open("rb") as left, (folder / other.file).open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for done in range(0, one.stop - one.start, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.stop - one.start - done)
            if left.read(size) != right.read(size):
                return False
    return True


def weight_names(tensors: Iterable[str], *, tied: bool, extra: tuple[str, ...] = ()) -> set[str]:
    """The names among a folder's tensors that are weights of their own: no derived buffer, no head of a tied model, and
    none of its `extra_layers`."""
    own = (name for name in tensors if not name.endswith(DERIVED) and not name.startswith(extra))
    return {name for name in own if not (tied and name == HEAD)}


def extra_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Name prefixes of multi-token prediction layers, which are not used.

    They are numbered after the last layer or, as in Qwen3-Next, have MTP_PREFIX.
    """
    first, counts = config.get("num_hidden_layers"), [config.get(name) or 0 for name in PREDICTS]
    if any(type(count) is not int or not 0 <= count < 100 for count in counts) or type(first) is not int:
        return (MTP_PREFIX,)
    return MTP_PREFIX, *(f"model.layers.{first + number}." for number in range(max(counts)))


def without_extra_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model without these layers."""
    return {name: 0 if name in PREDICTS else value for name, value in config.items()}


def published_names(folder: Path, *, tied: bool) -> frozenset[str]:
    """The weights that a publish must bring; empty when the folder has none (nothing can be checked then)."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return frozenset()
    return frozenset(weight_names(stored_tensors(folder), tied=tied, extra=extra_layers(read_config(folder))))


def weights_fingerprint(folder: Path, num_blocks: int = NUM_BLOCKS) -> str:
    """A hash of config.json and of the safetensors, so that another checkpoint at the same path is another model.

    For a file over 64 MiB it reads `num_blocks` blocks at even distance, the head among them: a step of training
    changes weights everywhere, and reading 100 GB on every rank would take minutes. ValueError for a folder without
    safetensors.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(_no_safetensors(folder))
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            stride = BLOCK_BYTES if size <= WHOLE_BYTES else size // num_blocks
            for start in range(0, size, stride):
                stream.seek(start)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


def some(names: list[str]) -> str:
    """The first three of many names."""
    return ", ".join(map(one_line, names[:3])) + (", ..." if len(names) > 3 else "")


def _read_otherwise(folder: Path, named: set[str] | None) -> Iterator[str]:
    """A line for every kind of file from which another reader would take weights; `named` are those of the index."""
    stored = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(".")}
    adapters = set(adapter_files(folder))
    if adapters:
        yield (
            f"{folder} holds {some(sorted(adapters))} beside whole weights: transformers with peft puts the adapter on "
            "top of them, training does not. Move the adapter away; if it is not merged yet, merge it first"
        )
    if named is None:
        if strays := sorted(stored - adapters - {SINGLE}):
            yield (
                f"{folder} holds {some(strays)} beside {SINGLE}, without {INDEX}: vLLM loads every *.safetensors, "
                f"training {SINGLE} alone. Move what is not the model's away, or copy the index from its source"
            )
        return
    if SINGLE in stored - named:
        yield (
            f"{folder} holds {SINGLE} beside {INDEX}, which does not name it: transformers reads the one, training "
            "and vLLM the files of the other. Move away the one that is not the model's"
        )
    if stale := sorted(name for name in stored - named if SHARD.fullmatch(name)):
        yield (
            f"{folder} holds {some(stale)}, which {INDEX} does not name: a file of another save, or the index is. "
            "Move it away, or copy the folder again"
        )


def _against_index(file: Path, unnamed: set[str], index: Mapping[str, str]) -> Iterator[str]:
    """A line for tensors of a file that the index does not look for there: other readers load them all the same."""
    if elsewhere := sorted(unnamed & index.keys()):
        yield (
            f"{file} holds {len(elsewhere)} tensors that {INDEX} places in another file: {some(elsewhere)}; training "
            "takes those of the index, vLLM and transformers the ones that they read last. Copy the folder again"
        )
    if nowhere := sorted(unnamed - index.keys()):
        yield (
            f"{file} holds {len(nowhere)} tensors that {INDEX} does not name: {some(nowhere)}; vLLM and transformers "
            "load them, training does not. Copy the folder again"
        )


def _is_map_of_names(index: Any) -> bool:
    """True if it maps names to file names; a path would lead out of the folder."""
    return isinstance(index, dict) and all(isinstance(f, str) and f == Path(f).name for f in index.values())


def _no_safetensors(folder: Path) -> str:
    if adapters := adapter_files(folder):
        return f"{folder} holds {some(adapters)}{of_base(folder)} and no whole weights; {MERGE}"
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds its weights as pickles ({some(pickles)}), which can run code when read; "
            "convert it to safetensors (save_pretrained of a current transformers does)"
        )
    return f"{folder} holds no safetensors ({SINGLE} or {INDEX}): give a Hugging Face folder, such as RUN/agents/NAME"
