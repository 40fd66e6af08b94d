"""The [slurm] table: what `hacpo-mega slurm` asks a cluster for. It changes where and how a run starts, never the run.

Not here: who runs on which node (cluster/slurm.py), and the job script itself (launch/slurm.sbatch).
"""

import datetime
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from hacpo_mega.config.section import Count, CountOrZero, Flag, Section


def _as_text(value: Any) -> Any:
    """TOML reads 90 as a number and 12:00:00 as a time of day; both are limits that Slurm reads."""
    return str(value) if type(value) in (int, datetime.time) else value


def _limit(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}", text):
        raise ValueError(f"needs minutes, hours:minutes:seconds or days-hours, as sbatch reads them, found {text!r}")
    return text


TimeLimit = Annotated[str, BeforeValidator(_as_text), AfterValidator(_limit)]


class SlurmAgentConfig(Section):
    """Nodes of another kind for one agent; what is not given is as in [slurm]."""

    partition: str | None = None
    """Partition of this agent's nodes."""
    constraint: str | None = None
    """Features that this agent's nodes must have, as sbatch's --constraint reads them."""
    gpus_per_node: CountOrZero | None = None
    """GPUs of each of this agent's nodes; 0: a CPU node."""
    ranks_per_node: Count | None = None
    """Processes of each of this agent's nodes where it has no GPUs."""


class SlurmConfig(Section):
    """What the run asks a Slurm cluster for; read by `hacpo-mega slurm` alone."""

    partition: str | None = None
    """Partition of the nodes; not given: the cluster's default."""
    account: str | None = None
    """Account that is charged; not given: the user's default."""
    time: TimeLimit | None = None
    """Limit of one attempt, as sbatch's --time reads it: minutes, hours:minutes:seconds, days-hours; not given: the
    partition's."""
    nodes: Count | None = None
    """Nodes of the job; not given: as many as the layout fills."""
    gpus_per_node: CountOrZero = 8
    """GPUs of a node, one process each; 0: CPU nodes, of which ranks_per_node says how many processes they take."""
    ranks_per_node: Count | None = None
    """Processes of a node without GPUs; needed where gpus_per_node is 0."""
    cpus_per_rank: Count | None = None
    """Processor cores of each process; not given: the partition decides."""
    constraint: str | None = None
    """Features that the nodes must have, as sbatch's --constraint reads them."""
    agents: dict[str, SlurmAgentConfig] = Field(default_factory=dict)
    """A table for each agent, by name, that runs on nodes of another kind: the job becomes a heterogeneous one."""
    tp_across_nodes: Flag = False
    """Whether a tensor parallel group may reach over several nodes, where every layer waits for the network."""
    setup: tuple[str, ...] = ()
    """Shell lines of the job before anything else, such as `module load cuda`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of all processes, such as NCCL_IB_HCA; they win over what hacpo-mega would set."""
    run_with: tuple[str, ...] = ()
    """Words before the command of every process, such as those of a container: apptainer, exec, --nv, image.sif."""
    python: str | None = None
    """Interpreter on the nodes, in the container if there is one; not given: the one that submits."""
    srun_options: tuple[str, ...] = ("--cpu-bind=cores",)
    """Options of the srun that starts the processes; by default each stays on its cores, and so on their memory."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of the job, one `#SBATCH` line each, such as --exclusive or --qos=high."""
    signal_s: Annotated[int, Field(strict=True, ge=30, le=65535)] = 300
    """Seconds before the time limit at which the run is told to take a checkpoint and to queue again; Slurm may tell it
    up to 60 seconds earlier."""
    preflight: Flag = True
    """Whether all nodes are compared and the groups timed before an attempt begins, so that it leaves out a bad one."""
    max_attempts: Count = 100
    """Attempts of one job, the first included, before it is no longer queued again."""
