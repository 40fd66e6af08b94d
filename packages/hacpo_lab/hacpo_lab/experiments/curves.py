"""The curves of an experiment: accuracy against steps, answers and seconds, one figure per regime and axis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hacpo_lab.experiments.evidence import ALL_AGENTS, MethodEvidence, RegimeEvidence
from hacpo_lab.experiments.table import names_of
from hacpo_mega.report.canvas import panels, report_style, to_inline_svg, to_png
from hacpo_mega.report.catalogue import AGENT_COLOURS
from hacpo_mega.report.plots import Picture

# The second round of the colours is dashed, the third dotted.
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)))


@dataclass(frozen=True)
class XAxis:
    """An x axis of accuracy. `values` gives a method's numbers at its evaluated steps; empty if runs have no counts."""

    stem: str
    label: str
    values: Callable[[MethodEvidence], tuple[float, ...]]


X_AXES = (
    XAxis("steps", "step", lambda found: found.steps),
    XAxis("generated-answers", "answers generated, all agents together", lambda found: found.generated_answers),
    XAxis("trained-answers", "answers trained on, all agents together", lambda found: found.trained_answers),
    XAxis("seconds", "seconds of training", lambda found: found.seconds),
)


def draw_curves(name: str, regime: RegimeEvidence, ablation_of: Mapping[str, str]) -> list[Picture]:
    """A figure per x-axis that any method has numbers for; a panel per agent, and one for the mean of all.

    `ablation_of` has the methods that take another's learning rate: they share a figure of their own with that one.
    """
    pictures = []
    ablations = [method for method in regime.methods if {method} & {*ablation_of, *ablation_of.values()}]
    whole = [method for method in regime.methods if method not in ablation_of]
    with report_style():
        for axis in X_AXES:
            if methods := [method for method in whole if axis.values(regime.methods[method])]:
                pictures.append(_draw(f"{name}-{axis.stem}", name, regime, axis, methods))
        if len(ablations) > 1:
            pictures.append(_draw(f"{name}-ablations", f"{name}, ablations", regime, X_AXES[0], ablations))
    return pictures


def _draw(stem: str, title: str, regime: RegimeEvidence, x_axis: XAxis, methods: list[str]) -> Picture:
    names = names_of(regime)
    figure, axes = panels(len(names), 2, 3.4)
    for agent, axis in zip(names, axes):
        axis.set_title("mean of all agents" if agent == ALL_AGENTS else agent)
        if axis.get_xlabel():  # the lowest of each column
            axis.set_xlabel(x_axis.label)
        lines = []  # one per method, the same in all panels: the legend needs those of one
        for method in methods:
            colour, dashes = _look(regime, method)
            x, curve = x_axis.values(regime.methods[method]), regime.methods[method].curves[agent]
            low, high = ([m + sign * s for m, s in zip(curve.mean, curve.sd)] for sign in (-1, 1))
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            lines += axis.plot(x, curve.mean, color=colour, linestyle=dashes, marker="o", markersize=2.5, linewidth=1.6)
    axes[0].set_ylabel(f"{regime.measure} on held-out prompts")
    figure.legend(lines, methods, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    note = "Mean over seeds; the shade is one standard deviation between seeds to both sides."
    title = f"{title}: {regime.measure} against {x_axis.label}"
    return Picture(stem, title, note, to_png(figure), to_inline_svg(figure, stem))


def _look(regime: RegimeEvidence, method: str) -> tuple[str, str | tuple]:
    """Colour and dashes of a method, the same in every figure, also in those where other methods are absent."""
    number = list(regime.methods).index(method)
    return AGENT_COLOURS[number % len(AGENT_COLOURS)], DASHES[number // len(AGENT_COLOURS) % len(DASHES)]
