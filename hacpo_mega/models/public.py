"""Sizes of public models by name, so that a plan needs no folder. Imports no torch.

A row of public.json has the names of folders, the positions of each (null: the family's), and what the config.json of
https://huggingface.co/<name> says of them all, of an image checkpoint its text_config; those of DeepSeek are published
in fp8. Tests hold the number of parameters to the one that the Hub shows for the weights.
Elsewhere: a model that lies in a folder (architecture.py).
"""

import difflib
import json
from pathlib import Path

from hacpo_mega.models.families.architecture import Architecture

_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_MODELS = {
    name: {**row, "max_position_embeddings": positions} for row in _ROWS for name, positions in row.pop("names").items()
}
PUBLIC_NAMES = tuple(_MODELS)


def public_architecture(name: str) -> Architecture:
    """The model of a Hub name, or of a path that ends in its last part, such as models/Qwen3-8B.

    ValueError, with the nearest names, for one that is not in the table.
    """
    matches = [known for known in PUBLIC_NAMES if name in (known, _last(known)) or _last(name) == _last(known)]
    if not matches:
        by_last = {_last(known).lower(): known for known in PUBLIC_NAMES}
        near = difflib.get_close_matches(_last(name).lower(), by_last, n=3, cutoff=0.0)
        raise ValueError(
            f"{name} is no folder with a config.json and none of the {len(PUBLIC_NAMES)} public models that are known "
            f"by name. Nearest: {', '.join(by_last[last] for last in near)}"
        )
    return Architecture.from_config(Path(matches[0]), _MODELS[matches[0]])


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
