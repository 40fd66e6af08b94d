"""Model folders whose safetensors have a whole header and a hole instead of numbers: any size, no disk space."""

import json
import math
from pathlib import Path

from hacpo_mega.models.families.architecture import Architecture
from hacpo_mega.models.sharding.segments import all_sources


def write_hollow_weights(folder: Path, architecture: Architecture) -> None:
    """`folder`/model.safetensors with every tensor of the architecture in bfloat16; all its numbers read as zero."""
    write_hollow_safetensors(
        folder / "model.safetensors", {source.name: source.shape for source in all_sources(architecture)}
    )


def write_hollow_safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 tensors by the letter of the format."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def write_smallest_tokenizer(folder: Path) -> None:
    """A tokenizer of one token, which fits every model."""
    model = {"type": "WordLevel", "vocab": {"<eos>": 0}, "unk_token": "<eos>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
