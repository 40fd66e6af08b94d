"""The attempts of a job that a launcher starts again and again (Slurm, torchrun with restarts), and when to stop it.

logs/attempts.jsonl   one line per attempt: which job, which number, and the step that it begins after

A job whose attempts all begin after the same step dies of something that starting again does not mend.
Not here: which attempt this process is in (environment.py).
"""

import json
import time
from pathlib import Path
from typing import Any

from hacpo_mega.models.documents import parse_json

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
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    attempts = []
    for number, line in enumerate(lines, start=1):
        try:
            attempt = parse_json(line)
            if not isinstance(attempt, dict):
                raise ValueError("no object")
            attempts.append(attempt)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not a line of an attempt ({error}); move the file away"
            ) from error
    return attempts


def goes_in_circles(run_dir: Path, job: str, attempt: int, step: int) -> bool:
    """Whether the last attempts of this job all began where this one does. What this attempt notes is not looked at."""
    begun = {line["attempt"]: line["step"] for line in read_attempts(run_dir) if line["job"] == job}
    return all(begun.get(attempt - back) == step for back in range(1, MOST_IN_VAIN + 1))
