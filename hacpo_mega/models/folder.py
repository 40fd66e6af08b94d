"""What the engine needs to know of a Hugging Face folder before it opens it, from its JSON files and tensor headers.

Not here: weights (vLLM and megatron/weights.py read them) and text (samples/tokenizers.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open


def eos_token_ids(model: Path) -> tuple[int, ...]:
    """Every token id that ends an answer: of generation_config.json, config.json and the tokenizer of a model folder.

    The files disagree in practice: one may name the end of a text, another that of a chat turn.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = read_json(model / name).get("eos_token_id")
        found.update([named] if isinstance(named, int) else named or [])
    token = read_json(model / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = read_json(model / "tokenizer.json").get("added_tokens", [])
    found.update(entry["id"] for entry in added if text and entry["content"] == text)
    return tuple(sorted(found))


def weight_names(model: Path) -> frozenset[str]:
    """The names in a folder's safetensors files; empty when it has none (nothing can be checked then)."""
    names: set[str] = set()
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)


def read_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty without the file."""
    return json.loads(file.read_text()) if file.is_file() else {}
