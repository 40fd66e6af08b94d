"""The command that gives a run to a Slurm cluster, `hacpo-mega slurm`, and how a rank begins an attempt of a job.

Imports nothing heavy: who submits needs no torch.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.checkpoint import committed_steps
from hacpo_mega.cluster.attempts import MOST_IN_VAIN, goes_in_circles, record_attempt
from hacpo_mega.cluster.environment import attempt_of_job, is_first_of_the_job, shown_environment
from hacpo_mega.config import load_config
from hacpo_mega.config.input_checks import missing_models


def slurm(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="slurm.time=12:00:00")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print placement and job script; submit nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; what lies in run_dir moves aside.")] = False,
    accept: Annotated[list[str] | None, typer.Option(metavar="KEY", help="As in train.")] = None,
    branch: Annotated[Path | None, typer.Option("--from", metavar="STEP", help="As in train.")] = None,
) -> None:
    """Train on a Slurm cluster: show who runs on which node, write the job script and submit it."""
    config = load_config(config_file, overrides or [])
    if missing := missing_models(config):
        raise ValueError("\n".join(f"{config_file}: {problem}" for problem in missing))
    from hacpo_mega.commands.slurm import prepare, submit

    job = prepare(config, fresh=fresh, accept=accept or [], branch=branch)
    print(job.plan.table())
    print(job.script if dry_run else submit(job))


def begin_attempt(run_dir: Path) -> None:
    """Notes which attempt of its job this process is in, where a launcher starts jobs again; rank 0 writes and says it.

    Exit 3 on every rank when the last attempts all began after the step that this one begins after.
    """
    if (found := attempt_of_job()) is None:
        return
    (job, attempt), step = found, max(committed_steps(run_dir), default=0)
    is_first = is_first_of_the_job()
    if goes_in_circles(run_dir, job, attempt, step):
        if is_first:
            print(
                f"{run_dir} does not get past step {step}: the last {MOST_IN_VAIN} attempts of this job all began "
                "after it and committed no other. Their logs say why; mend it and start again",
                file=sys.stderr,
            )
        raise typer.Exit(3)
    if is_first:
        record_attempt(run_dir, job, attempt, step)
        print(f"attempt {attempt} of job {job} begins after step {step}; {shown_environment()}", flush=True)
