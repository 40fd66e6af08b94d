"""The command `hacpo-mega slurm`, which submits a run to a Slurm cluster, and a rank's first step in an attempt.

Imports nothing heavy: a submission needs no torch.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hacpo_mega.checkpoint.files import StartOptions, committed_steps
from hacpo_mega.cli.start import (
    Accept,
    Branch,
    Fresh,
    LastWhole,
    Overrides,
    fetch_agents,
    load_with_models,
    models_to_download,
)
from hacpo_mega.cluster.machine.driver import driver_needed, torch_cuda
from hacpo_mega.cluster.machine.environment import attempt_of_job, is_first_of_the_job, shown_environment
from hacpo_mega.config import Config
from hacpo_mega.config.checks.checks import batch_problems, find_problems, named_models
from hacpo_mega.config.load import load_unchecked
from hacpo_mega.config.tables.slurm import time_note
from hacpo_mega.jobs.attempts import MAX_CRASHES, is_crash_loop, record_attempt
from hacpo_mega.jobs.local import train_arguments
from hacpo_mega.models.files.visible import say


def slurm(
    config_file: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="The run's TOML file.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print placement and job script; submit nothing.")] = False,
    fresh: Fresh = False,
    accept: Accept = None,
    branch: Branch = None,
    last_whole: LastWhole = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Only take the nodes, and keep them, for starts by --job.")
    ] = False,
    job_number: Annotated[
        str | None, typer.Option("--job", metavar="N", help="Start now, here, on the nodes of a job that holds some.")
    ] = None,
    status: Annotated[
        Path | None, typer.Option("--status", metavar="RUN", help="Show a run's status on one screen.")
    ] = None,
) -> None:
    """Train on a Slurm cluster: show who runs on which node, write the job script and submit it."""
    if status is not None:
        if config_file is not None or dry_run or fresh or hold or job_number is not None:
            raise ValueError("--status takes a run folder and nothing else: hacpo-mega slurm --status RUN")
        raise typer.Exit(_print_status(status))
    if config_file is None:
        raise ValueError("give a configuration, or --status RUN")
    if job_number is not None and not (job_number.isdigit() and not hold):
        raise ValueError(f"--job {job_number}: give the number of a job that runs, and no --hold")
    if hold and (fresh or accept or branch is not None or last_whole or dry_run):
        raise ValueError("--hold takes nodes and starts nothing on them: give the other options with --job N")
    from hacpo_mega.jobs.slurm_held import start_in
    from hacpo_mega.jobs.slurm_script import hold as hold_nodes
    from hacpo_mega.jobs.slurm_script import prepare, submit

    branch = None if branch is None else branch.absolute()
    # `fresh` is not among them: the submission itself moves the old run aside, once for all attempts.
    arguments = train_arguments(StartOptions(accept=accept or [], branch=branch, last_whole=last_whole))
    if dry_run:
        config = _load_for_dry_run(config_file, overrides or [])
        job = prepare(config, arguments, for_any_cluster=True)
        _print_time_note(config)
        say("\n".join([job.plan.table(), *_environment(config), str(job.request), job.script(1)]))
        for problem in job.request.problems:
            say(f"submission would be refused: {problem}", file=sys.stderr)
        return
    options = StartOptions(fresh=fresh, accept=accept or [], branch=branch, last_whole=last_whole)
    # Models are downloaded here, since the nodes may have no network.
    fetch_agents(config_file, overrides or [], partial(_require_inputs, options=options))
    config = load_with_models(config_file, overrides)
    job = prepare(config, arguments)
    _require_inputs(config, options)
    _print_time_note(config)
    say(job.plan.table())
    if job_number is not None:
        raise typer.Exit(start_in(job, job_number, fresh=fresh))
    say(job.request)
    for line in hold_nodes(job) if hold else submit(job, fresh=fresh):
        say(line)


def _require_inputs(config: Config, options: StartOptions) -> None:
    """ValueError for a run that cannot resume as asked, and for rows that are no prompts."""
    from hacpo_mega.data.prompt_files import require_good_files
    from hacpo_mega.logbook.run.run_inputs import start_with_same_inputs

    start_with_same_inputs(config, **options)
    require_good_files(config)


def _load_for_dry_run(file: Path, overrides: Sequence[str]) -> Config:
    """A configuration whose models and data need not exist here; prints what a submission would download or refuse.

    ValueError with a line per problem that no missing file explains: keys, batches, layouts of known models.
    """
    config = load_unchecked(file, tuple(overrides))
    if problems := [*batch_problems(config), *named_models(config)[1]]:
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    to_come = models_to_download(config)
    for model in dict.fromkeys(to_come.values()):
        say(f"{model} would be downloaded first", file=sys.stderr)
    for problem in find_problems(config, to_come=to_come):
        say(f"submission would be refused: {file}: {problem}", file=sys.stderr)
    return config


def _environment(config: Config) -> list[str]:
    """A line on the driver that this environment needs on the nodes; none if they use another environment."""
    slurm = config.slurm
    has_other = slurm.python or slurm.container_image or slurm.run_with
    cuda = None if has_other else torch_cuda()
    return [f"environment: CUDA {cuda}, for a {driver_needed(cuda)}"] if cuda else []


def _print_time_note(config: Config) -> None:
    if note := time_note(config.slurm.time):
        say(note, file=sys.stderr)


def _print_status(run_dir: Path) -> int:
    from hacpo_mega.jobs.slurm_status import status_of

    status = status_of(run_dir)
    say(status.text)
    return status.exit_code


def begin_attempt(run_dir: Path) -> None:
    """Records and prints, on rank 0, the attempt of its job that this process is in, if a launcher starts jobs again.

    Exit code 3 on every rank if MAX_CRASHES attempts have died after the step that this one begins after.
    """
    if (current := attempt_of_job()) is None:
        return
    (job, attempt), step = current, max(committed_steps(run_dir), default=0)
    is_first = is_first_of_the_job()
    if is_crash_loop(run_dir, job, attempt, step):
        if is_first:
            say(
                f"{run_dir} does not get past step {step}: {MAX_CRASHES} attempts of this job began after it, "
                "committed no other and died. Their logs say why; mend it and start again",
                file=sys.stderr,
            )
        raise typer.Exit(3)
    if is_first:
        record_attempt(run_dir, job, attempt, step)
        say(f"attempt {attempt} of job {job} begins after step {step}; {shown_environment()}")
