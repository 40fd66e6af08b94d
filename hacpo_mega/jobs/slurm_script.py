"""`hacpo-mega slurm`: the job script of a run, from launch/slurm.sbatch, and its submission. Imports no torch.

    <run_dir>/slurm/job.<N>.sbatch   the script of the Nth submission    config.<N>.toml   of all its attempts
    <run_dir>/slurm/<job>.log        output of the script and of rank 0

Script and configuration are never overwritten: a job that waits, or is queued again, keeps those of its submission.
Elsewhere: the ranks of each node and the request (jobs/slurm_plan.py), the attempts of a job (the script itself).
"""

import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from hacpo_mega.checkpoint.files import plain
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config, SlurmConfig
from hacpo_mega.jobs.installed_files import installed_files
from hacpo_mega.jobs.slurm_plan import WHOLE_NODE, Plan, Request, request_of, seconds_of
from hacpo_mega.jobs.slurm_queue import (
    CONTROLLER_S,
    QueuedJob,
    ask,
    ask_sbatch,
    job_line,
    job_name,
    jobs_of,
    partitions,
)
from hacpo_mega.logbook.run.older_runs import move_aside
from hacpo_mega.logbook.run.run_lock import RunLock
from hacpo_mega.models.files.hub import CACHE, HubModel

LAUNCH = installed_files("launch")
TEMPLATE = LAUNCH / "slurm.sbatch"
FORBIDDEN = '%"\\'  # in a path of a directive: sbatch reads a pattern, the end of the value, an escape
FORBIDDEN_IN_MOUNTS = ',:"$`'  # pyxis splits at the first two; enroot's shell expands the others
PLACEHOLDERS = ("directives", "settings", "setup")
# Messages that sbatch --test-only gives also for nodes that are drained or down, for which a job may wait.
MAY_CHANGE = re.compile(r"(?i)not available|unavailable|down, drained|limit")
# The script of a held allocation, which only signals its runs when the time is nearly over.
HOLD_SCRIPT = """\
#!/bin/bash
@directives@
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
echo "[slurm $(date '+%F %T')] job $SLURM_JOB_ID holds $SLURM_JOB_NODELIST"
sleep infinity &
while kill -0 $! 2>/dev/null; do wait $!; done
"""
# File systems in the memory of one machine. Any other may be shared, even the login node's own disk, if it is exported;
# a node that does not see the folder reports it when the job starts.
NEVER_SHARED = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Job:
    """A run's submission to Slurm.

    options   arguments for `hacpo-mega train`
    mounts    folders that a container must show
    config    TOML text for all attempts
    held      on nodes of an allocation that stays when the run ends
    """

    run_dir: Path
    plan: Plan
    request: Request
    template: str
    slurm: SlurmConfig
    options: tuple[str, ...]
    mounts: tuple[Path, ...]
    config: str
    has_hub_models: bool
    held: bool = False

    def script(self, number: int) -> str:
        """The job script of the run's submission of this number."""
        parts = {
            "directives": "\n".join(_directives(self)),
            "settings": "\n".join(_settings(self, number)),
            "setup": "\n".join(_setup(self.slurm.setup)),
        }
        return re.sub("@([a-z_]+)@", lambda match: parts[match[1]], self.template)

    def folder(self) -> Path:
        return self.run_dir / "slurm"


def prepare(config: Config, options: Sequence[str] = (), *, for_any_cluster: bool = False) -> Job:
    """The job of a configuration; writes nothing. `options` are arguments for `hacpo-mega train`.

    ValueError for a job that no cluster could run and, unless it is `for_any_cluster`, for one that this cluster could
    not.
    """
    slurm, plan = config.slurm, Plan.of(RankMap.of(config), config.slurm)
    if slurm.time is not None and seconds_of(slurm.time) <= slurm.signal_s:
        raise ValueError(
            f"slurm.signal_s ({slurm.signal_s}) leaves nothing of slurm.time ({slurm.time} = {seconds_of(slurm.time)} "
            "seconds) to train in: give less, or more time"
        )
    if slurm.nodelist is not None and len(plan.components) > 1:
        raise ValueError("slurm.nodelist: nodes of several kinds cannot be named in one list; leave it out")
    run_dir = config.run_dir.absolute()
    if odd := sorted(set(FORBIDDEN).intersection(f"{run_dir}{Path.cwd()}")):
        raise ValueError(f"run_dir {run_dir}: sbatch reads {odd[0]!r} in the path of a log as its own; give another")
    if len(plan.nodes) > 1 and (kind := _file_system(run_dir)) in NEVER_SHARED:
        raise ValueError(
            f"run_dir {run_dir} is on {kind}, in this machine's memory: {len(plan.nodes)} nodes need a folder that all "
            "of them see"
        )
    request = request_of(plan, slurm, partitions())
    if request.problems and not for_any_cluster:
        raise ValueError("\n".join(request.problems))
    return Job(
        run_dir=run_dir,
        plan=plan,
        request=request,
        template=_template(slurm.template),
        slurm=slurm,
        options=tuple(options),
        mounts=tuple(_mounts(config)),
        has_hub_models=any(HubModel.of_snapshot(agent.model) for agent in config.agents),
        config=tomli_w.dumps(plain(config)),
    )


def submit(job: Job, *, fresh: bool) -> Iterator[str]:
    """Writes the script and submits it with sbatch; yields lines on the job: number, log, how to watch and end it.

    `fresh` moves the content of the run's folder aside. ValueError without sbatch, if the run has a job whose folder
    `fresh` would move, and with Slurm's message if it refuses the job.
    """
    sbatch = _sbatch("; --dry-run shows the script")
    others = jobs_of(job.run_dir, CONTROLLER_S)
    if others is None:
        raise ValueError(
            f"squeue does not answer: whether a job of {job.run_dir} runs or waits is not known; try later"
        )
    require_no_job(job, others, fresh=fresh)
    _require_acceptance(sbatch, job)
    script = write(job, fresh=fresh)
    number = _job_number(ask_sbatch([sbatch, "--parsable", str(script)], job.run_dir), str(script))
    log = job.folder() / f"{number}.log"
    if others:
        yield f"this run has a job already: {job_line(others)}; this one begins when it has ended"
    watch, state = (shlex.quote(str(path)) for path in (log, job.run_dir))
    yield f"job {number}, log {log}\nwatch: tail -F {watch}\nstate: hacpo-mega slurm --status {state}"
    yield f"end:   scancel {number}"


def hold(job: Job) -> Iterator[str]:
    """Submits an allocation of the job's nodes that lasts until its time limit, and starts nothing; yields lines on it.

    ValueError for nodes of several kinds, without sbatch, and with Slurm's message if it refuses.
    """
    if len(job.plan.components) > 1:
        raise ValueError("slurm.agents: nodes of several kinds are a job of their own; leave --hold out")
    sbatch, held = _sbatch(), replace(job, held=True)
    folder = _private_folder(job)
    text = HOLD_SCRIPT.replace("@directives@", "\n".join(_directives(held)))
    number = _job_number(ask_sbatch([sbatch, "--parsable"], job.run_dir, text, held=True), "the job")
    yield f"job {number} holds {len(job.plan.nodes)} nodes, log {folder / f'held.{number}.log'}"
    yield f"start:  hacpo-mega slurm CONFIG --job {number}     one configuration after the other, as soon as it runs"
    yield f"end:    scancel {number}"


def require_no_job(job: Job, jobs: Sequence[QueuedJob], *, fresh: bool) -> None:
    """ValueError if `fresh` would move the folder of a job that waits or runs."""
    if fresh and jobs:
        numbers = " ".join(queued.number for queued in jobs)
        raise ValueError(f"--fresh: {job_line(jobs)} of {job.run_dir}: wait for it, or end it first: scancel {numbers}")


def _require_acceptance(sbatch: str, job: Job) -> None:
    """ValueError with Slurm's message for an unknown account, qos or option, before anything is written."""
    done = ask([sbatch, "--test-only", "--output=/dev/null"], script=job.script(1))
    if not MAY_CHANGE.search(done.stderr):
        _job_number(done, "the job")


def _sbatch(hint: str = "") -> str:
    if (sbatch := shutil.which("sbatch")) is None:
        raise ValueError(f"sbatch is not on the PATH: submit on a login node of the cluster{hint}")
    return sbatch


def _job_number(done: subprocess.CompletedProcess, submission: str) -> str:
    """The number of a submitted job. ValueError with Slurm's message if sbatch has refused it."""
    if done.returncode:
        message = "; ".join(line.replace("sbatch: error: ", "") for line in done.stderr.strip().splitlines())
        raise ValueError(f"Slurm refuses {submission}: {message}")
    return done.stdout.strip().partition(";")[0]


def write(job: Job, *, fresh: bool) -> Path:
    """Writes script and configuration of the next submission; returns the script's path. `fresh` first moves the
    content of the run's folder aside."""
    if fresh:
        with RunLock(job.run_dir) as lock:
            aside = move_aside(job.run_dir)
            job.run_dir.mkdir(parents=True, exist_ok=True)
            lock.enter(aside)  # else the lock's mark would stay in the folder that has moved
    folder = _private_folder(job)
    number = 1
    while (folder / f"config.{number}.toml").exists():
        number += 1
    script = folder / f"job.{number}.sbatch"
    for path, text in ((folder / f"config.{number}.toml", job.config), (script, job.script(number))):
        with path.open("x", encoding="utf-8") as file:
            path.chmod(0o644)
            file.write(text)
    return script


def _private_folder(job: Job) -> Path:
    """Makes the folder of the run's scripts and logs, to which no other user may write."""
    folder = job.folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o022)
    except PermissionError as error:
        raise ValueError(
            f"{folder} is another user's: its job scripts would run as you; give another run_dir"
        ) from error
    return folder


def _template(path: Path | None) -> str:
    """The job script with its placeholders. ValueError if one is missing or unknown."""
    try:
        text = (path or TEMPLATE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"slurm.template: {path} cannot be read: {error}") from error
    names = set(re.findall("@([a-z_]+)@", text))
    for name in sorted(names.symmetric_difference(PLACEHOLDERS)):
        problem = "is no placeholder" if name in names else "is missing"
        raise ValueError(f"slurm.template: @{name}@ {problem} in {path}; it needs @{'@, @'.join(PLACEHOLDERS)}@")
    return text


def _mounts(config: Config) -> Iterator[Path]:
    """The folders that a container must show at their own paths."""
    # The parent of run_dir, since the run's lock lies beside its folder.
    yield from (LAUNCH.parent, Path.cwd(), config.run_dir.absolute().parent)
    for agent in config.agents:  # the files of a snapshot are links into the folder of all its model's snapshots
        model = HubModel.of_snapshot(agent.model)
        yield agent.model.absolute() if model is None else agent.model.parent.parent
    files = (*config.data.files, *config.evaluation.files)
    yield from (file.absolute().parent for file in files if not str(file).startswith("hub:"))


def _directives(job: Job) -> Iterator[str]:
    """The #SBATCH lines: of the job, then of each component. An allocation for --job is never queued again."""
    slurm = job.slurm
    yield f'#SBATCH --job-name="{job_name(job.run_dir, held=job.held)}"'
    # A log with a bare number belongs to the run (slurm_status.py); that of a held allocation does not.
    yield f'#SBATCH --output="{job.run_dir}/slurm/{"held." * job.held}%j.log"'
    yield "#SBATCH --open-mode=append"
    yield f'#SBATCH --chdir="{Path.cwd()}"'
    if not job.held:
        yield "#SBATCH --dependency=singleton"
    for number, component in enumerate(job.plan.components):
        if number:
            yield "#SBATCH hetjob"
            # With the first component's name it would wait for that one to end (singleton).
            yield f'#SBATCH --job-name="{job_name(job.run_dir)}+{number}"'
        options: Mapping[str, str | int | None] = {
            "partition": component.kind.partition,
            "constraint": component.kind.constraint,
            "account": slurm.account,
            "qos": slurm.qos,
            "time": slurm.time,
            "nodelist": slurm.nodelist,
            "exclude": slurm.exclude,
            "nodes": len(component.counts),
            "ntasks-per-node": max(component.counts),
            "cpus-per-task": job.request.cpus,
            "mem": job.request.mem[number] or None,
            "signal": f"B:USR1@{slurm.signal_s}",
        }
        yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
        if gpus := job.request.gpus[number]:
            yield f"#SBATCH --{gpus}"
        yield f"#SBATCH --{'no-' * job.held}requeue"
        if job.request.takes_whole_nodes and WHOLE_NODE not in slurm.sbatch_options:
            yield f"#SBATCH {WHOLE_NODE}"
        yield from (f"#SBATCH {option}" for option in slurm.sbatch_options)


def _settings(job: Job, number: int) -> Iterator[str]:
    """Lines that set the variables of the script's body."""
    slurm, plan, folder = job.slurm, job.plan, job.folder()
    counts = plan.components[0].counts if len(plan.components) == 1 else ()
    yield f"launch={shlex.quote(str(LAUNCH))}"
    yield f"run_dir={shlex.quote(str(job.run_dir))}"
    yield f"config={shlex.quote(str(folder / f'config.{number}.toml'))}"
    yield f"script={shlex.quote(str(folder / f'job.{number}.sbatch'))}"
    yield f"python={shlex.quote(slurm.python or sys.executable)}"
    yield f"options=({shlex.join(job.options)})"
    yield f"run_with=({shlex.join(slurm.run_with)})"
    yield f"srun_options=({shlex.join([*_container(job), *slurm.srun_options])})"
    yield f"num_ranks={plan.rank_map.world_size}"
    yield f"num_components={len(plan.components)}"
    yield f"counts=({' '.join(map(str, counts))}) # processes of each node"
    yield f"cpus={job.request.cpus} # processors of each process"
    yield f"signal_s={slurm.signal_s}"
    yield f"preflight={int(slurm.preflight)}"
    yield f"preflight_wait_s={slurm.preflight_wait_s}"
    yield f"max_attempts={slurm.max_attempts}"
    yield f"held={int(job.held)} # whether the nodes stay when this script ends"
    # The nodes must read models of the Hub from this cache, whatever home or HF_HOME they have.
    environment = {"HF_HUB_CACHE": CACHE, **slurm.environment} if job.has_hub_models else slurm.environment
    yield from (f"export {name}={shlex.quote(value)}" for name, value in environment.items())


def _setup(lines: Sequence[str]) -> Iterator[str]:
    """The lines of slurm.setup, each of which must succeed. ValueError for one that is not a complete command."""
    for line in lines:
        done = subprocess.run(["bash", "-n"], input=f"{line}\n", capture_output=True, text=True)
        if done.returncode:
            message = done.stderr.strip().splitlines()[-1].removeprefix("bash: ")
            raise ValueError(f"slurm.setup: {line!r} is no whole command: {message}; give a construct as one text")
        yield f"eval {shlex.quote(line)} || setup_failed {shlex.quote(line)}"


def _container(job: Job) -> Iterator[str]:
    """Options of pyxis; the script adds a name for the container, to remove it by."""
    if job.slurm.container_image is None:
        if job.slurm.container_mounts:
            raise ValueError("slurm.container_mounts: there is no slurm.container_image to mount them in")
        return
    folders = sorted(set(job.mounts))
    outermost = [one for one in folders if not any(other != one and one.is_relative_to(other) for other in folders)]
    for folder in outermost:
        if odd := sorted(set(FORBIDDEN_IN_MOUNTS).intersection(str(folder))):
            raise ValueError(
                f"{folder}: pyxis reads {odd[0]!r} in the path of a mount as its own, and the container needs this "
                "folder; give it another name"
            )
    yield f"--container-image={job.slurm.container_image}"
    yield f"--container-mounts={','.join([*(f'{one}:{one}' for one in outermost), *job.slurm.container_mounts])}"
    yield f"--container-workdir={Path.cwd()}"
    if "--container-mount-home" not in job.slurm.srun_options:  # its packages and settings would shadow the image's
        yield "--no-container-mount-home"


def _file_system(path: Path) -> str:
    """The type of the file system that holds a path, also of one that does not exist yet."""
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text("utf-8").strip("\n").split("\n")]
    types = {Path(left.split()[4]): right.split()[0] for left, right in mounts}
    resolved = path.resolve()
    return next((types[folder] for folder in (resolved, *resolved.parents) if folder in types), "unknown")
