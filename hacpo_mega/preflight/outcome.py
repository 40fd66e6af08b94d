"""Result of a preflight: the exit code, the table for people, the record for programs. Pure.

Not here: how it is found out (preflight.py).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hacpo_mega.cluster.launcher_env import LauncherEnv
from hacpo_mega.preflight.meeting import Word
from hacpo_mega.preflight.node_comparison import Finding, warnings
from hacpo_mega.preflight.node_report import NodeReport, size

FAILED, REFUSED, NODE_BAD = 1, 2, 5  # exit statuses
MOST_ROWS = 32  # of the table: beyond them, nodes without a finding are only counted


@dataclass
class Outcome:
    """Result on rank 0.

    words      of every rank that came      findings   in the order in which they were found
    measured   rows of preflight/meeting.py's Measured    failure    what went wrong where no node can be named
    """

    words: dict[int, Word] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    measured: list[Mapping[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def reports(self) -> list[NodeReport]:
        """Reports of the nodes that came, by their first rank."""
        return [NodeReport(**word["report"]) for _, word in sorted(self.words.items()) if "report" in word]

    @property
    def is_good(self) -> bool:
        return not (self.findings or self.missing or self.failure)

    @property
    def exit_code(self) -> int:
        """REFUSED if every node has the same complaint about the user's input."""
        if self.is_good:
            return 0
        by_node = {tuple(report.problems) for report in self.reports}
        if not self.missing and len(by_node) == 1 and not any(report.in_job for report in self.reports):
            return REFUSED
        return NODE_BAD if self.bad_nodes or self.missing else FAILED

    @property
    def bad_nodes(self) -> list[str]:
        return list(dict.fromkeys(finding.node for finding in self.findings))


def missing_findings(outcome: Outcome, env: LauncherEnv, gave_up: Mapping[str, float]) -> list[Finding]:
    """The nodes that are missing, or miss processes, as far as the launcher or the others name them.

    Nodes that waited for rank 0 for so many seconds and gave up (`gave_up`) were there: rank 0 is late. If only rank
    0's own node arrived, of at least three, that one cannot be reached.
    """
    if not outcome.missing:
        return []
    counts: dict[str, int] = {}
    for word in outcome.words.values():
        counts[word["node"]] = counts.get(word["node"], 0) + 1
    early = {node: seconds for node, seconds in gave_up.items() if node not in counts}
    absent = [node for node in env.nodes if node not in counts and node not in early]
    if early:
        node, seconds = min(early.items())
        late = [Finding(env.node, f"rank 0 came when {node} had given up, after {seconds:.0f} s")]
        return late + [Finding(node, "did not come") for node in absent]
    if len(absent) > 1 and list(counts) == [env.node]:
        return [Finding(env.node, f"rank 0 is here, and none of the {len(absent)} other nodes reaches it")]
    found = [Finding(node, "did not come") for node in absent]
    for report in outcome.reports:
        if (come := counts[report.node]) < report.num_ranks:
            found.append(Finding(report.node, f"only {come} of its {report.num_ranks} processes came"))
    return found


def table(outcome: Outcome, seconds: float) -> str:
    """The nodes, those with findings first; the groups by kind; the findings; the line for sbatch."""
    reports = sorted(outcome.reports, key=lambda report: report.node not in outcome.bad_nodes)
    shown = reports[: max(MOST_ROWS, len(outcome.bad_nodes))]
    head = ("node", "ranks", "agents", "devices", "cores of a process", "memory free", "/dev/shm free", "disk free", "")
    rows = [head]
    for report in shown:
        last = report.first_rank + report.num_ranks - 1
        ranks = f"{report.first_rank}-{last}" if last > report.first_rank else f"{last}"
        # a node that could not read its configuration has looked at nothing
        frees = [
            size(number) if report.in_job else "?"
            for number in (report.memory_bytes, report.shm_bytes, report.disk_bytes)
        ]
        verdict = "BAD" if report.node in outcome.bad_nodes else "ok"
        cores = str(report.cores) if report.in_job else "?"
        rows.append((report.node, ranks, report.agents, report.in_agents.get("devices", "?"), cores, *frees, verdict))
    lines = [_columns(rows)]
    if len(reports) > len(shown):
        lines.append(f"... and {len(reports) - len(shown)} more nodes without a finding")
    lines.append(_measured_lines(outcome.measured))
    lines += [f"{finding.node}: {finding.text}" for finding in outcome.findings]
    lines += warnings(outcome.reports)
    lines += [outcome.failure]
    if outcome.missing:
        lines.append(f"ranks that did not come: {_spans(outcome.missing)}")
    lines.append(f"--exclude={','.join(outcome.bad_nodes)}" if outcome.bad_nodes else "")
    lines.append(f"{len(reports)} node(s), {len(outcome.words)} rank(s), {seconds:.1f} s since rank 0 came")
    return "\n".join(line for line in lines if line)


def record(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """The record for programs: `exit_code`, `bad_nodes`, `exclude`, `findings`, `missing_ranks`, `groups`, `nodes`,
    `warnings`."""
    return {
        "time_unix_s": round(time.time(), 3),
        "seconds": round(seconds, 3),
        "exit_code": outcome.exit_code,
        "bad_nodes": outcome.bad_nodes,
        "exclude": f"--exclude={','.join(outcome.bad_nodes)}" if outcome.bad_nodes else "",
        "findings": [asdict(finding) for finding in outcome.findings],
        "failure": outcome.failure,
        "missing_ranks": outcome.missing,
        "groups": list(outcome.measured),
        "nodes": [asdict(report) | {"packages": len(report.packages)} for report in outcome.reports],
        "warnings": warnings(outcome.reports),
    }


def _measured_lines(measured: Sequence[Mapping[str, Any]]) -> str:
    """A line per kind of group: how many, how fast the median and the slowest are, and which that is."""
    rows = [("group", "how many", "ranks", "sent by each", "median", "slowest", "")]
    for kind in dict.fromkeys(one["kind"] for one in measured):
        groups = sorted((one for one in measured if one["kind"] == kind), key=lambda one: one["seconds"])
        middle, last = groups[len(groups) // 2], groups[-1]
        speeds = [
            f"{one['GB_per_s']:.2f} GB/s" if one["num_bytes"] else f"{1e3 * one['seconds']:.1f} ms"
            for one in (middle, last)
        ]
        sent = size(last["num_bytes"]) if last["num_bytes"] else "-"
        rows.append((kind, str(len(groups)), str(last["num_ranks"]), sent, *speeds, last["group"]))
    return _columns(rows) if len(rows) > 1 else ""


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers with their runs shortened: "3, 8-15"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
