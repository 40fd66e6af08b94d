"""Comparison of node reports: nodes that differ from the others. Pure. Imports no torch."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hacpo_mega.preflight.node_report import NodeReport, size

MAX_CLOCK_SKEW_S = 2.0  # files of a later step must not look older
MIN_MEMORY_SHARE = 0.5  # of the free memory of other nodes of the same agents
MIN_CORES_SHARE = 0.5  # of a process's cores on other nodes of the same agents with as many processes
MOST_PACKAGES = 5  # that are named of one node
PROBED_NEIGHBOURS = 2  # tells a node that nobody reaches from one that reaches nobody


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
    found += _differing((report.node, report.in_job) for report in reports)
    found += _other_packages(reports)
    for agents in dict.fromkeys(report.agents for report in reports):
        peers = [report for report in reports if report.agents == agents]
        found += _differing((report.node, report.in_agents) for report in peers)
        found += _short_of_memory(peers)
        found += _short_of_cores(peers)
    return found


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
    usual = {
        name: Counter(report.packages.get(name, "absent") for report in reports).most_common(1)[0][0]
        for name in sorted({name for report in reports for name in report.packages})
    }
    found = []
    for report in reports:
        own = {name: report.packages.get(name, "absent") for name in usual}
        other = [f"{name} {own[name]} ({usual[name]} on others)" for name in usual if own[name] != usual[name]]
        if other:
            more = f" and {len(other) - MOST_PACKAGES} more" if len(other) > MOST_PACKAGES else ""
            found.append(Finding(report.node, f"installed packages: {', '.join(other[:MOST_PACKAGES])}{more}"))
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
