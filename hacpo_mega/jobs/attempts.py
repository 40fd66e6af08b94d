"""The attempts of a job that a launcher starts again and again (Slurm, torchrun with restarts), and when to stop it.

logs/attempts.jsonl   one line per attempt: which job, which number, and the step that it begins after

A job whose attempts all begin after the same step dies of something that starting again does not mend.
Not here: which attempt this process is in (environment.py).
"""

import json
import time
from pathlib import Path
from typing import Any

from hacpo_mega.models.documents import parse_json, short

LATEST_S = 1e11  # later times have no date
MOST_IN_VAIN = 3  # attempts in a row that commit no further step


def record_attempt(run_dir: Path, job: str, attempt: int, step: int) -> None:
    """Notes that an attempt begins, after a committed step (0: none). Written before anything that can fail."""
    path = run_dir / "logs" / "attempts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"time_unix_s": round(time.time(), 3), "job": job, "attempt": attempt, "step": step}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first: `time_unix_s`, `job`, `attempt`, `step`."""
    path = run_dir / "logs" / "attempts.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    attempts = []
    for number, line in enumerate(lines, start=1):
        try:
            attempts.append(_attempt(parse_json(line)))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not a line of an attempt ({error}); move the file away"
            ) from error
    return attempts


def _attempt(line: Any) -> dict[str, Any]:
    """What a line says. ValueError where it is not as `record_attempt` writes it."""
    if not isinstance(line, dict):
        raise ValueError("no object")
    kinds = {"time_unix_s": (int, float), "job": str, "attempt": int, "step": int}
    if wrong := [name for name, kind in kinds.items() if not isinstance(line.get(name), kind)]:
        raise ValueError(f"{wrong[0]} is {short(line.get(wrong[0]))}")
    if not 0 <= line["time_unix_s"] < LATEST_S:  # nan is neither
        raise ValueError(f"time_unix_s is {short(line['time_unix_s'])}")
    return line


def goes_in_circles(run_dir: Path, job: str, attempt: int, step: int) -> bool:
    """Whether the last attempts of this job all began where this one does. What this attempt notes is not looked at."""
    begun = {line["attempt"]: line["step"] for line in read_attempts(run_dir) if line["job"] == job}
    return all(begun.get(attempt - back) == step for back in range(1, MOST_IN_VAIN + 1))
