"""The attempts of a job that a launcher starts again and again (Slurm, torchrun with restarts), and when to stop it.

logs/attempts.jsonl   a line when an attempt begins: which job, which number, the step that it begins after
                      a line when it ends, by whoever knows how: launch/slurm.sbatch, or a process that is told to end

    died   a process failed, was killed or hung
    told   to end, from outside: a signal, the time limit, a preemption
    lost   a node went down

A job whose attempts die after the same step dies of something that starting again does not mend; the others may end as
often as they like. Elsewhere: which attempt this process is in (environment.py).
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from hacpo_mega.cluster.machine.environment import attempt_of_job, ends_are_noted
from hacpo_mega.models.files.documents import parse_json, short

LATEST_S = 1e11  # later times have no date
MOST_IN_VAIN = 3  # attempts that die after the same step
DIED, TOLD, LOST = "died", "told", "lost"
BEGIN = {"time_unix_s": (int, float), "job": str, "attempt": int, "step": int}
END = {"time_unix_s": (int, float), "job": str, "attempt": int, "ended": str}


def record_attempt(run_dir: Path, job: str, attempt: int, step: int) -> None:
    """Notes that an attempt begins, after a committed step (0: none). Written before anything that can fail."""
    # A job script that notes every end of its own: without such a line Slurm has ended the attempt.
    _append(run_dir, {"job": job, "attempt": attempt, "step": step, "ended": TOLD if ends_are_noted() else DIED})


def record_termination(run_dir: Path) -> None:
    """Notes that the attempt of this process was told to end, if a launcher starts jobs again."""
    if (found := attempt_of_job()) is not None:
        _append(run_dir, {"job": found[0], "attempt": found[1], "ended": TOLD})


def _append(run_dir: Path, line: dict[str, Any]) -> None:
    path = run_dir / "logs" / "attempts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():  # a line that a full disk has cut would take this one with it
            file.seek(-1, os.SEEK_END)
        begin = b"" if file.read(1) in (b"\n", b"") else b"\n"
        file.write(begin + json.dumps({"time_unix_s": round(time.time(), 3)} | line).encode() + b"\n")


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first: `time_unix_s`, `job`, `attempt`, `step`, and how it `ended`, or would.

    Lines that a full disk has cut are left out: no attempt ends for them.
    """
    path = run_dir / "logs" / "attempts.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    attempts = []
    for line in lines:
        try:
            found = _attempt(parse_json(line))
        except ValueError:
            continue
        if "step" in found:
            attempts.append({"ended": DIED} | found)
            continue
        same = (other for other in reversed(attempts) if all(other[key] == found[key] for key in ("job", "attempt")))
        if (begun := next(same, None)) is not None:  # else it ended before rank 0 began
            begun["ended"] = found["ended"]
    return attempts


def _attempt(line: Any) -> dict[str, Any]:
    """The attempt that a line notes. ValueError if it is neither a begin nor an end."""
    if not isinstance(line, dict):
        raise ValueError("no object")
    kinds = BEGIN if "step" in line or "ended" not in line else END
    if wrong := [name for name, kind in kinds.items() if not isinstance(line.get(name), kind)]:
        raise ValueError(f"{wrong[0]} is {short(line.get(wrong[0]))}")
    if not 0 <= line["time_unix_s"] < LATEST_S:  # nan is neither
        raise ValueError(f"time_unix_s is {short(line['time_unix_s'])}")
    if line.get("ended", DIED) not in (DIED, TOLD, LOST):
        raise ValueError(f"ended is {short(line['ended'])}")
    return line


def goes_in_circles(run_dir: Path, job: str, attempt: int, step: int) -> bool:
    """True if attempts of this job have died after the step that this one begins after. Its own notes are left out, and
    attempts that were told to end or lost a node do not count."""
    num_died = 0
    for line in reversed(read_attempts(run_dir)):
        if line["job"] == job and line["attempt"] < attempt:
            if line["step"] != step:
                break
            attempt = line["attempt"]  # torchrun's jobs may have had the same name before, and larger numbers
            num_died += line["ended"] == DIED
    return num_died >= MOST_IN_VAIN
