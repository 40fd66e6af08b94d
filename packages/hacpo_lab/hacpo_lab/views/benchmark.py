"""The watch page's view of `hacpo-mega bench`: bench.json (one work under every schedule), scaling.json (by size)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacpo_lab.throughput.table import BYTES, OF_SIZES, size_tables, step_tables
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
NUMBER_OR_INFINITY = Kind("a number, or Infinity", lambda value: is_number(value) or value == math.inf)
OF_AGENT = {
    **{"phases_s": table_of(NUMBER), "idle_share": NUMBER.or_null, "flops_per_s": table_of(NUMBER)},
    **dict.fromkeys(("trained_answers", "generated_per_s", "trained_per_s"), NUMBER),
    "seconds_per_1000": NUMBER_OR_INFINITY,
}
OF_SIZE = {
    "cpu_s": table_of(NUMBER),
    **dict.fromkeys((*OF_SIZES, "trained_per_core_s", *BYTES), NUMBER),
}


def benchmark(path: Path) -> dict[str, Any]:
    """Seconds of a step by schedule, and by phase of every agent. ValueError, one line, for another file."""
    content = _read(path, "schedules", OF_SCHEDULE)
    schedules = content["schedules"]
    for schedule in schedules:
        for agent, found in schedule["agents"].items():
            if why := wrong_field(found, OF_AGENT, f"{agent}."):
                raise ValueError(f"{path} is no result of `hacpo-mega bench`: {why}")
    bars = [
        {
            "label": f"{schedule['name']}, {agent}",
            "whole": schedule["wall_s"],
            "parts": [
                [phase, found["phases_s"][phase], phase_colour(phase)] for phase in in_step_order(found["phases_s"])
            ],
        }
        for schedule in schedules
        for agent, found in schedule["agents"].items()
    ]
    note = "Seconds of an agent's slowest rank, mean over steps; what no phase fills is waiting."
    return {
        "facts": content["facts"],
        "bars": [{"title": "Seconds of a step", "note": note, "unit": "s", "rows": bars}],
        "tables": [table.of_watch() for table in step_tables(schedules)],
    }


def scaling(path: Path) -> dict[str, Any]:
    """Processor seconds and bytes by size of the job. ValueError, one line, for another file."""
    content = _read(path, "sizes", OF_SIZE)
    return {"facts": content["facts"], "tables": [table.of_watch() for table in size_tables(content["sizes"])]}


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
