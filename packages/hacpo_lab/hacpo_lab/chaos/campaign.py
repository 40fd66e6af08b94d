"""A run that is struck by faults at random moments, and started again until it is finished.

    OUT/undisturbed/    the same run left undisturbed, the reference
    OUT/run/            the run under faults
    OUT/attempts/       the output of the ranks, by start
    OUT/attempts.jsonl  the faults and the end of every start
    OUT/campaign.json   the identity of the campaign: options, configuration, digests of its files
    OUT/chaos.json, OUT/table.txt

The ranks are forked from a server (hacpo_lab/forked.py) and do what those of `hacpo-mega train` do; a start costs
seconds. A campaign that was itself ended goes on where it was, when it is started again.
Elsewhere: the effect of a fault (faults.py), and the comparison at the end (verdict.py).
"""

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

from hacpo_lab.chaos.faults import Fault, draw_fault, strike, take_back
from hacpo_lab.forked import JobServer, wait_for_ranks
from hacpo_mega.checkpoint.files import committed_steps, plain
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.config.changes import changes
from hacpo_mega.logbook.files.json_lines import json_lines
from hacpo_mega.logbook.files.metrics import METRICS_LINE, read_metrics
from hacpo_mega.logbook.run.provenance import exported_steps, read_starts
from hacpo_mega.logbook.run.run_folder import resolved_toml
from hacpo_mega.logbook.run.run_inputs import run_contents
from hacpo_mega.models.files.documents import json_file, parse_json
from hacpo_mega.models.files.replacing import replace_file

PRELOAD = "hacpo_lab.preloaded"
UNDISTURBED_RANKS = "undisturbed_ranks"  # folder of the output of the undisturbed run's ranks
START_S, STEP_S = 20.0, 2.0  # assumed seconds of a start and of a step, until some are measured
LONGER = 1.5  # a start that was struck is taken to need this times the seconds that it had
LOOK_S = 0.1  # seconds between two looks at the run's progress
MOST_NAMED = 3  # differences from the campaign that an OUT has
RECENT = 5  # steps from which the present speed of the machine is estimated
# Seconds beyond stall_s in which the job must end after a fault: else the job has not noticed it.
NOTICE_S = 120.0
PHASE = re.compile(r"in phase (\w+)")
SURVIVED = ("pause",)  # faults that must not end a run


class ChaosError(Exception):
    """The run ended, or was refused, without a fault that explains it."""


@dataclass(frozen=True)
class Attempt:
    """One start of the run under faults, as attempts.jsonl keeps it. Times are seconds since the epoch.

    opened       when the run folder was opened, from when on the job makes progress; None if it never was
    resumed      the step from which it resumed; None with `opened`
    struck       (fault, time); the last one has ended the attempt, unless all statuses are 0
    last_step    the last step in metrics.jsonl at the end      committed   the newest checkpoint at the end
    phase        of the job when the last fault struck, as its ranks reported it; None when none could
    unnoticed    whether the job did not end in time after a fault that must end it
    """

    launched: float
    opened: float | None
    resumed: int | None
    ended: float
    statuses: tuple[int | None, ...]
    struck: tuple[tuple[Fault, float], ...]
    last_step: int
    committed: int
    phase: str | None
    unnoticed: bool

    @property
    def is_done(self) -> bool:
        """Tells whether the run was finished."""
        return set(self.statuses) == {0}

    def __str__(self) -> str:
        began = "did not open the run" if self.opened is None else f"on from step {self.resumed}"
        faults = ", ".join(f"{fault.number} {fault.kind}" for fault, _ in self.struck) or "none"
        where = f" in {self.phase}" if self.phase else ""
        return (
            f"start {began}; faults: {faults}{where}{'; NOT NOTICED by the job' * self.unnoticed}; "
            f"step {self.last_step} logged, {self.committed} safe; exit statuses {list(self.statuses)}"
        )


@dataclass(frozen=True)
class Campaign:
    """A run, the number and kinds of its faults, the seed that they are drawn from, and the function of a rank.

    `config` is that of the run under faults; its run_dir is OUT/run.
    """

    config: Config
    out: Path
    num_faults: int
    seed: int
    kinds: tuple[str, ...]
    train_rank: Callable[[str], None]

    @cached_property
    def _server(self) -> JobServer:
        server = JobServer(PRELOAD)
        server.start()  # else the server's imports would count as seconds of the first start
        return server

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return RankMap.of(self.config).world_size

    def require_same(self) -> None:
        """Writes the campaign's identity to OUT/campaign.json. ValueError, one line, where another has begun there."""
        options = {"--faults": self.num_faults, "--seed": self.seed, "--kinds": list(self.kinds)}
        identity = options | plain(self.config) | {"inputs": run_contents(self.config), "run_dir": "OUT/run"}
        file = self.out / "campaign.json"
        if any((self.out / begun).exists() for begun in ("undisturbed", "run", "attempts.jsonl")):
            found = map(str, changes(json_file(file), identity)) if file.exists() else ["it lacks campaign.json"]
            if differences := "; ".join(list(found)[:MOST_NAMED]):
                raise ValueError(f"{self.out} is of another campaign: {differences}; give another --out")
        replace_file(file, json.dumps(identity), synced=True)

    def run_undisturbed(self, run_dir: Path) -> None:
        """Runs the configuration undisturbed, unless a finished run is there. ChaosError when it fails."""
        if exported_steps(run_dir) == self.config.num_steps:
            return
        folder = self.out / UNDISTURBED_RANKS
        with self._ranks(folder, self.config.model_copy(update={"run_dir": run_dir})) as processes:
            statuses = _exit_statuses(processes)
        if set(statuses) != {0}:
            raise ChaosError(f"the undisturbed run failed, exit statuses {statuses}: {_last_line(folder)}")

    def run_under_faults(self) -> Iterator[Attempt]:
        """Starts the run until it is finished; yields the attempts. ChaosError for an end that no fault explains."""
        attempts = self.attempts()
        while not (attempts and attempts[-1].is_done):
            attempt = self._attempt(attempts)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(attempt)) + "\n")
            attempts.append(attempt)
            yield attempt

    def attempts(self) -> list[Attempt]:
        """Every attempt so far, in order."""
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []
        attempts = []
        for number, line in enumerate(lines, start=1):
            try:
                attempts.append(_attempt_of(parse_json(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{self._log}, line {number}: not a start of this campaign ({error})"
                raise ValueError(f"{problem}; give another --out") from error
        return attempts

    @property
    def _log(self) -> Path:
        return self.out / "attempts.jsonl"

    def _attempt(self, before: list[Attempt]) -> Attempt:
        folder = self.out / "attempts" / f"{len(before):04d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a start that the campaign itself did not survive
        number = sum(len(attempt.struck) for attempt in before)
        ranks = self._ranks(folder, self.config)
        safe, launched = self._on_disk()[0], time.time()
        struck: list[tuple[Fault, float]] = []
        unnoticed = False
        with ranks as processes:
            while number < self.num_faults:
                fault = self._next_fault(number, before, is_running=bool(struck))
                if self._await_moment(fault, processes, launched):
                    break
                struck.append((fault, time.time()))
                number += 1
                is_over, unnoticed = self._strike_and_wait(fault, processes)
                if is_over:
                    break
            statuses = _exit_statuses(processes)
        opened, resumed = opened_since(self.config.run_dir, launched)
        committed, last_step = self._on_disk()
        attempt = Attempt(
            launched=launched,
            opened=opened,
            resumed=resumed,
            ended=time.time(),
            statuses=tuple(statuses),
            struck=tuple(struck),
            last_step=last_step,
            committed=committed,
            phase=_phase(folder) if struck else None,
            unnoticed=unnoticed,
        )
        _require_explained(attempt, max([safe, *(earlier.committed for earlier in before)]), folder)
        return attempt

    def _next_fault(self, number: int, before: list[Attempt], *, is_running: bool) -> Fault:
        """The next fault, at a moment before which the run does on average its share of the remaining steps.

        The share of each remaining fault is the same. A moment is uniform over a start (start_s) and n steps (step_s),
        and no step is done during the start: on average step_s n^2 / 2 / (start_s + n step_s) steps are done, which is
        to be `share`. Where the run has survived the fault before (`is_running`) there is no start.
        """
        start_s, step_s = self._pace(before)
        start_s = 0.0 if is_running else start_s
        share = (self.config.num_steps - max(0, self._on_disk()[0])) / (self.num_faults - number)
        num_steps = share + math.sqrt(share**2 + 2.0 * share * start_s / step_s)
        return draw_fault(
            number,
            self.seed,
            self.kinds,
            world_size=self.world_size,
            window_s=start_s + num_steps * step_s,
            step_s=step_s,
            stall_s=self.config.stall_s,
        )

    def _await_moment(self, fault: Fault, processes: list[BaseProcess], launched: float) -> bool:
        """Waits until the fault is due; True if the run has ended before.

        It is due earlier where the run is so fast that less than a step would be left to each of the later faults.
        """
        end = time.monotonic() + fault.moment_s
        latest = max(self._on_disk()[0] + 1, self.config.num_steps - (self.num_faults - fault.number))
        while (wait_s := end - time.monotonic()) > 0.0 and self._logged(since=launched) < latest:
            if _wait(processes, min(wait_s, LOOK_S)):
                return True
        return _wait(processes, 0.0)

    def _pace(self, before: list[Attempt]) -> tuple[float, float]:
        """Seconds of a start and of a step by the last ones, since the speed of a shared machine varies."""
        start_s = self._first_start_s()
        for attempt in before:
            if attempt.opened is not None:
                start_s = attempt.opened - attempt.launched
            else:  # struck before its start was over, which takes longer than that
                start_s = max(start_s, LONGER * (attempt.ended - attempt.launched))
        steps = list((step_seconds(self.config.run_dir) or step_seconds(self.out / "undisturbed")).values())
        return start_s, median(steps[-RECENT:]) if steps else STEP_S

    def _first_start_s(self) -> float:
        """Seconds of the start of the undisturbed run, if this campaign has made that run; else START_S."""
        launched, opened = self.out / UNDISTURBED_RANKS / "config.toml", read_starts(self.out / "undisturbed")
        return opened[-1]["time_unix_s"] - launched.stat().st_mtime if launched.exists() and opened else START_S

    def _on_disk(self) -> tuple[int, int]:
        """(the newest committed step, the last step in metrics.jsonl) of the run; 0 where there is none."""
        return max(committed_steps(self.config.run_dir), default=0), self._logged(since=0.0)

    def _logged(self, since: float) -> int:
        """The last step that was written to metrics.jsonl after `since`; 0 where none was."""
        with suppress(FileNotFoundError):  # none yet, or a start moves the folder aside at this moment
            steps = read_metrics(self.config.run_dir / "metrics.jsonl").items()
            return max((step for step, of_step in steps if of_step.timing["time_unix_s"] > since), default=0)
        return 0

    def _strike_and_wait(self, fault: Fault, processes: list[BaseProcess]) -> tuple[bool, bool]:
        """Strikes, and waits until the fault is over: (whether the job has ended, whether it did not end by itself)."""
        pids = [process.pid for process in processes]
        strike(fault, pids)
        if fault.lasts_s is not None:
            is_over = _wait(processes, fault.lasts_s)
            take_back(fault, pids)
            return is_over, False
        if _wait(processes, self.config.stall_s + NOTICE_S):
            return True, False
        for process in processes:
            process.kill()
        return True, True

    def _ranks(self, folder: Path, config: Config) -> AbstractContextManager[list[BaseProcess]]:
        server = self._server
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "config.toml"
        file.write_text(resolved_toml(config), encoding="utf-8")
        return server.ranks(self.world_size, folder, self.train_rank, str(file))


def opened_since(run_dir: Path, launched: float) -> tuple[float, int] | tuple[None, None]:
    """(time at which a run launched at `launched` opened its folder, step from which it resumed); None, None: never.

    The start is found by its time: a run that finds no checkpoint moves the folder aside and counts its starts anew.
    """
    starts = [start for start in read_starts(run_dir) if start["time_unix_s"] > launched]
    return (starts[0]["time_unix_s"], starts[0]["steps_done"]) if starts else (None, None)


def step_seconds(run_dir: Path) -> dict[int, float]:
    """Wall seconds of every step that counts, since the last line that the run wrote before it, of any file."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return {}
    written = {step: of_step.timing["time_unix_s"] for step, of_step in read_metrics(metrics).items()}
    dropped = run_dir / "metrics.dropped.jsonl"
    events = [start["time_unix_s"] for start in read_starts(run_dir)] + list(written.values())
    if dropped.exists():
        events += [line["timing"]["time_unix_s"] for _, _, line in json_lines(dropped, METRICS_LINE)]
    return {step: at - max(event for event in events if event < at) for step, at in written.items() if step > 0}


def _wait(processes: list[BaseProcess], seconds: float) -> bool:
    """Waits at most so long for a process to end; True if one has."""
    return bool(connection.wait([process.sentinel for process in processes], timeout=seconds))


def _exit_statuses(processes: list[BaseProcess]) -> list[int | None]:
    """Waits for the ranks (forked.wait_for_ranks); their exit statuses, None for one that still runs."""
    wait_for_ranks(processes)
    return [process.exitcode for process in processes]


def _attempt_of(line: dict) -> Attempt:
    struck = tuple((Fault(**fault | {"ranks": tuple(fault["ranks"])}), when) for fault, when in line.pop("struck"))
    return Attempt(struck=struck, statuses=tuple(line.pop("statuses")), **line)


def _require_explained(attempt: Attempt, committed: int, folder: Path) -> None:
    """ChaosError for an end that no fault explains, and when the checkpoint of step `committed` has been lost."""
    if attempt.resumed not in (None, committed) or attempt.committed < committed:
        raise ChaosError(
            f"step {committed} was committed, but the run went on from {attempt.resumed} and has {attempt.committed} "
            f"now; see {folder}"
        )
    last = attempt.struck[-1][0].kind if attempt.struck else None
    if not attempt.is_done and (last is None or last in SURVIVED):
        reason = "no fault struck" if last is None else f"a {last} must not end it"
        raise ChaosError(f"the run failed, exit statuses {attempt.statuses}, and {reason}: {_last_line(folder)}")
    if 2 in attempt.statuses:
        raise ChaosError(f"the run was refused: {_last_line(folder)}")


def _phase(folder: Path) -> str | None:
    """The phase in which an attempt ended, by the messages of its ranks; None if there is none."""
    for file in sorted(folder.glob("*.err")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if " stops: " in line or " was told to end " in line:
                return PHASE.findall(line)[-1]
    return None


def _last_line(folder: Path) -> str:
    files = sorted(folder.glob("*.err"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return lines[-1] if lines else f"it said nothing in {folder}"
