"""A benchmark's summaries for people (Markdown), for spreadsheets (CSV) and for programs (JSON)."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hacpo_lab.experiments.table import NOTHING, Table, markdown_of
from hacpo_lab.throughput.summary import Summary
from hacpo_mega.logbook.console import in_step_order

# Receivers of bytes: the other leaders of a lane, the ranks of a cell, the agent's other leaders, all ranks (metrics),
# other ranks of the model on the way to the engine (tp, pp), and the engine.
SENT_TO = ("lane", "cell", "row", "job", "tp", "pp", "engine")
OF_SIZES = ("agents", "lanes", "ranks")
BYTES = {
    "lane_bytes": "answers, a leader",
    "capability_bytes": "capability, a leader",
    "published_bytes": "published, a rank",
    "metrics_bytes": "metrics, all",
}


def to_json(facts: Mapping[str, str], summaries: Sequence[Summary]) -> str:
    """Everything, under `facts` and `schedules`."""
    return json.dumps({"facts": dict(facts), "schedules": [summary.table() for summary in summaries]}, indent=1) + "\n"


def to_csv(summaries: Sequence[Summary]) -> str:
    """A row per schedule, agent and phase; the phase `step` is the whole of it."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("schedule", "agent", "phase", "seconds", "model_flops_per_s", "cpu_seconds", "peak_bytes", *SENT_TO))
    for summary in summaries:
        for agent, found in summary.agents.items():
            rows.writerow((summary.name, agent, "step", f"{summary.wall_s:.6f}", *[""] * (3 + len(SENT_TO))))
            for phase, seconds in found.phases_s.items():
                numbers = (found.flops_per_s.get(phase), found.cpu_s.get(phase), found.peak_bytes.get(phase))
                sent = (found.sent_bytes.get(f"{phase}/{whom}", 0.0) for whom in SENT_TO)
                cells = ("" if number is None else f"{number:.6g}" for number in (*numbers, *sent))
                rows.writerow((summary.name, agent, phase, f"{seconds:.6f}", *cells))
    return text.getvalue()


def to_markdown(facts: Mapping[str, str], summaries: Sequence[Summary]) -> str:
    """Facts, then seconds of a step, then what every agent did in them, held and sent."""
    schedules = [summary.table() for summary in summaries]
    by_phase = [
        _phases("Seconds by phase", schedules, "phases_s", "{:.3f}"),
        _phases("CPU seconds by phase", schedules, "cpu_s", "{:.3f}"),
        _phases("Peak MiB by phase", schedules, "peak_bytes", "{:.0f}", 2**20),
        _phases("KB sent by phase", schedules, "sent_bytes", "{:.1f}", 1e3),
    ]
    return markdown(facts, [*step_tables(schedules), *by_phase])


def step_tables(schedules: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Schedules and their agents, of what bench.json has under `schedules`."""
    first = schedules[0] if schedules else {"name": "the first", "wall_s": 0.0}
    rows = [
        (
            *(found["name"], *(f"{found[key]:.2f}" for key in ("wall_s", "p50_s", "p95_s"))),
            " ".join(f"{seconds:.2f}" for seconds in found["by_round_s"]),
            f"{first['wall_s'] / found['wall_s']:.2f}" if found["wall_s"] else NOTHING,
            "" if found["together"] is None else f"{found['together']:.2f}",
        )
        for found in schedules
    ]
    head = ("schedule", "s/step", "p50", "p95", "by round", f"{first['name']} needs", "at once, not in turns")
    agents = [
        (
            *(schedule, agent, f"{found['trained_answers']:.0f}", f"{found['seconds_per_1000']:.2f}"),
            *(f"{found['generated_per_s']:.0f}", f"{found['trained_per_s']:.0f}"),
            "" if found["idle_share"] is None else f"{found['idle_share']:.0%}",
            ", ".join(f"{phase} {rate / 1e9:.2f}" for phase, rate in found["flops_per_s"].items()),
        )
        for schedule, agent, found in _agents_of(schedules)
    ]
    of_agents = ("schedule", "agent", "trained answers", "s per 1,000", "generated tok/s", "trained tok/s", "idle")
    return [
        Table("Schedules", head, tuple(rows)),
        Table("Agents", (*of_agents, "model GFLOP/s"), tuple(agents)),
    ]


def _agents_of(schedules: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Every agent of every schedule: both names, and what was measured of it."""
    return [(found["name"], agent, own) for found in schedules for agent, own in found["agents"].items()]


def _phases(title: str, schedules: Sequence[Mapping[str, Any]], key: str, shown: str, unit: float = 1.0) -> Table:
    """A number by phase; what nobody did, or sent, has no column."""
    every = [(schedule, agent, found[key]) for schedule, agent, found in _agents_of(schedules)]
    names = in_step_order({name for _, _, numbers in every for name, number in numbers.items() if number})
    rows = (
        (schedule, agent, *(shown.format(numbers.get(name, 0.0) / unit) for name in names))
        for schedule, agent, numbers in every
    )
    return Table(title, ("schedule", "agent", *names), tuple(rows))


def size_tables(sizes: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Processor seconds and bytes by size of the job, of what scaling.json has under `sizes`."""
    phases = in_step_order({phase for size in sizes for phase in size["cpu_s"]})
    where = [tuple(f"{size[key]:.0f}" for key in OF_SIZES) for size in sizes]
    spent = tuple(
        (*place, f"{size['trained_per_core_s']:.1f}", *(f"{size['cpu_s'].get(phase, 0.0):.4f}" for phase in phases))
        for place, size in zip(where, sizes)
    )
    sent = tuple((*place, *(f"{size[kind]:,.0f}" for kind in BYTES)) for place, size in zip(where, sizes))
    head = (*OF_SIZES, "trained answers a core-second", *(f"{phase} s" for phase in phases))
    return [
        Table("Processor seconds of a rank of the first agent in a step", head, spent),
        Table("Bytes sent in a step", (*OF_SIZES, *BYTES.values()), sent),
    ]


def markdown(facts: Mapping[str, str], tables: Sequence[Table]) -> str:
    """The facts that tables were measured on, as a list, and the tables."""
    lines = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    return "\n\n".join([lines, *(markdown_of(table).rstrip() for table in tables)]) + "\n"
