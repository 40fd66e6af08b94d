"""A node's report before a job starts: code, versions, devices, models, memory, disk. Imports no torch.

Not here: the comparison with others (node_comparison.py), and facts that take two nodes to find (preflight.py).
"""

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hacpo_mega.checkpoint.disk_space import CHECKPOINT_BYTES_PER_PARAMETER, free_bytes
from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.cluster.machine.environment import (
    compiler_problems,
    cores_of_a_process,
    num_threads_set,
    visible_devices,
)
from hacpo_mega.cluster.machine.machine_limits import free_memory_bytes
from hacpo_mega.cluster.machine.visible_gpus import Gpu, visible_gpus
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.models.files.folder import dtype_name

OUR_PACKAGES = ("hacpo_mega", "hacpo_grading", "hacpo_kernels")
SHORT = 12  # characters of a digest that a person reads
# What NVIDIA's containers ask for (docker run --shm-size=1g): NCCL's ranks of one node meet there.
SHM_BYTES_WITH_GPUS = 1 << 30
# The ranks of a vLLM engine on the CPU meet in 4 MiB each (docs/guide/troubleshooting.md).
SHM_BYTES_PER_RANK = 4 << 20


@dataclass(frozen=True)
class NodeReport:
    """The facts of a node.

    agents      names of the agents whose ranks are on it
    in_job      what must be equal on all nodes, by what it is
    in_agents   what must be equal on the nodes of the same agents: other partitions may have other devices
    packages    all that Python finds, name to version: equal on all nodes, as in_job
    cores       processors of each process; threads   how many it runs on them (OMP_NUM_THREADS)
    wanted      processors that a process needs at least
    *_bytes     free now: host memory, /dev/shm, the disk of the run folder
    problems    what is wrong with it whatever the others say
    """

    node: str
    first_rank: int
    num_ranks: int
    agents: str = ""
    in_job: Mapping[str, str] = field(default_factory=dict)
    in_agents: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    threads: int = 0
    wanted: int = 0
    memory_bytes: int = 0
    shm_bytes: int = 0
    disk_bytes: int = 0
    problems: tuple[str, ...] = ()


def report_of(env: LauncherEnv, config: Config, versions: Mapping[str, str]) -> NodeReport:
    """This node's report, by its first process; `versions` are those of the installed packages."""
    shown = visible_devices()
    gpus, problems = visible_gpus(shown)
    problems += compiler_problems() if gpus else []
    facts = {"code": source_digest(), "configuration": _digest(config.model_dump_json().encode())}
    facts |= {f"{name}'s version": version for name, version in versions.items()}
    model_bytes = checkpoint_bytes = 0
    for agent in config.agents:
        try:
            text, weights, parameters = _model(agent.model)
        except (OSError, ValueError) as error:
            problems.append(f"agents.{agent.name}: {error}")
            continue
        facts[f"{agent.name}'s model folder"] = text
        model_bytes += weights
        checkpoint_bytes += CHECKPOINT_BYTES_PER_PARAMETER * parameters
    is_saved = config.checkpoint.every_steps or config.checkpoint.every_minutes
    # one checkpoint is written before the oldest goes
    needed = model_bytes + (config.checkpoint.keep_last + 1) * checkpoint_bytes * bool(is_saved)
    shm = free_bytes(Path("/dev/shm"))
    shm_needed = SHM_BYTES_WITH_GPUS if gpus else SHM_BYTES_PER_RANK * env.num_local
    disk = free_bytes(config.run_dir)
    if disk < needed:
        problems.append(
            f"disk of {config.run_dir}: {size(disk)} free, {size(needed)} needed for the exported agents and "
            f"{config.checkpoint.keep_last + 1} checkpoints"
        )
    if shm < shm_needed:
        problems.append(f"/dev/shm: {size(shm)} free, {size(shm_needed)} needed")
    devices = min(env.num_local, RankMap.of(config).num_devices)
    has_its_own = shown is not None and len(gpus) == 1  # Slurm may show each process one, another to each
    if 0 < len(gpus) < devices and not has_its_own:
        problems.append(f"{len(gpus)} GPUs, {devices} needed")
    return NodeReport(
        node=env.node,
        first_rank=env.rank,
        num_ranks=env.num_local,
        agents=_agents_of(env, config),
        in_job=facts,
        in_agents=_device_facts(gpus),
        packages=_installed(),
        cores=cores_of_a_process(env.num_local),
        threads=num_threads_set(),
        wanted=config.reward.num_workers + 2 if gpus else 1,
        memory_bytes=free_memory_bytes(),
        shm_bytes=shm,
        disk_bytes=disk,
        problems=tuple(problems),
    )


def size(number: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def source_digest() -> str:
    """A digest of all source files of this project's packages: two checkouts that differ in a byte differ in it."""
    digest = hashlib.sha256()
    for package in OUR_PACKAGES:
        for folder in importlib.util.find_spec(package).submodule_search_locations:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:SHORT]


def _installed() -> dict[str, str]:
    """All packages that Python finds here, and their versions; of two of one name the first is imported."""
    found = [(package.name, package.version) for package in importlib.metadata.distributions()]
    return dict(reversed(found))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SHORT]


def _model(folder: Path) -> tuple[str, int, int]:
    """A model's (digests of its files, bytes of the weights, parameters). OSError, ValueError if unreadable."""
    config = (folder / "config.json").read_bytes()
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    for file in files:
        with file.open("rb") as weights:
            weights.read(8)
    names = _digest(repr([(file.name, number) for file, number in zip(files, sizes)]).encode())
    text = f"config.json {_digest(config)}, {len(files)} weight files of {sum(sizes):,} bytes (names {names})"
    return text, sum(sizes), sum(sizes) // (4 if dtype_name(folder) == "float32" else 2)


def _agents_of(env: LauncherEnv, config: Config) -> str:
    ranks = RankMap.of(config)
    on_node = range(env.rank, min(env.rank + env.num_local, ranks.world_size))
    return ", ".join(dict.fromkeys(ranks.coordinate(rank).agent_name for rank in on_node))


def _device_facts(gpus: Sequence[Gpu]) -> dict[str, str]:
    if not gpus:
        return {"devices": "no GPU"}
    kinds = [gpu.name for gpu in gpus]
    return {
        "devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "driver": ", ".join(dict.fromkeys(gpu.driver for gpu in gpus)),
        "highest clocks": ", ".join(dict.fromkeys(f"{gpu.clocks} MHz" for gpu in gpus)),
    }
