"""Grids and results of experiments that nobody ran: the numbers are made up, the records are real."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from hacpo_lab.experiments.grid import Cell, Grid, load_grid
from hacpo_lab.experiments.identity import Identity
from hacpo_lab.experiments.result import Curves, Diagnosis, Machine, Result

COMMIT = "a" * 40


def grid_file(folder: Path, **changes: Any) -> Path:
    """Methods alone, shared and (an ablation of it) cut, on seeds 1, 2, 3, tuned on 11, 12. None takes a key out."""
    table = {
        "results": str(folder / "results"),
        "work_dir": str(folder / "work"),
        "seeds": [1, 2, 3],
        "tuning_seeds": [11, 12],
        "learning_rates": [4e-4, 2e-4],
        "regimes": {"skills": {"config": str(folder / "run.toml")}},
        "methods": {
            "alone": {"set": ["algorithm.method=gspo"]},
            "shared": {},
            "cut": {"set": ["algorithm.alpha=0.0"], "learning_rate_of": "shared", "seeds": [2, 1]},
        },
    } | changes
    path = folder / "grid.toml"
    path.write_text(tomli_w.dumps({key: value for key, value in table.items() if value is not None}))
    return path


def make_grid(folder: Path, **changes: Any) -> Grid:
    return load_grid(grid_file(folder, **changes))


def make_result(cell: Cell, ends: Sequence[float], commit: str = COMMIT, **digests: Any) -> Result:
    """A run of as many agents as `ends` has accuracies; all began at 0.25."""
    names = tuple("ABC"[: len(ends)])
    identity = {"config": f"config of {cell.method}", "held_out": "prompts", "models": dict.fromkeys(names, "start")}
    return Result(
        regime=cell.regime,
        method=cell.method,
        learning_rate=cell.learning_rate,
        seed=cell.seed,
        stage=cell.stage,
        commit=commit,
        versions={},
        machine=Machine(cpu="a processor", cores=2),
        config_file="run.toml",
        overrides=(),
        identity=Identity(**(identity | digests)),
        agents=names,
        steps=(0, 10),
        seconds=(0.0, 12.5),
        curves=Curves(
            accuracy={name: (0.25, end) for name, end in zip(names, ends)},
            accuracy_by_skill={},
            generated_answers=dict.fromkeys(names, (0, 1000)),
            trained_answers={},
            updates={},
        ),
        diagnosis=Diagnosis(steps_per_window=10, values={}),
    )
