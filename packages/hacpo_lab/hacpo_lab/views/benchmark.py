"""The watch page's view of `hacpo-mega bench`: bench.json (one work under every schedule), scaling.json (by size)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hacpo_mega.logbook.console import in_step_order
from hacpo_mega.logbook.files.json_lines import NUMBER, TABLE, TEXT, Kind, is_number, list_of, table_of, wrong_field
from hacpo_mega.models.files.documents import json_file
from hacpo_mega.report.catalogue import phase_colour
from hacpo_mega.watch.studies import StudyKind

TIMES, SIZES = "bench.json", "scaling.json"
OF_SCHEDULE = {
    **{"name": TEXT, "by_round_s": list_of(NUMBER), "together": NUMBER.or_null, "agents": table_of(TABLE)},
    **dict.fromkeys(("wall_s", "p50_s", "p95_s"), NUMBER),
}
# Infinity stands for an agent that has trained on nothing.
WITHOUT_END = Kind("a number, or Infinity", lambda value: is_number(value) or value == math.inf)
OF_AGENT = {
    **{"phases_s": table_of(NUMBER), "idle_share": NUMBER.or_null, "flops_per_s": table_of(NUMBER)},
    **dict.fromkeys(("trained_answers", "generated_per_s", "trained_per_s"), NUMBER),
    "seconds_per_1000": WITHOUT_END,
}
OF_SIZE = {
    "cpu_s": table_of(NUMBER),
    **dict.fromkeys(("agents", "lanes", "ranks", "trained_per_core_s"), NUMBER),
    **dict.fromkeys(("lane_bytes", "capability_bytes", "published_bytes", "metrics_bytes"), NUMBER),
}
OF_SIZES = ("agents", "lanes", "ranks")


def benchmark(path: Path) -> dict[str, Any]:
    """Seconds of a step by schedule, and by phase of every agent. ValueError, one line, for another file."""
    content = _read(path, "schedules", OF_SCHEDULE)
    schedules = content["schedules"]
    for schedule in schedules:
        for agent, found in schedule["agents"].items():
            if why := wrong_field(found, OF_AGENT, f"{agent}."):
                raise ValueError(f"{path} is no result of `hacpo-mega bench`: {why}")
    agents = [(schedule, agent, found) for schedule in schedules for agent, found in schedule["agents"].items()]
    bars = [
        {
            "label": f"{schedule['name']}, {agent}",
            "whole": schedule["wall_s"],
            "parts": [
                [phase, found["phases_s"][phase], phase_colour(phase)] for phase in in_step_order(found["phases_s"])
            ],
        }
        for schedule, agent, found in agents
    ]
    note = "Seconds of an agent's slowest rank, mean over steps; what no phase fills is waiting."
    return {
        "facts": content["facts"],
        "bars": [{"title": "Seconds of a step", "note": note, "unit": "s", "rows": bars}],
        "tables": [_steps(schedules), _agents(agents)],
    }


def scaling(path: Path) -> dict[str, Any]:
    """Processor seconds and bytes by size of the job. ValueError, one line, for another file."""
    content = _read(path, "sizes", OF_SIZE)
    sizes = content["sizes"]
    phases = in_step_order({phase for size in sizes for phase in size["cpu_s"]})
    where = [[f"{size[key]:.0f}" for key in OF_SIZES] for size in sizes]
    spent = [
        [*place, f"{size['trained_per_core_s']:.1f}", *(f"{size['cpu_s'].get(phase, 0.0):.4f}" for phase in phases)]
        for place, size in zip(where, sizes)
    ]
    kinds = ("lane_bytes", "capability_bytes", "published_bytes", "metrics_bytes")
    sent = [[*place, *(f"{size[kind]:,.0f}" for kind in kinds)] for place, size in zip(where, sizes)]
    names = ("answers, a leader", "capability, a leader", "published, a rank", "metrics, all")
    head = [*OF_SIZES, "trained answers a core-second", *(f"{phase} s" for phase in phases)]
    return {
        "facts": content["facts"],
        "tables": [
            {"title": "Processor seconds of a rank of the first agent", "head": head, "rows": spent, "notes": []},
            {"title": "Bytes sent in a step", "head": [*OF_SIZES, *names], "rows": sent, "notes": []},
        ],
    }


BENCH = StudyKind(lambda _, names: TIMES in names, lambda folder, _: benchmark(folder / TIMES))
SCALING = StudyKind(lambda _, names: SIZES in names, lambda folder, _: scaling(folder / SIZES))


def _read(path: Path, key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    content = json_file(path)
    why = None if isinstance(content, dict) else "no table"
    why = why or wrong_field(content, {"facts": table_of(TEXT), key: list_of(TABLE)})
    why = why or next(filter(None, (wrong_field(row, fields) for row in content[key])), None)
    if why:
        raise ValueError(f"{path} is no result of `hacpo-mega bench`: {why}")
    return content


def _steps(schedules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = schedules[0] if schedules else {"name": "the first", "wall_s": 0.0}
    rows = [
        [
            *(found["name"], *(f"{found[key]:.2f}" for key in ("wall_s", "p50_s", "p95_s"))),
            " ".join(f"{seconds:.2f}" for seconds in found["by_round_s"]),
            f"{first['wall_s'] / found['wall_s']:.2f}" if found["wall_s"] else "–",
            "" if found["together"] is None else f"{found['together']:.2f}",
        ]
        for found in schedules
    ]
    head = ("schedule", "s/step", "p50", "p95", "by round", f"{first['name']} needs", "at once, not in turns")
    return {"title": "Schedules", "head": head, "rows": rows, "notes": []}


def _agents(agents: Sequence[tuple[Mapping[str, Any], str, Mapping[str, Any]]]) -> dict[str, Any]:
    rows = [
        [
            *(schedule["name"], agent, f"{found['trained_answers']:.0f}", f"{found['seconds_per_1000']:.2f}"),
            *(f"{found['generated_per_s']:.0f}", f"{found['trained_per_s']:.0f}"),
            "" if found["idle_share"] is None else f"{found['idle_share']:.0%}",
            ", ".join(f"{phase} {rate / 1e9:.2f}" for phase, rate in found["flops_per_s"].items()),
        ]
        for schedule, agent, found in agents
    ]
    head = ("schedule", "agent", "trained answers", "s per 1,000", "generated tok/s", "trained tok/s", "idle")
    return {"title": "Agents", "head": (*head, "model GFLOP/s"), "rows": rows, "notes": []}
