"""Different language models teach each other (HACPO, arXiv 2603.02604), on Megatron actors and vLLM engines.

The face: `load_config`, `Config`, and `Trainer`, which is imported when it is first asked for, since it brings torch,
Megatron and vLLM with it and `hacpo-mega check` must answer without them.
"""

from typing import Any

from hacpo_mega.config import Config, load_config

__version__ = "0.2.0"
__all__ = ["Config", "Trainer", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from hacpo_mega.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
