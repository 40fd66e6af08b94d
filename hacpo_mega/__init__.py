"""Different language models teach each other (HACPO, arXiv 2603.02604), on Megatron actors and vLLM engines.

The face: `load_config`, `Config`, `train`, which starts its ranks by itself, and `Trainer`, one rank of a job that a
launcher has started. The last two are imported when they are first asked for: `hacpo-mega check` must answer at once.
"""

from typing import Any

from hacpo_mega.config import Config, load_config

__version__ = "0.2.0"
__all__ = ["Config", "Trainer", "__version__", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from hacpo_mega.jobs.from_python import train

        return train
    if name == "Trainer":
        from hacpo_mega.cluster.machine.environment import prepare_environment

        prepare_environment()  # vLLM and transformers read theirs when they are imported, which is now
        from hacpo_mega.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
