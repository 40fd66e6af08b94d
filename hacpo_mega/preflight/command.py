"""`hacpo-mega preflight`: is every node fit for this run, seen from all of them at once, before a model is loaded.

    arrive   every rank comes, every node reports (preflight/node_report.py)
    look     every node looks whose mark it sees in the run folder, connects to its neighbours, and tells its clock
    groups   the groups that training makes are made and timed

Rank 0 compares, prints one table and writes RUN/logs/preflight.json; a round that finds something is the last.
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
    Door,
    GroupTest,
    Meeting,
    Word,
    group_nodes,
    knock,
    leave_mark,
    not_in_ring,
    see_mark,
)
from hacpo_mega.preflight.node_report import (
    Finding,
    Look,
    NodeReport,
    look_findings,
    neighbours,
    report_findings,
    shared_shortage,
    size,
    suspects,
    warnings,
)

FILE = "preflight.json"  # in RUN/logs
# In which a rank goes through the groups.
ORDER = (
    "job, making groups", "cell, all-reduce", "lane, all-gather", "weights, all-gather", "agent, all-reduce",
    "job, barrier",
)  # fmt: skip
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
        return not (self.findings or self.missing or self.failure or self.shortage)

    @property
    def shortage(self) -> str:
        """The line on a disk that no node can mend."""
        return shared_shortage(self.reports)

    @property
    def exit_code(self) -> int:
        """REFUSED if every node has the same complaint about the user's input, or about the disk."""
        if self.is_good:
            return 0
        by_node = {tuple(report.problems) for report in self.reports}
        is_input = len(by_node) == 1 and not any(report.in_job for report in self.reports)
        if not self.missing and (is_input or self.shortage):
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
    lines = columns(rows)
    if len(reports) > len(shown):
        lines.append(f"... and {len(reports) - len(shown)} more nodes without a finding")
    environments = (report.in_agents.get("environment") for report in reports)
    lines += [f"environment: {text}" for text in dict.fromkeys(filter(None, environments))]
    lines += _measured_lines(outcome.measured)
    lines += [f"{finding.node}: {finding.text}" for finding in outcome.findings]
    lines += warnings(outcome.reports)
    lines += [outcome.failure or outcome.shortage]
    if outcome.missing:
        lines.append(f"ranks that did not come: {ranges(outcome.missing)}")
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
        "failure": outcome.failure or outcome.shortage,
        "missing_ranks": outcome.missing,
        "groups": list(outcome.measured),
        "nodes": [asdict(report) | {"packages": len(report.packages)} for report in outcome.reports],
        "warnings": warnings(outcome.reports),
    }


def _measured_lines(measured: Sequence[Mapping[str, Any]]) -> list[str]:
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
    return columns(rows) if len(rows) > 1 else []


class Preflight:
    """One rank's part in it."""

    def __init__(
        self, env: LauncherEnv, rank_map: RankMap | None, run_dir: Path | None, report: NodeReport, patience_s: float
    ):
        """`rank_map` and `run_dir` are None if the configuration could not be read; `report` then says why."""
        self._env, self._rank_map, self._report, self._patience_s = env, rank_map, report, patience_s
        self._logs = None if run_dir is None else run_dir.absolute() / "logs"
        self._outcome, self._before = Outcome(), _changed(self._logs)
        self._ending = threading.Lock()
        self._started_s, self._came_s = time.monotonic(), time.time()

    def run(self) -> int:
        """The exit code, equal on all ranks that came to the meeting. Ends within some fourteen times `patience_s`."""
        # More than all waits below together: the store has no limit for a request to a rank 0 that stands still.
        limit_s = 13 * self._patience_s + 20
        limit = threading.Timer(limit_s, self._end_alone, (Unreachable(f"no end within {limit_s:.0f} s"),))
        limit.daemon = True
        limit.start()
        try:
            self._meeting = Meeting(self._env, self._patience_s)
            self._came_s = time.time()  # of rank 0: from here on the others reach it
            self._token = self._meeting.token()
            with Door(self._env.node, self._meeting.secret) as door:
                code = self._arrive(door.port) or self._look() or self._groups()
        except LOST as error:
            return self._alone(error)
        finally:
            limit.cancel()
        if self._logs is not None and self._env.is_first_of_node:
            with suppress(OSError):
                (self._logs / f"preflight.{self._token}").unlink(missing_ok=True)
        self._meeting.leave(len(self._outcome.words))
        return code

    # ---- rounds: each returns the exit code if it was the last one

    def _arrive(self, port: int) -> int | None:
        env, report = self._env, self._report
        word: Word = {"node": env.node}
        if env.is_first_of_node:
            if self._logs is not None and (problem := leave_mark(self._logs, self._token, env.node)):
                report = NodeReport(**asdict(report) | {"problems": (*report.problems, problem)})
            word |= {"report": asdict(report), "port": port, "addresses": [own_address(), socket.gethostname()]}
            word |= {"logs": None if self._logs is None else str(self._logs)}
        self._meeting.tell("arrive", word)
        if env.rank != 0:
            return self._meeting.await_answer("arrive")["code"]
        outcome = self._outcome
        outcome.words = dict(self._meeting.hear("arrive", range(env.world_size)))
        outcome.missing = [rank for rank in range(env.world_size) if rank not in outcome.words]
        outcome.findings += missing_findings(outcome, env, self._gave_up())
        outcome.findings += report_findings(outcome.reports)
        if outcome.missing or not all(report.in_job for report in outcome.reports):
            return self._conclude("arrive")
        self._send_looking()
        self._asked_s = time.time()
        self._meeting.answer("arrive", {"code": None})
        return None

    def _send_looking(self) -> None:
        """Gives every node its list of nodes to connect to, by a key of its own: one for all would be nodes^2 bytes."""
        speakers = {
            word["node"]: (rank, word) for rank, word in sorted(self._outcome.words.items()) if "report" in word
        }
        nodes = list(speakers)
        for index, (rank, _) in enumerate(speakers.values()):
            doors = [
                (node, speakers[node][1]["addresses"], speakers[node][1]["port"]) for node in neighbours(nodes, index)
            ]
            self._meeting.store.set(f"look/whom/{rank}", json.dumps(doors))

    def _look(self) -> int | None:
        env = self._env
        if env.is_first_of_node:
            clock_s = time.time()
            doors = json.loads(self._meeting.store.get(f"look/whom/{env.rank}"))
            errors = {node: knock(node, self._meeting.secret, addresses, port) for node, addresses, port in doors}
            unreached = {node: error for node, error in errors.items() if error is not None}
            home = see_mark(self._logs, self._token)
            self._meeting.tell("look", asdict(Look(home, [node for node, *_ in doors], unreached, clock_s)))
        if env.rank != 0:
            return self._meeting.await_answer("look")["code"]
        outcome = self._outcome
        speakers = {rank: word["node"] for rank, word in sorted(outcome.words.items()) if "report" in word}
        looks, heard_s = {}, {}
        for rank, word in self._meeting.hear("look", list(speakers)):
            looks[speakers[rank]], heard_s[speakers[rank]] = Look(**word), time.time()
        silent = [node for node in speakers.values() if node not in looks]
        outcome.findings += [Finding(node, "came, and then said nothing more") for node in silent]
        if not silent:
            outcome.findings += look_findings(looks, self._asked_s, heard_s)
        if not outcome.is_good:
            return self._conclude("look")
        self._meeting.answer("look", {"code": None})
        return None

    def _groups(self) -> int:
        """Bounded by a timer, since a collective that hangs does not come back."""
        test = GroupTest()
        timer = threading.Timer(self._patience_s, self._give_up, (test,))
        timer.daemon = True
        timer.start()
        error = ""
        try:
            # longer than the timer, which speaks first
            test.run(self._rank_map, self._meeting.store, 2 * self._patience_s)
        except (RuntimeError, OSError) as problem:
            error = f"{type(problem).__name__}: {str(problem).strip()}".splitlines()[0]
        self._ending.acquire()  # never released: one thread ends this process
        timer.cancel()
        return self._end_groups(self._meeting, test.word(error))

    def _give_up(self, test: GroupTest) -> None:
        self._ending.acquire()
        try:
            meeting = self._meeting.second()
            code = self._end_groups(meeting, test.word(f"no end within {self._patience_s:.0f} s"))
            meeting.leave(len(self._outcome.words))
        except LOST as error:
            self._end_alone(error)
        sys.stdout.flush()
        os._exit(code)  # the main thread is inside a collective that will not return

    def _end_groups(self, meeting: Meeting, word: Word) -> int:
        meeting.tell("groups", word)
        if self._env.rank != 0:
            return meeting.await_answer("groups")["code"]
        outcome = self._outcome
        words = dict(meeting.hear("groups", range(self._env.world_size)))
        silent = dict.fromkeys(outcome.words[rank]["node"] for rank in outcome.words if rank not in words)
        outcome.findings += [Finding(node, "fell silent while the groups were made") for node in silent]
        outcome.measured = [measured for word in words.values() for measured in word["measured"]]
        if not silent:
            self._judge_groups(words, meeting)
        return self._conclude("groups", meeting)

    def _judge_groups(self, words: Mapping[int, Word], meeting: Meeting) -> None:
        """Names the suspects of the first kind of group in which a rank is stuck; later kinds fail in consequence."""
        stuck = {rank: word for rank, word in words.items() if word["stage"]}
        if not stuck:
            return
        node_of = {rank: word["node"] for rank, word in self._outcome.words.items()}
        first = min((word["stage"][0] for word in stuck.values()), key=ORDER.index)
        failed = [rank for rank, word in stuck.items() if word["stage"][0] == first]
        text = f"{first}: {stuck[failed[0]]['error']}"
        if first == ORDER[0]:
            named = list(dict.fromkeys(node_of[rank] for rank in not_in_ring(meeting.store, len(node_of))))
        else:
            through = [rank for rank, word in words.items() if first in dict(word["passed"])]
            groups = (
                [group_nodes(self._rank_map, node_of, first, rank) for rank in ranks] for ranks in (failed, through)
            )
            named = suspects(*groups)
        if 0 < len(named) <= len(set(node_of.values())) / 2:
            self._outcome.findings += [Finding(node, f"in every group that fails, {text}") for node in named]
        else:
            self._outcome.failure = f"{text}; no node can be told from the others"

    # ---- ends

    def _conclude(self, round_name: str, meeting: Meeting | None = None) -> int:
        """Rank 0 prints, writes, and tells all ranks their exit code."""
        outcome = self._outcome
        seconds = time.monotonic() - self._started_s
        if outcome.exit_code == REFUSED:
            say(outcome.shortage or "\n".join(outcome.reports[0].problems), file=sys.stderr)
        else:
            say(table(outcome, seconds))
            self._write_file(record(outcome, seconds))
        (meeting or self._meeting).answer(round_name, {"code": outcome.exit_code})
        return outcome.exit_code

    def _write_file(self, content: Mapping[str, Any]) -> None:
        known = [word["logs"] for word in self._outcome.words.values() if word.get("logs")]
        logs = self._logs or (Path(known[0]) if known else None)
        if logs is None:
            return
        try:
            _write(logs, content)
        except OSError as error:
            say(f"{logs / FILE} cannot be written: {error.strerror}", file=sys.stderr)

    def _end_alone(self, error: Exception) -> NoReturn:
        """`_alone` in a thread of its own, while the main thread waits for what does not come."""
        code = self._alone(error)
        sys.stdout.flush()
        os._exit(code)

    def _alone(self, error: Exception) -> int:
        """Without the meeting. If rank 0 is alive it names this node; else this node names rank 0's."""
        env = self._env
        if env.is_first_of_node:
            where = f"rank 0 at {env.address} port {env.port}"
            say(f"node {env.node} does not reach {where}: {str(error).splitlines()[0]}", file=sys.stderr)
            if (note := self._note()) is not None:
                with suppress(OSError), note.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([env.node, time.time(), time.monotonic() - self._started_s]) + "\n")
        time.sleep(self._patience_s)
        if self._logs is not None and env.is_first_of_node and env.rank != 0 and _changed(self._logs) == self._before:
            finding = Finding(env.address, f"rank 0's node; {env.node} does not reach its port {env.port}")
            with suppress(OSError):
                _write(self._logs, record(Outcome(findings=[finding]), time.monotonic() - self._started_s))
        return NODE_BAD

    def _note(self) -> Path | None:
        """The file of processes that joined this meeting and gave up before rank 0 did; nobody else knows its name."""
        if self._logs is None:
            return None
        return self._logs / f"preflight.{Secret.of_job(self._env).proof('node', 'gave up', b'').hex()[:16]}.early"

    def _gave_up(self) -> dict[str, float]:
        """Seconds that nodes had waited for rank 0 when they gave up, all before it came; on rank 0."""
        waited_s = {}
        if (note := self._note()) is not None:
            with suppress(OSError, ValueError):
                for line in note.read_text(encoding="utf-8").splitlines():
                    node, gave_up_s, seconds = json.loads(line)
                    if gave_up_s < self._came_s:
                        waited_s[str(node)] = float(seconds)
                note.unlink()
        return waited_s


def _changed(logs: Path | None) -> int | None:
    """Time at which the file for programs was last written; None if there is none."""
    with suppress(OSError):
        return (logs / FILE).stat().st_mtime_ns if logs is not None else None
    return None


def _write(logs: Path, content: Mapping[str, Any]) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    replace_file(logs / FILE, json.dumps(content, indent=1) + "\n")
