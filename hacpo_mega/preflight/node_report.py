"""A node's report before a job starts (code, versions, devices, models, memory, disk), and the findings of all reports.

Imports no torch. Elsewhere: measurements between two nodes (meeting.py).
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

OWN_PACKAGES = ("hacpo_mega", "hacpo_grading", "hacpo_kernels")
DIGEST_CHARACTERS = 12  # short, since people compare them
# Shared memory that NVIDIA's containers ask for (docker run --shm-size=1g): NCCL uses it between a node's ranks.
SHM_BYTES_WITH_GPUS = 1 << 30
# Each rank of a vLLM engine on the CPU takes 4 MiB of shared memory (docs/guide/troubleshooting.md).
SHM_BYTES_PER_RANK = 4 << 20
MAX_CLOCK_SKEW_S = 2.0  # files of a later step must not look older
MIN_MEMORY_SHARE = 0.5  # of the free memory of other nodes of the same agents
MIN_CORES_SHARE = 0.5  # of a process's cores on other nodes of the same agents with as many processes
MOST_PACKAGES = 5  # named in the finding of a node
PROBED_NEIGHBOURS = 2  # one would not distinguish a node that cannot be reached from one that reaches none


@dataclass(frozen=True)
class NodeReport:
    """The facts of a node.

    agents      names of the agents whose ranks are on it
    in_job      facts by name, equal on all nodes of a sound job
    in_agents   facts by name, equal on the nodes of the same agents: other partitions may have other devices
    packages    versions by name of all packages that Python finds, equal on all nodes
    cores       processors of each process; threads   OMP_NUM_THREADS of a process
    wanted      processors that a process needs at least
    *_bytes     free now: host memory, /dev/shm, the disk of the run folder
    shortage    the message of `train` if the disk of the run folder is too small for the run
    problems    faults of this node by itself, a line each
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
    if not gpus and torch_cuda() is None:  # a CPU environment needs no GPU: a failing nvidia-smi is no fault there
        problems = []
    problems += [*compiler_problems(), *missing_kernels(config)] if gpus else []
    environment, mismatch = _environment_facts(gpus)
    problems += mismatch
    facts = {"code": source_digest(), "configuration": _digest(config.model_dump_json().encode())}
    facts |= {f"{name}'s version": version for name, version in versions.items()}
    shortage = ""
    try:
        facts |= {f"{agent.name}'s model folder": _model_digest(agent.model) for agent in config.agents}
        require_room(config)
    except OSError as error:
        problems.append(f"agents: {error}")
    except ValueError as error:
        shortage = str(error)
    shm = free_bytes(Path("/dev/shm"))
    shm_needed = SHM_BYTES_WITH_GPUS if gpus else SHM_BYTES_PER_RANK * env.num_local
    if shm < shm_needed:
        problems.append(f"/dev/shm: {size_text(shm)} free, {size_text(shm_needed)} needed")
    devices = min(env.num_local, RankMap.of(config).num_devices)
    has_own_gpu = shown is not None and len(gpus) == 1  # Slurm may show each process only its own GPU
    if 0 < len(gpus) < devices and not has_own_gpu:
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


def size_text(number: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def source_digest() -> str:
    """A digest of all source files of this project's packages."""
    digest = hashlib.sha256()
    for package in OWN_PACKAGES:
        for folder in importlib.util.find_spec(package).submodule_search_locations:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def _installed() -> dict[str, str]:
    """Versions of all packages that Python finds here, by name; of two of one name the first is the imported one."""
    packages = [(package.name, package.version) for package in importlib.metadata.distributions()]
    return dict(reversed(packages))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_CHARACTERS]


def _model_digest(folder: Path) -> str:
    """A digest of config.json, and the number, names and sizes of weight files. OSError for an unreadable file."""
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
    """CUDA of this environment and the driver of a node with GPUs, as a fact; a problem if they do not fit together."""
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
class ProbeReport:
    """A node's test of the run folder and of its neighbours.

    mark        whose mark it reads in the run folder (meeting.py); equal on all nodes if they share the folder
    targets     the nodes that it connected to
    unreached   errors by node, of targets that it could not connect to
    clock_s     its clock when it was told to probe
    """

    mark: str
    targets: Sequence[str]
    unreached: Mapping[str, str]
    clock_s: float


def report_findings(reports: Sequence[NodeReport]) -> list[Finding]:
    """Findings of the reports: each node's own problems, and differences from most others.

    A node that could not read its configuration has no facts to compare.
    """
    findings = [Finding(report.node, problem) for report in reports for problem in report.problems]
    reports = [report for report in reports if report.in_job]
    if not shared_shortage(reports):
        findings += [Finding(report.node, report.shortage) for report in reports if report.shortage]
    findings += _differing((report.node, report.in_job) for report in reports)
    findings += _differing_packages(reports)
    for agents in dict.fromkeys(report.agents for report in reports):
        peers = [report for report in reports if report.agents == agents]
        findings += _differing((report.node, report.in_agents) for report in peers)
        findings += _short_of_memory(peers)
        findings += _short_of_cores(peers)
    return findings


def shared_shortage(reports: Sequence[NodeReport]) -> str:
    """The message on a disk that all nodes find too small for the run, which is no node's fault; else empty."""
    lines = [report.shortage for report in reports if report.in_job]
    return lines[0] if lines and all(lines) else ""


def warnings(reports: Sequence[NodeReport]) -> list[str]:
    """Warnings that name no bad node, since any other would have the same; each for the first node that has it."""
    first = {}
    for report in reports:
        at = f"{report.node}: {report.cores} processor(s) of each process"
        if report.threads > report.cores > 0:
            first.setdefault("threads", f"{at} for {report.threads} threads (OMP_NUM_THREADS)")
        if 0 < report.cores < report.wanted:
            first.setdefault("wanted", f"{at} for a trainer, an engine and {report.wanted - 2} grading processes")
    return [f"warning: {text}: see slurm.cpus_per_rank" for text in first.values()]


def probe_findings(probes: Mapping[str, ProbeReport], sent_s: float, received_s: Mapping[str, float]) -> list[Finding]:
    """Findings of the nodes' probes: run folder, connections between nodes, clocks.

    Rank 0 sent the request at `sent_s` and received each report at `received_s`, by its own clock. A right clock shows
    a time between the two, however long the messages take.
    """
    findings = _differing((node, {"the run folder": probe.mark}) for node, probe in probes.items())
    findings += list(_unreachable(probes))
    for node, probe in probes.items():
        ahead, behind = probe.clock_s - received_s[node], sent_s - probe.clock_s
        if max(ahead, behind) > MAX_CLOCK_SKEW_S:
            text = f"its clock is {max(ahead, behind):.1f} s {'ahead' if ahead > 0 else 'behind'}"
            findings.append(Finding(node, text))
    return findings


def neighbours(nodes: Sequence[str], index: int) -> list[str]:
    """The nodes that a node connects to: the next ones around the ring."""
    steps = range(1, min(PROBED_NEIGHBOURS, len(nodes) - 1) + 1)
    return [nodes[(index + step) % len(nodes)] for step in steps]


def suspects(failed: Iterable[frozenset[str]], passed: Iterable[frozenset[str]]) -> list[str]:
    """The nodes that are in all `failed` groups and in no group that `passed`; sorted."""
    common = frozenset.intersection(*failed)
    return sorted(common.difference(*passed))


def _differing(facts: Iterable[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """A finding for every fact of a node that differs from the most frequent value; of equals the first node's wins."""
    facts = list(facts)
    findings = []
    for name in dict.fromkeys(name for _, facts_of_node in facts for name in facts_of_node):
        values = [(node, facts_of_node.get(name, "absent")) for node, facts_of_node in facts]
        usual, number = Counter(value for _, value in values).most_common(1)[0]
        findings += [
            Finding(node, f"{name}: {value}; on {number} other node(s): {usual}")
            for node, value in values
            if value != usual
        ]
    return findings


def _short_of_memory(reports: Sequence[NodeReport]) -> list[Finding]:
    usual = statistics.median(report.memory_bytes for report in reports)
    others = f"{size_text(usual)} on the other nodes"
    return [
        Finding(report.node, f"host memory: {size_text(report.memory_bytes)} free, {others}")
        for report in reports
        if report.memory_bytes < MIN_MEMORY_SHARE * usual
    ]


def _short_of_cores(reports: Sequence[NodeReport]) -> list[Finding]:
    """Compares with nodes of as many processes: where processes are not bound they share all of a node's processors."""
    findings = []
    for number in dict.fromkeys(report.num_ranks for report in reports):
        peers = [report for report in reports if report.num_ranks == number]
        usual = statistics.median(report.cores for report in peers)
        findings += [
            Finding(report.node, f"processors of each process: {report.cores}; {usual:.0f} on the other nodes")
            for report in peers
            if report.cores < MIN_CORES_SHARE * usual
        ]
    return findings


def _differing_packages(reports: Sequence[NodeReport]) -> list[Finding]:
    """One finding per node with the packages by which it differs from most."""
    by_node, findings = defaultdict(list), []
    for finding in _differing((report.node, report.packages) for report in reports):
        by_node[finding.node].append(finding.text)
    for node, texts in by_node.items():
        more = f" and {len(texts) - MOST_PACKAGES} more" if len(texts) > MOST_PACKAGES else ""
        findings.append(Finding(node, f"installed packages: {' / '.join(texts[:MOST_PACKAGES])}{more}"))
    return findings


def _unreachable(probes: Mapping[str, ProbeReport]) -> Iterator[Finding]:
    """Nodes that reach none of several targets although others do, then targets that other nodes cannot connect to."""
    callers: dict[str, list[str]] = {node: [] for node in probes}
    failed: dict[str, list[str]] = {node: [] for node in probes}
    for node, probe in probes.items():
        for target in probe.targets:
            callers[target].append(node)
            if target in probe.unreached:
                failed[target].append(node)
    isolated = {
        node
        for node, probe in probes.items()
        if len(probe.unreached) == len(probe.targets) > 1 and any(failed[n] != callers[n] for n in probe.targets)
    }
    for node in isolated:
        error = next(iter(probes[node].unreached.values()))
        yield Finding(node, f"it reaches none of {', '.join(probes[node].targets)} ({error})")
    for target, nodes in failed.items():
        if blaming := [node for node in nodes if node not in isolated]:
            error = probes[blaming[0]].unreached[target]
            yield Finding(target, f"{' and '.join(blaming)} cannot connect to it ({error})")
