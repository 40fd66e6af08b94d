"""Check that TransformerEngine, apex, flash-attention 3 and flash-linear-attention are each complete or absent.

An incomplete one is refused in one line.

This comes before Megatron imports them. None is in a lock: all are built from source (launch/image/).
TransformerEngine's wheels on the public index lack the extension for torch, and the public package called apex is
another project. Megatron takes an ImportError for "not installed" and silently goes on without: a build for another
torch would be ignored.
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

import torch  # noqa: F401  apex's extension is linked to libraries that torch loads

# The first has all that megatron-core 0.19.2 imports for this project's layers and optimizer; the second came after it.
TE_FIRST, TE_BEYOND = (2, 14), (2, 20)
TE_REMEDY = (
    'Build it for this torch: pip install --no-build-isolation "transformer-engine[pytorch]>=2.14,<2.20" '
    "(docs/guide/gpus.md), or remove it: hacpo_mega trains without"
)
APEX_REMEDY = "Build it for this torch (launch/image/Dockerfile has the lines), or remove it: hacpo_mega trains without"


def version_problem(version: str) -> str | None:
    """Problem with a version of TransformerEngine; None if Megatron supports it."""
    if TE_FIRST <= tuple(int(part) for part in version.split(".")[:2]) < TE_BEYOND:
        return None
    return f"transformer-engine {version} is installed; Megatron takes 2.14 up to, not including, 2.20. {TE_REMEDY}"


@contextmanager
def whole_or_absent(name: str, remedy: str, absent: type[ImportError] = ModuleNotFoundError) -> Iterator[None]:
    """Context of an import that nothing follows from where the package is `absent`. ValueError for one that is there in
    part."""
    try:
        yield
    except absent:
        pass
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} is installed in part: {type(error).__name__}: {error}. {remedy}") from error


te = apex = None
with whole_or_absent("transformer-engine", TE_REMEDY, absent=ImportError):  # which Megatron reads as: not there
    import transformer_engine.pytorch as te
TE_VERSION = te and importlib.metadata.version("transformer-engine")
if TE_VERSION and (problem := version_problem(TE_VERSION)):
    raise ValueError(problem)

with whole_or_absent("apex", APEX_REMEDY):  # also without its extensions, or the other project of that name
    import amp_C  # noqa: F401
    import apex.optimizers
APEX_VERSION = apex and importlib.metadata.version("apex")

FLASH3 = None  # attention over packed sequences of flash-attention 3, whose module is not a part of flash_attn
with whole_or_absent(
    "flash-attention 3",
    "Build it for this torch (hopper/ of Dao-AILab/flash-attention), or remove it: torch's attention is used without",
):
    from flash_attn_interface import flash_attn_varlen_func

    FLASH3 = flash_attn_varlen_func

DELTA_RULE = None  # the gated delta rule over packed sequences of flash-linear-attention
with whole_or_absent(
    "flash-linear-attention",
    "Install it for this torch, or remove it: gated delta nets are computed by torch without",
):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    DELTA_RULE = chunk_gated_delta_rule
