"""The look of the report's figures: themes, panels, curves named at their end, stacks. Knows no metric."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hacpo_mega.report.run import Series

# The page's colour for each part of a figure that is not data; the values are those of a PNG, on white paper.
PAPER, INK, FAINT, GRID = "#ffffff", "#22262c", "#6a717c", "#e4e7eb"
PAGE_COLOURS = {PAPER: "var(--paper)", INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)"}


@contextmanager
def dressed() -> Iterator[None]:
    """Figures drawn inside look like the report's."""
    settings = {
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "text.color": INK,
        "axes.labelcolor": FAINT,
        "axes.titlecolor": INK,
        "axes.edgecolor": GRID,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.labelsize": 8.5,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "svg.fonttype": "path",
        "svg.hashsalt": "hacpo_mega",
    }
    with matplotlib.rc_context(settings):
        yield


def to_png(figure: Figure) -> bytes:
    """The figure on white paper, for slides and mails."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160, metadata={"Software": None})
    figure.set_layout_engine("none")  # it is laid out now; doing it again takes longer than drawing
    return file.getvalue()


def to_inline_svg(figure: Figure, stem: str) -> str:
    """The figure as an element of the page, in the page's colours, light or dark; letters are outlines.

    Ids get the stem in front, since several figures share one page. Coordinates keep two decimals of a point.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{stem}-", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    for colour, variable in PAGE_COLOURS.items():
        svg = svg.replace(colour, variable)
    return svg


def panels(num: int, columns: int, height: float, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """A page-wide figure with `num` axes on a grid; the rest of the last row stays empty."""
    columns = min(num, columns)
    rows = math.ceil(num / columns)
    figure = Figure(figsize=(8.6, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=share_y)
    axes = list(grid.flat)
    for spare in axes[num:]:
        spare.set_visible(False)
    for axis in axes[max(0, num - columns) : num]:
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=8 if columns == 1 else 5))
    return figure, axes[:num]


def line(axis: Axes, series: Series, colour: str, **style: float) -> None:
    """A curve; one lonely point would be invisible as a line, so few points get markers."""
    marker = "o" if len(series.steps) <= 12 else None
    axis.plot(series.steps, series.values, color=colour, marker=marker, markersize=4, **style)


def band(
    axis: Axes, x: Sequence[float], mean: Sequence[float], sd: Sequence[float], colour: str, dashes: str | tuple
) -> Line2D:
    """A curve with one `sd` of shade to both sides; returns its line, for a legend."""
    low, high = [m - s for m, s in zip(mean, sd)], [m + s for m, s in zip(mean, sd)]
    axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    (drawn,) = axis.plot(x, mean, color=colour, linestyle=dashes, marker="o", markersize=2.5, linewidth=1.6)
    return drawn


def label_ends(axis: Axes, ends: list[tuple[Series, str, str]]) -> None:
    """Names curves at their last point, (series, name, colour) each, moved apart where they would overlap."""
    points = [(s.values[-1], s.steps[-1], name, c) for s, name, c in ends if s and math.isfinite(s.values[-1])]
    points.sort(key=lambda point: point[0])
    low, high = axis.get_ylim()
    last = max((point[1] for point in points), default=0)
    inches = axis.figure.get_figheight() * 0.8 / max(1, axis.get_subplotspec().get_gridspec().nrows)
    gap = (high - low) * 0.155 / max(inches, 0.5)
    place = -math.inf
    for value, _, name, colour in points:
        place = max(value, place + gap)
        axis.annotate(
            name,
            (last, place),
            xytext=(7, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.5,
            fontweight="bold",
            annotation_clip=False,
        )


def smooth(series: Series) -> Series:
    """The mean over a window of steps around each point: a tenth of the run, at least 3 and at most 25 steps."""
    half = max(1, min(12, len(series.values) // 20))
    windows = (series.values[max(0, i - half) : i + half + 1] for i in range(len(series.values)))
    finite = ([value for value in window if math.isfinite(value)] for window in windows)
    return Series(series.steps, tuple(fmean(values) if values else math.nan for values in finite))


def stack(axis: Axes, steps: Sequence[int], layers: Sequence[Sequence[float]], colours: list[str]) -> None:
    """Layers on top of each other, constant over each step: one shape per layer, however many steps there are."""
    edges = [steps[0] - 0.5, *steps, steps[-1] + 0.5]
    low = [0.0] * len(edges)
    for values, colour in zip(layers, colours):
        high = [base + value for base, value in zip(low, [values[0], *values, values[-1]])]
        axis.fill_between(edges, low, high, step="mid", color=colour, linewidth=0)
        low = high
    axis.margins(x=0.01)


def legend(figure: Figure, names: list[str], colours: list[str]) -> None:
    """One legend above all panels."""
    patches = [Patch(color=colour) for colour in colours]
    figure.legend(
        patches, names, loc="outside upper left", ncols=len(names), frameon=False, fontsize=8.5, handlelength=1
    )


def line_legend(figure: Figure, names: Sequence[str], lines: Sequence[Line2D]) -> None:
    """One legend below all panels, for more curves than their ends have room to name."""
    figure.legend(lines, names, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
