"""The figure of `hacpo-mega bench`, drawn from its bench.json: where the seconds of a step go."""

from pathlib import Path

from matplotlib.figure import Figure

from hacpo_mega.logbook.console import in_step_order
from hacpo_mega.models.files.documents import json_file
from hacpo_mega.report.canvas import legend, report_style, to_png
from hacpo_mega.report.catalogue import phase_colour

WAITING = "#e9ebee"


def draw_throughput(result: Path) -> Path:
    """Writes bench.png beside `result`, a bench.json; returns its path. Time that no phase fills is waiting."""
    schedules = json_file(result)["schedules"]
    bars = [(schedule, agent, found) for schedule in schedules for agent, found in schedule["agents"].items()]
    phases = in_step_order({phase for _, _, found in bars for phase in found["phases_s"]})
    colours = [phase_colour(phase) for phase in phases]
    with report_style():
        figure = Figure(figsize=(8.6, 0.9 + 0.42 * len(bars)), layout="constrained")
        axis = figure.subplots()
        for row, (schedule, _, found) in enumerate(bars):
            axis.barh(row, schedule["wall_s"], color=WAITING, height=0.7)
            start = 0.0
            for phase, colour in zip(phases, colours):
                seconds = found["phases_s"].get(phase, 0.0)
                axis.barh(row, seconds, left=start, color=colour, height=0.7)
                start += seconds
        axis.set_yticks(range(len(bars)), [f"{schedule['name']}, {agent}" for schedule, agent, _ in bars])
        axis.invert_yaxis()
        axis.set_xlabel("seconds of a step")
        legend(figure, [phase.replace("_", " ") for phase in phases], colours)
        path = result.with_suffix(".png")
        path.write_bytes(to_png(figure))
    return path
