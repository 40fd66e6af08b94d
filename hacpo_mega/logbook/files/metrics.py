"""Metrics of a step: sums and counts kept by every rank, reduced once per step, divided once, written in one place.

A metric that nobody added in a step is absent from it, not 0. Nothing here knows what a metric means; the names do:

    agent/<name>/reward_mean, answer_tokens_mean, truncated, verdict/<verdict>, logprob_mean  about its answers
    agent/<name>/num_answers, num_unjudged, answer_tokens_max                                 about its answers
    agent/<name>/engine_gap_mean, engine_gap_max, engine_kl                                   trainer minus engine
    agent/<name>/engine_weight_mean, engine_weight_ess, engine_weight_truncated               its correction, if any
    agent/<name>/reward/<part>             named rewards of its answers, and other numbers that a grader returned
    agent/<name>/own/<function>            what logging.metrics says of its answers
    agent/<name>/conversation/turns_mean, turns_max, own_tokens, <event>_mean       with an environment: records.EVENTS
    agent/<name>/conversation/environment_s, engine_busy_s, engine_idle_s, prefix_hits        a conversation's in its
                                                                    code; an engine's; share of tokens read before
    agent/<name>/accuracy, num_evaluated [/<skill>]                                           held-out evaluation
    agent/<name>/eval/reward_mean, eval/reward_square [/<skill>]    in place of accuracy, of graders that may give a
                                                                    part of a reward: the mean of it and of its square
    agent/<name>/held_out_gain, held_out_gain_square, num_held_out_pairs [/<skill>]     by prompt, since step 0
    agent/<name>/view/num_<what became of them>, token_ratio_mean                              answers on their way
    agent/<name>/self/ratio_mean, clipped, positive_share                                     own answers in its loss
    agent/<name>/self/first_ratio_error                                       highest abs(1 - ratio) of the first update
    agent/<name>/self/first_outside     (engine's scores)   share of its own ratios outside the clip in the first update
    agent/<name>/cross_coefficient_share, num_nonfinite, kl                                   its whole loss
    agent/<name>/advantage_max             largest advantage of the answers it trains with, either sign, omega applied
    agent/<learner>/from/<source>/ratio_mean, ratio_min, ratio_max, below, inside, above      others' answers in it
    agent/<learner>/from/<source>/weight_mean, weight_ess, weight_max, positive_share         and what they weigh there
    agent/<learner>/from/<source>/token_ratio, changed                                        and in its own tokens
    agent/<learner>/from/<source>/view/num_answers, num_trained, num_<why not>    each once, on their way to it
    agent/<learner>/from/<source>/grad_share, grad_cosine, grad_norm, self/grad_norm          with diagnose_every alone
    agent/<name>/grad_norm, grad_norm_max, lr, num_updates, num_skipped_updates               its optimizer
    agent/<name>/num_trained_answers, num_trained_tokens, num_microbatches                    and what it read
    agent/<name>/fullest_expert_share, expert_entropy    which experts that went to, mean over layers; 1 / number of
    agent/<name>/replay_changed     (of a first update)  experts and 1 if even; pairs that the replay changed
    agent/<name>/moe_aux_loss, moe_z_loss    auxiliary losses of its routers without coefficients, mean over layers
    agent/<name>/phase/<phase>_s, phase_mean/<phase>_s                                        slowest rank, mean rank
    agent/<name>/judge_hidden_s                                       mean leader, with while_sampling alone
    agent/<name>/roll_out_hidden_s, staleness_steps                   mean leader, with one_step_off alone
    agent/<name>/step_s                                                                       mean rank, whole step
    agent/<name>/wait/<phase>_s                                       seconds in which a rank waited for others, mean
    agent/<name>/rss_bytes, device_bytes                              memory of its largest rank, of its fullest device
    agent/<name>/asleep_bytes                                         and what is held there while its engine sleeps
    agent/<name>/memory/<phase>_bytes                                 or as a phase ends; on the CPU by its largest rank
    agent/<name>/learn_mfu       model FLOP/s of learning over the peak of its GPUs, where models/flops.py knows that
    capability/<name>, omega/<learner>/<source>                                               the job
    rate/learn_mfu, answer_tokens_per_gpu_s        the same of all agents; tokens of answers per second and GPU
    start/<part>_s, start/processor_s                              before the first step: slowest rank (start_parts.py)
    time_unix_s                                                             when the step's line was written

Every rank adds only what it owns, so nothing is counted twice: a cell's leader its answers and the results of its
samples and updates; the first rank of an agent its skipped updates; the job's rank 0 capability and omega; and every
rank its own phase seconds. A value that is equal everywhere is a gauge, taken from the lowest rank.
"""

import io
import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hacpo_mega.logbook.files.backlog import Backlog
from hacpo_mega.logbook.files.json_lines import COUNT, MAX_COUNT, TABLE, checked, json_lines
from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.replacing import replace_file

Parts = list[list[float]]
METRICS_LINE = "a line of metrics"

TIMING_SUFFIXES = ("_s", "_bytes", "_mfu", "/prefix_hits")
# Names that end with one of the user's: of an agent; below agent/<name>, of a reward's part, a function or a skill.
OF_AGENTS = ("capability", "omega")
OF_USERS = (
    *("reward", "own", "accuracy", "eval", "num_evaluated"),
    *("held_out_gain", "held_out_gain_square", "num_held_out_pairs"),
)


@dataclass(frozen=True)
class StepMetrics:
    """One step, reduced over the job: `values` repeat exactly when a run is repeated, `timing` does not."""

    values: dict[str, float]
    timing: dict[str, float]


def is_timing(name: str) -> bool:
    """True if a metric describes the machine and changes between two identical runs; the rest must not.

    Its ending says so, unless that is a name of the user's.
    """
    first, _, third = [*name.split("/"), "", ""][:3]
    is_named_by_user = first in OF_AGENTS or (first == "agent" and third in OF_USERS)
    return name.endswith(TIMING_SUFFIXES) and not is_named_by_user


class Metrics:
    """The metrics of one rank since the last `reduce`.

    agent       this rank's agent: the prefix of its phase seconds
    gather      collects one payload per rank, in rank order; a collective, called once per `reduce` on every rank.
                Ranks that need no result may get an empty list from it
    show_phase  called with the name of every phase as it begins (the console of rank 0)
    """

    def __init__(
        self,
        agent: str,
        gather: Callable[[bytes], list[bytes]],
        show_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._agent = agent
        self._gather = gather
        self._show_phase = show_phase
        self._entries: dict[str, dict[str, list[float]]] = {kind: {} for kind in _KINDS}
        self._began = time.perf_counter()

    def add(self, name: str, sum: float, count: float) -> None:
        """A mean over the job: sums and counts of all calls and ranks are added, then divided once."""
        assert count >= 0, (name, count)
        self._accumulate("mean", name, float(sum), float(count))

    def count(self, name: str, number: float) -> None:
        """A total over the job; such names start with `num_`, or end with their unit."""
        self._accumulate("total", name, float(number))

    def add_weights(self, name: str, sum: float, sum_of_squares: float, count: float) -> None:
        """Importance weights: `<name>_mean`, and `<name>_ess`, the effective sample size as a share of the count.

        ESS / n = (sum w)^2 / (n sum w^2) (Kong 1992): 1 when all weights are equal, 1/n when one weight is everything.
        """
        self._accumulate("weights", name, float(sum), float(sum_of_squares), float(count))

    def shares(self, name: str, numbers: Mapping[str, int]) -> None:
        """Shares of a total: `<name>/<part>` is the part's share of everything added under `name` in the job.

        A part that one rank has not seen still counts in its total: shares of a name add up to 1.
        """
        for part, number in numbers.items():
            self._accumulate("shares", f"{name}/{part}", float(number))

    def gauge(self, name: str, value: float) -> None:
        """A value that every rank agrees on, so nothing is added up: the lowest rank's latest is taken."""
        self._entries["gauge"][name] = [float(value)]

    def highest(self, name: str, value: float) -> None:
        """The maximum over calls and ranks; NaN as soon as one is NaN, so that a broken value cannot hide."""
        before = self._entries["highest"].get(name, [-math.inf])[0]
        self._entries["highest"][name] = [_max([before, float(value)])]

    def lowest(self, name: str, value: float) -> None:
        """The minimum over calls and ranks; NaN as soon as one is NaN."""
        before = self._entries["lowest"].get(name, [math.inf])[0]
        self._entries["lowest"][name] = [-_max([-before, -float(value)])]

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Seconds of a phase of the step (`roll_out`, `judge`, ...); several blocks of one phase add up.

        The clock is the host's: work that a device finishes later is billed to the phase that waits for it.
        """
        self._show_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._accumulate("seconds", f"agent/{self._agent}/phase/{phase}_s", time.perf_counter() - start)

    def reduce(self) -> StepMetrics:
        """The job's metrics since the last call; everything restarts at zero. Collective."""
        self._add_step_time()
        payload, self._entries = json.dumps(self._entries).encode(), {kind: {} for kind in _KINDS}
        return reduce_payloads(self._gather(payload))

    def _add_step_time(self) -> None:
        """All seconds since the last `reduce` as `step_s`, and those of no phase as the phase `other`."""
        now = time.perf_counter()
        step_s, self._began = now - self._began, now
        in_phases = sum(seconds for (seconds,) in self._entries["seconds"].values())
        self.add(f"agent/{self._agent}/step_s", step_s, 1)
        self._accumulate("seconds", f"agent/{self._agent}/phase/other_s", max(0.0, step_s - in_phases))

    def _accumulate(self, kind: str, name: str, *parts: float) -> None:
        entry = self._entries[kind].setdefault(name, [0.0] * len(parts))
        for i, part in enumerate(parts):
            entry[i] += part


def reduce_payloads(payloads: list[bytes]) -> StepMetrics:
    """Merges the numbers of all ranks. math.fsum rounds once, so the result does not depend on the order of the
    ranks."""
    merged: dict[str, dict[str, Parts]] = {kind: {} for kind in _KINDS}
    for payload in payloads:
        for kind, entries in json.loads(payload).items():
            for name, parts in entries.items():
                merged[kind].setdefault(name, []).append(parts)
    reduced: dict[str, float] = {}
    reduced |= _reduce_shares(merged.pop("shares"))
    for kind, entries in merged.items():
        for name, parts in entries.items():
            reduced |= _REDUCERS[kind](name, parts)
    timing = {name: value for name, value in sorted(reduced.items()) if is_timing(name)}
    return StepMetrics({name: reduced[name] for name in sorted(reduced.keys() - timing.keys())}, timing)


def _total(values: list[float]) -> float:
    """The exactly rounded sum; math.fsum raises on inf - inf, where a broken run should show NaN."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _max(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _reduce_mean(name: str, parts: Parts) -> dict[str, float]:
    sums, counts = zip(*parts)
    count = _total(counts)
    return {name: _total(sums) / count} if count else {}


def _reduce_weights(name: str, parts: Parts) -> dict[str, float]:
    total, squares, count = (_total(column) for column in zip(*parts))
    if not count:
        return {}
    share = {f"{name}_ess": total**2 / (count * squares)} if squares else {}
    return {f"{name}_mean": total / count} | share


def _reduce_shares(numbers: dict[str, Parts]) -> dict[str, float]:
    """Every part over the sum of the parts of its name: the one denominator that all ranks have in common."""
    totals: dict[str, float] = {}
    counts = {name: _total([part[0] for part in parts]) for name, parts in numbers.items()}
    for name, count in counts.items():
        whole = name.rpartition("/")[0]
        totals[whole] = totals.get(whole, 0.0) + count
    return {name: count / totals[name.rpartition("/")[0]] for name, count in counts.items()}


def _reduce_seconds(name: str, parts: Parts) -> dict[str, float]:
    seconds = [part[0] for part in parts]
    return {name: max(seconds), name.replace("/phase/", "/phase_mean/"): _total(seconds) / len(seconds)}


_REDUCERS: dict[str, Callable[[str, Parts], dict[str, float]]] = {
    "mean": _reduce_mean,
    "total": lambda name, parts: {name: _total([part[0] for part in parts])},
    "weights": _reduce_weights,
    "gauge": lambda name, parts: {name: parts[0][0]},
    "highest": lambda name, parts: {name: _max([part[0] for part in parts])},
    "lowest": lambda name, parts: {name: -_max([-part[0] for part in parts])},
    "seconds": _reduce_seconds,
}
# A share needs all parts of its name together, so it is reduced by _reduce_shares.
_KINDS = (*_REDUCERS, "shares")


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Rank 0's writer of a run folder: `metrics.jsonl` and `tensorboard/`, continued after `steps_done` steps.

    Step 0 is before training; step n is after n steps. Lines of steps that a restart will repeat move to
    `metrics.dropped.jsonl`: the checkpoint that is resumed knows nothing of them.
    """

    def __init__(self, run_dir: Path, steps_done: int = 0, backlog: Backlog | None = None) -> None:
        """`backlog` keeps records that cannot be written at present; by default one of this writer's own."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        _drop_lines_after(self._path, steps_done)
        self._backlog = Backlog() if backlog is None else backlog
        self._events = _TensorBoardFile(run_dir / "tensorboard", steps_done, self._backlog)

    def write(self, step: int, metrics: StepMetrics) -> None:
        """One line and one TensorBoard event, on disk when this returns unless the disk takes nothing."""
        line = {
            "step": step,
            "values": {name: json_number(value) for name, value in metrics.values.items()},
            "timing": {"time_unix_s": round(time.time(), 3)}
            | {name: json_number(round(value, 6)) for name, value in metrics.timing.items()},
        }
        self._backlog.append(self._path, json.dumps(line, allow_nan=False).encode() + b"\n")
        self._events.scalars(step, metrics.values | metrics.timing)

    def close(self) -> None:
        """Writes the waiting records. OSError if the disk still refuses."""
        if error := self._backlog.flush():
            raise error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else that error is the one to report
            self.close()


class _TensorBoardFile:
    """An event file written record by record, at once.

    torch's SummaryWriter would import tensorflow where it is installed, and queues events in a thread that a killed job
    takes with it.
    """

    def __init__(self, folder: Path, steps_done: int, backlog: Backlog) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._backlog = backlog
        self._write(Event(file_version="brain.Event:2"))
        # TensorBoard then forgets what earlier files say of this step and later ones.
        self._write(Event(step=steps_done + 1 if steps_done else 0, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._backlog.append(self._path, record.getvalue())


def read_metrics(path: Path) -> dict[int, StepMetrics]:
    """The lines of a `metrics.jsonl` by step, ascending; several lines of one step are merged, the later one wins.

    A last line without its end (the job was killed while writing) is left out. Raises ValueError for any other line
    that is not a metrics line, with its number; FileNotFoundError when there is no file.
    """
    return by_step(metrics_lines(path))


def by_step(lines: Iterable[tuple[int, StepMetrics]]) -> dict[int, StepMetrics]:
    """The numbers of lines by step, as `read_metrics`."""
    steps: dict[int, StepMetrics] = {}
    for step, metrics in lines:
        known = steps.get(step, StepMetrics({}, {}))
        steps[step] = StepMetrics(known.values | metrics.values, known.timing | metrics.timing)
    return dict(sorted(steps.items()))


def metrics_lines(path: Path) -> Iterator[tuple[int, StepMetrics]]:
    """Step and numbers of each line of a `metrics.jsonl`, as it is read. Raises as `read_metrics`."""
    return (content for _, _, content in json_lines(path, METRICS_LINE, metrics_of))


def metrics_of(line: Mapping[str, Any]) -> tuple[int, StepMetrics]:
    """Step and numbers of a line of `metrics.jsonl`. ValueError, with the reason, for another shape.

    Lines of older versions have some values below `timing`, by the names of agents and others of the user's.
    """
    checked(line, {"step": COUNT, "values": TABLE, "timing": TABLE})
    values, timing = _floats(line["values"]), _floats(line["timing"])
    misplaced = {name: value for name, value in timing.items() if not is_timing(name)}
    return line["step"], StepMetrics(values | misplaced, {n: v for n, v in timing.items() if n not in misplaced})


def require_readable_metrics(run_dir: Path) -> None:
    """ValueError, with its number, for a line of a run that it could not go on after."""
    with suppress(FileNotFoundError):  # reported when the run resumes
        for _ in metrics_lines(run_dir / "metrics.jsonl"):
            pass


def _floats(table: dict[str, float | str]) -> dict[str, float]:
    """The numbers of a line. ValueError, with the name, for no number, and for an impossible count."""
    floats = {}
    for name, value in table.items():
        is_whole = type(value) is int and abs(value) < 1 << 1000  # beyond, it is no float
        if not is_whole and type(value) is not float and value not in ("nan", "inf", "-inf"):
            raise ValueError(f"{name} is {short(value)}, needs a number")
        floats[name] = float(value)
        is_ours = not {"own", "reward"} & set(name.split("/"))  # the user names those
        if is_ours and "/num_" in name and not 0.0 <= floats[name] <= MAX_COUNT:
            raise ValueError(f"{name} is {short(value)}, needs a number, 0 or more")
    return floats


def json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity: they travel as "nan", "inf", "-inf", which float() reads back."""
    return value if math.isfinite(value) else str(value)


def _drop_lines_after(path: Path, steps_done: int) -> None:
    """Moves lines that a resumed run will write again, and a torn last one, to `metrics.dropped.jsonl` beside it."""
    if not path.exists():
        return
    kept, dropped = [], []
    for _, text, line in json_lines(path, METRICS_LINE):
        stays = steps_done and line["step"] <= steps_done
        (kept if stays else dropped).append(text + b"\n")
    if path.stat().st_size == sum(map(len, kept)):
        return
    with path.with_name("metrics.dropped.jsonl").open("ab") as file:
        file.writelines(dropped)
    replace_file(path, b"".join(kept), synced=True)
