"""The attempts of a job that a launcher starts again and again (Slurm, torchrun with restarts), and when to stop it.

logs/attempts.jsonl   a line when an attempt begins: its job, its number, the step that it begins after
                      a line when it ends, by launch/slurm.sbatch, or by a process that is told to end

    died   a process failed, was killed or hung
    told   the attempt was told to end: by a signal, the time limit, a preemption
    lost   a node went down

A job whose attempts die again and again after the same step would not be mended by another start. Attempts that end in
the other ways do not count. Elsewhere: which attempt this process is in (environment.py).
"""

from pathlib import Path
from typing import Any

from hacpo_mega.cluster.machine.environment import attempt_of_job, ends_are_noted
from hacpo_mega.logbook.files.json_lines import COUNT, TEXT, FieldType, add_dated_line, is_number, wrong_field
from hacpo_mega.models.files.documents import parse_json

MAX_TIME_S = 1e11  # later times have no date
MAX_CRASHES = 3  # attempts that die after the same step
DIED, TOLD, LOST = "died", "told", "lost"
FIELDS = {
    "time_unix_s": FieldType("a time", lambda value: is_number(value) and 0 <= value < MAX_TIME_S),
    "job": TEXT,
    "attempt": COUNT,
    "step": COUNT.if_given,
    "ended": FieldType("an end", lambda value: value in (DIED, TOLD, LOST)).if_given,
}


def record_attempt(run_dir: Path, job: str, attempt: int, step: int) -> None:
    """Notes that an attempt begins, after a committed step (0: none). Written before anything that can fail."""
    # A job script that notes every end itself writes a further line; if it could not, Slurm has ended the attempt.
    _add(run_dir, job=job, attempt=attempt, step=step, ended=TOLD if ends_are_noted() else DIED)


def record_termination(run_dir: Path) -> None:
    """Notes that the attempt of this process was told to end, if a launcher starts jobs again."""
    if (current := attempt_of_job()) is not None:
        job, attempt = current
        _add(run_dir, job=job, attempt=attempt, ended=TOLD)


def _add(run_dir: Path, **line: Any) -> None:
    path = run_dir / "logs" / "attempts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    add_dated_line(path, **line)


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first: `time_unix_s`, `job`, `attempt`, `step`, `ended`.

    `ended` of an attempt whose end is not noted is that of its first line. Lines that a full disk has cut are left out.
    """
    path = run_dir / "logs" / "attempts.jsonl"
    attempts = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or wrong_field(record, FIELDS):
            continue
        if "step" in record:
            attempts.append({"ended": DIED} | record)
        elif "ended" in record:
            same = (one for one in reversed(attempts) if all(one[key] == record[key] for key in ("job", "attempt")))
            if (begun := next(same, None)) is not None:  # else the attempt ended before rank 0 began
                begun["ended"] = record["ended"]
    return attempts


def is_crash_loop(run_dir: Path, job: str, attempt: int, step: int) -> bool:
    """True if MAX_CRASHES attempts of this job before this one died after the `step` that it begins after.

    Attempts that were told to end or lost a node do not count.
    """
    num_died = 0
    for line in reversed(read_attempts(run_dir)):
        if line["job"] == job and line["attempt"] < attempt:
            if line["step"] != step:
                break
            attempt = line["attempt"]  # further back, a larger number is of an older job of the same name (torchrun)
            num_died += line["ended"] == DIED
    return num_died >= MAX_CRASHES
