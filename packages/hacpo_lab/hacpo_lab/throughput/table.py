"""A benchmark's summaries for people (Markdown), for spreadsheets (CSV) and for programs (JSON)."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hacpo_lab.throughput.summary import AgentSummary, Summary
from hacpo_mega.logbook.console import in_step_order

# Whom bytes go to: the other leaders of a lane, the ranks of a cell, the agent's other leaders, all ranks (metrics),
# other ranks of the model on the way to the engine, and the engine.
SENT_TO = ("lane", "cell", "row", "job", "tp", "pp", "engine")


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
    parts = [fact_lines(facts), _steps(summaries), _agents(summaries)]
    parts.append(_phases("seconds", summaries, lambda found: found.phases_s, "{:.3f}"))
    parts.append(_phases("CPU seconds", summaries, lambda found: found.cpu_s, "{:.3f}"))
    in_mib = _phases("peak MiB", summaries, lambda found: _scaled(found.peak_bytes, 2**20), "{:.0f}")
    parts += [in_mib, _phases("KB sent", summaries, lambda found: _scaled(found.sent_bytes, 1e3), "{:.1f}")]
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
            "" if summary.together is None else f"{summary.together:.2f}",
        )
        for summary in summaries
    ]
    head = ("schedule", "s/step", "p50", "p95", "by round", f"{first.name} needs", "at once, not in turns")
    return markdown_table(head, rows)


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
                    "" if found.idle_share is None else f"{found.idle_share:.0%}",
                    flops,
                )
            )
    head = ("schedule", "agent", "trained answers", "s per 1,000", "generated tok/s", "trained tok/s", "idle")
    return markdown_table((*head, "model GFLOP/s"), rows)


def _phases(
    what: str, summaries: Sequence[Summary], of: Callable[[AgentSummary], Mapping[str, float]], shown: str
) -> list[str]:
    """A number by phase; what nobody did, or sent, has no column."""
    every = [(summary.name, agent, of(found)) for summary in summaries for agent, found in summary.agents.items()]
    names = in_step_order({name for _, _, numbers in every for name, number in numbers.items() if number})
    rows = [
        (schedule, agent, *(shown.format(numbers.get(name, 0.0)) for name in names))
        for schedule, agent, numbers in every
    ]
    return markdown_table((what, "agent", *names), rows)


def _scaled(numbers: Mapping[str, float], unit: float) -> dict[str, float]:
    return {name: number / unit for name, number in numbers.items()}


def fact_lines(facts: Mapping[str, str]) -> list[str]:
    """The facts that a table was measured on, as a list."""
    return [f"- {name}: {fact}" for name, fact in facts.items()]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
