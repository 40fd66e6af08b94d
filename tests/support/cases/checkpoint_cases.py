"""Checkpoints of the quickstart's configuration as files, written without a job."""

import math
from pathlib import Path

import pytest
from repository import ROOT

from hacpo_mega.checkpoint.files import (
    AgentState,
    Checkpoint,
    FileState,
    commit,
    file_sha256,
    find_start,
    folder_of,
    model_digests,
    plain,
)
from hacpo_mega.config import Config, load_config
from hacpo_mega.logbook.run.run_inputs import run_inputs

NAMES = ("qwen", "llama")


def config_in(run_dir: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "quickstart.toml", [f"run_dir={run_dir}", *overrides])


def written(
    config: Config, step: int, accuracy: float | None = None, names: tuple[str, ...] = NAMES
) -> tuple[Path, Checkpoint]:
    """The shards of a step on disk, and the record that would commit it."""
    folder = folder_of(config.run_dir, step)
    writing = folder.with_name(folder.name + ".writing")
    for name in names:
        (writing / name).mkdir(parents=True)
        (writing / name / "shard").write_bytes(f"{name} after {step} steps".encode())
    files = {f"{name}/shard": writing / name / "shard" for name in names}
    record = Checkpoint(
        folder=folder,
        step=step,
        config=plain(config),
        versions={"torch": "2"},
        models=model_digests(config),
        # what JSON has no number for, and what needs all of a float64
        capability={"history": [[0.1 + 0.2, math.nan], [1 / 3, 1.0]]},
        accuracy=accuracy,
        agents={name: AgentState(4 * step, 4 * step - 1, "bfloat16", 1, [{"told": []}]) for name in names},
        files={path: FileState(file.stat().st_size, file_sha256(file)) for path, file in files.items()},
        inputs=run_inputs(config),
    )
    return writing, record


def make_step(config: Config, step: int, accuracy: float | None = None, names: tuple[str, ...] = NAMES) -> Path:
    writing, record = written(config, step, accuracy, names)
    commit(writing, record)
    return record.folder


def start_of(config: Config, **how):
    return find_start(config, **how)


def complaint(config: Config, **options) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        start_of(config, **options)
    return str(error.value)
