"""Different language models teach each other (HACPO, arXiv 2603.02604), on Megatron actors and vLLM engines.

The face: `load_config`, `Config`, `train`, which starts its ranks by itself, and `Trainer`, one rank of a job that a
launcher has started. Each is imported when it is first asked for: `hacpo-mega check` must answer at once, and so must a
worker whose grader imports hacpo_mega.grading.
"""

from typing import Any

__version__ = "0.2.0"
__all__ = ["Config", "Trainer", "__version__", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name in ("Config", "load_config"):
        from hacpo_mega import config

        return getattr(config, name)
    if name == "train":
        from hacpo_mega.jobs.from_python import train

        return train
    if name == "Trainer":
        from hacpo_mega.cluster.machine.environment import prepare_environment

        prepare_environment()  # vLLM and transformers read theirs when they are imported, which is now
        from hacpo_mega.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
