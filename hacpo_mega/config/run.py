"""The configuration of a run from its own folder, whether or not its models and data still lie where they did."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacpo_mega.config.load import readable_problems
from hacpo_mega.config.tables.schema import Config
from hacpo_mega.models.files.documents import toml_file
from hacpo_mega.models.files.links import require_inside


def config_of_run(run_dir: Path) -> Config:
    """The resolved configuration that a run wrote. ValueError when the folder is none of a run, or the file is broken.

    Unlike `load_config` it looks at no model and no data file: the run is over, and they may be gone.
    """
    file = run_dir / "config.toml"
    require_inside(run_dir, file)
    if not file.exists():
        raise ValueError(f"{run_dir} has no config.toml: give the run_dir of a run")
    return config_of_table(toml_file(file, "the run_dir of a run"), file)


def config_of_table(table: dict[str, Any], file: Path) -> Config:
    """The resolved configuration that `file` holds as a table. ValueError, which names the file, when it is none."""
    try:
        return Config.model_validate(of_today(table))
    except ValidationError as error:
        lines = readable_problems(error, table)
        raise ValueError("\n".join(f"{file} is not the configuration of a run: {line}" for line in lines)) from error


def of_today(table: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the key that older runs have elsewhere: algorithm.success_reward is reward.success.

    At 1 it was the default, as reward.success is where it is not given.
    """
    algorithm, reward = table.get("algorithm"), table.get("reward", {})
    if not isinstance(algorithm, dict) or not isinstance(reward, dict) or "success_reward" not in algorithm:
        return table
    kept = {key: value for key, value in algorithm.items() if key != "success_reward"}
    success = {} if algorithm["success_reward"] == 1.0 else {"success": algorithm["success_reward"]}
    return table | {"algorithm": kept, "reward": reward | success}
