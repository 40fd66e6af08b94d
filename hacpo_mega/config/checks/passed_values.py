"""What the values of `agents.megatron` and `agents.vllm` may be, beyond their types: ranges, choices, code that exists.

vLLM's ranges are read from the source of its configuration, which is not imported. Not here: which keys there are
(pass_through.py). A name that only a plug-in of vLLM's knows is refused: no source says it.
"""

import ast
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacpo_mega.config.checks.grader_checks import code_problem
from hacpo_mega.models.files.documents import short

BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
LARGEST = 2**31
# Keys of vLLM that name classes, as module:Class or module.Class.
NAMES_CODE = ("worker_extension_cls", "logits_processors", "scheduler_cls")


def megatron_value_problem(value: Any) -> str | None:
    """What is wrong with the value of a TransformerConfig field, by sign and size: none of them takes others."""
    if type(value) in (int, float) and not 0 <= value < LARGEST:
        return f"must be from 0 to {LARGEST - 1}, found {short(value)}"
    return None


def vllm_value_problem(key: str, value: Any, folder: Path) -> str | None:
    """What is wrong with the value of an engine argument by the source of vLLM, which lies in `folder`; else None."""
    if type(value) in (int, float):
        if abs(value) >= 2**63:
            return f"must be a number that fits 64 bits, found {short(value)}"
        # where no bound is written, vLLM takes no number below 0, but for the -1 that means all log-probs
        bounds = _bounds(folder, key) or {"ge": -1 if key == "max_logprobs" else 0}
        return _range_problem(value, bounds)
    if key in NAMES_CODE and isinstance(value, str | list):
        named = [value] if isinstance(value, str) else value
        return next(filter(None, map(_class_problem, named)), None)
    if key == "quantization" and isinstance(value, str) and value not in (known := _quantizations(folder)):
        return f"{short(value)} is none of vLLM's; known: {', '.join(known)}" if known else None
    return None


def _range_problem(value: float, bounds: Mapping[str, float]) -> str | None:
    if all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
        return None
    wanted = " and ".join(f"{BOUNDS[name]} {bound:g}" for name, bound in bounds.items())
    return f"must be {wanted}, found {short(value)}"


def _bounds(folder: Path, key: str) -> dict[str, float]:
    """The bounds that vLLM's configuration gives the field of this name, where its `Field(...)` writes them out."""
    field = re.compile(rf"^    {re.escape(key)}:", re.MULTILINE)
    for file in sorted((folder / "config").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if field.search(text) else ():
            is_field = isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
            if is_field and isinstance(node.target, ast.Name) and node.target.id == key:
                words = {word.arg: word.value for word in node.value.keywords if word.arg in BOUNDS}
                found = {name: at.value for name, at in words.items() if isinstance(at, ast.Constant)}
                if found:
                    return found
    return {}


def _class_problem(name: Any) -> str | None:
    if not isinstance(name, str):
        return f"must name a class, found {short(name)}"
    module, _, attribute = name.replace(":", ".").rpartition(".")
    if not module or not attribute.isidentifier():
        return f"{short(name)} names no class; write module.Class"
    return code_problem(module, attribute, "class")


def _quantizations(folder: Path) -> list[str]:
    """The methods that vLLM's source lists."""
    file = folder / "model_executor/layers/quantization/__init__.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "QuantizationMethods":
            return [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    return []
