"""The page's data about runs as tables ready for JSON: the list, curves, the job, a comparison, verdicts.

Arrays of a view have a value for each of its steps: null where a step has no number, or one that JSON cannot hold.
Elsewhere: answers (answers.py).
"""

import math
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from hacpo_mega.checkpoint.files import committed_steps
from hacpo_mega.cluster.rank_map import RankMap
from hacpo_mega.config import Config
from hacpo_mega.jobs.attempts import read_attempts
from hacpo_mega.jobs.slurm_status import trouble_of
from hacpo_mega.logbook.files.metrics import StepMetrics, is_timing
from hacpo_mega.logbook.run.provenance import read_alarms
from hacpo_mega.logbook.run.rank_files import MOST_RANKS, read_rank_files, seconds_between
from hacpo_mega.report.run import Run, accuracies, agents_of
from hacpo_mega.report.verdicts import WINDOW, fates_by_step, verdicts
from hacpo_mega.watch.index import progress_of, words_of
from hacpo_mega.watch.runs import Runs, Watched
from hacpo_mega.watch.studies import Study

DIGITS, MOST_DECIMALS = 7, 22  # of a number in a curve
LAST_STEPS = 10  # whose median is the seconds of a step
MOST_NAMES = 200
STALE_S = 10.0  # without a new file of a rank it is silent; in larger jobs ranks write less often
MOST_ALARMS = 5  # among the job's trouble
# Groups of metrics by a pattern of their names; the first that fits.
GROUPS = {
    "held-out answers": r"/(accuracy|eval|held_out|num_evaluated|num_held_out)",
    "others' answers": r"/from/",
    "capability": r"^(omega|capability)/",
    "answers on their way": r"/view/",
    "rewards": r"/(reward|verdict|num_unjudged|own/|advantage_max)",
    "engine and trainer": r"/(engine_|logprob_mean|self/first)",
    "lengths": r"/(answer_tokens|truncated|num_answers)",
    "loss and gradients": r"/(self/|grad_norm|lr$|kl$|cross_coef|num_nonfinite|num_skipped|num_updates|num_trained)",
    "phases": r"/(phase|phase_mean)/",
    "waiting": r"/wait/",
    "memory": r"_bytes$",
    "rates": r"^rate/|_s$",
}
LOOKED_BACK = 10 * WINDOW  # last steps that verdicts are read from; some metrics come only every few steps
MOST_FATES = 1000  # steps of a chart of fates, evenly spaced
HELD_OUT_METRICS = (
    *("agent/%/accuracy", "agent/%/eval/reward_%", "agent/%/num_evaluated"),
    *("agent/%/held_out_gain", "agent/%/held_out_gain_square", "agent/%/num_held_out_pairs"),
)
FATE_METRICS = ("agent/%/from/%/view/num_%", "agent/%/from/%/inside")
VERDICT_METRICS = (
    *("agent/%/from/%", "omega/%", "agent/%/engine_gap_mean", "agent/%/truncated"),
    *("agent/%/wait/%_s", "agent/%/step_s", "agent/%/device_bytes", "agent/%/rss_bytes"),
)
FROM_METRIC = "FROM metrics WHERE name = (SELECT id FROM words WHERE kind = 'metric' AND word = ?)"
HELD_OUT = re.compile(r"agent/([^/]+)/(?:accuracy|eval/reward_mean)(?:/(.+))?")


def run_list(runs: Runs) -> list[dict[str, Any]]:
    """The watched runs."""
    return [_list_entry(run) for run in runs]


def _list_entry(run: Watched) -> dict[str, Any]:
    with run.index.reading() as db:
        steps, last = db.execute("SELECT count(DISTINCT step), max(step) FROM lines WHERE step > 0").fetchone()
        names = words_of(db, "metric")
        progress = progress_of(db)
    starts, state = run.starts(), run.state
    notes = [*run.index.notes]
    if progress is not None:
        notes.append(progress)
    if state == "gone":
        notes.append(f"{run.folder} was moved or deleted; this is what it had")
    return {
        **{"id": run.id, "path": str(run.folder), "name": run.folder.name, "state": state, "steps": steps},
        **{"last_step": last, "num_steps": run.num_steps, "seed": run.config.get("seed")},
        **{"started": starts[0].get("time_unix_s") if starts else None, "config_digest": run.group},
        **{"agents": agents_of(run.config, names), "experiment": run.experiment, "note": "; ".join(notes) or None},
    }


def curves(
    run: Watched, names: Sequence[str], after: int | None, generation: int | None, every: int = 1
) -> dict[str, Any]:
    """Metrics over steps; without `names` the names of all, by group.

    Steps up to `after` are left out, unless rows were replaced since the `generation` that the page has: then all come,
    with "full". For a long run the page first asks for every `every`-th step and the last. ValueError for more names
    than MOST_NAMES.
    """
    with run.index.reading() as db:
        state = dict(db.execute("SELECT key, value FROM state"))
        if not names:
            return _metric_groups(db) | {"generation": state["generation"]}
        if len(names) > MOST_NAMES:
            raise ValueError(f"{len(names)} names are too many: ask for at most {MOST_NAMES} at once")
        is_full = after is None or generation != state["generation"]
        first = 0 if is_full else after + 1
        last = db.execute("SELECT max(step) FROM lines").fetchone()[0]
        query = "SELECT DISTINCT step FROM lines WHERE step >= ? AND (step % ? = 0 OR step = ?) ORDER BY step"
        steps = [row[0] for row in db.execute(query, (first, max(1, every), last))]
        index_of = {step: index for index, step in enumerate(steps)}
        series = {name: _series(db, name, index_of, every) for name in names}
        times = _series(db, "time_unix_s", index_of, every)
        trained = _trained_totals(db, steps)
        intervals = _intervals(run, db, names, index_of)
    begin = _start_time(run.starts(), min((time for time in times if time is not None), default=None))
    return {
        **{"names": list(names), "steps": steps, "seconds": [t and round(t - begin, 3) for t in times]},
        **{"trained_answers": trained, "series": series, "intervals": intervals, "events": _events(run)},
        **{"full": is_full, "generation": state["generation"]},
    }


def _start_time(starts: Sequence[Mapping[str, Any]], first: float | None) -> float:
    """Unix seconds at which a run began: at its first start, else at its first step."""
    return min([start["time_unix_s"] for start in starts if "time_unix_s" in start] or [first or 0.0])


def _metric_groups(db: sqlite3.Connection) -> dict[str, Any]:
    names = [name for name in words_of(db, "metric") if name != "time_unix_s"]
    groups: dict[str, list[str]] = {}
    for name in names:
        title = next((title for title, pattern in GROUPS.items() if re.search(pattern, name)), "other")
        groups.setdefault(title, []).append(name)
    ordered = {title: groups[title] for title in (*GROUPS, "other") if title in groups}
    return {"names": names, "groups": ordered, "last_step": db.execute("SELECT max(step) FROM lines").fetchone()[0]}


def _series(db: sqlite3.Connection, name: str, index_of: Mapping[int, int], every: int) -> list[float | None]:
    series: list[float | None] = [None] * len(index_of)
    query = f"SELECT step, value {FROM_METRIC} AND step >= ? AND (step % ? = 0 OR step = ?)"
    bounds = (name, min(index_of, default=0), max(1, every), max(index_of, default=0))
    rows = [row for row in db.execute(query, bounds) if row[1] is not None and row[0] in index_of]
    values = np.asarray([value for _, value in rows], np.float64)
    values = values if name == "time_unix_s" else _rounded(values)
    for (step, _), value in zip(rows, values.tolist()):
        if math.isfinite(value):
            series[index_of[step]] = value
    return series


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers rounded to DIGITS digits, which makes the JSON short; those below 1e-15 are not rounded."""
    rounded = values.copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        decimals = DIGITS - 1 - np.floor(np.log10(np.abs(values)))
    for number in np.unique(decimals[decimals <= MOST_DECIMALS]):  # np.around divides by 10**decimals, inexact beyond
        has_decimals = decimals == number
        rounded[has_decimals] = np.around(values[has_decimals], int(number))
    return rounded


def _trained_totals(db: sqlite3.Connection, steps: Sequence[int]) -> list[float]:
    """Number of answers that all agents were trained on, from the run's first step up to each of the `steps`."""
    query = (
        "SELECT step, sum(value) FROM metrics WHERE name IN (SELECT id FROM words WHERE kind = 'metric' "
        "AND word LIKE 'agent/%/num_trained_answers') GROUP BY step ORDER BY step"
    )
    total, totals = 0.0, {}
    for step, value in db.execute(query):
        total += value or 0.0
        totals[step] = total
    at_steps, first = [], min(steps, default=0)
    latest = max((value for step, value in totals.items() if step < first), default=0.0)
    for step in steps:
        latest = totals.get(step, latest)
        at_steps.append(latest)
    return at_steps


def _intervals(
    run: Watched, db: sqlite3.Connection, names: Sequence[str], index_of: Mapping[int, int]
) -> dict[str, dict[str, list[float | None]]]:
    """95 % intervals of the curves that are means of held-out answers, as the report has them."""
    intervals = {}
    for name in names:
        if not (held_out := HELD_OUT.fullmatch(name)):
            continue
        agent, skill = held_out.groups()
        suffix = f"/{skill}" if skill else ""
        metrics = ("accuracy", "accuracy_square", "eval/reward_mean", "eval/reward_square", "num_evaluated")
        data = _as_run(run, db, _metrics(db, [f"agent/{agent}/{metric}{suffix}" for metric in metrics]))
        low, high = ([None] * len(index_of) for _ in range(2))
        for point in accuracies(data, agent, skill):
            if point.step in index_of and point.interval is not None:
                low[index_of[point.step]], high[index_of[point.step]] = point.interval
        intervals[name] = {"low": low, "high": high}
    return intervals


def _metrics(db: sqlite3.Connection, patterns: Sequence[str], first: int = 0, every: int = 1) -> dict[int, StepMetrics]:
    """Metrics by step, of the names that match a pattern of SQL's LIKE, from step `first` on, every `every`-th step."""
    likes = " OR ".join(["word LIKE ?"] * len(patterns))
    query = (
        "SELECT step, word, value FROM metrics JOIN words ON words.id = name WHERE name IN "
        f"(SELECT id FROM words WHERE kind = 'metric' AND ({likes})) AND step >= ? AND step % ? = 0 "
        "AND value IS NOT NULL"
    )
    steps: dict[int, StepMetrics] = {}
    for step, word, value in db.execute(query, [*patterns, first, every]):
        metrics = steps.setdefault(step, StepMetrics({}, {}))
        (metrics.timing if is_timing(word) else metrics.values)[word] = value
    return steps


def _as_run(run: Watched, db: sqlite3.Connection, *tables: dict[int, StepMetrics]) -> Run:
    """The run as the report reads it, with only the metrics of `tables`."""
    steps: dict[int, StepMetrics] = {}
    for step, metrics in (entry for table in tables for entry in table.items()):
        known = steps.get(step, StepMetrics({}, {}))
        steps[step] = StepMetrics(known.values | metrics.values, known.timing | metrics.timing)
    agents = agents_of(run.config, words_of(db, "metric"))
    return Run(run.folder, run.config, "", dict(sorted(steps.items())), agents, [])


def _events(run: Watched) -> list[dict[str, Any]]:
    """Starts and alarms, by step."""
    starts = run.starts()
    events = [
        {"step": start.get("steps_done", 0), "kind": "resume" if number else "start", "text": _start_text(start)}
        for number, start in enumerate(starts)
    ]
    events += [{"step": alarm["step"], "kind": "alarm", "text": alarm["text"]} for alarm in read_alarms(run.folder)]
    return sorted(events, key=lambda event: event["step"])


def _start_text(start: Mapping[str, Any]) -> str:
    where = "".join(f", {key} {start[key]}" for key in ("job", "nodes") if start.get(key))
    return f"start after step {start.get('steps_done', 0)}, commit {str(start.get('commit'))[:9]}{where}"


def job(run: Watched) -> dict[str, Any]:
    """The job of a run: its progress, its ranks with their present work, and its last trouble."""
    with run.index.reading() as db:
        query = f"SELECT step, value {FROM_METRIC} ORDER BY step DESC LIMIT ?"
        ended = dict(db.execute(query, ("time_unix_s", LAST_STEPS + 1)))
        first = db.execute(f"SELECT min(value) {FROM_METRIC}", ("time_unix_s",)).fetchone()[0]
    starts, attempts, safe = run.starts(), [], None
    with suppress(OSError, ValueError):
        attempts = read_attempts(run.folder)
    with suppress(OSError, ValueError):
        safe = max(committed_steps(run.folder), default=None)
    step = max(ended, default=None)
    between = [ended[later] - ended[earlier] for later, earlier in pairwise(sorted(ended, reverse=True))]
    begin = _start_time(starts, first)
    left = run.num_steps - step if run.num_steps is not None and step is not None else None
    state, ranks = run.state, _ranks(run, starts)
    return {
        **{"state": state, "step": step, "num_steps": run.num_steps, "safe_step": safe},
        "seconds": None if step is None else round((time.time() if state == "running" else ended[step]) - begin, 1),
        "seconds_left": round(median(between) * left, 1) if between and left is not None else None,
        **{"step_s": round(median(between), 3) if between else None, "attempt": attempts[-1] if attempts else None},
        **{"trouble": _trouble(run), "ranks": ranks, "waited_for": _waited_for(ranks)},
    }


def _trouble(run: Watched) -> list[dict[str, Any]]:
    """The last alarms, and what the job's newest log says of trouble."""
    alarms = [
        {"time_unix_s": alarm["time_unix_s"], "text": f"step {alarm['step']}: {alarm['text']}"}
        for alarm in read_alarms(run.folder)[-MOST_ALARMS:]
    ]
    with suppress(OSError, ValueError):
        text, is_trouble = trouble_of(run.folder)
        alarms += [{"text": text}] if is_trouble else []
    return alarms


def _ranks(run: Watched, starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """All ranks: their places by the configuration, their nodes and their present work by their own files.

    None for a configuration of another version, and for a job of more than MOST_RANKS. A rank without a file gets its
    node from the last start, whose nodes have equal numbers of ranks, in order.
    """
    try:
        rank_map = RankMap.of(Config.model_validate(run.config))
    except (ValueError, AttributeError):
        return None
    if (size := rank_map.world_size) > MOST_RANKS:
        return None
    nodes = _nodes(str(starts[-1].get("nodes") or "")) if starts else []
    per_node = size // len(nodes) if nodes and size % len(nodes) == 0 else 0
    files, now = read_rank_files(run.folder), time.time()
    places = (rank_map.coordinate(rank) for rank in range(size))
    return [
        {
            **{"rank": place.global_rank, "agent": place.agent_name, "lane": place.lane, "cell": place.cell_in_lane},
            **{"node": nodes[place.global_rank // per_node] if per_node else None, "leader": place.is_leader},
            **{"pp": place.pp_rank, "cp": place.cp_rank, "tp": place.tp_rank},
            **_activity(files.get(place.global_rank), now, max(STALE_S, 3.0 * seconds_between(size))),
        }
        for place in places
    ]


def _activity(file: Mapping[str, Any] | None, now: float, stale_s: float) -> dict[str, Any]:
    """Present work of a rank by its file, and the file's age; a rank silent for `stale_s` may hang or be dead.

    `progress` is the share of the small steps of its phase that are done, by the number in its last phase of that name.
    """
    if file is None:
        return {"phase": None, "seen_s_ago": None}
    before, silent_s = file["num_before"], round(max(0.0, now - file["time_unix_s"]), 1)
    known = {key: file[key] for key in ("phase", "when", "phase_s", "num_done", "num_before", "waits_for", "waited_s")}
    progress = min(1.0, file["num_done"] / before) if before else None
    return known | {"node": file["host"], "progress": progress, "seen_s_ago": silent_s, "silent": silent_s > stale_s}


def _waited_for(ranks: Sequence[Mapping[str, Any]] | None) -> list[int]:
    """The ranks that wait for nobody, if others wait in a collective; empty if all ranks or none wait."""
    seen = [rank for rank in ranks or () if rank["phase"] is not None]
    late = [rank["rank"] for rank in seen if rank["waits_for"] is None]
    return late if len(late) < len(seen) else []


def _nodes(text: str) -> list[str]:
    """The nodes in a list of Slurm's, such as "n[01-03,7],login1"; empty for other text."""
    nodes = []
    for prefix, ranges in re.findall(r"([^,\[\]]+)(?:\[([\d,-]+)\])?(?:,|$)", text):
        for part in ranges.split(",") if ranges else [""]:
            low, _, high = part.partition("-")
            span = range(int(low), int(high or low) + 1) if low else []
            nodes += [f"{prefix}{number:0{len(low)}}" for number in span[:MOST_RANKS]] or [prefix]
    return nodes


def comparison(runs: Sequence[Watched]) -> dict[str, Any]:
    """Settings in which runs differ, and groups of runs that differ only in their seed."""
    settings = {run.id: run.settings for run in runs}
    keys = dict.fromkeys(key for table in settings.values() for key in table)
    tables = {key: {run: table.get(key) for run, table in settings.items()} for key in keys if key != "run_dir"}
    differences = [
        {"key": key, "values": values} for key, values in tables.items() if len(set(map(repr, values.values()))) > 1
    ]
    groups: dict[str, list[Watched]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    named = [{"name": _group_name(group, differences), "runs": [run.id for run in group]} for group in groups.values()]
    return {"differences": differences, "groups": named}


def _group_name(group: Sequence[Watched], differences: Sequence[Mapping[str, Any]]) -> str:
    first = group[0]
    settings = [setting for setting in differences if setting["key"] != "seed"]
    parts = [f"{setting['key'].rpartition('.')[2]} {setting['values'][first.id]}" for setting in settings[:3]]
    return ", ".join(parts) if parts and len(group) > 1 else first.folder.name


def study_list(runs: Runs) -> list[dict[str, Any]]:
    """The watched folders of experiments, benchmarks and evaluations."""
    return [
        {
            **{"id": entry.id, "kind": entry.kind, "path": str(entry.folder), "name": entry.folder.name},
            "note": None if entry.file_states() else f"{entry.folder} was moved or deleted",
        }
        for entry in runs.studies.values()
    ]


def study(runs: Runs, name: str) -> Study:
    """A study by its id. ValueError for an unknown one."""
    if (found := runs.studies.get(name)) is None:
        raise ValueError(f"no study {name!r} is watched here")
    return found


class VerdictViews:
    """Verdicts of runs, cached until a run has a further step, since they read many steps."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[Any, dict[str, Any]]] = {}

    def of(self, run: Watched) -> dict[str, Any]:
        """The verdicts of a run's charts, and the fates of others' answers over its steps."""
        with run.index.reading() as db:
            query = "SELECT max(start), (SELECT value FROM state WHERE key = 'generation') FROM lines"
            state = db.execute(query).fetchone()
            if run.id in self._cached and self._cached[run.id][0] == state:
                return self._cached[run.id][1]
            num_steps, last = db.execute("SELECT count(DISTINCT step), max(step) FROM lines").fetchone()
            recent = _metrics(db, VERDICT_METRICS, first=(last or 0) - LOOKED_BACK)
            data = _as_run(run, db, _metrics(db, HELD_OUT_METRICS), recent)
            fates = _as_run(run, db, _metrics(db, FATE_METRICS, every=max(1, math.ceil(num_steps / MOST_FATES))))
        found = {"verdicts": verdicts(data), "fates": fates_by_step(fates)}
        self._cached[run.id] = (state, found)
        return found
