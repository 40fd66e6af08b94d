"""A node's report before a job starts: code, versions, devices, models, memory, disk; and which nodes differ by them.

Imports no torch. Elsewhere: facts that take two nodes to find (meeting.py).
"""

import hashlib
import importlib.metadata
import importlib.util
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hacpo_mega.checkpoint.disk_space import free_bytes, require_room
from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.cluster.machine.driver import driver_problem, installed_driver, torch_cuda
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
from hacpo_mega.config.checks.notes import missing_kernels

OUR_PACKAGES = ("hacpo_mega", "hacpo_grading", "hacpo_kernels")
SHORT = 12  # characters of a digest that a person reads
# Shared memory that NVIDIA's containers ask for (docker run --shm-size=1g): NCCL's ranks of one node meet there.
SHM_BYTES_WITH_GPUS = 1 << 30
# The ranks of a vLLM engine on the CPU meet in 4 MiB each (docs/guide/troubleshooting.md).
SHM_BYTES_PER_RANK = 4 << 20
MAX_CLOCK_SKEW_S = 2.0  # files of a later step must not look older
MIN_MEMORY_SHARE = 0.5  # of the free memory of other nodes of the same agents
MIN_CORES_SHARE = 0.5  # of a process's cores on other nodes of the same agents with as many processes
MOST_PACKAGES = 5  # that are named of one node
PROBED_NEIGHBOURS = 2  # tells a node that nobody reaches from one that reaches nobody


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
    shortage    the line of `train` where the disk of the run folder cannot hold the run
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
    shortage: str = ""
    problems: tuple[str, ...] = ()


def report_of(env: LauncherEnv, config: Config, versions: Mapping[str, str]) -> NodeReport:
    """This node's report, by its first process; `versions` are those of the installed packages."""
    shown = visible_devices()
    gpus, problems = visible_gpus(shown)
    if not gpus and torch_cuda() is None:  # a CPU environment uses none: a tool that fails there is no fault of a node
        problems = []
    problems += [*compiler_problems(), *missing_kernels(config)] if gpus else []
    environment, mismatch = _environment_facts(gpus)
    problems += mismatch
    facts = {"code": source_digest(), "configuration": _digest(config.model_dump_json().encode())}
    facts |= {f"{name}'s version": version for name, version in versions.items()}
    shortage = ""
    try:
        facts |= {f"{agent.name}'s model folder": _model(agent.model) for agent in config.agents}
        require_room(config)
    except OSError as error:
        problems.append(f"agents: {error}")
    except ValueError as short:
        shortage = str(short)
    shm = free_bytes(Path("/dev/shm"))
    shm_needed = SHM_BYTES_WITH_GPUS if gpus else SHM_BYTES_PER_RANK * env.num_local
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
        in_agents=_device_facts(gpus) | environment,
        packages=_installed(),
        cores=cores_of_a_process(env.num_local),
        threads=num_threads_set(),
        wanted=config.reward.num_workers + 2 if gpus else 1,
        memory_bytes=free_memory_bytes(),
        shm_bytes=shm,
        disk_bytes=free_bytes(config.run_dir),
        shortage=shortage,
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


def _model(folder: Path) -> str:
    """Digests of a model's files. OSError if they are unreadable."""
    config = (folder / "config.json").read_bytes()
    files = sorted(folder.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    for file in files:
        with file.open("rb") as weights:
            weights.read(8)
    names = _digest(repr([(file.name, number) for file, number in zip(files, sizes)]).encode())
    return f"config.json {_digest(config)}, {len(files)} weight files of {sum(sizes):,} bytes (names {names})"


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


def _environment_facts(gpus: Sequence[Gpu]) -> tuple[dict[str, str], list[str]]:
    """CUDA of this environment with the driver of a node that has GPUs, and why the one does not run on the other."""
    if (driver := installed_driver() if gpus else None) is None:
        return {}, []
    cuda = torch_cuda()
    problem = driver_problem(cuda, driver)
    return {"environment": f"CUDA {cuda or 'none'}; {driver}"}, [problem] if problem else []


@dataclass(frozen=True)
class Finding:
    """A problem of a node."""

    node: str
    text: str


@dataclass(frozen=True)
class Look:
    """A node's findings about others.

    home         whose file it sees in the run folder; equal on all nodes if they share it
    unreached    the nodes that it could not connect to, of those that it was asked to, with the error
    clock_s      its clock when it was told to look
    """

    home: str
    asked: Sequence[str]
    unreached: Mapping[str, str]
    clock_s: float


def report_findings(reports: Sequence[NodeReport]) -> list[Finding]:
    """Findings of the reports: each node's own problems, and differences from most others.

    A node that could not read its configuration has no facts to compare.
    """
    found = [Finding(report.node, problem) for report in reports for problem in report.problems]
    reports = [report for report in reports if report.in_job]
    if not shared_shortage(reports):
        found += [Finding(report.node, report.shortage) for report in reports if report.shortage]
    found += _differing((report.node, report.in_job) for report in reports)
    found += _other_packages(reports)
    for agents in dict.fromkeys(report.agents for report in reports):
        peers = [report for report in reports if report.agents == agents]
        found += _differing((report.node, report.in_agents) for report in peers)
        found += _short_of_memory(peers)
        found += _short_of_cores(peers)
    return found


def shared_shortage(reports: Sequence[NodeReport]) -> str:
    """The line on a disk that all nodes find too small for the run: no node's fault. Empty if there is none."""
    lines = [report.shortage for report in reports if report.in_job]
    return lines[0] if lines and all(lines) else ""


def warnings(reports: Sequence[NodeReport]) -> list[str]:
    """Warnings that hold on every node, so that leaving some out would not help; in the first node's words."""
    first = {}
    for report in reports:
        at = f"{report.node}: {report.cores} processor(s) of each process"
        if report.threads > report.cores > 0:
            first.setdefault("threads", f"{at} for {report.threads} threads (OMP_NUM_THREADS)")
        if 0 < report.cores < report.wanted:
            first.setdefault("wanted", f"{at} for a trainer, an engine and {report.wanted - 2} grading processes")
    return [f"warning: {text}: see slurm.cpus_per_rank" for text in first.values()]


def look_findings(looks: Mapping[str, Look], asked_s: float, heard_s: Mapping[str, float]) -> list[Finding]:
    """Findings of nodes about each other: run folder, ways between them, clocks.

    `asked_s` is when rank 0 told them to look, `heard_s` when it heard of each, by its clock. A clock is off by less
    than heard - told from what it shows, so a node is named only if no delay can explain it.
    """
    found = _differing((node, {"the run folder": look.home}) for node, look in looks.items())
    found += list(_ways(looks))
    for node, look in looks.items():
        ahead, behind = look.clock_s - heard_s[node], asked_s - look.clock_s
        if ahead > MAX_CLOCK_SKEW_S or behind > MAX_CLOCK_SKEW_S:
            found.append(Finding(node, f"its clock is {max(ahead, behind):.1f} s {'ahead' if ahead > 0 else 'behind'}"))
    return found


def neighbours(nodes: Sequence[str], index: int) -> list[str]:
    """The nodes that a node connects to: the next ones around the ring."""
    steps = range(1, min(PROBED_NEIGHBOURS, len(nodes) - 1) + 1)
    return [nodes[(index + step) % len(nodes)] for step in steps]


def suspects(failed: Iterable[frozenset[str]], passed: Iterable[frozenset[str]]) -> list[str]:
    """The nodes that all failed groups have in common and no group of theirs that worked has; sorted."""
    common = frozenset.intersection(*failed)
    return sorted(common.difference(*passed))


def _differing(facts: Iterable[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """A finding for every fact of a node that differs from the majority; of two halves, the first node's is right."""
    facts = list(facts)
    found = []
    for name in dict.fromkeys(name for _, own in facts for name in own):
        values = Counter(own.get(name, "absent") for _, own in facts)
        usual, number = values.most_common(1)[0]  # of equals, the one met first
        found += [
            Finding(node, f"{name}: {own.get(name, 'absent')}; on {number} other node(s): {usual}")
            for node, own in facts
            if own.get(name, "absent") != usual
        ]
    return found


def _short_of_memory(reports: Sequence[NodeReport]) -> list[Finding]:
    usual = statistics.median(report.memory_bytes for report in reports)
    return [
        Finding(report.node, f"host memory: {size(report.memory_bytes)} free, {size(usual)} on the other nodes")
        for report in reports
        if report.memory_bytes < MIN_MEMORY_SHARE * usual
    ]


def _short_of_cores(reports: Sequence[NodeReport]) -> list[Finding]:
    """Compares with nodes of as many processes: unbound resources are shared by all processes of a node."""
    found = []
    for number in dict.fromkeys(report.num_ranks for report in reports):
        peers = [report for report in reports if report.num_ranks == number]
        usual = statistics.median(report.cores for report in peers)
        found += [
            Finding(report.node, f"processors of each process: {report.cores}; {usual:.0f} on the other nodes")
            for report in peers
            if report.cores < MIN_CORES_SHARE * usual
        ]
    return found


def _other_packages(reports: Sequence[NodeReport]) -> list[Finding]:
    """The packages by which a node differs from most, in a line."""
    texts, found = defaultdict(list), []
    for finding in _differing((report.node, report.packages) for report in reports):
        texts[finding.node].append(finding.text)
    for node, own in texts.items():
        more = f" and {len(own) - MOST_PACKAGES} more" if len(own) > MOST_PACKAGES else ""
        found.append(Finding(node, f"installed packages: {' / '.join(own[:MOST_PACKAGES])}{more}"))
    return found


def _ways(looks: Mapping[str, Look]) -> Iterator[Finding]:
    """Nodes that nobody reaches, then nodes that reach nobody; a way that is closed for one of two is the target's
    fault."""
    asked_by: dict[str, list[str]] = {node: [] for node in looks}
    closed_to: dict[str, list[str]] = {node: [] for node in looks}
    for node, look in looks.items():
        for other in look.asked:
            asked_by[other].append(node)
            if other in look.unreached:
                closed_to[other].append(node)
    lonely = {
        node
        for node, look in looks.items()
        if len(look.unreached) == len(look.asked) > 1 and any(closed_to[n] != asked_by[n] for n in look.asked)
    }
    for node in lonely:
        error = next(iter(looks[node].unreached.values()))
        yield Finding(node, f"it reaches none of {', '.join(looks[node].asked)} ({error})")
    for node, callers in closed_to.items():
        if blaming := [caller for caller in callers if caller not in lonely]:
            error = looks[blaming[0]].unreached[node]
            yield Finding(node, f"{' and '.join(blaming)} cannot connect to it ({error})")
