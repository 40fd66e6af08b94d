"""The style of the report's figures: themes, panels, curves named at their end, stacks. Knows no metric."""

import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hacpo_mega.report.run import Series

MOST_BARS = 600  # of a figure that is 619 points wide
LEAST_BAR = 0.08  # of a strip's height, so that a single answer is visible
LETTER_INCHES = 0.072  # width of a letter of a legend
LARGE_INCHES, TICKS_INCHES = 0.08, 0.5  # widths of a letter of a title or at a curve's end; of tick labels
COUNTS_HEIGHT = 0.22  # height of the strips of counts, as a share of the height of the points above them

# Colours of everything that is not data: in a PNG, on white paper, and as the page's variables.
PAPER, INK, FAINT, GRID = "#ffffff", "#22262c", "#6a717c", "#e4e7eb"
PAGE_COLOURS = {PAPER: "var(--paper)", INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)"}


@contextmanager
def report_style() -> Iterator[None]:
    """Figures drawn inside have the style of the report."""
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

    Ids begin with the stem, since several figures share one page. Coordinates keep two decimals of a point.
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


def panels(
    num: int, columns: int, height: float, share_y: bool = True, steps: tuple[int, int] | None = None
) -> tuple[Figure, list[Axes]]:
    """A page-wide figure with `num` axes over the first to the last of the `steps`; a short last row is stretched."""
    columns = min(num, columns)
    rows, last = math.ceil(num / columns), num % columns or columns
    figure = Figure(figsize=(8.6, height * rows), layout="constrained")
    if rows > 1:
        figure.get_layout_engine().set(hspace=0.06)  # between a row's steps and the titles below
    grid = figure.add_gridspec(rows, math.lcm(columns, last))
    axes: list[Axes] = []
    for index in range(num):
        row, column = divmod(index, columns)
        width = grid.ncols // (last if row == rows - 1 else columns)
        shared = {"sharex": axes[0], "sharey": axes[0] if share_y else None} if axes else {}
        axes.append(figure.add_subplot(grid[row, column * width : (column + 1) * width], **shared))
    for index, axis in enumerate(axes):
        if index // columns == rows - 1:
            axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=8 if columns == 1 else 5))
    if steps is not None:
        axes[0].set_xlim(steps[0] - 0.5, steps[1] + 0.5)
    return figure, axes


def line(axis: Axes, series: Series, colour: str, **style: float) -> None:
    """A curve over consecutive steps, broken where a step has no number.

    A point without a neighbour would be invisible as a line, so it is marked; where points are few, all are.
    """
    known = [(step, value) for step, value in zip(series.steps, series.values) if math.isfinite(value)]
    if not known:
        return
    pieces = _consecutive(known)
    broken = [point for piece in pieces for point in (*piece, (piece[-1][0] + 0.5, math.nan))][:-1]
    axis.plot(*zip(*broken), color=colour, **style)
    marked = known if len(known) <= 12 else [piece[0] for piece in pieces if len(piece) == 1]
    if marked:
        axis.plot(*zip(*marked), color=colour, linestyle="none", marker="o", markersize=4, **style)


def _consecutive(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The (step, value) points, split into pieces of consecutive steps."""
    pieces: list[list[tuple[int, float]]] = []
    for point in points:
        if not pieces or point[0] != pieces[-1][-1][0] + 1:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def dots(
    axis: Axes, series: Series, intervals: Sequence[tuple[float, float] | None], colour: str, offset: float
) -> None:
    """Points without a line, since nothing was measured between them, each with its interval where it has one.

    offset   in steps, by which the points are moved to the right
    """
    xs = [step + offset for step in series.steps]
    axis.plot(xs, series.values, color=colour, linestyle="none", marker="o", markersize=5)
    bars = [(x, *interval) for x, interval in zip(xs, intervals) if interval is not None]
    if bars:
        axis.vlines(*zip(*bars), color=colour, alpha=0.55, linewidth=1.4)


def as_number(value: float, _place: int | None = None) -> str:
    """A tick of an axis whose numbers may be tiny, with its own power of ten: a common one would overlap the title."""
    return f"{value:g}" if value == 0.0 or abs(value) >= 1e-3 else f"{value:.1e}".replace("e-0", "e-")


def as_share(axis: Axes, room: float = 0.0) -> None:
    """The axis from 0 to 100 %."""
    axis.set_ylim(-room, 1 + room)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _inches(axis: Axes) -> float:
    place = axis.get_subplotspec()
    return axis.figure.get_figwidth() * len(place.colspan) / place.get_gridspec().ncols


def entitle(axis: Axes, text: str, **style: str) -> None:
    """A title on as many lines as it needs above its panel: neighbours would write over each other."""
    letters = int((_inches(axis) - TICKS_INCHES) / LARGE_INCHES)
    axis.set_title("\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, letters)), **style)


def shortened(name: str, most: int) -> str:
    """A name of at most so many letters: of a longer one its two ends."""
    half = most // 2 - 1
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def label_ends(axis: Axes, ends: list[tuple[Series, str, str]]) -> None:
    """Names curves at their last point, (series, name, colour) each, moved apart where they would overlap."""
    points = [(s.values[-1], name, colour) for s, name, colour in ends if s and math.isfinite(s.values[-1])]
    points.sort(key=lambda point: point[0])
    column = axis.figure.get_figwidth() / axis.get_subplotspec().get_gridspec().ncols  # holds labels of two rows
    most = int(min(0.4 * min(map(_inches, axis.figure.axes)), column - TICKS_INCHES) / LARGE_INCHES)
    low, high = axis.get_ylim()
    last = axis.get_xlim()[1]
    inches = axis.figure.get_figheight() * 0.8 / max(1, axis.get_subplotspec().get_gridspec().nrows)
    gap = (high - low) * 0.155 / max(inches, 0.5)
    places: list[float] = []
    for value, *_ in points:
        places.append(max([value, *(place + gap for place in places[-1:])]))
    top = high
    for n in reversed(range(len(places))):  # back below the top, which many names would pass
        places[n] = min(places[n], top)
        top = places[n] - gap
    for place, (_, name, colour) in zip(places, points):
        axis.annotate(
            shortened(name, most),
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
    known = {step: value for step, value in series.by_step.items() if math.isfinite(value)}
    windows = ([known[s] for s in range(step - half, step + half + 1) if s in known] for step in series.steps)
    values = (fmean(window) if step in known else math.nan for step, window in zip(series.steps, windows))
    return Series(series.steps, tuple(values))


def stack(
    axis: Axes, steps: Sequence[int], layers: Sequence[Sequence[float]], colours: list[str], alpha: float = 1.0
) -> None:
    """Layers [layer][step] on top of each other, each one shape: a bar at each of the `steps`, nothing between."""
    low = [0.0] * len(steps)
    for values, colour in zip(layers, colours):
        high = [base + value for base, value in zip(low, values)]
        _bars(axis, steps, low, high, color=colour, alpha=alpha)
        low = high


def counts_below(axes: Sequence[Axes], counts: Sequence[Sequence[tuple[Mapping[int, float], str]]]) -> None:
    """Draws the number of answers behind the points of panels with common limits: strips of bars below the points.

    `counts` has, for each panel, a strip each as (answers by step, colour). The largest number of all panels fills its
    strip.
    """
    most = max((n for panel in counts for by_step, _ in panel for n in by_step.values()), default=0)
    if not most:
        return
    low, high = axes[0].get_ylim()
    ticks = [tick for tick in axes[0].get_yticks() if low <= tick <= high]
    height = COUNTS_HEIGHT * (high - low)
    axes[0].set_ylim(low - height, high)
    axes[0].set_yticks(ticks)
    for axis, panel in zip(axes, counts):
        for strip, (by_step, colour) in enumerate(panel):
            bottom, full = low - height + strip * height / len(panel), 0.8 * height / len(panel)
            steps = [step for step, n in by_step.items() if n]
            tops = [bottom + full * max(LEAST_BAR, by_step[step] / most) for step in steps]
            _bars(axis, steps, [bottom] * len(steps), tops, color=colour, alpha=0.45)


def range_text(numbers: Sequence[float]) -> str:
    """The range of some counts as text: "8" or "8 to 1,024"."""
    low, high = round(min(numbers)), round(max(numbers))
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _bars(axis: Axes, steps: Sequence[int], low: Sequence[float], high: Sequence[float], **style: str | float) -> None:
    """A bar per step that is as wide as a step; bars of consecutive steps make one outline.

    More than MOST_BARS steps share bars, each the mean of a block of steps: a page of 20,000 would have 57 MB.
    """
    block_size = math.ceil((steps[-1] - steps[0] + 1) / MOST_BARS) if steps else 1
    edges: list[tuple[float, float, float]] = []
    for _, block in groupby(zip(steps, low, high), key=lambda bar: (bar[0] - steps[0]) // block_size):
        places, bases, tops = zip(*block)
        if edges and edges[-1][0] != places[0] - 0.5:
            edges.append((edges[-1][0], math.nan, math.nan))
        edges += [(place, fmean(bases), fmean(tops)) for place in (places[0] - 0.5, places[-1] + 0.5)]
    if edges:
        axis.fill_between(*zip(*edges), linewidth=0, **style)


def legend(figure: Figure, names: list[str], colours: list[str]) -> None:
    """One legend above all panels, in as many rows as its names need."""
    patches = [Patch(color=colour) for colour in colours]
    widest = max(map(len, names), default=0) * LETTER_INCHES + 0.35
    columns = max(1, min(len(names), int(figure.get_figwidth() / widest)))
    figure.legend(patches, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5, handlelength=1)
