"""Check that TransformerEngine, apex, flash-attention 3 and flash-linear-attention are each complete or absent.

An incomplete one is refused in one line.

This comes before Megatron imports them. None is in a lock: all are built from source (launch/image/).
TransformerEngine's wheels on the public index lack the extension for torch, and the public package called apex is
another project. Megatron takes an ImportError for "not installed" and silently goes on without: a build for another
torch would be ignored.
"""

import importlib.metadata

import torch  # noqa: F401  apex's extension is linked to libraries that torch loads

# The first has all that megatron-core 0.19.2 imports for this project's layers and optimizer; the second came after it.
FIRST, BEYOND = (2, 14), (2, 20)
REMEDY = (
    'Build it for this torch: pip install --no-build-isolation "transformer-engine[pytorch]>=2.14,<2.20" '
    "(docs/guide/gpus.md), or remove it: hacpo_mega trains without"
)
APEX_REMEDY = "Build it for this torch (launch/image/Dockerfile has the lines), or remove it: hacpo_mega trains without"


def version_problem(version: str) -> str | None:
    """Problem with a version of TransformerEngine; None if Megatron supports it."""
    if FIRST <= tuple(int(part) for part in version.split(".")[:2]) < BEYOND:
        return None
    return f"transformer-engine {version} is installed; Megatron takes 2.14 up to, not including, 2.20. {REMEDY}"


VERSION = None  # of the installed TransformerEngine
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

APEX_VERSION = None  # of the installed apex
try:
    import amp_C  # noqa: F401
    import apex.optimizers  # noqa: F401
except ModuleNotFoundError:
    pass  # not there, or without its extensions, or the other project of that name
except (ImportError, OSError, RuntimeError) as error:
    raise ValueError(f"apex is installed in part: {type(error).__name__}: {error}. {APEX_REMEDY}") from error
else:
    APEX_VERSION = importlib.metadata.version("apex")

FLASH3 = None  # attention over packed sequences of flash-attention 3, whose module is not a part of flash_attn
try:
    from flash_attn_interface import flash_attn_varlen_func
except ModuleNotFoundError:
    pass
except (ImportError, OSError, RuntimeError) as error:
    raise ValueError(
        f"flash-attention 3 is installed in part: {type(error).__name__}: {error}. Build it for this torch (hopper/ of "
        "Dao-AILab/flash-attention), or remove it: torch's attention is used without"
    ) from error
else:
    FLASH3 = flash_attn_varlen_func

DELTA_RULE = None  # the gated delta rule over packed sequences of flash-linear-attention
try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ModuleNotFoundError:
    pass
except (ImportError, OSError, RuntimeError) as error:
    raise ValueError(
        f"flash-linear-attention is installed in part: {type(error).__name__}: {error}. Install it for this torch, or "
        "remove it: gated delta nets are computed by torch without"
    ) from error
else:
    DELTA_RULE = chunk_gated_delta_rule
