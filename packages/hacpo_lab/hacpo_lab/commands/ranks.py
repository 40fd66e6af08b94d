"""The work of a rank that is forked for an experiment, a fault campaign or a benchmark, and not started by `train`.

Imports are inside functions: who asks for ranks must not load what they do.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hacpo_lab.throughput.workload import Workload


def train_rank(config_file: str) -> None:
    """Runs one rank of a run, in a process forked from the server: the same as `hacpo-mega train`."""
    from hacpo_mega.cluster.launcher_env import RESUMABLE
    from hacpo_mega.config import load_config
    from hacpo_mega.trainer.trainer import Trainer

    with Trainer(load_config(config_file, try_templates=False)) as trainer:
        is_done = trainer.fit()
    if not is_done:
        raise SystemExit(RESUMABLE)


def bench_rank(config_file: str, num_steps: int, workload: "Workload") -> None:
    """Runs one rank of a block, in a process forked from the server."""
    from hacpo_lab.throughput.measured_trainer import take_steps
    from hacpo_mega.config import load_config

    take_steps(load_config(config_file, try_templates=False), workload, num_steps)
