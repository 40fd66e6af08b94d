"""`hacpo-mega slurm --status RUN`: the status of a run on one screen, from its folder and from Slurm's queue.

Reads only the ends of files, so that it answers at once for a run of any size. Imports no torch.
Elsewhere: the results of a run (report/).
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from hacpo_mega.checkpoint.files import committed_steps
from hacpo_mega.jobs.attempts import read_attempts
from hacpo_mega.jobs.slurm_queue import QueuedJob, job_line, jobs_of
from hacpo_mega.logbook.run.provenance import exported_steps
from hacpo_mega.models.files.documents import parse_json, toml_file
from hacpo_mega.models.files.visible import one_line

DONE_OR_ACTIVE, INACTIVE, NO_RUN = 0, 1, 2  # exit codes
PART_BYTES = 1 << 20  # of a file that are read
LAST_STEPS = 10  # of which the median is the time of a step
# Messages of the job script, the ranks and Python about trouble, which a job that queues again may yet overcome.
TROUBLE = re.compile(
    r"ended first|no word from|stops:|ends with status|cannot queue again|does not queue again|no checkpoint in time|"
    r"slurm\.setup|the preflight failed|too few nodes|does not answer|does not get past|warning: |"
    r"[A-Z]\w*(?:Error|Exception)\b|^srun: error|BAD$|CANCELLED"
)

# Lines of the job script: one names the rank that ended first, the other begins an attempt of the job.
ENDED_FIRST = re.compile(
    r"\] rank (\d+) on \S+ ended first, with status \d+; the end of .*/attempt_(\d+)/rank_\1\.log:"
)
ATTEMPT_BEGINS = re.compile(r"\] attempt (\d+): job \d+ on ")
# A line of rank 0, by cli/slurm.py.
RANK_BEGINS = re.compile(r"^attempt (\d+) of job (.+?) begins after step (\d+);", re.MULTILINE)
# Lines at the end of a rank's log that give no reason: its first line, and messages of libraries at shutdown.
NO_REASON = re.compile(
    r"^\s*$|^rank \d+ of \d+ on |^nanobind:|^ - leaked|^srun: |^\[W|Warning: |^  warnings\.warn|^\s*\^+\s*$"
)


@dataclass(frozen=True)
class Status:
    """The status as text; exit code 0 (done, or a job waits or runs), 1 (neither), 2 (there is no run)."""

    text: str
    exit_code: int


def status_of(run_dir: Path) -> Status:
    """The status of the run in a folder."""
    if not any((run_dir / name).exists() for name in ("slurm", "config.toml", "logs/attempts.jsonl")):
        return Status(f"{run_dir} holds no run", NO_RUN)
    jobs, ended = jobs_of(run_dir), dict(_end_times(run_dir))
    num_steps = _num_steps(run_dir, jobs or [])
    step, safe = max(ended, default=0), max(committed_steps(run_dir), default=0)
    is_done = num_steps is not None and (exported_steps(run_dir) or 0) >= num_steps
    rows = [
        ("run", f"{run_dir}{', done' if is_done else ''}"),
        ("queue", _queue(jobs)),
        ("attempt", _attempt(run_dir)),
        ("step", f"{step} of {num_steps or '?'}, safe {safe}"),
        ("speed", _speed(ended, step, num_steps)),
        ("trouble", trouble_of(run_dir)[0]),
    ]
    exit_code = DONE_OR_ACTIVE if is_done or jobs is None or jobs else INACTIVE  # None: not known
    return Status("\n".join(f"{name:8} {text}" for name, text in rows), exit_code)


def _queue(jobs: Sequence[QueuedJob] | None) -> str:
    if jobs is None:
        return "unknown: squeue is not on the PATH, or does not answer"
    return job_line(jobs) or "no job of this run waits or runs"


def _attempt(run_dir: Path) -> str:
    """The newest attempt of the run: by the folders of the job script, else by the lines of another launcher's job."""
    numbers = [folder.name.removeprefix("attempt_") for folder in run_dir.glob("logs/attempt_*")]
    newest = max((int(number) for number in numbers if re.fullmatch("[0-9]{1,9}", number)), default=0)
    attempts = read_attempts(run_dir)
    if newest:
        begins = RANK_BEGINS.search(_read_part(run_dir / f"logs/attempt_{newest}/rank_0.log", at_end=False))
        if begins is None:
            return f"{newest}, of which rank 0 has not begun"
        number, job, step = int(begins[1]), begins[2], begins[3]
        times_s = [line["time_unix_s"] for line in attempts if (line["job"], line["attempt"]) == (job, number)]
        when = f" {_date(times_s[-1])}" if times_s else ""
        return f"{newest} ({one_line(job)}), began{when} after step {step}"
    if not attempts:
        return "none has begun"
    last = attempts[-1]
    return f"{last['attempt']} of {last['job']}, began {_date(last['time_unix_s'])} after step {last['step']}"


def _date(time_unix_s: float) -> str:
    return time.strftime("%F %T", time.localtime(time_unix_s))


def _num_steps(run_dir: Path, jobs: Sequence[QueuedJob]) -> int | None:
    """num_steps of the running job, else of the run's folder; before its first start, of the newest submission."""
    numbers = [re.search(r"/job\.(\d+)\.sbatch$", job.script) for job in jobs if job.state != "PENDING"]
    running = [run_dir / f"slurm/config.{number[1]}.toml" for number in numbers if number]
    submitted = sorted(run_dir.glob("slurm/config.*.toml"), key=lambda path: path.stat().st_mtime)
    for path in (*running, run_dir / "config.toml", *reversed(submitted)):
        # A file may be half written, or by another version: then the next one is read.
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            return int(toml_file(path, "a configuration")["num_steps"])
    return None


def _end_times(run_dir: Path) -> Iterator[tuple[int, float]]:
    """The last steps and their end times, in seconds since 1970; a torn or foreign line is left out."""
    for line in _last_lines(run_dir / "metrics.jsonl"):
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            table = parse_json(line)
            step, end_s = int(table["step"]), float(table["timing"]["time_unix_s"])
            if math.isfinite(end_s):
                yield step, end_s


def _speed(ended: dict[int, float], step: int, num_steps: int | None) -> str:
    """The median time of the last steps, from end to end, when the last one ended, and the time that is left."""
    ends = [ended[n] for n in sorted(ended)[-LAST_STEPS - 1 :]]
    between = [later - earlier for earlier, later in pairwise(ends)]
    if not between:
        return "no two steps yet"
    seconds = median(between)
    left = "" if num_steps is None or step >= num_steps else f", about {_duration(seconds * (num_steps - step))} left"
    ago = _duration(time.time() - ends[-1])
    return f"{seconds:.1f} s a step (median of {len(between)}), the last ended {ago} ago{left}"


def _duration(seconds: float) -> str:
    days, rest = divmod(int(max(0.0, seconds)), 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def trouble_of(run_dir: Path) -> tuple[str, bool]:
    """The last line of trouble in the newest job's log, with its file, and True; else a text that says so, and False.

    The logs of rank 0 are read only where no job has a log. The reason comes before the line: the last message of the
    rank that ended first in that attempt.
    """
    by_age = partial(sorted, key=lambda path: path.stat().st_mtime)
    for log in (by_age(run_dir.glob("slurm/[0-9]*.log")) or by_age(run_dir.glob("logs/attempt_*/rank_0.log")))[-1:]:
        lines = _last_lines(log)
        for number in reversed(range(len(lines))):
            if TROUBLE.search(lines[number]):
                sources = [*_reason(run_dir, lines[: number + 1]), (lines[number], log)]
                return f"\n{'':9}".join(f"{one_line(line[:200])}\n{'':9}in {path}" for line, path in sources), True
        return f"none in {log}", False
    return "no log yet", False


def _reason(run_dir: Path, lines: Sequence[str]) -> list[tuple[str, Path]]:
    """The reason for the failure of the last attempt in a job's log: a line and its file; none if no rank is named."""
    for line in reversed(lines):
        ranks: tuple[str, ...] = ()
        if match := ENDED_FIRST.search(line):
            attempt, ranks = match[2], (match[1], "0")  # an error of all ranks is printed by the first of each node
        elif not (match := ATTEMPT_BEGINS.search(line)):
            continue
        elif "ends with status" in lines[-1]:
            attempt, ranks = match[1], ("0",)
        for rank in ranks:
            log = run_dir / f"logs/attempt_{attempt}/rank_{rank}.log"
            if reasons := [line for line in _last_lines(log) if not NO_REASON.search(line)]:
                return [(reasons[-1], log)]
        break
    return []


def _read_part(path: Path, *, at_end: bool) -> str:
    """The last or the first bytes of a file; empty without it, and for a pipe or a device, which might never end."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - PART_BYTES) if at_end else 0)
            return file.read(PART_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _last_lines(path: Path) -> list[str]:
    text = _read_part(path, at_end=True)
    return text.split("\n") if text else []
