"""`hacpo-mega slurm --status RUN`: the status of a run on one screen, from its folder and from Slurm's queue.

Reads the ends of files alone, so that it answers at once beside a run of any size. Imports no torch.
Elsewhere: what a run has learnt (report/).
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
from hacpo_mega.jobs.slurm_queue import QueuedJob, jobs_of, spoken
from hacpo_mega.logbook.run.provenance import exported_steps
from hacpo_mega.models.files.documents import parse_json, toml_file
from hacpo_mega.models.files.visible import one_line

DONE_OR_ALIVE, NOBODY_WORKS, NO_RUN = 0, 1, 2  # exit codes
END_BYTES = 1 << 20  # of a file that are looked at
LAST_STEPS = 10  # over which the seconds of a step are the median
# Messages of the job script, the ranks and Python about trouble; in a job that queues again they are no trouble yet.
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
RANK_BEGINS = re.compile(r"^attempt (\d+) of job (.+?) begins after step (\d+);", re.MULTILINE)  # cli/slurm.py says it
# Lines at the end of a rank's log that give no reason: its first line, and messages of libraries at shutdown.
NO_REASON = re.compile(
    r"^\s*$|^rank \d+ of \d+ on |^nanobind:|^ - leaked|^srun: |^\[W|Warning: |^  warnings\.warn|^\s*\^+\s*$"
)


@dataclass(frozen=True)
class Status:
    """The shown status, and 0 (done, or somebody works on it), 1 (nobody does), 2 (there is no run)."""

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
    works = is_done or jobs is None or bool(jobs)
    return Status("\n".join(f"{name:8} {text}" for name, text in rows), DONE_OR_ALIVE if works else NOBODY_WORKS)


def _queue(jobs: Sequence[QueuedJob] | None) -> str:
    if jobs is None:
        return "unknown: squeue is not on the PATH, or does not answer"
    return spoken(jobs) or "no job of this run waits or runs"


def _attempt(run_dir: Path) -> str:
    """The newest attempt of the run, as the job script counts them, else of a job with another script."""
    numbers = [folder.name.removeprefix("attempt_") for folder in run_dir.glob("logs/attempt_*")]
    newest = max((int(number) for number in numbers if re.fullmatch("[0-9]{1,9}", number)), default=0)
    attempts = read_attempts(run_dir)
    if newest:
        found = RANK_BEGINS.search(_part(run_dir / f"logs/attempt_{newest}/rank_0.log", at_end=False))
        if found is None:
            return f"{newest}, of which rank 0 has not begun"
        number, job, step = int(found[1]), found[2], found[3]
        began = [line["time_unix_s"] for line in attempts if (line["job"], line["attempt"]) == (job, number)]
        when = f" {_date(began[-1])}" if began else ""
        return f"{newest} ({one_line(job)}), began{when} after step {step}"
    if not attempts:
        return "none has begun"
    last = attempts[-1]
    return f"{last['attempt']} of {last['job']}, began {_date(last['time_unix_s'])} after step {last['step']}"


def _date(time_unix_s: float) -> str:
    return time.strftime("%F %T", time.localtime(time_unix_s))


def _num_steps(run_dir: Path, jobs: Sequence[QueuedJob]) -> int | None:
    """Steps of the running job, else of the run's folder; before its first start, of the newest submission."""
    numbers = [re.search(r"/job\.(\d+)\.sbatch$", job.script) for job in jobs if job.state != "PENDING"]
    running = [run_dir / f"slurm/config.{number[1]}.toml" for number in numbers if number]
    submitted = sorted(run_dir.glob("slurm/config.*.toml"), key=lambda path: path.stat().st_mtime)
    for path in (*running, run_dir / "config.toml", *reversed(submitted)):
        with suppress(
            OSError, ValueError, KeyError, TypeError, OverflowError
        ):  # half written, or by another version: the next one tells
            return int(toml_file(path, "a configuration")["num_steps"])
    return None


def _end_times(run_dir: Path) -> Iterator[tuple[int, float]]:
    """End times of the last steps, in seconds since 1970; a torn or foreign line is left out."""
    for line in _last_lines(run_dir / "metrics.jsonl"):
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            table = parse_json(line)
            step, end_s = int(table["step"]), float(table["timing"]["time_unix_s"])
            if math.isfinite(end_s):
                yield step, end_s


def _speed(ended: dict[int, float], step: int, num_steps: int | None) -> str:
    """Seconds from the end of a step to that of the next, over the last ones of this start."""
    ends = [ended[n] for n in sorted(ended)[-LAST_STEPS - 1 :]]
    between = [later - earlier for earlier, later in pairwise(ends)]
    if not between:
        return "no two steps yet"
    seconds = median(between)
    left = "" if num_steps is None or step >= num_steps else f", about {_spoken_s(seconds * (num_steps - step))} left"
    ago = _spoken_s(time.time() - ends[-1])
    return f"{seconds:.1f} s a step (median of {len(between)}), the last ended {ago} ago{left}"


def _spoken_s(seconds: float) -> str:
    days, rest = divmod(int(max(0.0, seconds)), 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def trouble_of(run_dir: Path) -> tuple[str, bool]:
    """The last line of trouble in the newest job's log, with its file, and True; else False and a text that says so.

    Other logs count only where no job has one. Before the line the reason, by the log of the rank that ended first in
    that attempt.
    """
    by_age = partial(sorted, key=lambda path: path.stat().st_mtime)
    for log in (by_age(run_dir.glob("slurm/[0-9]*.log")) or by_age(run_dir.glob("logs/attempt_*/rank_0.log")))[-1:]:
        lines = _last_lines(log)
        for number in reversed(range(len(lines))):
            if TROUBLE.search(lines[number]):
                found = [*_reason(run_dir, lines[: number + 1]), (lines[number], log)]
                return f"\n{'':9}".join(f"{one_line(line[:200])}\n{'':9}in {path}" for line, path in found), True
        return f"none in {log}", False
    return "no log yet", False


def _reason(run_dir: Path, lines: Sequence[str]) -> list[tuple[str, Path]]:
    """The reason why the attempt at the end of a job's log failed: a line and its file; none if no rank is named."""
    for line in reversed(lines):
        ranks: tuple[str, ...] = ()
        if found := ENDED_FIRST.search(line):
            attempt, ranks = found[2], (found[1], "0")  # what several find the first of a node says alone
        elif not (found := ATTEMPT_BEGINS.search(line)):
            continue
        elif "ends with status" in lines[-1]:
            attempt, ranks = found[1], ("0",)
        for rank in ranks:
            log = run_dir / f"logs/attempt_{attempt}/rank_{rank}.log"
            if reasons := [line for line in _last_lines(log) if not NO_REASON.search(line)]:
                return [(reasons[-1], log)]
        break
    return []


def _part(path: Path, *, at_end: bool) -> str:
    """The last or the first bytes of a file; nothing without it, nor of a pipe or a device, which would not end."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - END_BYTES) if at_end else 0)
            return file.read(END_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _last_lines(path: Path) -> list[str]:
    text = _part(path, at_end=True)
    return text.split("\n") if text else []
