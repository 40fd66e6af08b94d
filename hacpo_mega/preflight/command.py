"""`hacpo-mega preflight`: whether every node is fit for this run, by a test on all of them before a model is loaded.

    arrive   every rank comes, every node sends its report (preflight/node_report.py)
    probe    every node reads the mark in the run folder, connects to its neighbours, and sends its clock
    groups   the groups that training makes are made and timed

Rank 0 compares, prints one table and writes RUN/logs/preflight.json; the first round with a finding is the last one.
Elsewhere: the meeting itself (preflight/meeting.py), and what counts as a difference (preflight/node_report.py).
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hacpo_mega.cluster.launcher_env import LauncherEnv, Unreachable
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.cluster.rendezvous import own_address
from hacpo_mega.cluster.security.secret import Secret
from hacpo_mega.models.files.replacing import replace_file
from hacpo_mega.models.files.visible import columns, ranges, say
from hacpo_mega.preflight.meeting import (
    LOST,
    GroupTest,
    Meeting,
    Message,
    ProbeListener,
    group_nodes,
    not_in_ring,
    probe,
    read_mark,
    write_mark,
)
from hacpo_mega.preflight.node_report import (
    Finding,
    NodeReport,
    ProbeReport,
    neighbours,
    probe_findings,
    report_findings,
    shared_shortage,
    size_text,
    suspects,
    warnings,
)

FILE = "preflight.json"  # in RUN/logs
# Kinds of groups, in the order in which every rank tests them.
ORDER = (
    "job, making groups", "cell, all-reduce", "lane, all-gather", "weights, all-gather", "agent, all-reduce",
    "job, barrier",
)  # fmt: skip
FAILED, REFUSED, NODE_BAD = 1, 2, 5  # exit statuses
MOST_ROWS = 32  # of the table: beyond them, nodes without a finding are only counted


@dataclass
class Outcome:
    """Result on rank 0.

    messages   of the ranks that came, by rank
    findings   in the order in which they were found
    missing    ranks that did not come
    timings    of groups, as tables of preflight/meeting.py's GroupTiming
    failure    an error for which no node can be named
    """

    messages: dict[int, Message] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    timings: list[Mapping[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def reports(self) -> list[NodeReport]:
        """Reports of the nodes that came, by their first rank."""
        return [NodeReport(**message["report"]) for _, message in sorted(self.messages.items()) if "report" in message]

    @property
    def is_good(self) -> bool:
        return not (self.findings or self.missing or self.failure or self.shortage)

    @property
    def shortage(self) -> str:
        """The line on a disk that all nodes find too small; empty if there is none."""
        return shared_shortage(self.reports)

    @property
    def exit_code(self) -> int:
        """REFUSED if every node has the same complaint about the user's input, or about the disk."""
        if self.is_good:
            return 0
        complaints = {tuple(report.problems) for report in self.reports}
        is_input = len(complaints) == 1 and not any(report.in_job for report in self.reports)
        if not self.missing and (is_input or self.shortage):
            return REFUSED
        return NODE_BAD if self.bad_nodes or self.missing else FAILED

    @property
    def bad_nodes(self) -> list[str]:
        return list(dict.fromkeys(finding.node for finding in self.findings))


def missing_findings(outcome: Outcome, env: LauncherEnv, gave_up: Mapping[str, float]) -> list[Finding]:
    """The nodes that are missing, or miss processes, as far as the launcher or other nodes name them.

    Nodes in `gave_up` waited so many seconds for rank 0 and ended: rank 0 was late, they are not missing. If only rank
    0's own node arrived, of at least three, that one cannot be reached.
    """
    if not outcome.missing:
        return []
    counts: dict[str, int] = {}
    for message in outcome.messages.values():
        counts[message["node"]] = counts.get(message["node"], 0) + 1
    early = {node: seconds for node, seconds in gave_up.items() if node not in counts}
    absent = [node for node in env.nodes if node not in counts and node not in early]
    if early:
        node, seconds = min(early.items())
        late = [Finding(env.node, f"rank 0 came when {node} had given up, after {seconds:.0f} s")]
        return late + [Finding(node, "did not come") for node in absent]
    if len(absent) > 1 and list(counts) == [env.node]:
        return [Finding(env.node, f"rank 0 is here, and none of the {len(absent)} other nodes reaches it")]
    findings = [Finding(node, "did not come") for node in absent]
    for report in outcome.reports:
        if (num_come := counts[report.node]) < report.num_ranks:
            findings.append(Finding(report.node, f"only {num_come} of its {report.num_ranks} processes came"))
    return findings


def table(outcome: Outcome, seconds: float) -> str:
    """The nodes, those with findings first; the groups by kind; the findings; the line for sbatch."""
    reports = sorted(outcome.reports, key=lambda report: report.node not in outcome.bad_nodes)
    shown = reports[: max(MOST_ROWS, len(outcome.bad_nodes))]
    head = ("node", "ranks", "agents", "devices", "cores of a process", "memory free", "/dev/shm free", "disk free", "")
    rows = [head]
    for report in shown:
        last = report.first_rank + report.num_ranks - 1
        ranks = f"{report.first_rank}-{last}" if last > report.first_rank else f"{last}"
        # A node that could not read its configuration has measured nothing.
        free = [
            size_text(number) if report.in_job else "?"
            for number in (report.memory_bytes, report.shm_bytes, report.disk_bytes)
        ]
        verdict = "BAD" if report.node in outcome.bad_nodes else "ok"
        cores = str(report.cores) if report.in_job else "?"
        rows.append((report.node, ranks, report.agents, report.in_agents.get("devices", "?"), cores, *free, verdict))
    lines = columns(rows)
    if len(reports) > len(shown):
        lines.append(f"... and {len(reports) - len(shown)} more nodes without a finding")
    environments = (report.in_agents.get("environment") for report in reports)
    lines += [f"environment: {text}" for text in dict.fromkeys(filter(None, environments))]
    lines += _timing_lines(outcome.timings)
    lines += [f"{finding.node}: {finding.text}" for finding in outcome.findings]
    lines += warnings(outcome.reports)
    lines += [outcome.failure or outcome.shortage]
    if outcome.missing:
        lines.append(f"ranks that did not come: {ranges(outcome.missing)}")
    lines.append(f"--exclude={','.join(outcome.bad_nodes)}" if outcome.bad_nodes else "")
    lines.append(f"{len(reports)} node(s), {len(outcome.messages)} rank(s), {seconds:.1f} s since rank 0 came")
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
        "failure": outcome.failure or outcome.shortage,
        "missing_ranks": outcome.missing,
        "groups": list(outcome.timings),
        "nodes": [asdict(report) | {"packages": len(report.packages)} for report in outcome.reports],
        "warnings": warnings(outcome.reports),
    }


def _timing_lines(timings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per kind of group: their number, the speed of the median and of the slowest, and the slowest's name."""
    rows = [("group", "how many", "ranks", "sent by each", "median", "slowest", "")]
    for kind in dict.fromkeys(timing["kind"] for timing in timings):
        groups = sorted((one for one in timings if one["kind"] == kind), key=lambda one: one["seconds"])
        middle, last = groups[len(groups) // 2], groups[-1]
        speeds = [
            f"{one['GB_per_s']:.2f} GB/s" if one["num_bytes"] else f"{1e3 * one['seconds']:.1f} ms"
            for one in (middle, last)
        ]
        sent = size_text(last["num_bytes"]) if last["num_bytes"] else "-"
        rows.append((kind, str(len(groups)), str(last["num_ranks"]), sent, *speeds, last["group"]))
    return columns(rows) if len(rows) > 1 else []


class Preflight:
    """The preflight, as one rank takes part in it."""

    def __init__(
        self, env: LauncherEnv, rank_map: RankMap | None, run_dir: Path | None, report: NodeReport, patience_s: float
    ):
        """`rank_map` and `run_dir` are None if the configuration could not be read; `report` then has the reason."""
        self._env, self._rank_map, self._report, self._patience_s = env, rank_map, report, patience_s
        self._logs = None if run_dir is None else run_dir.absolute() / "logs"
        self._outcome, self._mtime = Outcome(), _mtime_ns(self._logs)
        self._end_lock = threading.Lock()
        self._started_s, self._came_s = time.monotonic(), time.time()

    def run(self) -> int:
        """The exit code, equal on all ranks that came to the meeting. Takes at most about 14 `patience_s`."""
        # More than all waits below together: a request to the store has no limit of its own if rank 0 hangs.
        limit_s = 13 * self._patience_s + 20
        limit = threading.Timer(limit_s, self._end_alone, (Unreachable(f"no end within {limit_s:.0f} s"),))
        limit.daemon = True
        limit.start()
        try:
            self._meeting = Meeting(self._env, self._patience_s)
            self._came_s = time.time()  # on rank 0: from now on the others reach it
            self._token = self._meeting.token()
            with ProbeListener(self._env.node, self._meeting.secret) as listener:
                code = self._arrive(listener.port) or self._probe() or self._groups()
        except LOST as error:
            return self._end_without_meeting(error)
        finally:
            limit.cancel()
        if self._logs is not None and self._env.is_first_of_node:
            with suppress(OSError):
                (self._logs / f"preflight.{self._token}").unlink(missing_ok=True)
        self._meeting.leave(len(self._outcome.messages))
        return code

    # ---- rounds: each returns the exit code if it was the last one

    def _arrive(self, port: int) -> int | None:
        env, report = self._env, self._report
        message: Message = {"node": env.node}
        if env.is_first_of_node:
            if self._logs is not None and (problem := write_mark(self._logs, self._token, env.node)):
                report = NodeReport(**asdict(report) | {"problems": (*report.problems, problem)})
            message |= {"report": asdict(report), "port": port, "addresses": [own_address(), socket.gethostname()]}
            message |= {"logs": None if self._logs is None else str(self._logs)}
        self._meeting.send("arrive", message)
        if env.rank != 0:
            return self._meeting.await_answer("arrive")["code"]
        outcome = self._outcome
        outcome.messages = dict(self._meeting.receive("arrive", range(env.world_size)))
        outcome.missing = [rank for rank in range(env.world_size) if rank not in outcome.messages]
        outcome.findings += missing_findings(outcome, env, self._gave_up())
        outcome.findings += report_findings(outcome.reports)
        if outcome.missing or not all(report.in_job for report in outcome.reports):
            return self._conclude("arrive")
        self._send_neighbours()
        self._probes_sent_s = time.time()
        self._meeting.send_answer("arrive", {"code": None})
        return None

    def _send_neighbours(self) -> None:
        """Sends every node the nodes to connect to, by a key of its own: one list of all would be nodes^2 bytes."""
        messages = self._outcome.messages
        first_ranks = {message["node"]: rank for rank, message in sorted(messages.items()) if "report" in message}
        nodes = list(first_ranks)
        for index, rank in enumerate(first_ranks.values()):
            others = [messages[first_ranks[node]] for node in neighbours(nodes, index)]
            targets = [(message["node"], message["addresses"], message["port"]) for message in others]
            self._meeting.store.set(f"probe/targets/{rank}", json.dumps(targets))

    def _probe(self) -> int | None:
        env = self._env
        if env.is_first_of_node:
            clock_s = time.time()
            targets = json.loads(self._meeting.store.get(f"probe/targets/{env.rank}"))
            errors = {node: probe(node, self._meeting.secret, addresses, port) for node, addresses, port in targets}
            unreached = {node: error for node, error in errors.items() if error is not None}
            mark = read_mark(self._logs, self._token)
            self._meeting.send("probe", asdict(ProbeReport(mark, list(errors), unreached, clock_s)))
        if env.rank != 0:
            return self._meeting.await_answer("probe")["code"]
        outcome = self._outcome
        nodes = {rank: message["node"] for rank, message in sorted(outcome.messages.items()) if "report" in message}
        probes, received_s = {}, {}
        for rank, message in self._meeting.receive("probe", list(nodes)):
            probes[nodes[rank]], received_s[nodes[rank]] = ProbeReport(**message), time.time()
        silent = [node for node in nodes.values() if node not in probes]
        outcome.findings += [Finding(node, "came, and then said nothing more") for node in silent]
        if not silent:
            outcome.findings += probe_findings(probes, self._probes_sent_s, received_s)
        if not outcome.is_good:
            return self._conclude("probe")
        self._meeting.send_answer("probe", {"code": None})
        return None

    def _groups(self) -> int:
        """Limited by a timer, since a collective that hangs does not return."""
        test = GroupTest()
        timer = threading.Timer(self._patience_s, self._give_up, (test,))
        timer.daemon = True
        timer.start()
        error = ""
        try:
            # A longer limit than the timer's, so that the timer ends a hang.
            test.run(self._rank_map, self._meeting.store, 2 * self._patience_s)
        except (RuntimeError, OSError) as problem:
            error = f"{type(problem).__name__}: {str(problem).strip()}".splitlines()[0]
        self._end_lock.acquire()  # never released: one thread ends this process
        timer.cancel()
        return self._end_groups(self._meeting, test.message(error))

    def _give_up(self, test: GroupTest) -> None:
        self._end_lock.acquire()
        try:
            meeting = self._meeting.clone()
            code = self._end_groups(meeting, test.message(f"no end within {self._patience_s:.0f} s"))
            meeting.leave(len(self._outcome.messages))
        except LOST as error:
            self._end_alone(error)
        sys.stdout.flush()
        os._exit(code)  # the main thread is inside a collective that will not return

    def _end_groups(self, meeting: Meeting, message: Message) -> int:
        meeting.send("groups", message)
        if self._env.rank != 0:
            return meeting.await_answer("groups")["code"]
        outcome = self._outcome
        messages = dict(meeting.receive("groups", range(self._env.world_size)))
        silent = dict.fromkeys(come["node"] for rank, come in outcome.messages.items() if rank not in messages)
        outcome.findings += [Finding(node, "fell silent while the groups were made") for node in silent]
        outcome.timings = [timing for message in messages.values() for timing in message["timings"]]
        if not silent:
            self._find_suspects(messages, meeting)
        return self._conclude("groups", meeting)

    def _find_suspects(self, messages: Mapping[int, Message], meeting: Meeting) -> None:
        """Names the suspects of the first kind of group in which a rank is stuck; later kinds fail in consequence."""
        stuck = {rank: message for rank, message in messages.items() if message["stage"]}
        if not stuck:
            return
        node_of = {rank: message["node"] for rank, message in self._outcome.messages.items()}
        first = min((message["stage"][0] for message in stuck.values()), key=ORDER.index)
        failed = [rank for rank, message in stuck.items() if message["stage"][0] == first]
        text = f"{first}: {stuck[failed[0]]['error']}"
        if first == ORDER[0]:
            nodes = list(dict.fromkeys(node_of[rank] for rank in not_in_ring(meeting.store, len(node_of))))
        else:
            passed = [rank for rank, message in messages.items() if first in dict(message["passed"])]
            groups = (
                [group_nodes(self._rank_map, node_of, first, rank) for rank in ranks] for ranks in (failed, passed)
            )
            nodes = suspects(*groups)
        if 0 < len(nodes) <= len(set(node_of.values())) / 2:
            self._outcome.findings += [Finding(node, f"in every group that fails, {text}") for node in nodes]
        else:
            self._outcome.failure = f"{text}; no node can be told from the others"

    # ---- ends

    def _conclude(self, round_name: str, meeting: Meeting | None = None) -> int:
        """Prints and writes the outcome, and sends all ranks their exit code; on rank 0."""
        outcome = self._outcome
        seconds = time.monotonic() - self._started_s
        if outcome.exit_code == REFUSED:
            say(outcome.shortage or "\n".join(outcome.reports[0].problems), file=sys.stderr)
        else:
            say(table(outcome, seconds))
            self._write_file(record(outcome, seconds))
        (meeting or self._meeting).send_answer(round_name, {"code": outcome.exit_code})
        return outcome.exit_code

    def _write_file(self, content: Mapping[str, Any]) -> None:
        others = [message["logs"] for message in self._outcome.messages.values() if message.get("logs")]
        logs = self._logs or (Path(others[0]) if others else None)  # another node may have read the configuration
        if logs is None:
            return
        try:
            _write(logs, content)
        except OSError as error:
            say(f"{logs / FILE} cannot be written: {error.strerror}", file=sys.stderr)

    def _end_alone(self, error: Exception) -> NoReturn:
        """`_end_without_meeting` in a thread of its own, while the main thread hangs."""
        code = self._end_without_meeting(error)
        sys.stdout.flush()
        os._exit(code)

    def _end_without_meeting(self, error: Exception) -> int:
        """The exit code without an answer of rank 0. If rank 0 is alive it names this node, else this node names it."""
        env = self._env
        if env.is_first_of_node:
            where = f"rank 0 at {env.address} port {env.port}"
            say(f"node {env.node} does not reach {where}: {str(error).splitlines()[0]}", file=sys.stderr)
            if (path := self._early_path()) is not None:
                with suppress(OSError), path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([env.node, time.time(), time.monotonic() - self._started_s]) + "\n")
        time.sleep(self._patience_s)
        if self._logs is not None and env.is_first_of_node and env.rank != 0 and _mtime_ns(self._logs) == self._mtime:
            finding = Finding(env.address, f"rank 0's node; {env.node} does not reach its port {env.port}")
            with suppress(OSError):
                _write(self._logs, record(Outcome(findings=[finding]), time.monotonic() - self._started_s))
        return NODE_BAD

    def _early_path(self) -> Path | None:
        """The file for nodes that gave up before rank 0 came; a name that only processes of this job can know."""
        if self._logs is None:
            return None
        return self._logs / f"preflight.{Secret.of_job(self._env).proof('node', 'gave up', b'').hex()[:16]}.early"

    def _gave_up(self) -> dict[str, float]:
        """Seconds that nodes waited for rank 0, by node, if they gave up before it came; on rank 0."""
        waited_s = {}
        if (path := self._early_path()) is not None:
            with suppress(OSError, ValueError):
                for line in path.read_text(encoding="utf-8").splitlines():
                    node, gave_up_s, seconds = json.loads(line)
                    if gave_up_s < self._came_s:
                        waited_s[str(node)] = float(seconds)
                path.unlink()
        return waited_s


def _mtime_ns(logs: Path | None) -> int | None:
    """Modification time of preflight.json; None if there is none."""
    with suppress(OSError):
        return (logs / FILE).stat().st_mtime_ns if logs is not None else None
    return None


def _write(logs: Path, content: Mapping[str, Any]) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    replace_file(logs / FILE, json.dumps(content, indent=1) + "\n")
