"""A benchmark's summaries for people (Markdown), for spreadsheets (CSV) and for programs (JSON)."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hacpo_mega.logbook.console import in_step_order
from hacpo_mega.throughput.summary import Summary


def to_json(facts: Mapping[str, str], summaries: Sequence[Summary]) -> str:
    """Everything, under `facts` and `schedules`."""
    return json.dumps({"facts": dict(facts), "schedules": [summary.table() for summary in summaries]}, indent=1) + "\n"


def to_csv(summaries: Sequence[Summary]) -> str:
    """A row per schedule, agent and phase; the phase `step` is the whole of it."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("schedule", "agent", "phase", "seconds", "model_flops_per_s"))
    for summary in summaries:
        for agent, found in summary.agents.items():
            rows.writerow((summary.name, agent, "step", f"{summary.wall_s:.6f}", ""))
            for phase, seconds in found.phases_s.items():
                rate = found.flops_per_s.get(phase)
                rows.writerow((summary.name, agent, phase, f"{seconds:.6f}", "" if rate is None else f"{rate:.6g}"))
    return text.getvalue()


def to_markdown(facts: Mapping[str, str], summaries: Sequence[Summary]) -> str:
    """Facts, then seconds of a step, then what every agent did in them."""
    parts = [[f"- {name}: {fact}" for name, fact in facts.items()], _steps(summaries), _agents(summaries)]
    parts.append(_phases(summaries))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _steps(summaries: Sequence[Summary]) -> list[str]:
    first = summaries[0]
    rows = [
        (
            summary.name,
            f"{summary.wall_s:.2f}",
            f"{summary.p50_s:.2f}",
            f"{summary.p95_s:.2f}",
            " ".join(f"{seconds:.2f}" for seconds in summary.by_round_s),
            f"{first.wall_s / summary.wall_s:.2f}",
            f"{summary.together:.2f}",
        )
        for summary in summaries
    ]
    head = ("schedule", "s/step", "p50", "p95", "by round", f"{first.name} needs", "at once, not in turns")
    return _table(head, rows)


def _agents(summaries: Sequence[Summary]) -> list[str]:
    rows: list[tuple[Any, ...]] = []
    for summary in summaries:
        for agent, found in summary.agents.items():
            flops = " ".join(f"{phase} {rate / 1e9:.2f}" for phase, rate in found.flops_per_s.items())
            rows.append(
                (
                    summary.name,
                    agent,
                    f"{found.trained_answers:.0f}",
                    f"{found.seconds_per_1000:.2f}",
                    f"{found.generated_per_s:.0f}",
                    f"{found.trained_per_s:.0f}",
                    f"{found.idle_share:.0%}",
                    flops,
                )
            )
    head = ("schedule", "agent", "trained answers", "s per 1,000", "generated tok/s", "trained tok/s", "idle")
    return _table((*head, "model GFLOP/s"), rows)


def _phases(summaries: Sequence[Summary]) -> list[str]:
    names = in_step_order(
        {phase for summary in summaries for found in summary.agents.values() for phase in found.phases_s}
    )
    rows = [
        (summary.name, agent, *(f"{found.phases_s.get(name, 0.0):.3f}" for name in names))
        for summary in summaries
        for agent, found in summary.agents.items()
    ]
    return _table(("seconds", "agent", *names), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
