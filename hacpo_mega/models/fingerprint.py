"""What an evaluation must know of a Hugging Face folder before an engine loads it, read from config.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

BLOCK_BYTES = 64 * 2**10
WHOLE_BYTES = 64 * 2**20
NUM_BLOCKS = 1000


def check_positions(model: Path, max_prompt_tokens: int, max_answer_tokens: int) -> None:
    """ValueError when prompt and answer may exceed the positions of the model."""
    positions = _read_config(model).get("max_position_embeddings")
    if positions is not None and max_prompt_tokens + max_answer_tokens > positions:
        raise ValueError(
            f"prompts of {max_prompt_tokens} and answers of {max_answer_tokens} tokens exceed the {positions} "
            f"positions of {model}: lower one of them, for example --max-tokens {max(1, positions - max_prompt_tokens)}"
        )


def weights_dtype(model: Path) -> torch.dtype:
    """The floating-point type that a model folder names. ValueError when it names none that torch has."""
    config = _read_config(model)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{model / 'config.json'}: dtype {name!r} is unknown; expected float32, bfloat16 or float16")
    return dtype


def weights_fingerprint(model: Path) -> str:
    """A hash of config.json and of the safetensors: another checkpoint at the same path is another model.

    Of a file over 64 MiB it reads the head and 1,000 blocks at even distance: a step of training changes weights
    everywhere, and reading 100 GB on every rank would take minutes. ValueError for a folder without safetensors.
    """
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{model} holds no safetensors: give a Hugging Face folder, such as RUN/agents/NAME")
    digest = hashlib.blake2b((model / "config.json").read_bytes(), digest_size=16)
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            stride = BLOCK_BYTES if size <= WHOLE_BYTES else size // NUM_BLOCKS
            for start in range(0, size, stride):
                stream.seek(start)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


def _read_config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    if not file.is_file():
        raise ValueError(f"{model} has no config.json: give a Hugging Face folder, such as RUN/agents/NAME")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
