"""The attempts of a job that a launcher starts again and again (Slurm, torchrun with restarts), and when to stop it.

logs/attempts.jsonl   a line when an attempt begins: which job, which number, the step that it begins after
                      a line when it ends, by whoever knows how: launch/slurm.sbatch, or a process that is told to end

    died   a process failed, was killed or hung
    told   to end, from outside: a signal, the time limit, a preemption
    lost   a node went down

A job whose attempts die after the same step dies of something that starting again does not mend; the others may end as
often as they like. Elsewhere: which attempt this process is in (environment.py).
"""

from pathlib import Path
from typing import Any

from hacpo_mega.cluster.machine.environment import attempt_of_job, ends_are_noted
from hacpo_mega.logbook.files.json_lines import COUNT, TEXT, FieldType, add_dated_line, is_number, wrong_field
from hacpo_mega.models.files.documents import parse_json

LATEST_S = 1e11  # later times have no date
MOST_IN_VAIN = 3  # attempts that die after the same step
DIED, TOLD, LOST = "died", "told", "lost"
FIELDS = {
    "time_unix_s": FieldType("a time", lambda value: is_number(value) and 0 <= value < LATEST_S),
    **{"job": TEXT, "attempt": COUNT, "step": COUNT.if_given},
    "ended": FieldType("an end", lambda value: value in (DIED, TOLD, LOST)).if_given,
}


def record_attempt(run_dir: Path, job: str, attempt: int, step: int) -> None:
    """Notes that an attempt begins, after a committed step (0: none). Written before anything that can fail."""
    # A job script that notes every end of its own: without such a line Slurm has ended the attempt.
    _add(run_dir, job=job, attempt=attempt, step=step, ended=TOLD if ends_are_noted() else DIED)


def record_termination(run_dir: Path) -> None:
    """Notes that the attempt of this process was told to end, if a launcher starts jobs again."""
    if (found := attempt_of_job()) is not None:
        _add(run_dir, job=found[0], attempt=found[1], ended=TOLD)


def _add(run_dir: Path, **line: Any) -> None:
    path = run_dir / "logs" / "attempts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    add_dated_line(path, **line)


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first: `time_unix_s`, `job`, `attempt`, `step`, and how it `ended`, or would.

    Lines that a full disk has cut are left out: no attempt ends for them.
    """
    path = run_dir / "logs" / "attempts.jsonl"
    attempts = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if not isinstance(found, dict) or wrong_field(found, FIELDS):
            continue
        if "step" in found:
            attempts.append({"ended": DIED} | found)
        elif "ended" in found:
            same = (one for one in reversed(attempts) if all(one[key] == found[key] for key in ("job", "attempt")))
            if (begun := next(same, None)) is not None:  # else it ended before rank 0 began
                begun["ended"] = found["ended"]
    return attempts


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
