"""TransformerEngine is whole and of a version that Megatron takes, or not there; else one line, before Megatron looks.

Its wheels on the public index lack the extension for torch, which is built from source. Megatron takes an ImportError
for "not installed" and goes on without; a package installed in part raises FileNotFoundError, a traceback of ten files.
"""

import importlib.metadata

# of megatron-core 0.16.1, from the first up to but without the second
FIRST, BEYOND = (2, 9), (2, 12)
REMEDY = (
    'Build it for this torch: pip install --no-build-isolation "transformer-engine[pytorch]>=2.9,<2.12" '
    "(docs/guide/gpus.md), or remove it: hacpo_mega trains without"
)


def version_problem(version: str) -> str | None:
    """What is wrong with a version of TransformerEngine; None where Megatron takes it."""
    if FIRST <= tuple(int(part) for part in version.split(".")[:2]) < BEYOND:
        return None
    return f"transformer-engine {version} is installed; Megatron takes 2.9 up to, not including, 2.12. {REMEDY}"


VERSION = None  # of the installed one
try:
    import transformer_engine.pytorch  # noqa: F401
except ImportError:
    pass  # as Megatron reads it: not there
except (OSError, RuntimeError, AssertionError) as error:
    raise ValueError(f"transformer-engine is installed in part: {type(error).__name__}: {error}. {REMEDY}") from error
else:
    VERSION = importlib.metadata.version("transformer-engine")
    if problem := version_problem(VERSION):
        raise ValueError(problem)
