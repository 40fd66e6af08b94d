"""The [slurm] table: the resources that `hacpo-mega slurm` requests. It changes where and how a run starts, never the
run.

Elsewhere: who runs on which node (jobs/slurm_plan.py), and the job script itself (launch/slurm.sbatch).
"""

import datetime
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from hacpo_mega.config.tables.section import Count, CountOrZero, FilePath, Flag, Positive, Section


def _as_text(value: Any) -> Any:
    """TOML reads 90 as a number and 12:00:00 as a time of day; to Slurm they are sizes and limits."""
    return str(value) if type(value) in (int, datetime.time) else value


def _limit(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}", text):
        raise ValueError(f"needs minutes, hours:minutes:seconds or days-hours, as sbatch reads them, found {text!r}")
    return text


def time_note(limit: str | None) -> str | None:
    """Note on a Slurm time limit that is easily mistaken for hours; None for any other."""
    match = re.fullmatch(r"(\d+)(?::(\d\d))?", limit or "")
    if match is None or (match[2] is None and int(match[1]) > LIKE_HOURS):
        return None
    first, second = int(match[1]), int(match[2] or 0)
    means = f"{first} minutes" + (f" {second} seconds" if second else "")
    hours = f"{first} hours" + (f" {second} minutes" if second else "")
    return f"slurm.time: {limit} is {means} to Slurm; {hours} is {first:02}:{second:02}:00"


def _gres(text: str) -> str:
    """The value of sbatch's --gres: "h100:8" stands for "gpu:h100:8"."""
    match = re.fullmatch(r"(?:gpu:)?(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)|none", text)
    if match is None:
        raise ValueError(f"needs a type and a number of GPUs, such as 'h100:8', or 'none', found {text!r}")
    return text if text == "none" or text.startswith("gpu:") else f"gpu:{text}"


def _line(text: str) -> str:
    """A value for one line of the job script. ValueError if it would begin another."""
    if not text or not text.isprintable():
        raise ValueError(f"needs one line of printable text, found {text!r}")
    return text


Line = Annotated[str, AfterValidator(_line)]
Memory = Annotated[str, BeforeValidator(_as_text), Field(pattern=r"^\d+[KMGT]?$")]
TimeLimit = Annotated[str, BeforeValidator(_as_text), AfterValidator(_limit)]


# A number alone is minutes; up to three days it may have been meant as hours.
LIKE_HOURS = 72


class SlurmAgentConfig(Section):
    """Nodes of another kind for one agent; missing keys are as in [slurm]."""

    partition: Line | None = None
    """Partition of this agent's nodes."""
    constraint: Line | None = None
    """Features that this agent's nodes must have, as sbatch's --constraint reads them."""
    gpus_per_node: CountOrZero | None = None
    """GPUs of each of this agent's nodes; 0: a CPU node."""
    ranks_per_node: Count | None = None
    """Processes of each of this agent's nodes where it has no GPUs."""


class SlurmConfig(Section):
    """Resources that the run asks a Slurm cluster for; read by `hacpo-mega slurm` alone."""

    partition: Line | None = None
    """Partition of the nodes; not given: the cluster's default."""
    account: Line | None = None
    """Account that is charged; not given: the user's default."""
    qos: Line | None = None
    """Quality of service; not given: the user's default."""
    time: TimeLimit | None = None
    """Limit of one attempt, as sbatch's --time reads it: minutes, hours:minutes:seconds, days-hours; not given: the
    partition's."""
    nodes: Count | None = None
    """Nodes of the job; not given: as many as the layout fills."""
    gpus_per_node: CountOrZero = 8
    """GPUs of a node, one process each; 0: CPU nodes, with ranks_per_node processes each."""
    ranks_per_node: Count | None = None
    """Processes of a node without GPUs; needed if gpus_per_node is 0."""
    gres: Annotated[str, AfterValidator(_gres)] | None = None
    """GPUs of a node by type, such as h100:8, as many as gpus_per_node; none: request no GPUs but whole nodes, for a
    Slurm that counts none; not given: gpus_per_node of any type, none if sinfo shows none."""
    cpus_per_rank: Count | None = None
    """Processors of each process, as Slurm counts them; not given: an equal share of a whole node (--exclusive), else
    sinfo's share of one GPU of the node, or 8 if sinfo cannot be asked."""
    mem: Memory | None = None
    """Memory of each node, as sbatch's --mem reads it; 0: all of it; not given: all of a node whose GPUs or processors
    the job takes all (or --exclusive), else their share of it; all if sinfo cannot be asked."""
    constraint: Line | None = None
    """Features that the nodes must have, as sbatch's --constraint reads them."""
    nodelist: Line | None = None
    """Nodes that the job must have; not for a heterogeneous one."""
    exclude: Line | None = None
    """Nodes that the job must not have; a preflight adds those that it finds bad."""
    agents: dict[str, SlurmAgentConfig] = Field(default_factory=dict)
    """A table for each agent, by name, on nodes of another kind; the job becomes a heterogeneous one."""
    tp_across_nodes: Flag = False
    """Allow the ranks of tp x cp on several nodes, where every layer waits for the network."""
    setup: tuple[str, ...] = ()
    """Shell lines of the job before anything else, such as `module load cuda`."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(default_factory=dict)
    """Variables of all processes, such as NCCL_IB_HCA; they win over what hacpo-mega would set."""
    run_with: tuple[str, ...] = ()
    """Command prefix of every process, such as a container's: apptainer, exec, --nv, image.sif."""
    container_image: Line | None = None
    """Image of a pyxis container that every process runs in, unpacked once a node and attempt."""
    container_mounts: tuple[Line, ...] = ()
    """Mounts of the container, such as /data:/data:ro, beside the repository, the current folder and those of the run,
    the models and the data files."""
    python: str | None = None
    """Interpreter on the nodes, in the container if there is one; not given: the one that submits."""
    srun_options: tuple[str, ...] = ()
    """Further options of the srun that starts the processes; it binds each to its own cores unless these say another
    --cpu-bind."""
    sbatch_options: tuple[Line, ...] = ()
    """Further options of the job, one `#SBATCH` line each, such as --exclusive or --reservation=NAME; they win."""
    template: FilePath | None = None
    """A job script of your own in place of launch/slurm.sbatch, with its placeholders."""
    signal_s: Annotated[int, Field(strict=True, ge=30, le=65535)] = 300
    """Seconds before the time limit at which the run is told to take a checkpoint and to queue again; Slurm may signal
    up to 60 seconds earlier."""
    preflight: Flag = True
    """Compare all nodes and time the groups before an attempt begins, and leave out bad nodes."""
    preflight_wait_s: Positive = 180.0
    """Seconds without news after which the preflight gives up on missing processes: Python may start late if many nodes
    read one file system."""
    max_attempts: Count = 100
    """Attempts of one job, the first included, before it is no longer queued again."""
