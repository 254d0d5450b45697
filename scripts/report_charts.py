"""The charts of scripts/report.py: one description of a chart, drawn as SVG for the page and by matplotlib as PNG.

Colours are CSS classes (s0, s1, ... for the runs), so the page decides them for its light and its dark mode; runs differ
in their dashes, too. A chart carries its numbers as text for those who do not see it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

Points = Sequence[tuple[float, float]]
COLOURS = ("#0b5cad", "#c2410c", "#00795c", "#8b3fa0", "#8a6100", "#0e7490")  # the page's, in its light mode
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4")
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 30  # margins around the plot, in units of the view box
MOST = 400  # buckets of steps that are drawn; each keeps its lowest and its highest value


@dataclass
class Line:
    """One run's curve. smooth: drawn over the raw points, which turn faint. dots: mark each point."""

    name: str
    colour: int
    points: Points
    smooth: Points = ()
    dots: bool = False


@dataclass
class Chart:
    """Curves over steps. marks: (step, colour, what happened there). steps: the first and the last one of the axis."""

    title: str
    unit: str
    lines: list[Line]
    marks: list[tuple[float, int, str]] = field(default_factory=list)
    note: str = ""
    steps: tuple[float, float] | None = None  # None: those of the lines

    @property
    def key(self) -> str:
        """The title as the name of a file or an HTML id."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower()).strip("-")

    @property
    def summary(self) -> str:
        """The chart in words, with its numbers."""
        told = []
        for line in self.lines:
            values = [y for _, y in line.points]
            low, high = (min(line.points, key=lambda p: p[1]), max(line.points, key=lambda p: p[1]))
            told.append(
                f"{line.name}: {len(values)} points, first {number(values[0])} at step {line.points[0][0]}, last "
                f"{number(values[-1])} at step {line.points[-1][0]}, lowest {number(low[1])} at step {low[0]}, highest "
                f"{number(high[1])} at step {high[0]}."
            )
        told += [f"{what} at step {step}." for step, _, what in self.marks]
        return " ".join(
            [f"{self.title} ({self.unit}) over steps." if self.unit else f"{self.title} over steps.", *told]
        )


def number(value: float) -> str:
    """A number as people read it: 12.4k, 0.0312, 3e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if sign == 'k' else limit):.3g}{sign}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def smoothed(points: Points) -> Points:
    """Each point's mean with its neighbours, by a Gaussian of a fiftieth of the points: no lag behind the values."""
    width = max(1.0, len(points) / 50)
    reach = np.arange(-math.ceil(3 * width), math.ceil(3 * width) + 1)
    weights = np.exp(-0.5 * (reach / width) ** 2)
    steps, values = zip(*points, strict=True)
    sums, counts = (np.convolve(row, weights)[reach[-1] : -reach[-1]] for row in (values, np.ones(len(values))))
    return list(zip(steps, (sums / counts).tolist(), strict=True))


def thinned(points: Points) -> Points:
    """At most 2 x MOST of the points: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= 2 * MOST:
        return points
    size, kept = math.ceil(len(points) / MOST), []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) between low and high."""
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def limits(chart: Chart) -> tuple[float, float, float, float]:
    """(x from, x to, y from, y to). Lone values far above all others are cut off at the top; a high start is not."""
    xs = chart.steps or [x for line in chart.lines for x, _ in line.points]
    ys = sorted(y for line in chart.lines for _, y in line.points)
    low, high, typical = ys[0], ys[-1], ys[math.floor(0.98 * (len(ys) - 1))]
    if len(ys) > 40 and high - low > 3 * (typical - low) > 0:
        starts = [y for line in chart.lines for _, y in [line.points[0], *line.smooth]]
        high = max(low + 1.3 * (typical - low), *starts)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    bottom = low - room if low < 0 or low - room > 0.3 * high else 0.0  # 0 where it is near
    return min(xs), max(max(xs), min(xs) + 1), bottom, high + room


def svg(chart: Chart, width: int, height: int, ident: str) -> str:
    """The chart as an SVG element of the given view box; `ident` is unique in the page."""
    x0, x1, y0, y1 = limits(chart)
    plot_width, plot_height = width - LEFT - RIGHT, height - TOP - BOTTOM

    def x(step: float) -> float:
        return LEFT + (step - x0) / (x1 - x0) * plot_width

    def y(value: float) -> float:
        return TOP + (1 - (min(max(value, y0), y1) - y0) / (y1 - y0)) * plot_height

    def path(points: Points, classes: str, colour: int) -> str:
        drawn = thinned(points)
        if len(drawn) == 1:
            return f'<circle class="{classes} dot" cx="{x(drawn[0][0]):.1f}" cy="{y(drawn[0][1]):.1f}" r="3.5"/>'
        places = " L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in drawn)
        dash = f' stroke-dasharray="{DASHES[colour]}"' if DASHES[colour] and "raw" not in classes else ""
        return f'<path class="{classes}" d="M{places}"{dash}/>'

    parts = []
    for value in ticks(y0, y1, max(3, plot_height // 36)):
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f} H{width - RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    for step in (step for step in ticks(x0, x1, max(3, plot_width // 70)) if step == int(step) and x(step) > LEFT + 20):
        parts.append(
            f'<text class="tick" x="{x(step):.1f}" y="{height - 9}" text-anchor="middle">{number(step)}</text>'
        )
    parts.append(f'<text class="tick" x="{LEFT - 7}" y="{height - 9}" text-anchor="end">step</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP + plot_height} H{width - RIGHT}"/>')
    for step, colour, what in chart.marks:
        place = min(max(x(step), LEFT), width - RIGHT)
        parts.append(f'<path class="mark s{colour}" d="M{place:.1f} {TOP} V{TOP + plot_height}"/>')
        parts.append(
            f'<path class="flag s{colour}" d="M{place:.1f} {TOP} l-4.5 -8 h9 z"><title>{escape(what)}, step {step}'
            "</title></path>"
        )
    for line in chart.lines:
        colour = line.colour % len(COLOURS)
        if line.smooth:
            parts.append(path(line.points, f"curve raw s{colour}", colour))
        parts.append(path(line.smooth or line.points, f"curve s{colour}", colour))
        for step, value in line.points if line.dots and len(line.points) <= 60 else ():
            parts.append(
                f'<circle class="dot s{colour}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5"><title>step {step}: '
                f"{number(value)}</title></circle>"
            )
    parts.append(f'<path class="cross" d="M0 {TOP} V{TOP + plot_height}"/>')
    return (
        f'<svg role="img" viewBox="0 0 {width} {height}" aria-labelledby="{ident}-t" aria-describedby="{ident}-d" '
        f'data-x="{x0} {x1} {LEFT} {RIGHT}"><title id="{ident}-t">{escape(chart.title)}</title>'
        f'<desc id="{ident}-d">{escape(chart.summary)}</desc>{"".join(parts)}</svg>'
    )


def histogram_svg(counts: Sequence[int], edges: Sequence[float], title: str, ident: str) -> str:
    """Counts between edges as bars."""
    width, height = 480, 190
    plot_width, plot_height = width - LEFT - RIGHT, height - TOP - BOTTOM
    low, high, most = edges[0], max(edges[-1], edges[0] + 1), max(max(counts), 1)

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * plot_width

    parts = []
    for value in (value for value in ticks(0, most, 3) if value == int(value)):
        place = TOP + (1 - value / most) * plot_height
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f} H{width - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{place + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in ticks(low, high, 6):
        parts.append(
            f'<text class="tick" x="{x(value):.1f}" y="{height - 9}" text-anchor="middle">{number(value)}</text>'
        )
    for count, begin, end in zip(counts, edges, edges[1:], strict=False):
        bar, tall = max(1.0, x(end) - x(begin) - 1.5), count / most * plot_height
        parts.append(
            f'<rect class="bar" x="{x(begin):.1f}" y="{TOP + plot_height - tall:.1f}" width="{bar:.1f}" '
            f'height="{tall:.1f}"><title>{begin:.0f} to {end:.0f}: {count}</title></rect>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {TOP + plot_height} H{width - RIGHT}"/>')
    told = "; ".join(
        f"{begin:.0f} to {end:.0f}: {count}"
        for count, begin, end in zip(counts, edges, edges[1:], strict=False)
        if count
    )
    return (
        f'<svg role="img" viewBox="0 0 {width} {height}" aria-labelledby="{ident}-t" aria-describedby="{ident}-d"><title '
        f'id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(told)}</desc>{"".join(parts)}</svg>'
    )


def write_png(chart: Chart, file: Path) -> None:
    """Draw the chart by matplotlib into `file`. Raises ImportError where it is not installed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), dpi=160, layout="constrained")
    x0, x1, y0, y1 = limits(chart)
    for step, colour, _ in chart.marks:
        axes.axvline(step, color=COLOURS[colour % len(COLOURS)], linewidth=1, linestyle=(0, (2, 3)), alpha=0.7)
    for line in chart.lines:
        colour = line.colour % len(COLOURS)
        dashes = [float(part) / 2 for part in DASHES[colour].split()]
        style = {"color": COLOURS[colour], "linestyle": (0, dashes) if dashes else "-"}
        if line.smooth:
            axes.plot(*zip(*thinned(line.points), strict=True), color=COLOURS[colour], linewidth=0.8, alpha=0.3)
        drawn = thinned(line.smooth or line.points)
        marker = "o" if (line.dots and len(drawn) <= 60) or len(drawn) == 1 else None
        axes.plot(*zip(*drawn, strict=True), linewidth=1.8, marker=marker, markersize=4, label=line.name, **style)
    axes.set(xlim=(x0, x1), ylim=(y0, y1), xlabel="step")
    axes.set_title(f"{chart.title} ({chart.unit})" if chart.unit else chart.title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e3e3e0", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if len(chart.lines) > 1:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)
    pyplot.close(figure)
