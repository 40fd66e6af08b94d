"""The configuration of a run from its own folder, whether or not its models and data still lie where they did."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacpo_mega.config.load import readable_problems
from hacpo_mega.config.tables.algorithm import REMOVED
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
    """A stored configuration without the keys of older runs that have moved or are gone.

    algorithm.success_reward is reward.success now; at 1 it was the default, as reward.success is where it is not given.
    The keys of the calibrated band are gone.
    """
    algorithm, reward = table.get("algorithm"), table.get("reward", {})
    if not isinstance(algorithm, dict) or not isinstance(reward, dict):
        return table
    kept = {key: value for key, value in algorithm.items() if key not in {"success_reward", *REMOVED}}
    before = algorithm.get("success_reward", 1.0)
    return table | {"algorithm": kept} | ({} if before == 1.0 else {"reward": reward | {"success": before}})


def completed(table: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration as plain values, with the keys that its version did not have or called otherwise.

    New ones are at their defaults, with which a run does what it did before there were such keys.
    """
    try:
        found = Config.model_validate(of_today(table)).model_dump(mode="json", exclude_none=True)
    except ValidationError:  # a key that is gone since: `changes` names it
        return table
    if table.get("algorithm", {}).get("band") == "calibrated":  # the run trained otherwise: `changes` asks
        found["algorithm"]["band"] = "calibrated"
    return found
