"""A run in an existing allocation: `hacpo-mega slurm CONFIG --job N`, after --hold or salloc. Imports no torch.

The run's job script (launch/slurm.sbatch) runs here, in the foreground, and its sruns on the first nodes of the
allocation: secret, environment, placement, preflight and the report of a failed rank are those of a job. When the run
ends, nothing starts it again. Elsewhere: the request for nodes (jobs/slurm_script.py).
"""

import shutil
import signal
import subprocess
from dataclasses import replace

from hacpo_mega.cluster.machine.environment import outside_of_jobs
from hacpo_mega.jobs.slurm_queue import ask, jobs_of
from hacpo_mega.jobs.slurm_script import Job, require_no_job, write

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def start_in(job: Job, number: str, *, fresh: bool) -> int:
    """Runs the job on nodes of job `number`, to its end, and returns its exit code.

    The first signal makes the run save a checkpoint and end, a second one ends it at once. ValueError if that job does
    not run, or has too few nodes, and for --fresh beside a job of the run.
    """
    if len(job.plan.components) > 1:
        raise ValueError("slurm.agents: nodes of several kinds are a job of their own; leave --job out")
    require_no_job(job, jobs_of(job.run_dir) or [], fresh=fresh)
    nodes = _nodes_of(number, job.slurm.exclude)
    if len(nodes) < (needed := len(job.plan.nodes)):
        raise ValueError(f"--job {number}: it has {len(nodes)} nodes ({','.join(nodes)}), the run needs {needed}")
    script = write(replace(job, held=True), fresh=fresh)
    chosen = {"SLURM_JOB_NODELIST": ",".join(nodes[:needed]), "SLURM_JOB_NUM_NODES": str(needed)}
    environment = outside_of_jobs() | chosen | {"SLURM_JOB_ID": number}
    # A session of its own, since Ctrl-C would end the script and leave its srun.
    process = subprocess.Popen(["bash", str(script)], env=environment, start_new_session=True)
    signals = iter(["USR1"])

    def pass_on(*_: object) -> None:
        subprocess.Popen(["scancel", f"--signal={next(signals, 'TERM')}", number])

    before = {signum: signal.signal(signum, pass_on) for signum in FORWARDED_SIGNALS}
    try:
        return process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _nodes_of(number: str, excluded: str | None) -> list[str]:
    """The nodes of a running job, without excluded ones. ValueError if it does not run."""
    if shutil.which("scontrol") is None:
        raise ValueError("scontrol is not on the PATH: start on a login node of the cluster, or on a node of the job")
    shown = _scontrol("show", "job", "-o", number).split()
    fields = dict(word.split("=", 1) for word in shown if "=" in word)
    if fields.get("JobState") != "RUNNING":
        state = fields.get("JobState", "unknown to Slurm")
        raise ValueError(f"--job {number}: it is {state}: wait until it runs, or ask for nodes with --hold")
    left_out = _scontrol("show", "hostnames", excluded).split() if excluded else []
    return [node for node in _scontrol("show", "hostnames", fields["NodeList"]).split() if node not in left_out]


def _scontrol(*words: str) -> str:
    return ask(["scontrol", *words]).stdout
