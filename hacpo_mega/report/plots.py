"""The curves of a run: what is drawn, one function per figure, nothing when the run has none of its numbers.

One colour per agent on every figure; FIGURES lists them with their titles. How things look is canvas.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from hacpo_mega.logbook.console import in_step_order
from hacpo_mega.report.canvas import dressed, label_ends, legend, line, panels, smooth, stack, to_inline_svg, to_png
from hacpo_mega.report.colours import BAND_COLOURS, agent_colour, phase_colour
from hacpo_mega.report.run import Run, Series, accuracies, measure_of, phase_series
from hacpo_mega.report.timeline import draw_timeline


def draw_accuracy(run: Run) -> Figure | None:
    """Held-out accuracy, or mean reward, with its 95 % interval."""
    curves = {agent: found for agent in run.agents if (found := accuracies(run, agent))}
    if not curves:
        return None
    figure, (axis,) = panels(1, 1, 3.4)
    ends = []
    for agent, found in curves.items():
        series = Series(tuple(point.step for point in found), tuple(point.value for point in found))
        colour = agent_colour(run, agent)
        if all(point.interval is not None for point in found):
            low, high = zip(*(point.interval for point in found))
            axis.fill_between(series.steps, low, high, color=colour, alpha=0.15, linewidth=0)
        line(axis, series, colour)
        ends.append((series, f"{agent} {series.values[-1]:.3f}", colour))
    axis.set_ylabel(f"{measure_of(point for found in curves.values() for point in found)} on held-out prompts")
    label_ends(axis, ends)
    return figure


def draw_reward(run: Run) -> Figure | None:
    """Mean reward of the answers that an agent gave in a step, raw and smoothed."""
    curves = {agent: found for agent in run.agents if (found := run.series(f"agent/{agent}/reward_mean"))}
    if not curves:
        return None
    figure, (axis,) = panels(1, 1, 3.0)
    ends = []
    for agent, series in curves.items():
        colour = agent_colour(run, agent)
        trend = smooth(series)
        axis.plot(series.steps, series.values, color=colour, alpha=0.3, linewidth=1)
        line(axis, trend, colour)
        ends.append((trend, agent, colour))
    axis.set_ylabel("mean reward of own answers")
    label_ends(axis, ends)
    return figure


def _draw_by_learner(run: Run, name_of: Callable[[str, str], str], label: str, level: float | None) -> Figure | None:
    """A panel per learner, a curve per source in the source's colour."""
    curves = {pair: found for pair in run.pairs if (found := run.series(name_of(*pair)))}
    learners = [agent for agent in run.agents if any(learner == agent for learner, _ in curves)]
    if not learners:
        return None
    figure, axes = panels(len(learners), 3 if len(learners) != 4 else 2, 2.7)
    for learner, axis in zip(learners, axes):
        axis.set_title(f"{learner} learns from")
        if level is not None:
            axis.axhline(level, color=matplotlib.rcParams["axes.labelcolor"], linewidth=0.8, linestyle=(0, (4, 3)))
        for (who, source), series in curves.items():
            if who == learner:
                line(axis, series, agent_colour(run, source), alpha=0.95)
    for learner, axis in zip(learners, axes):  # when the shared y limits are known
        ends = [(s, source, agent_colour(run, source)) for (who, source), s in curves.items() if who == learner]
        label_ends(axis, ends)
    axes[0].set_ylabel(label)
    return figure


def draw_omega(run: Run) -> Figure | None:
    """Capability of the learner over capability of the source."""
    return _draw_by_learner(run, lambda k, j: f"omega/{k}/{j}", "omega (learner / source)", 1.0)


def draw_ratio(run: Run) -> Figure | None:
    """Mean sequence ratio of cross answers, with the band of the first update behind it."""
    figure = _draw_by_learner(run, lambda k, j: f"agent/{k}/from/{j}/ratio_mean", "mean cross ratio", None)
    delta = run.setting("algorithm", "delta")
    if figure is not None and isinstance(delta, float):
        for axis in figure.axes:
            axis.axhspan(1 - delta, 1.0, color=BAND_COLOURS["inside"], alpha=0.12, linewidth=0)
    return figure


def draw_ess(run: Run) -> Figure | None:
    """Effective sample size of the cross weights, as a share of the answers."""
    figure = _draw_by_learner(run, lambda k, j: f"agent/{k}/from/{j}/weight_ess", "effective share", None)
    for axis in figure.axes if figure else ():
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def draw_cosine(run: Run) -> Figure | None:
    """Cosine between the gradient of own answers and that of a source's, over the steps that were diagnosed."""
    return _draw_by_learner(run, lambda k, j: f"agent/{k}/from/{j}/grad_cosine", "cosine with own gradient", 0.0)


def draw_signs(run: Run) -> Figure | None:
    """What share of the pull of cross answers makes answers likelier; the rest makes them less likely."""
    figure = _draw_by_learner(run, lambda k, j: f"agent/{k}/from/{j}/positive_share", "share of the pull", 0.5)
    for axis in figure.axes if figure else ():
        axis.set_ylim(0, 1)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def draw_bands(run: Run) -> Figure | None:
    """Where cross answers lie: below, inside or above the band, stacked to one."""
    shares = {(k, j): [run.series(f"agent/{k}/from/{j}/{side}") for side in BAND_COLOURS] for k, j in run.pairs}
    shares = {pair: sides for pair, sides in shares.items() if all(sides) and len({s.steps for s in sides}) == 1}
    if not shares:
        return None
    figure, axes = panels(len(shares), 4 if len(shares) > 6 else 3 if len(shares) > 2 else 2, 2.3)
    for ((learner, source), sides), axis in zip(shares.items(), axes):
        axis.set_title(f"{learner} from {source}")
        stack(axis, sides[0].steps, [side.values for side in sides], list(BAND_COLOURS.values()))
        axis.set_ylim(0, 1)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylabel("share of cross answers")
    legend(figure, list(BAND_COLOURS), list(BAND_COLOURS.values()))
    return figure


def draw_phases(run: Run) -> Figure | None:
    """Seconds per step, stacked by phase, a panel per agent."""
    tables = {agent: phases for agent in run.agents if (phases := phase_series(run, agent))}
    if not tables:
        return None
    order = in_step_order({phase for phases in tables.values() for phase in phases})
    colours = [phase_colour(phase) for phase in order]
    figure, axes = panels(len(tables), 2, 2.6)
    for (agent, phases), axis in zip(tables.items(), axes):
        steps = sorted({step for by_step in phases.values() for step in by_step})
        axis.set_title(agent, color=agent_colour(run, agent), fontweight="bold")
        stack(axis, steps, [[phases.get(phase, {}).get(s, 0.0) for s in steps] for phase in order], colours)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("seconds per step")
    legend(figure, [phase.replace("_", " ") for phase in order], colours)
    return figure


HEALTH = {
    "grad_norm": "gradient norm before clipping",
    "answer_tokens_mean": "tokens per answer",
    "truncated": "share of answers cut at the limit",
    "self/clipped": "share of own answers clipped",
    "self/positive_share": "share of the pull of own answers that makes likelier",
    "cross_coefficient_share": "share of others' answers in the squared loss coefficients",
    "kl": "KL to the initial policy (nats)",
    "lr": "learning rate",
}


def draw_health(run: Run) -> Figure | None:
    """What to look at first when a run goes wrong."""
    charts = {name: [(a, s) for a in run.agents if (s := run.series(f"agent/{a}/{name}"))] for name in HEALTH}
    charts = {name: curves for name, curves in charts.items() if curves}
    if not charts:
        return None
    figure, axes = panels(len(charts), 2, 2.2, share_y=False)
    for (name, curves), axis in zip(charts.items(), axes):
        axis.set_title(HEALTH[name])
        for agent, series in curves:
            line(axis, series, agent_colour(run, agent), alpha=0.9)
        if name != "answer_tokens_mean":
            axis.set_ylim(bottom=0)  # else a constant is drawn as noise
        label_ends(axis, [(series, agent, agent_colour(run, agent)) for agent, series in curves])
    return figure


@dataclass(frozen=True)
class Picture:
    """A figure of the report. `stem` names its PNG file, `note` says how to read it; the SVG is for the page."""

    stem: str
    title: str
    note: str
    png: bytes
    svg: str


# The one without a name is called as what was measured on held-out prompts.
FIGURES: tuple[tuple[str, str, Callable[[Run], Figure | None], str], ...] = (
    ("", "", draw_accuracy, "Greedy answers to held-out prompts; the shade is the 95 % interval."),
    ("reward", "Reward while training", draw_reward, "Sampled answers of each step; thin as measured, thick smoothed."),
    ("omega", "Capability ratio", draw_omega, "Above 1 the learner did better than the source in the last steps."),
    ("bands", "Cross answers and the band", draw_bands, "Only answers inside the band give a cross gradient."),
    ("ratio", "Cross ratio", draw_ratio, "Learner over source per answer; the shade is the band of the first update."),
    ("ess", "Effective sample size", draw_ess, "Of the weights of cross answers: 100 % when all weigh the same."),
    (
        "signs",
        "Sign of cross answers",
        draw_signs,
        "How much of their pull on log-probs has A above 0.",
    ),
    (
        "cosine",
        "Own and cross gradient",
        draw_cosine,
        "Over the whole model, each before an update; below 0 a source works against the learner's own answers.",
    ),
    (
        "phases",
        "Where the time goes",
        draw_phases,
        "Of each agent's slowest rank; exchange includes waiting for others.",
    ),
    ("timeline", "One step of all agents", draw_timeline, "Bars are phases; pale inside one, the rank waits."),
    ("health", "Health", draw_health, "What to look at first when a run goes wrong."),
)


def draw_pictures(run: Run) -> list[Picture]:
    """Every figure that this run has numbers for."""
    pictures = []
    measure = measure_of(point for agent in run.agents for point in accuracies(run, agent))
    with dressed():
        for stem, title, draw, note in FIGURES:
            if (figure := draw(run)) is not None:
                name, shown = stem or measure.replace(" ", "_"), title or measure.capitalize()
                pictures.append(Picture(name, shown, note, to_png(figure), to_inline_svg(figure, name)))
    return pictures
