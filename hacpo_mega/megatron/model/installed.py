"""Check that TransformerEngine, apex and flash-attention 3 are each complete or absent; else one line.

It comes before Megatron imports them. None is in a lock: all are built from source (launch/image/). TransformerEngine's
wheels on the public index lack the extension for torch, and the public package called apex is another project. Megatron
takes an ImportError for "not installed" and silently goes on without: a build for another torch would be ignored.
"""

import importlib.metadata

import torch  # noqa: F401  apex's extension is linked to libraries that torch loads

# of megatron-core 0.16.1, from the first up to but without the second
FIRST, BEYOND = (2, 9), (2, 12)
REMEDY = (
    'Build it for this torch: pip install --no-build-isolation "transformer-engine[pytorch]>=2.9,<2.12" '
    "(docs/guide/gpus.md), or remove it: hacpo_mega trains without"
)
APEX_REMEDY = "Build it for this torch (launch/image/Dockerfile has the lines), or remove it: hacpo_mega trains without"


def version_problem(version: str) -> str | None:
    """Problem with a version of TransformerEngine; None if Megatron supports it."""
    if FIRST <= tuple(int(part) for part in version.split(".")[:2]) < BEYOND:
        return None
    return f"transformer-engine {version} is installed; Megatron takes 2.9 up to, not including, 2.12. {REMEDY}"


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
