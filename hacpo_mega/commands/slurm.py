"""`hacpo-mega slurm`: the job script of a run, from launch/slurm.sbatch, and its submission. Imports no torch.

    <run_dir>/slurm/job.sbatch    the script     config.toml   beside it, the configuration of all its attempts
    <run_dir>/slurm/<job>.log     what the script and rank 0 say

Not here: who runs where (cluster/slurm.py), what becomes of an attempt (the script itself).
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from hacpo_mega.checkpoint import find_start, plain
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.slurm import Component, Plan, seconds_of
from hacpo_mega.config import Config, SlurmConfig
from hacpo_mega.logbook.older_runs import move_aside

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "launch" / "slurm.sbatch"
# File systems in the memory of one machine. Of others nothing is known here: the head node of a cluster may export its
# own disk; a node that does not see the folder says so when the job starts.
NEVER_SHARED = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Job:
    """A run as Slurm is to have it. `moves_aside`: whether what lies in its folder does not belong to it."""

    run_dir: Path
    plan: Plan
    script: str
    config: str
    moves_aside: bool


def prepare(config: Config, *, fresh: bool, accept: Sequence[str], branch: Path | None) -> Job:
    """The job of a configuration; writes nothing. `fresh`, `accept` and `branch` are those of `train`.

    ValueError, in one line, for what a cluster could not run, or the run's checkpoint does not go on with.
    """
    slurm, plan = config.slurm, Plan.of(RankMap.of(config), config.slurm)
    if slurm.time is not None and seconds_of(slurm.time) <= slurm.signal_s:
        raise ValueError(
            f"slurm.signal_s ({slurm.signal_s}) leaves nothing of slurm.time ({slurm.time} = {seconds_of(slurm.time)} "
            "seconds) to train in: give less, or more time"
        )
    find_start(config, fresh=fresh, accept=accept, branch=branch)
    run_dir = config.run_dir.absolute()
    if len(plan.nodes) > 1 and (kind := _file_system(run_dir)) in NEVER_SHARED:
        raise ValueError(
            f"run_dir {run_dir} is on {kind}, in this machine's memory: {len(plan.nodes)} nodes need a folder that all "
            "of them see"
        )
    options = [word for key in accept for word in ("--accept", key)]
    options += ["--from", str(branch.absolute())] if branch is not None else []
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.replace("@directives@", "\n".join(_directives(slurm, plan.components, run_dir)))
    script = script.replace("@settings@", "\n".join(_settings(slurm, plan, run_dir, options)))
    return Job(run_dir, plan, script, tomli_w.dumps(plain(config)), moves_aside=fresh)


def submit(job: Job) -> str:
    """Writes the script and gives it to sbatch; says the job's number, its log and how to watch and end it.

    ValueError without sbatch, and with Slurm's own words when it refuses the job.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ValueError("sbatch is not on the PATH: submit on a login node of the cluster; --dry-run shows the script")
    if job.moves_aside:
        move_aside(job.run_dir)
    folder = job.run_dir / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(job.config, encoding="utf-8")
    script = folder / "job.sbatch"
    script.write_text(job.script, encoding="utf-8")
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        words = "; ".join(done.stderr.strip().splitlines()).replace("sbatch: error: ", "")
        raise ValueError(f"Slurm refuses {script}: {words}")
    number = done.stdout.strip().partition(";")[0]
    log = folder / f"{number}.log"
    return f"job {number}, log {log}\nwatch: tail -F {log}\nstate: squeue -j {number}\nend:   scancel {number}"


def _directives(slurm: SlurmConfig, components: Sequence[Component], run_dir: Path) -> Iterator[str]:
    """The #SBATCH lines: of the job, then of each component."""
    yield f'#SBATCH --job-name="{run_dir.name}"'
    yield f'#SBATCH --output="{run_dir}/slurm/%j.log"'
    yield "#SBATCH --open-mode=append"
    yield f'#SBATCH --chdir="{Path.cwd()}"'
    for number, component in enumerate(components):
        if number:
            yield "#SBATCH hetjob"
        kind, most = component.kind, max(component.counts)
        gpus = most if component.is_even else kind.gpus
        options = {
            "partition": kind.partition,
            "constraint": kind.constraint,
            "account": slurm.account,
            "time": slurm.time,
            "nodes": len(component.counts),
            "ntasks-per-node": most,
            "gpus-per-node": gpus if kind.gpus else None,
            "cpus-per-task": slurm.cpus_per_rank,
            "signal": f"B:USR1@{slurm.signal_s}",
        }
        yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
        yield "#SBATCH --requeue"
        yield from (f"#SBATCH {option}" for option in slurm.sbatch_options)


def _settings(slurm: SlurmConfig, plan: Plan, run_dir: Path, options: Sequence[str]) -> Iterator[str]:
    """What the script's own lines refer to, and what the user wants to be done first."""
    counts = plan.components[0].counts if len(plan.components) == 1 else ()
    python = slurm.python or sys.executable
    yield f"root={shlex.quote(str(ROOT))}"
    yield f"run_dir={shlex.quote(str(run_dir))}"
    yield f"config={shlex.quote(str(run_dir / 'slurm' / 'config.toml'))}"
    yield f"python={shlex.quote(python)}"
    yield f"options=({shlex.join(options)})"
    yield f"run_with=({shlex.join(slurm.run_with)})"
    yield f"srun_options=({shlex.join(slurm.srun_options)})"
    yield f"num_ranks={plan.rank_map.world_size}"
    yield f"num_components={len(plan.components)}"
    yield f"counts=({' '.join(map(str, counts))}) # processes of each node"
    yield f"signal_s={slurm.signal_s}"
    yield f"preflight={int(slurm.preflight)}"
    yield f"max_attempts={slurm.max_attempts}"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items())
    yield from slurm.setup


def _file_system(path: Path) -> str:
    """The type of the file system that holds a path, or would, once it exists."""
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    types = {Path(left.split()[4]): right.split()[0] for left, right in mounts}
    resolved = path.resolve()
    return next((types[folder] for folder in (resolved, *resolved.parents) if folder in types), "unknown")
