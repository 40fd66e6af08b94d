"""The curves of an experiment: accuracy against steps, answers and seconds, one figure per regime and axis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hacpo_mega.experiments.evidence import ALL_AGENTS, MethodEvidence, RegimeEvidence
from hacpo_mega.report.canvas import band, dressed, line_legend, panels, to_inline_svg, to_png
from hacpo_mega.report.plots import AGENT_COLOURS as COLOURS
from hacpo_mega.report.plots import Picture

# The second round of the colours is dashed, the third dotted.
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)))


@dataclass(frozen=True)
class XAxis:
    """What accuracy is drawn against. `values` are at the evaluated steps, empty where the runs did not count it."""

    stem: str
    label: str
    values: Callable[[MethodEvidence], tuple[float, ...]]


X_AXES = (
    XAxis("steps", "step", lambda found: found.steps),
    XAxis("generated-answers", "answers generated, all agents together", lambda found: found.generated_answers),
    XAxis("trained-answers", "answers trained on, all agents together", lambda found: found.trained_answers),
    XAxis("seconds", "seconds of training", lambda found: found.seconds),
)


def draw_curves(name: str, regime: RegimeEvidence) -> list[Picture]:
    """A figure per x-axis that any method has numbers for; a panel per agent, and one for the mean of all."""
    with dressed():
        return [
            _draw(name, regime, axis, curves)
            for axis in X_AXES
            if (curves := {method: found for method, found in regime.methods.items() if axis.values(found)})
        ]


def _draw(name: str, regime: RegimeEvidence, x_axis: XAxis, methods: Mapping[str, MethodEvidence]) -> Picture:
    shown = regime.agents if len(regime.agents) == 1 else (*regime.agents, ALL_AGENTS)
    figure, axes = panels(len(shown), 2, 3.4)
    lines = []
    for agent, axis in zip(shown, axes):
        axis.set_title("mean of all agents" if agent == ALL_AGENTS else agent)
        axis.set_xlabel(x_axis.label)
        curves = {method: found.curves[agent] for method, found in methods.items()}
        lines = [
            band(axis, x_axis.values(methods[method]), curve.mean, curve.sd, *_look(regime, method))
            for method, curve in curves.items()
        ]
    axes[0].set_ylabel("accuracy on held-out prompts")
    line_legend(figure, list(methods), lines)
    stem = f"{name}-{x_axis.stem}"
    note = "Mean over seeds; the shade is one standard deviation between seeds to both sides."
    title = f"{name}: accuracy against {x_axis.label}"
    return Picture(stem, title, note, to_png(figure), to_inline_svg(figure, stem))


def _look(regime: RegimeEvidence, method: str) -> tuple[str, str | tuple]:
    """Colour and dashes of a method, the same in every figure, also in those where other methods are absent."""
    number = list(regime.methods).index(method)
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
