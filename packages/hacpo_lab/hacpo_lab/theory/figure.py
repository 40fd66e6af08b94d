"""The figure of `hacpo-mega theory`, drawn from its theory.json: bias by window, and gradients as policies part."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hacpo_mega.models.files.documents import json_file
from hacpo_mega.report.canvas import FAINT, INK, dressed, to_png

BLUE, ORANGE, GREEN = "#3b6fb6", "#d98032", "#1f9d6b"


def draw_theory(result: Path) -> Path:
    """Writes theory.png beside `result`, a theory.json; returns its path. Bars are two standard errors."""
    theory = json_file(result)
    with dressed():
        figure = Figure(figsize=(8.6, 6.4), layout="constrained")
        (bias, ratio), (cosine, opposed) = figure.subplots(2, 2)
        _draw_bias(bias, theory["omegas"], theory["world"]["names"][-1])
        _draw_ratio(ratio, theory["ratios"])
        for axis, quantity in ((cosine, "cosine"), (opposed, "sampled_opposed")):
            _draw_gradients(axis, theory["gradients"], quantity)
        cosine.set_title("Cosine of cross and own gradient, exact")
        opposed.set_title("Prompts whose sampled cross gradient opposes the own")
        picture = to_png(figure)
    path = result.with_suffix(".png")
    path.write_bytes(picture)
    return path


def _draw_bias(axis: Axes, rows: list[dict[str, Any]], agent: str) -> None:
    paper = [row for row in rows if row["preset"] == "paper" and row["window"]]
    own = [row for row in paper if row["learner"] == row["source"] == agent]
    for agents, colour in (("stationary", BLUE), ("improving", ORANGE)):
        for current, style in ((True, "-"), (False, "--")):
            chosen = [row for row in own if row["agents"] == agents and row["includes_current"] == current]
            label = f"{agents}, {'with' if current else 'without'} current"
            _curve(axis, chosen, "window", "numerator", colour, style, label)
    axis.axhline(0, color=INK, linewidth=0.8)
    _window_axis(axis, rows)
    axis.set(title=f"E[R - mu], own answers of the {agent} agent")
    axis.legend(frameon=False, fontsize=7.5)


def _draw_ratio(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for num_prompts, colour in zip(sorted({row["num_prompts"] for row in rows}), (BLUE, ORANGE, GREEN)):
        chosen = [row for row in rows if row["num_prompts"] == num_prompts]
        windows = [row["window"] for row in chosen]
        axis.plot(windows, [row["predicted"] for row in chosen], color=colour, linewidth=1, linestyle=":")
        _curve(axis, chosen, "window", "authors", colour, "", f"{num_prompts} prompts")
    axis.set(yscale="log", ylim=(1e-5, 1), title="E[omega_hat] / omega - 1, bounds 0.1 to 10")
    _window_axis(axis, rows)
    axis.legend(frameon=False, fontsize=7.5, title="dotted: second order", title_fontsize=7.5)


def _draw_gradients(axis: Axes, rows: list[dict[str, Any]], quantity: str) -> None:
    looks = {"band, alpha = 1": BLUE, "s <= 1 only, alpha = 1": ORANGE, "no clip, alpha = 0": GREEN}
    for objective, colour in looks.items():
        for source, style in (("stronger", "-"), ("weaker", "--")):
            chosen = [
                row
                for row in rows
                if (row["objective"], row["source"], row["cross_baseline"]) == (objective, source, "source")
            ]
            _curve(axis, chosen, "distance", quantity, colour, style, f"{objective}, {source} source")
    axis.set_xlabel("distance of the policies, logits", color=FAINT)
    axis.set_ylim(bottom=0)
    if quantity == "cosine":
        axis.legend(frameon=False, fontsize=7.5)


def _window_axis(axis: Axes, rows: list[dict[str, Any]]) -> None:
    windows = sorted({row["window"] for row in rows} - {0})
    axis.set(xscale="log", xlabel="K, steps")
    axis.set_xticks(windows, [str(window) for window in windows])
    axis.minorticks_off()


def _curve(axis: Axes, rows: list[dict[str, Any]], x: str, y: str, colour: str, style: str, label: str) -> None:
    axis.errorbar(
        [row[x] for row in rows],
        [row[y]["mean"] for row in rows],
        yerr=[2 * row[y]["error"] for row in rows],
        color=colour,
        linestyle=style,
        marker="o",
        markersize=3,
        linewidth=1.4,
        elinewidth=0.8,
        label=label,
    )
