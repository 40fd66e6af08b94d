"""The look of the report's figures: themes, panels, curves named at their end, stacks. Knows no metric."""

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
LEAST_BAR = 0.08  # of a strip: one answer shows, too
LETTER_INCHES = 0.072  # of a legend
LARGE_INCHES, TICKS_INCHES = 0.08, 0.5  # of a letter of a title or at a curve's end; of numbers beside a panel
COUNTS_HEIGHT = 0.22  # of the strip below a panel's points, over theirs

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
    for place in range(num):
        row, column = divmod(place, columns)
        width = grid.ncols // (last if row == rows - 1 else columns)
        shared = {"sharex": axes[0], "sharey": axes[0] if share_y else None} if axes else {}
        axes.append(figure.add_subplot(grid[row, column * width : (column + 1) * width], **shared))
    for place, axis in enumerate(axes):
        if place // columns == rows - 1:
            axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], nbins=8 if columns == 1 else 5))
    if steps is not None:
        axes[0].set_xlim(steps[0] - 0.5, steps[1] + 0.5)
    return figure, axes


def line(axis: Axes, series: Series, colour: str, **style: float) -> None:
    """A curve over steps that follow each other, broken where one has no number.

    A point without a neighbour would be invisible as a line, so it is a dot; few points are dots all.
    """
    known = [(step, value) for step, value in zip(series.steps, series.values) if math.isfinite(value)]
    pieces = neighbours(known)
    broken = [point for piece in pieces for point in (*piece, (piece[-1][0] + 0.5, math.nan))][:-1]
    if not broken:
        return
    axis.plot(*zip(*broken), color=colour, **style)
    dots = known if len(known) <= 12 else [piece[0] for piece in pieces if len(piece) == 1]
    if dots:
        axis.plot(*zip(*dots), color=colour, linestyle="none", marker="o", markersize=4, **style)


def neighbours(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Points by step, in pieces of steps that follow each other."""
    pieces: list[list[tuple[int, float]]] = []
    for point in points:
        if not pieces or point[0] != pieces[-1][-1][0] + 1:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def dots(
    axis: Axes, series: Series, intervals: Sequence[tuple[float, float] | None], colour: str, aside: float = 0.0
) -> None:
    """Points by themselves, each with its interval where it has one: nothing was measured between them.

    aside   steps by which they stand beside their own
    """
    places = [step + aside for step in series.steps]
    axis.plot(places, series.values, color=colour, linestyle="none", marker="o", markersize=5)
    bars = [(place, *interval) for place, interval in zip(places, intervals) if interval is not None]
    if bars:
        axis.vlines(*zip(*bars), color=colour, alpha=0.55, linewidth=1.4)


def as_number(value: float, _place: int | None = None) -> str:
    """A tick of an axis whose numbers may be tiny: with its own power of ten, since one for all hides in a title."""
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
    points = [(s.values[-1], s.steps[-1], name, c) for s, name, c in ends if s and math.isfinite(s.values[-1])]
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
    for place, (_, _, name, colour) in zip(places, points):
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
    known = {step: value for step, value in zip(series.steps, series.values) if math.isfinite(value)}
    windows = ([known[s] for s in range(step - half, step + half + 1) if s in known] for step in series.steps)
    values = (fmean(window) if step in known else math.nan for step, window in zip(series.steps, windows))
    return Series(series.steps, tuple(values))


def stack(
    axis: Axes, steps: Sequence[int], layers: Sequence[Sequence[float]], colours: list[str], alpha: float = 1.0
) -> None:
    """Layers on top of each other: a bar for each of the `steps` (_bars), nothing between; one shape per layer."""
    low = [0.0] * len(steps)
    for values, colour in zip(layers, colours):
        high = [base + value for base, value in zip(low, values)]
        _bars(axis, steps, low, high, color=colour, alpha=alpha)
        low = high


def counts_below(axes: Sequence[Axes], counts: Sequence[Sequence[tuple[Mapping[int, float], str]]]) -> None:
    """Draws the number of answers behind the points of panels with common limits: strips of bars below the points.

    `counts` are, for each panel, answers by step with a colour; a strip each. A bar is full at the most of all panels.
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
        for place, (by_step, colour) in enumerate(panel):
            bottom, full = low - height + place * height / len(panel), 0.8 * height / len(panel)
            known = [(step, n) for step, n in by_step.items() if n]
            top = [bottom + full * max(LEAST_BAR, n / most) for _, n in known]
            _bars(axis, [step for step, _ in known], [bottom] * len(known), top, color=colour, alpha=0.45)


def span_of(numbers: Sequence[float]) -> str:
    """The least and the most of some counts, for people."""
    low, high = round(min(numbers)), round(max(numbers))
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _bars(axis: Axes, steps: Sequence[int], low: Sequence[float], high: Sequence[float], **style: str | float) -> None:
    """A bar per step that is as wide as a step; neighbours make one outline.

    Neighbours of more than MOST_BARS steps share bars, with their mean: a page of 20,000 steps would have 57 MB.
    """
    each = math.ceil((steps[-1] - steps[0] + 1) / MOST_BARS) if steps else 1
    edges: list[tuple[float, float, float]] = []
    for _, block in groupby(zip(steps, low, high), key=lambda bar: (bar[0] - steps[0]) // each):
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
