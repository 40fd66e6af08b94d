"""Warnings about logs that a resumed run should find in its folder and does not."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hacpo_mega.logbook.files.metrics import read_metrics
from hacpo_mega.logbook.files.rollout_log import logged_parts
from hacpo_mega.logbook.run.provenance import read_starts


def missing_logs(run_dir: Path, steps_done: int) -> Iterator[str]:
    """A line for missing metrics and one for missing answers of the steps that were done.

    A lane's answers are missing where a later lane's are there; of the last lanes nothing can be told.
    """
    try:
        first = read_starts(run_dir)[0]["steps_done"]
    except (ValueError, KeyError, IndexError):  # nothing is known of where it began, and other files tell of it
        first = 0
    expected = range(first + 1, steps_done + 1)
    path = run_dir / "metrics.jsonl"
    known = read_metrics(path) if path.exists() else {}
    if missing := [step for step in expected if step not in known]:
        yield f"warning: {path} has no line of {_spoken(missing)}, which this run has done; it goes on without them"
    lanes = logged_parts(run_dir)
    if missing := [step for step in expected if set(range(max(lanes.get(step, [0])) + 1)) != lanes.get(step, set())]:
        folder = run_dir / "rollouts"
        yield f"warning: {folder} lacks answers of {_spoken(missing)}, which this run has done; it goes on without them"


def _spoken(steps: Sequence[int]) -> str:
    """Ascending steps as text: "steps 1 to 4, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1] = [runs[-1][0], step]
        else:
            runs.append([step])
    return ("steps " if len(steps) > 1 else "step ") + ", ".join(" to ".join(map(str, run)) for run in runs)
