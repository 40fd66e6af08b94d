"""State of a run's folder before the run: empty, only files of its job, a run of this program, or something else.

Only the third is ever moved away, and a run is written into the first two alone. Names and first lines decide, so that
`hacpo-mega check` answers at once. Elsewhere: the moving itself (logbook/run/older_runs.py).
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hacpo_mega.config.tables.schema import Config

CONFIG, STARTS, METRICS, TRACES = "config.toml", "starts.jsonl", "metrics.jsonl", "trace"
LOCK = ".lock"  # inside the folder of whoever writes it (logbook/run/run_lock.py)
# Names that a job writes there before its ranks begin, its lock, and mkfs's folder: no run, and nobody's work.
NO_CONTENT = frozenset({"slurm", "logs", LOCK, "lost+found"})
# Keys of a line of ours, which tell our files from others of the same name.
KEYS = {STARTS: {"steps_done", "commit", "packages"}, METRICS: {"step", "values", "timing"}}
RECORD = re.compile(rb'\{\s*"format": \d+,\s*"sha256": "[0-9a-f]{64}"')  # checkpoint/files.py writes it
RECORD_BYTES = 256
OCTAL = re.compile(rb"\\([0-7]{3})")  # how the kernel writes a blank in a list
FIRST_BYTES = 4 << 20
NAMES_SHOWN = 3
# Bytes of a name, and of the run folder's path, that leave room for what is named after it and lies below it.
MOST_BYTES = {"name": 200, "path": 3600}


def contents(folder: Path) -> list[str]:
    """The names in a folder that are a person's work, sorted; empty if there is no folder. OSError if unreadable."""
    return sorted(set(os.listdir(folder)) - NO_CONTENT) if folder.exists() else []


def is_run(folder: Path) -> bool:
    """True if a folder holds a run of this program: its configuration and a first line as we write it, or a checkpoint.

    One that was killed before it had written more than its first line is a run too.
    """
    has_begun = _is_ours(folder / STARTS)
    if (folder / CONFIG).is_file() and (has_begun or _is_ours(folder / METRICS)):
        return True
    return (has_begun and contents(folder) == [STARTS]) or _has_checkpoint(folder)


def may_hold_run(folder: Path) -> bool:
    """True if a run can go on in a folder: one recognised as ours, or one with steps to resume from."""
    return is_run(folder) or any((folder / "checkpoints").glob("step_*"))


def shown(names: list[str]) -> str:
    """Some names of a folder, as text for a line."""
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {len(names) - NAMES_SHOWN} more" if names[NAMES_SHOWN:] else "")


def require_displaceable(run_dir: Path) -> None:
    """ValueError if a new run could not replace the content of `run_dir`; an empty place is fine."""
    folder = Path(os.path.realpath(run_dir))
    if not (names := contents(folder)):
        return
    if not is_run(folder):
        raise ValueError(
            f"run_dir {run_dir} holds {shown(names)}, and is no run by its {CONFIG} and {STARTS} or {METRICS}: it is "
            "not moved away. Give an empty or a new folder"
        )


def is_mount_point(folder: Path) -> bool:
    """True if something is mounted at a real path, even a folder of the same file system."""
    lines = Path("/proc/self/mountinfo").read_bytes().strip(b"\n").split(b"\n")
    return any(OCTAL.sub(lambda found: bytes([int(found[1], 8)]), line.split()[4]) == bytes(folder) for line in lines)


def run_dir_problems(config: Config) -> Iterator[str]:
    """Problems of a run's folder, a line each. Another run would rename it, so it must be the run's alone."""
    given, folder = config.run_dir, _real(config.run_dir)
    if Path.cwd().is_relative_to(folder):
        yield f"run_dir: {str(given)!r} is a folder around the current one; a run needs its own. Nearest: runs/run"
        return
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir():
        yield f"run_dir: {given} cannot be made, since {existing} is a file. Nearest: {existing}.run"
    # The folder itself is renamed and made anew, which is written into the folder above it.
    elif not os.access(existing.parent if existing == folder else existing, os.W_OK | os.X_OK):
        yield f"run_dir: {given} cannot be made, since {existing} is not writable; give a folder that you may write"
        return
    named = [(f"agents.{agent.name}.model", agent.model) for agent in config.agents]
    named += [("data.files", file) for file in config.data.files]
    named += [("evaluation.files", file) for file in config.evaluation.files]
    inside = [(key, path) for key, path in named if _real(path).is_relative_to(folder)]
    for key, path in inside:
        yield (
            f"run_dir: {given} holds {path} of {key}, and an old run folder is moved away before a run starts. "
            f"Nearest: run_dir = '{given}.next'"
        )
    if not inside:
        yield from _folder_problems(given, folder, existing)
    names = [(f"agents.{agent.name}", "name", agent.name) for agent in config.agents]
    for key, kind, text in (*names, ("run_dir", "name", folder.name), ("run_dir", "path", folder)):
        if (number := len(os.fsencode(text))) > (most := MOST_BYTES[kind]):
            yield f"{key}: a {kind} of {number} bytes is too long for the run's files. Nearest: at most {most} bytes"


def _real(path: Path) -> Path:
    # Not Path.resolve, which raises for a circle of links.
    return Path(os.path.realpath(path))


def _folder_problems(given: Path, folder: Path, above: Path) -> Iterator[str]:
    """Problems of a run's folder by its content or its file system; `above` is the last part of it that exists."""
    if folder.is_symlink():  # although it is where all links lead to
        yield f"run_dir: {given} is a link that leads in a circle. Nearest: runs/run"
    elif above.is_dir() and os.statvfs(above).f_blocks == 0:
        yield f"run_dir: {given} is on a file system that holds no files of a user ({above}). Nearest: runs/run"
    elif folder == _real(Path(os.path.expanduser("~"))) or is_mount_point(folder):
        place = "a mount point" if is_mount_point(folder) else "your home"
        yield f"run_dir: {given} is {place}, and a run needs a folder of its own. Nearest: run_dir = '{given / 'run'}'"
    elif folder.is_dir():
        try:
            names = contents(folder)
        except OSError as error:
            yield f"run_dir: {given} cannot be read ({error.strerror}); give a folder that you may read and write"
            return
        if names and not may_hold_run(folder):
            yield (
                f"run_dir: {given} holds {shown(names)} and no run; a run needs an empty or a new folder, or a run to "
                f"go on with. Nearest: run_dir = '{given / 'run'}'"
            )


def _has_checkpoint(folder: Path) -> bool:
    for record in (folder / "checkpoints").glob("step_*/step.json"):
        with suppress(OSError), record.open("rb") as file:  # one that cannot be read shows nothing
            if RECORD.match(file.read(RECORD_BYTES)):
                return True
    return False


def _is_ours(path: Path) -> bool:
    """True if the first line of a file has the keys of ours."""
    try:
        with path.open("rb") as file:
            line = json.loads(file.readline(FIRST_BYTES))
    except (OSError, ValueError, RecursionError):  # then it is not
        return False
    return isinstance(line, dict) and line.keys() >= KEYS[path.name]
