"""The configuration of a run. Imports no torch and no model library, so that `hacpo-mega check` answers at once."""

from hacpo_mega.config.load import config_of_run, config_of_table, load_config
from hacpo_mega.config.tables.agents import (
    AgentConfig,
    DataParallelConfig,
    InitConfig,
    OptimizerConfig,
    WarmStartConfig,
)
from hacpo_mega.config.tables.algorithm import AlgorithmConfig
from hacpo_mega.config.tables.prompting import Prompting
from hacpo_mega.config.tables.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    RewardConfig,
    RolloutConfig,
    TrainingConfig,
)
from hacpo_mega.config.tables.slurm import SlurmConfig

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "EvaluationConfig",
    "InitConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "Prompting",
    "RewardConfig",
    "RolloutConfig",
    "SlurmConfig",
    "TrainingConfig",
    "WarmStartConfig",
    "config_of_run",
    "config_of_table",
    "load_config",
]
