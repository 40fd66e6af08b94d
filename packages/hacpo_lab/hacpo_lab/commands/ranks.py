"""The functions of ranks that are forked for an experiment, a fault campaign or a benchmark.

Imports are inside functions: a command that asks for ranks must not load the trainer.
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


def experiment_rank(config_file: str, answers_test: bool) -> None:
    """Runs one rank of an experiment's run; with `answers_test` its agent answers the test set at the end."""
    from hacpo_lab.experiments.final_answers import answer_test_set
    from hacpo_mega.config import load_config
    from hacpo_mega.trainer.trainer import Trainer

    with Trainer(load_config(config_file, try_templates=False)) as trainer:
        if not trainer.fit():
            raise SystemExit("told to end")
        if answers_test:
            answer_test_set(trainer)


def warm_start_rank(config_file: str) -> None:
    """Runs one rank that makes the models of a run: the same as `hacpo-mega init`."""
    from hacpo_mega.commands.warm_start import initialize
    from hacpo_mega.config import load_config

    initialize(load_config(config_file, try_templates=False))


def bench_rank(config_file: str, num_steps: int, workload: "Workload") -> None:
    """Runs one rank of a block, in a process forked from the server."""
    from hacpo_lab.throughput.measured_trainer import take_steps
    from hacpo_mega.config import load_config

    take_steps(load_config(config_file, try_templates=False), workload, num_steps)
